"""Strict reading of ``config.json``: every key is read, known to be irrelevant, or refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError, format_name

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
    "return_dict_in_generate", "sentence_transformers", "sep_token_id", "suppress_tokens", "task_specific_params",
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
    # Tables with an entry per layer are made, and every layer is traced; the deepest known decoder has 126.
    "num_hidden_layers": (1, 1024),
    # Far beyond any decoder; products of two of them fit into 31 bits, which engines count with.
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "shared_intermediate_size": (1, 1 << 24),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 4096),
    "vocab_size": (1, 1 << 24),
    # Angles are products with a position in float32, which holds whole numbers up to here.
    "max_position_embeddings": (1, 1 << 24),
    "original_max_position_embeddings": (1, 1 << 24),
    # Compared with positions and layers, in 31 bits.
    "sliding_window": (1, (1 << 31) - 1),
    "sliding_window_pattern": (1, 1024),
    "max_window_layers": (0, (1 << 31) - 1),
    # Added to a mean of squares: 0 makes a row of zeros no number, as float32 does with much less than 1e-30, and with
    # more than 1 it would outweigh the values.
    "rms_norm_eps": (1e-30, 1),
    "norm_epsilon": (1e-30, 1),
    "layer_norm_eps": (1e-30, 1),
    "layer_norm_epsilon": (1e-30, 1),
    # The slowest frequency, 1 / (theta * factor), stays a normal float32; below 1 the later pairs would turn faster.
    "rope_theta": (1, 1e30),
    "rope_local_base_freq": (1, 1e30),
    "partial_rotary_factor": (1e-3, 1),
    "factor": (1e-3, 1e6),
    "short_factor": (1e-3, 1e6),
    "long_factor": (1e-3, 1e6),
    # Powers of it multiply the base.
    "alpha": (1, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
    # Scale of queries; products are divided by its root.
    "query_pre_attn_scalar": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
    # 0.1 is published; it multiplies a logarithm.
    "llama_4_scaling_beta": (0, 1e3),
    "no_rope_layer_interval": (1, 1024),
    # Layers that predict further tokens.
    "num_nextn_predict_layers": (0, 64),
    "num_mtp_layers": (0, 64),
    # Gemma 4.
    "global_head_dim": (2, 4096),
    "num_global_key_value_heads": (1, 4096),
    "num_kv_shared_layers": (0, 1023),
    "hidden_size_per_layer_input": (0, (1 << 16) - 1),
    "vocab_size_per_layer_input": (1, 1 << 24),
    "backbone_hidden_size": (1, 1 << 20),
    "num_centroids": (1, 1 << 20),
    "centroid_intermediate_top_k": (1, 1 << 20),
    # Recurrent layers: heads, their widths, and taps of a convolution (3 and 4 in published models).
    "linear_num_key_heads": (1, 4095),
    "linear_num_value_heads": (1, 4095),
    "linear_key_head_dim": (1, 4095),
    "linear_value_head_dim": (1, 4095),
    "linear_conv_kernel_dim": (2, 255),
    "conv_L_cache": (2, 255),
    "mamba_n_heads": (1, 4095),
    "mamba_n_groups": (1, 4095),
    "mamba_d_state": (1, 4095),
    "mamba_d_conv": (2, 255),
    "mamba_expand": (1, 64),
    "mamba_d_ssm": (1, 1 << 20),
    "mamba_d_head": (1, 4095),
    "time_step_min": (0, 1e3),
    "full_attention_interval": (1, 1024),
    "block_multiple_of": (1, 1 << 20),
    "block_ffn_dim_multiplier": (1e-3, 1e3),
    # Mixtures: experts, counted as layers are, and the width of each.
    "num_experts": (1, 4095),
    "num_experts_per_tok": (1, 4095),
    "moe_intermediate_size": (1, 1 << 19),
    "moe_latent_size": (1, 1 << 20),
    "shared_expert_intermediate_size": (1, 1 << 19),
    "moe_shared_expert_intermediate_size": (1, 1 << 19),
    "decoder_sparse_step": (1, 1024),
    "num_dense_layers": (0, 1024),
    "first_k_dense_replace": (0, 1024),
    "n_shared_experts": (1, 64),
    "n_group": (1, 4095),
    "topk_group": (1, 4095),
    # Keys and values from one vector per token.
    "kv_lora_rank": (1, 1 << 16),
    "q_lora_rank": (1, 1 << 16),
    "qk_nope_head_dim": (1, 4094),
    "v_head_dim": (1, 4096),
    "routed_scaling_factor": (1e-6, 1e6),
    # 7 and 1.702 are published.
    "swiglu_limit": (1e-3, 1e6),
    "swiglu_alpha": (1e-3, 1e3),
    # Published ones lie between 0.007 and 16; squares of these are far from float32's ends.
    "attention_multiplier": (1e-6, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_in_multiplier": (1e-6, 1e6),
    "attention_out_multiplier": (1e-6, 1e6),
    "key_multiplier": (1e-6, 1e6),
    "lm_head_multiplier": (1e-6, 1e6),
    "mlp_multipliers": (1e-6, 1e6),
    "ssm_in_multiplier": (1e-6, 1e6),
    "ssm_multipliers": (1e-6, 1e6),
    "ssm_out_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "logit_scale": (1e-6, 1e6),
    # An encoder's end; a longest text beyond the model's positions is cut to them.
    "max_seq_length": (1, 1 << 24),
    "in_features": (1, 1 << 20),
    "out_features": (1, 1 << 20),
    "true_token_id": (0, 1 << 24),
    "false_token_id": (0, 1 << 24),
    # Vision towers, and how images are made ready for them: pixels, places in a prompt, numbers of pixels' values.
    "image_size": (1, 4096),
    "patch_size": (1, 4096),
    "num_channels": (1, 4096),
    "scale_factor": (1, 64),
    "merge_size": (1, 64),
    "spatial_merge_size": (1, 64),
    "temporal_patch_size": (1, 16),
    "in_channels": (1, 4096),
    "window_size": (1, 1 << 16),
    "depth": (1, 1024),
    "num_heads": (1, 4096),
    "out_hidden_size": (1, 1 << 20),
    "num_position_embeddings": (1, 1 << 22),
    "min_pixels": (1, (1 << 26) - 1),
    "max_pixels": (1, (1 << 26) - 1),
    "image_token_id": (0, (1 << 24) - 1),
    "image_token_index": (0, (1 << 24) - 1),
    "image_seq_len": (1, 1 << 24),
    "image_seq_length": (1, 1 << 24),
    "mm_tokens_per_image": (1, 1 << 24),
    "downsample_factor": (1, 64),
    "projector_hidden_size": (1, 1 << 19),
    "encoder_patch_size": (1, 4096),
    "tile_size": (1, 4096),
    "min_tiles": (1, 256),
    "max_tiles": (1, 256),
    "min_image_tokens": (1, 1 << 16),
    "max_image_tokens": (1, 1 << 16),
    "max_pixels_tolerance": (1e-3, 1e3),
    "height": (1, 4096),
    "width": (1, 4096),
    "longest_edge": (1, 4096),
    "resample": (0, 5),
    "rescale_factor": (1e-6, 1),
    "image_mean": (-1e3, 1e3),
    "image_std": (1e-6, 1e3),
    # Quantized weights; which of them are read, their reader says. A group of -1 is a whole row.
    "bits": (1, 64),
    "num_bits": (1, 64),
    "group_size": (-1, 1 << 20),
    # Adapters.
    "r": (1, 1 << 16),
    "lora_alpha": (1e-6, 1e6),
    # Defaults of generation, as sampling takes them; 0 of top_p would keep no token.
    "temperature": (0, 1e6),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "typical_p": (1e-9, 1),
    "repetition_penalty": (0.01, 100),
    "no_repeat_ngram_size": (0, (1 << 31) - 1),
    "min_new_tokens": (0, (1 << 31) - 1),
}


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
                if name in self._values and self._values[name] != value:
                    raise self.error(own, value, f"the same as {name}={self._values[name]!r:.80}")
                self._values = {key: kept for key, kept in self._values.items() if key != own} | {name: value}
                self._own_names[name] = own

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
        found = "is missing" if value is _MISSING else f"={value!r:.80} is unsupported"
        space = " " if value is _MISSING else ""
        return CheckpointError(f"{self.where}: {name}{space}{found}; expected {expected}")

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        return default if default is not None or name in self._values else _MISSING
