"""Checkpoints of models that see: a tiny model of each family, with the files of its processor."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import filled, tiny
from doubles.seeing import TEMPLATE
from doubles.shared import shared

TILE, TOKENS, SIDE = 32, 4, 4  # pixels, rows of a tile, and most tiles of each side of an image
MARKERS = ("<image>", "<fake_token_around_image>", "<global-img>")
PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, SIDE + 1) for column in range(1, SIDE + 1))
VOCAB = 4096 + len(MARKERS) + len(PLACES)  # the small model's tokens and these
IMAGE = 4096
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 16}
TEXT |= {"vocab_size": VOCAB, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2}
CONFIG = {
    "text_config": {**TEXT, **SIZES},
    "vision_config": {**SIZES, "hidden_size": 32, "intermediate_size": 48, "image_size": TILE, "patch_size": 4},
    "image_token_id": IMAGE,
    "scale_factor": 4,
}
# As SmolVLM2 is published.
IMAGES = {
    **dict.fromkeys(
        ("do_convert_rgb", "do_image_splitting", "do_normalize", "do_pad", "do_rescale", "do_resize"), True
    ),
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SmolVLMImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": TILE},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": SIDE * TILE},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": TILE}},
}
PROCESSOR = {"image_seq_len": TOKENS, "processor_class": "SmolVLMProcessor"}
# Gemma 3, with windows shorter than an image.
GEMMA_TOKENS = 16
GEMMA_CONFIG = {
    "text_config": {
        **TEXT,
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 12,
    },
    "vision_config": {**CONFIG["vision_config"], "model_type": "siglip_vision_model", "vision_use_head": False},
    "mm_tokens_per_image": GEMMA_TOKENS,
    "image_token_index": 4096,
    "boi_token_index": 4097,
    "eoi_token_index": 4098,
}
GEMMA_MARKERS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
# As Gemma 3 is published.
GEMMA_IMAGES = {
    **dict.fromkeys(("do_normalize", "do_rescale", "do_resize"), True),
    **dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops"), None),
    **dict.fromkeys(("pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate"), None),
    **{name: IMAGES[name] for name in ("image_mean", "image_std", "rescale_factor")},
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": GEMMA_TOKENS,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "size": {"height": TILE, "width": TILE},
}
GEMMA_PROCESSOR = {"image_seq_length": GEMMA_TOKENS, "processor_class": "Gemma3Processor"}

# LFM2-VL, whose images of more than 32 tokens are cut into tiles of 16.
LFM2_CONFIG = {
    "text_config": {
        **{name: value for name, value in TEXT.items() if name not in ("head_dim", "model_type")},
        **SIZES,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention", "conv", "full_attention", "full_attention"],
    },
    "vision_config": {
        **{name: value for name, value in CONFIG["vision_config"].items() if name != "image_size"},
        "model_type": "siglip2_vision_model",
        "num_patches": 25,
        "vision_use_head": False,
    },
    "image_token_id": 4096,
    "projector_hidden_size": 40,
}
LFM2_MARKERS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
LFM2_PLACES = tuple(
    f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column < 5
)
# As LFM2-VL is published.
LFM2_IMAGES = {
    **dict.fromkeys(("do_image_splitting", "do_normalize", "do_pad", "do_rescale", "do_resize", "use_thumbnail"), True),
    **dict.fromkeys(("crop_size", "device", "do_center_crop", "do_convert_rgb", "input_data_format"), None),
    **{name: IMAGES[name] for name in ("image_mean", "image_std", "rescale_factor")},
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "tile_size": TILE,
    "max_pixels_tolerance": 2.0,
    "min_tiles": 2,
    "max_tiles": 4,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "max_num_patches": 64,
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "processor_class": "Lfm2VlProcessor",
    "resample": 2,
    "size": {"height": TILE, "width": TILE},
}
LFM2_PROCESSOR = {"processor_class": "Lfm2VlProcessor"}


# Qwen's, whose rows are squares of 2 x 2 patches, and windows of 2 x 2 rows.
QWEN_MARKERS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE, PATCH = 4098, 4
QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN_TEXT |= {"num_key_value_heads": 2, "vocab_size": 4100, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
QWEN_TEXT |= {"bos_token_id": 0, "eos_token_id": 2}
QWEN_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
QWEN_VISION |= {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DEEP = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
PLACE_TOKENS = {
    "vision_start_token_id": 4096,
    "vision_end_token_id": 4097,
    "image_token_id": 4098,
    "video_token_id": 4099,
}
QWEN: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**QWEN_TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen3_vl": {
        "text_config": {
            **QWEN_TEXT,
            "head_dim": 16,
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {**QWEN_VISION, **DEEP},
    },
    "qwen3_5": {
        "text_config": {
            **QWEN_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                **ROPE,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 36},
    },
}
# As Qwen2.5-VL is published, for smaller images.
QWEN_IMAGES = {
    "min_pixels": 256,
    "max_pixels": 4096,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
# LFM3-VL, with Qwen's processor.
LFM3_CONFIG = {
    "text_config": {
        **QWEN_TEXT,
        "model_type": "lfm3",
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "sliding_window": 12,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "patch_size": PATCH,
        "layer_types": ["conv", "full_attention", "conv"],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    },
    "projector_hidden_size": 40,
}
# Mistral 3 with Pixtral's tower. As Mistral Small 3.1 is published, for smaller images.
MISTRAL_CONFIG = {
    "text_config": {**QWEN_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-3},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "image_size": 64,
        "patch_size": PATCH,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    },
    "image_token_index": 4096,
    "multimodal_projector_bias": True,
}
MISTRAL_MARKERS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]")
MISTRAL_IMAGES = {
    **dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True),
    **{name: QWEN_IMAGES[name] for name in ("image_mean", "image_std")},
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": PATCH, "width": PATCH},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 70},
}
MISTRAL_PROCESSOR = {
    **dict(zip(("image_token", "image_break_token", "image_end_token"), MISTRAL_MARKERS, strict=False)),
    "patch_size": PATCH,
    "processor_class": "PixtralProcessor",
    "spatial_merge_size": 2,
}
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What is written of a family: config, processor files, and special tokens in the order of their ids; the rows of a
    tile; a seed with which images decide what is said; the chat template."""

    config: dict[str, Any]
    images: dict[str, Any]
    processor: dict[str, Any]
    tokens: tuple[str, ...]
    rows: int = TOKENS
    seed: int = 0
    template: str = TEMPLATE


