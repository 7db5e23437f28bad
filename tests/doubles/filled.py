"""Tiny models of Gemma 4 that see, the settings of their processors, and a processor for messages."""

import json
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

IMAGE, BEGIN, END = "<|image|>", "<|image>", "<image|>"
MARKERS = (IMAGE, BEGIN, END)
IMAGE_ID, PATCH, POOLED, TOKENS = 4096, 4, 2, 70
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,  # shorter than an image
    "vocab_size": 4096 + len(MARKERS),
    "max_position_embeddings": 512,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
COMMON = {"image_token_id": IMAGE_ID, "boi_token_id": 4097, "eoi_token_id": 4098, "audio_config": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": {
        **COMMON,
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "num_kv_shared_layers": 2,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "patch_size": PATCH,
            "pooling_kernel_size": POOLED,
            "position_embedding_size": 150,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
            "rms_norm_eps": 1e-5,
            "use_clipped_linears": True,
            "standardize": True,
        },
    },
    "gemma4_unified": {
        **COMMON,
        "text_config": {**TEXT, "model_type": "gemma4_unified_text", "attention_k_eq_v": True},
        "vision_config": {
            "patch_size": PATCH,
            "pooling_kernel_size": POOLED,
            "mm_embed_dim": 48,
            "output_proj_dims": 48,
            "mm_posemb_size": 75,
            "rms_norm_eps": 1e-5,
        },
    },
}
# As Gemma 4 is published, for smaller images.
PROCESSOR: dict[str, Any] = {
    "audio_ms_per_token": 40,
    "audio_seq_length": 750,
    "image_processor": {
        **dict.fromkeys(("do_convert_rgb", "do_rescale", "do_resize"), True),
        "do_normalize": False,
        "image_mean": [0.0, 0.0, 0.0],
        "image_processor_type": "Gemma4ImageProcessor",
        "image_seq_length": 280,
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": TOKENS,
        "patch_size": PATCH,
        "pooling_kernel_size": POOLED,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": None,
    },
    "image_seq_length": 280,
    "processor_class": "Gemma4Processor",
    "video_processor": {"max_soft_tokens": 70},
}


def bound(model: Any) -> None:
    """Give clipped linears bounds that hold some values, and what standardizes means of patches random numbers; and
    unscaled attention smaller products, for float32 rounds sharp ones as coarsely as the tests compare."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and model.config.model_type in CONFIGS:
            parameter.data.mul_(0.7)
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max")):
            buffer.data.fill_(float(np.random.default_rng(len(name)).uniform(0.5, 1)) * (1 if "max" in name else -1))
        if name.endswith(("std_bias", "std_scale")):
            buffer.data.normal_(float(name.endswith("scale")), 0.25)


class FilledProcessor:
    """Transformers' Gemma4Processor with Pillow's resampling; the 12B's needs torchvision, and
    merges the patches that the other makes."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        settings = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))["image_processor"]
        self.merges = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "gemma4_unified"
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.images = Gemma4ImageProcessorPil(
            **{name: value for name, value in settings.items() if name not in ("image_processor_type", "size")}
        )
        self.template = (folder / "chat_template.jinja").read_text(encoding="utf-8")

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> dict[str, Any]:
        import torch

        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, chat_template=self.template
        )
        given: dict[str, Any] = {}
        if images := [part["image"] for each in messages for part in each["content"] if part["type"] == "image"]:
            given = dict(self.images(images, return_tensors="pt"))
            counts = iter(given.pop("num_soft_tokens_per_image").tolist())
            around = text.split(IMAGE)
            text = around[0] + "".join(f"{BEGIN}{IMAGE * next(counts)}{END}{part}" for part in around[1:])
            if self.merges:
                given |= merge(given["pixel_values"], given["image_position_ids"])
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        kinds = (ids == IMAGE_ID).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **given}


def merge(patches: Any, positions: Any) -> dict[str, Any]:
    """Squares of patches [B, P / squared, ...] with their positions, as transformers' patches_merge makes them, in any
    order; padding stays behind them."""
    import torch

    pixels, places = [], []
    for own, at in zip(patches, positions, strict=True):
        own, at = own[at[:, 0] >= 0], at[at[:, 0] >= 0]
        columns, rows = (at.max(0).values + 1).tolist()
        split = own.view(rows // POOLED, POOLED, columns // POOLED, POOLED, PATCH, PATCH, 3)
        squares = split.permute(0, 2, 1, 4, 3, 5, 6).reshape(-1, 3 * (PATCH * POOLED) ** 2)
        grid = torch.cartesian_prod(torch.arange(rows // POOLED), torch.arange(columns // POOLED)).flip(1)
        short = TOKENS - len(squares)
        pixels.append(torch.nn.functional.pad(squares, (0, 0, 0, short)))
        places.append(torch.nn.functional.pad(grid, (0, 0, 0, short), value=-1))
    return {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


def see_both_ways_in_windows(model: Any) -> Any:
    """A reference whose masks are those that transformers' ``create_masks_for_generate`` makes of the 12B; its plain
    ``forward`` lets rows of images see later ones in layers without a window, too."""
    import torch

    plain = model.forward

    @wraps(plain)
    def forward(input_ids: Any, attention_mask: Any = None, mm_token_type_ids: Any = None, **given: Any) -> Any:
        cache = given.get("cache")
        if mm_token_type_ids is not None and (cache is None or not cache.get_seq_length()):
            empty = torch.zeros(*input_ids.shape, 0)
            attention_mask = model.create_masks_for_generate(
                model.config, empty, attention_mask, cache, given.get("position_ids"), mm_token_type_ids
            )
        return plain(input_ids=input_ids, attention_mask=attention_mask, **given)

    model.forward = forward
    return model
