"""Checkpoints of Qwen's models that see: tiny ones with random weights, and the files of their processor."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from doubles.towers import TINY, write_json

MARKERS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(4096, 4100)  # behind the small model's tokens
VOCAB = 4100
PATCH = 4  # pixels; a row is a square of 2 x 2 patches, a window one of 2 x 2 rows
TEXT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
TEXT |= {"bos_token_id": 0, "eos_token_id": 2}
VISION: dict[str, Any] = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
VISION |= {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DEEP = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
PLACE_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {**VISION, "window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {**VISION, **DEEP},
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
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
        "vision_config": {**VISION, "num_position_embeddings": 36},
    },
}
# As Qwen2.5-VL is published, for smaller images.
IMAGES = {
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
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_qwen(folder: Path, kind: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind], **PLACE_TOKENS, vision_end_token_id=END)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms around one, the rest large enough to make all matter
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.25)
            if name.endswith("A_log"):  # states that keep what they have seen
                parameter.fill_(-4)
    model.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", IMAGES)
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Processor:
    """What transformers' Qwen2_5_VLProcessor makes of messages, which needs torchvision for videos."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

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
        kinds = (ids == IMAGE).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **given}
