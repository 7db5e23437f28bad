"""A tiny model that hears: its checkpoint with the files of its processor, audio, and transformers' own processor."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import tiny
from doubles.shared import shared
from doubles.towers import write_json
from tokenizers import AddedToken, Tokenizer

RATE, BANDS, WINDOW = 16_000, 20, 200  # samples per second; of the spectrum; frames that attend to one another
TOKENS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
MARK = "<asr_text>"  # no special token, so that it stands in texts
AUDIO = 4098
CONFIG: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4101,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "audio_config": {
        "model_type": "qwen3_asr_encoder",
        "num_mel_bins": BANDS,
        "encoder_layers": 2,
        "d_model": 32,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "output_dim": 64,
        "downsample_hidden_size": 12,
        "n_window_infer": WINDOW,
    },
    "audio_token_id": AUDIO,
    "eos_token_id": [2],
    "pad_token_id": 0,
    "timestamp_token_id": 4100,
}
# As Qwen3-ASR is published, for fewer bands.
FEATURES = {
    "chunk_length": 30,
    "dither": 0.0,
    "feature_extractor_type": "Qwen3ASRFeatureExtractor",
    "feature_size": BANDS,
    "hop_length": 160,
    "min_length": 8000,
    "n_fft": 400,
    "n_samples": 480_000,
    "n_window": 50,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": RATE,
}
# As Qwen3-ASR's: one system turn, then a turn with all audio and no other text, then the assistant's.
TEMPLATE = (
    "{%- macro texts(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{{- '<|im_start|>system\n' -}}"
    "{%- for each in messages if each.role == 'system' -%}{{- texts(each.content) -}}{%- endfor -%}"
    "{{- '<|im_end|>\n<|im_start|>user\n' -}}"
    "{%- for each in messages if each.content is not string -%}{%- for part in each.content if part.type == 'audio' -%}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}{%- endfor -%}{%- endfor -%}{{- '<|im_end|>\n' -}}"
    "{%- for each in messages if each.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}"
    "{% generation %}{{- texts(each.content) + '<|im_end|>\n' -}}{% endgeneration %}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def write_hearing(folder: Path) -> Path:
    model = tiny.make("qwen3_asr", "AutoModelForMultimodalLM", **CONFIG)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder, TOKENS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(MARK, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_json(
        folder / "processor_config.json",
        {"feature_extractor": FEATURES, "processor_class": "Qwen3ASRProcessor", "timestamp_segment_time": 80},
    )
    return folder


def share_hearing(factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, ``checkpoint``, and its ``export``, which nobody may change."""
    from llmc.export import export

    def make(folder: Path) -> None:
        export(write_hearing(folder / "checkpoint"), folder / "export")

    return shared(factory, "qwen3_asr", make)


def hum(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that come and go, with noise: samples float32 between -1 and 1."""
    random, times = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = sum(
        np.sin(2 * np.pi * pitch * times) * (np.sin(2 * np.pi * times / beat) > 0)
        for pitch, beat in zip(random.uniform(100, 4000, 4), random.uniform(0.3, 2, 4), strict=True)
    )
    return (tones / 5 + random.normal(0, 0.01, len(times))).astype(np.float32)


def write_wav(samples: np.ndarray, rate: int = RATE, subtype: str = "FLOAT", format: str = "WAV") -> bytes:  # noqa: A002
    """Samples [N] or [N, channels] as the bytes of a file."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype=subtype, format=format)
    return file.getvalue()


class Reference:
    """A checkpoint in transformers, in float32, with its own features and prompts."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForMultimodalLM, PreTrainedTokenizerFast
        from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
        from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

        self.model = AutoModelForMultimodalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        )
        named = dict(zip(("audio_bos_token", "audio_eos_token", "audio_token"), TOKENS, strict=True))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint, extra_special_tokens=named)
        self.processor = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(**FEATURES), tokenizer, chat_template=TEMPLATE)

    def prepare(self, samples: np.ndarray, **asked: Any) -> dict[str, Any]:
        """Inputs of the model for one clip; ``asked``: language and prompt."""
        return dict(self.processor.apply_transcription_request(samples, sampling_rate=RATE, **asked))

    def generate(self, given: dict[str, Any], count: int) -> list[int]:
        """Greedy tokens."""
        import torch

        with torch.no_grad():
            found = self.model.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return found[0, given["input_ids"].shape[1] :].tolist()