SMOLVLM = Family(CONFIG, IMAGES, PROCESSOR, (*MARKERS, *PLACES))
GEMMA_TEMPLATE = TEMPLATE.replace("<image>", "<start_of_image>")
MISTRAL_TEMPLATE = TEMPLATE.replace("<image>", "[IMG]")
FAMILIES = {
    "smolvlm": SMOLVLM,
    "idefics3": SMOLVLM,
    "gemma3": Family(
        *(GEMMA_CONFIG, GEMMA_IMAGES, GEMMA_PROCESSOR, (*GEMMA_MARKERS, *PLACES)), GEMMA_TOKENS, template=GEMMA_TEMPLATE
    ),
    "lfm2_vl": Family(LFM2_CONFIG, LFM2_IMAGES, LFM2_PROCESSOR, (*LFM2_MARKERS, *LFM2_PLACES), 16, 1),
    **{
        kind: Family({**config, **PLACE_TOKENS}, QWEN_IMAGES, {}, QWEN_MARKERS, template=QWEN_TEMPLATE)
        for kind, config in {**QWEN, "lfm3_vl": LFM3_CONFIG}.items()
    },
    "mistral3": Family(
        MISTRAL_CONFIG, MISTRAL_IMAGES, MISTRAL_PROCESSOR, MISTRAL_MARKERS, 1, template=MISTRAL_TEMPLATE
    ),
    **{
        kind: Family(
            *(config, {}, filled.PROCESSOR, filled.MARKERS), template=TEMPLATE.replace("<image>", filled.IMAGE)
        )
        for kind, config in filled.CONFIGS.items()
    },
}


def write_seeing(folder: Path, kind: str = "smolvlm") -> Path:
    family = FAMILIES[kind]
    model = tiny.make(kind, "AutoModelForImageTextToText", family.seed, **family.config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # states that keep what they have seen
            parameter.data.fill_(-4)
    filled.bound(model)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder, family.tokens)
    (folder / "chat_template.jinja").write_text(family.template)
    if family.images:
        write_json(folder / "preprocessor_config.json", family.images)
    if family.processor:
        write_json(folder / "processor_config.json", family.processor)
    return folder


