"""Strict reading of ``config.json``: every key is read, known to be irrelevant, or refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError, format_name
from llmc.origin import find_own_file
from llmc.strict import read_json

# Keys that do not change what a decoder computes when it generates. Weights carry their own dtypes; defaults of
# generation stand in generation_config.json; auto_map names code, which llmc never runs.
# fmt: off
IRRELEVANT = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_model_name_or_path", "_name_or_path", "_num_labels", "architectures", "attention_dropout", "attn_implementation",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "hidden_dropout", "id2label", "initializer_range", "internal_version",
    "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_sequence_length", "min_length",
    "model_max_length", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores", "pad_token_id",
    "perceiver_config", "pixel_shuffle_factor",
    "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sbert_ce_default_activation_function",
    "sentence_transformers", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
})
# fmt: on
# Keys that would change it, at the values where they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "compression_ratio": (1,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "is_llama_config": (True,),
    "normalization_function": ("rmsnorm",),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "qk_layer_norms": (False,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_resampler": (False,),
}
_MISSING = object()
# The range of every number that is read: what lies beyond cannot be meant, and would be computed with all the same.
RANGES: dict[str, tuple[float, float]] = {
    name: (low, high)
    for low, high, names in (
        # Tables with an entry per layer are made, and every layer is traced; the deepest known decoder has 126.
        (1, 1024, "num_hidden_layers depth no_rope_layer_interval sliding_window_pattern full_attention_interval"),
        (1, 1024, "decoder_sparse_step global_attn_every_n_layers encoder_layers"),
        (1, 255, "type_vocab_size"),
        (0, 1024, "num_dense_layers first_k_dense_replace"),
        (0, 1023, "num_kv_shared_layers"),
        (0, 64, "num_nextn_predict_layers num_mtp_layers"),  # layers that predict further tokens
        # Far beyond any decoder; products of two of them fit into 31 bits, which engines count with.
        (1, 1 << 20, "hidden_size backbone_hidden_size out_hidden_size moe_latent_size mamba_d_ssm d_model output_dim"),
        (1, 1 << 20, "block_multiple_of num_centroids centroid_intermediate_top_k in_features out_features"),
        (1, 1 << 20, "mm_embed_dim output_proj_dims"),
        (
            1,
            1 << 24,
            "intermediate_size encoder_ffn_dim shared_intermediate_size vocab_size vocab_size_per_layer_input",
        ),
        (0, (1 << 16) - 1, "hidden_size_per_layer_input"),
        (1, 4096, "num_attention_heads num_key_value_heads num_global_key_value_heads num_heads v_head_dim"),
        (2, 4096, "head_dim global_head_dim"),
        (1, 4094, "qk_nope_head_dim"),
        (1, 4096, "encoder_attention_heads"),
        (1, 1 << 16, "kv_lora_rank q_lora_rank"),
        # Angles are products with a position in float32, which holds whole numbers up to here.
        (1, 1 << 24, "max_position_embeddings original_max_position_embeddings max_seq_length"),
        # Compared with positions and layers, in 31 bits.
        (1, (1 << 31) - 1, "sliding_window local_attention"),
        (0, (1 << 31) - 1, "max_window_layers"),
        # Added to a mean of squares: 0 makes a row of zeros no number, as float32 does with much less than 1e-30, and
        # with more than 1 it would outweigh the values.
        (1e-30, 1, "rms_norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon post_norm_eps"),
        # The slowest frequency, 1 / (theta * factor), stays a normal float32; below 1 later pairs would turn faster.
        (1, 1e30, "rope_theta rope_local_base_freq local_rope_theta"),
        (1e-3, 1, "partial_rotary_factor"),
        (1e-3, 1e6, "factor short_factor long_factor low_freq_factor high_freq_factor beta_slow beta_fast"),
        (1, 1e6, "alpha"),  # powers of it multiply the base
        (1e-3, 1e3, "attention_factor"),
        # 0.1 of llama_4_scaling_beta is published; it multiplies a logarithm.
        (0, 1e3, "mscale mscale_all_dim llama_4_scaling_beta"),
        # Scale of queries: products are divided by its root.
        (1e-3, 1e6, "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"),
        # Recurrent layers: heads, their widths, and taps of a convolution (3, 4 and 7 in published models).
        (1, 4095, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
        (1, 4095, "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head"),
        (2, 255, "linear_conv_kernel_dim conv_L_cache mamba_d_conv"),
        (1, 15, "conv_kernel_size"),
        (1, 64, "mamba_expand"),
        (0, 1e3, "time_step_min"),
        (1e-3, 1e3, "block_ffn_dim_multiplier"),
        # Mixtures: experts, counted as layers are, and the width of each.
        (1, 4095, "num_experts num_experts_per_tok n_group topk_group"),
        (1, 64, "n_shared_experts"),
        (1, 1 << 19, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
        (1e-3, 1e6, "swiglu_limit"),  # 7 is published
        (1e-3, 1e3, "swiglu_alpha"),  # 1.702 is published
        # Published multipliers lie between 0.007 and 16; squares of these are far from float32's ends.
        (1e-6, 1e6, "attention_multiplier embedding_multiplier residual_multiplier attention_in_multiplier"),
        (1e-6, 1e6, "attention_out_multiplier key_multiplier lm_head_multiplier mlp_multipliers ssm_in_multiplier"),
        (1e-6, 1e6, "ssm_multipliers ssm_out_multiplier logits_scaling logit_scale routed_scaling_factor"),
        (1e-6, 1e6, "output_multiplier qk_scale_factor"),
        # Token ids.
        (0, 1 << 24, "true_token_id false_token_id pad_token_id"),
        (0, (1 << 24) - 1, "image_token_id image_token_index audio_token_id"),
        # Vision towers, and how images are made ready for them: pixels, places in a prompt, numbers of pixels' values.
        (1, 4096, "image_size patch_size encoder_patch_size tile_size height width longest_edge"),
        (1, 64, "scale_factor spatial_merge_size downsample_factor"),
        (1, 16, "temporal_patch_size pooling_kernel_size"),
        (1, 1 << 16, "position_embedding_size mm_posemb_size"),
        (1, 1 << 16, "window_size min_image_tokens max_image_tokens max_soft_tokens num_soft_tokens"),
        (1, 1 << 16, "vision_soft_tokens_per_image default_output_length"),
        (1, 1 << 22, "num_position_embeddings"),
        (1, (1 << 26) - 1, "min_pixels max_pixels"),
        (1, 1 << 24, "image_seq_len image_seq_length mm_tokens_per_image"),
        (1, 1 << 19, "projector_hidden_size"),
        (1, 256, "min_tiles max_tiles"),
        (1e-3, 1e3, "max_pixels_tolerance"),
        (0, 5, "resample"),
        (1e-6, 1, "rescale_factor"),
        (-1e3, 1e3, "image_mean"),
        (1e-6, 1e3, "image_std"),
        # Audio towers, and how audio is made ready for them: bands, frames, samples.
        (1, 512, "num_mel_bins"),
        (1, 1 << 16, "downsample_hidden_size"),
        (1, 1 << 18, "n_window_infer"),
        (16, 8192, "n_fft"),
        (1, 8192, "hop_length"),
        (1, (1 << 20) - 1, "min_length"),
        # Quantized weights; which of them are read, their reader says. A group of -1 is a whole row.
        (1, 64, "bits num_bits"),
        (-1, 1 << 20, "group_size"),
        # Adapters.
        (1, 1 << 16, "r"),
        (1e-6, 1e6, "lora_alpha"),
        # Defaults of generation, as sampling takes them; 0 of top_p would keep no token.
        (0, 1e6, "temperature"),
        (0, (1 << 31) - 1, "top_k no_repeat_ngram_size min_new_tokens"),
        (1e-9, 1, "top_p typical_p"),
        (0, 1, "min_p"),
        (0.01, 100, "repetition_penalty"),
    )
    for name in names.split()
}


def read_value(folder: Path, name: str) -> Any:
    """The content of a JSON file of a checkpoint, None without the file. Raises CheckpointError: it cannot be read."""
    file = find_own_file(folder, name)
    try:
        return None if file is None else read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} cannot be read as JSON ({error}); download it again") from error


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """As :func:`read_value`, of a file that holds an object; null is refused as any other value is."""
    value = read_value(folder, name)
    if not isinstance(value, dict) and (value is not None or find_own_file(folder, name)):
        kind = "null" if value is None else type(value).__name__
        raise CheckpointError(f"{folder / name} holds a JSON {kind}, expected an object; download it again")
    return value


def require_object(folder: Path, name: str) -> dict[str, Any]:
    """As :func:`read_object`, of a file that must be there."""
    values = read_object(folder, name)
    if values is None:
        raise CheckpointError(f"{folder}: no {name}; expected a Hugging Face checkpoint folder or GGUF file")
    return values


class Keys:
    """A JSON object of which every key must be accounted for."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.where = where  # its name in messages
        self.notes: list[str] = []  # sentences about what was left out on purpose
        self._values = values
        self._read: set[str] = set()
        self._own_names: dict[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """Read keys of a family's own (``names`` to the common ones) by the common names; messages keep theirs."""
        for own, name in names.items():
            if (value := self._values.get(own)) is not None:
                if self._values.get(name) not in (None, value):
                    raise self.error(own, value, f"the same as {name}={self._values[name]!r:.80}")
                self._values = {key: kept for key, kept in self._values.items() if key != own} | {name: value}
                self._own_names[name] = own

    def fill(self, **defaults: Any) -> None:
        """Take the values of ``defaults`` for keys that are missing."""
        self._values = {**defaults, **self._values}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number in its range of :data:`RANGES`; ``default`` also stands for null."""
        value, (low, high) = self._get(name, default), RANGES[name]
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"a whole number of at least {low} and at most {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number in its range of :data:`RANGES`; ``default`` also stands for null."""
        value, (low, high) = self._get(name, default), RANGES[name]
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers, each in the range of :data:`RANGES`."""
        value, (low, high) = self._get(name, None), RANGES[name]
        if not isinstance(value, list) or any(type(it) not in (int, float) or not low <= it <= high for it in value):
            raise self.error(name, value, f"a list of numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, options: tuple[str, ...], default: str | None = None) -> str:
        value = self._get(name, default)
        if value not in options:
            raise self.error(name, value, f"one of {', '.join(options)}")
        return str(value)

    def fixed(self, name: str, value: object, reason: str = "") -> None:
        """Refuse all values but one, which also stands for null and for a missing key; ``reason`` ends the error."""
        stated = self._get(name, value)
        if stated != value or isinstance(stated, bool) != isinstance(value, bool):
            raise self.error(name, stated, f"{json.dumps(value)}{reason}")

    def sliding_window(self) -> int:
        """The window, or 0 for null. The key must be there."""
        if "sliding_window" in self._values and self.raw("sliding_window") is None:
            return 0
        return self.integer("sliding_window")

    def optional_number(self, name: str) -> float | None:
        return None if self.raw(name) is None else self.number(name)

    def nullable_number(self, name: str, default: float) -> float:
        if name in self._values and self.raw(name) is None:
            return 0.0
        return self.number(name, default)

    def optional_integer(self, name: str) -> int | None:
        return None if self.raw(name) is None else self.integer(name)

    def inside(self, name: str) -> "Keys":
        """The object under ``name``, to be accounted for in the same way."""
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Keys(value, f"{self.where}: {format_name(name)}")

    def raw(self, name: str) -> Any:
        """The value as it stands, None where it is absent: the caller checks it."""
        self._read.add(name)
        return self._values.get(name)

    def unread(self) -> dict[str, Any]:
        """The values that were not read; null means not set."""
        return {name: value for name, value in self._values.items() if value is not None and name not in self._read}

    def skip(self, *names: str) -> None:
        """Mark keys as read whose value does not matter here."""
        self._read.update(names)

    def nest(self, name: str, besides: tuple[str, ...], kind: str) -> None:
        """Put all values but those of ``besides`` into an object ``name`` of the type ``kind``, where there is none, as
        older configs leave it out."""
        if self._values.get(name) is None:
            inner = {key: value for key, value in self._values.items() if key not in besides}
            self._values = {key: value for key, value in self._values.items() if key in besides}
            self._values[name] = {**inner, "model_type": kind}

    def layer_numbers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of layers, ascending, at most 1024."""
        value = list(default) if self.raw(name) is None else self.raw(name)
        if not isinstance(value, list) or any(type(it) is not int or not 0 <= it < 1024 for it in value):
            raise self.error(name, value, "a list of layers")
        if value != sorted({*value}):
            raise self.error(name, value, "layers in their order, each once")
        return tuple(value)

    def leave_out(self, name: str, reason: str) -> None:
        """Take a value for null, and say so in the manifest."""
        self.note(f"{name}={self._values[name]!r:.80} {reason} and was left out")
        self._values = {**self._values, name: None}

    def note(self, sentence: str) -> None:
        self.notes.append(f"{Path(self.where).name}: {sentence}")

    def finish(self) -> None:
        for name, value in self._values.items():
            if value is None or name in self._read or name in IRRELEVANT:  # null means not set
                continue
            if name not in NEUTRAL:
                raise CheckpointError(
                    f"{self.where}: {format_name(name)}={value!r:.80} is not known to llmc, which does not guess "
                    "whether it changes the result; if it does not, remove it from the file"
                )
            if value not in NEUTRAL[name]:
                raise self.error(name, value, " or ".join(repr(neutral) for neutral in NEUTRAL[name]))

    def error(self, name: str, value: object, expected: str) -> CheckpointError:
        name = self._own_names.get(name, name)
        problem = "is missing" if value is _MISSING else f"={value!r:.80} is unsupported"
        space = " " if value is _MISSING else ""
        return CheckpointError(f"{self.where}: {name}{space}{problem}; expected {expected}")

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        return default if default is not None or name in self._values else _MISSING
