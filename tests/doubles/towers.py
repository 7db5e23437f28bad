"""Checkpoints of models that see: random weights of a tiny SmolVLM or Idefics3, with the files of their processor."""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "checkpoint"
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


def write_seeing(folder: Path, kind: str = "smolvlm") -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():  # norms around one, the rest large enough to make every part matter
            parameter.normal_(float(parameter.dim() == 1), 0.25)
    model.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", IMAGES)
    write_json(folder / "processor_config.json", PROCESSOR)
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKERS, *PLACES])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)
    return folder


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")