def share_seeing(factory: pytest.TempPathFactory, kind: str = "smolvlm") -> Path:
    """A folder with a tiny model of any kind, ``checkpoint``, and its ``export``, which nobody may change."""
    from llmc.export import export

    def make(folder: Path) -> None:
        export(write_seeing(folder / "checkpoint", kind), folder / "export")

    return shared(factory, kind, make)


def open_graphs(exported: Path) -> Callable[[str, dict[str, np.ndarray]], np.ndarray]:
    """The first output of one of the export's graphs."""
    from doubles.lowerings import open_session

    graphs = {name: open_session(exported / f"{name}.onnx") for name in ("vision", "decoder")}
    return lambda name, feeds: graphs[name].run(None, feeds)[0]


def open_reference(checkpoint: Path) -> Any:
    """What transformers makes of a checkpoint, in float32."""
    import torch
    from transformers import AutoModelForImageTextToText

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, **options)
    return filled.see_both_ways_in_windows(model) if model.config.model_type == "gemma4_unified" else model


def copy_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint whose files may be changed."""
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def read_processor(folder: Path, kind: str) -> Any:
    """The family's own processor of what :func:`share_seeing` wrote, with Pillow's resampling."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if kind in (*QWEN, "lfm3_vl"):
        return QwenProcessor(folder, with_kinds=kind in QWEN)
    if kind == "mistral3":
        return PixtralProcessor(folder)
    if kind in filled.CONFIGS:
        return filled.FilledProcessor(folder)
    if kind == "lfm2_vl":
        from doubles.naflex import NaflexProcessor

        return NaflexProcessor(folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if kind != "gemma3":
        images, tokenizer = (it.from_pretrained(folder) for it in (SmolVLMImageProcessorPil, PreTrainedTokenizerFast))
        return Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=template)
    named = dict(zip(("image_token", "boi_token", "eoi_token"), GEMMA_MARKERS, strict=True))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=named)
    images = Gemma3ImageProcessorPil.from_pretrained(folder)
    return Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_TOKENS, chat_template=template)


def prepare(processor: Any, messages: Sequence[Any]) -> dict[str, Any]:
    """What a processor makes of messages, with the names that the model takes."""
    made = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    given = processor.apply_chat_template(messages, **made)
    names = {"input_ids", "attention_mask", "pixel_values", "pixel_attention_mask", "token_type_ids"}
    names |= {"spatial_shapes", "image_grid_thw", "image_sizes", "mm_token_type_ids", "image_position_ids"}
    return {name: given[name] for name in names & given.keys()}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


class QwenProcessor:
    """What transformers' Qwen2_5_VLProcessor, and with the kinds of tokens left out Lfm3VlProcessor, makes of messages;
    they need torchvision for videos."""

    def __init__(self, folder: Path, *, with_kinds: bool) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.with_kinds = with_kinds

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> dict[str, Any]:
        import torch

        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given: dict[str, Any] = {}
        if images := [part["image"] for each in messages for part in each["content"] if part["type"] == "image"]:
            given = dict(self.images(images, return_tensors="pt"))
            counts = iter((given["image_grid_thw"].prod(1) // 4).tolist())
            text = "".join(
                part + "<|image_pad|>" * next(counts) if number < len(images) else part
                for number, part in enumerate(text.split("<|image_pad|>"))
            )
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        given |= {"mm_token_type_ids": (ids == QWEN_IMAGE).int()} if self.with_kinds else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


class PixtralProcessor:
    """What transformers' PixtralProcessor makes of messages, which needs torchvision."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.images = PixtralImageProcessorPil.from_pretrained(folder)

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> dict[str, Any]:
        import torch

        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given: dict[str, Any] = {}
        if images := [part["image"] for each in messages for part in each["content"] if part["type"] == "image"]:
            square = MISTRAL_PROCESSOR["patch_size"] * MISTRAL_PROCESSOR["spatial_merge_size"]
            given = dict(self.images(images, patch_size=square, return_tensors="pt"))
            sizes = (given["image_sizes"] // square).tolist()
            lines = [("[IMG]" * columns + "[IMG_BREAK]") * rows for rows, columns in sizes]
            written = [each.removesuffix("[IMG_BREAK]") + "[IMG_END]" for each in lines]
            around = text.split("[IMG]")
            text = "".join(part for pair in zip(around, [*written, ""], strict=True) for part in pair)
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}
