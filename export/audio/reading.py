"""Read the tower and the feature extractor of a checkpoint that hears, as strictly as its config."""

from pathlib import Path
from typing import Any

from llmc.bundle.model.audio import Audio, Spectrum, halve
from llmc.errors import CheckpointError
from llmc.export.audio.shapes import AudioTowerConfig
from llmc.export.keys import Keys

PROCESSOR_FILE, FEATURES_FILE = "processor_config.json", "preprocessor_config.json"
EXTRACTORS = "Qwen3ASRFeatureExtractor", "WhisperFeatureExtractor"
TOKEN, OPENING = "<|audio_pad|>", "language {language}<asr_text>"
# Half a chunk. transformers counts 13 rows for each whole chunk, which holds for this size only.
HALF_CHUNK = 50
RATE = 16_000  # samples per second; transformers' bands end at half of it
# transformers' names of the parts of the tower and of its projector, below ``model.`` or not.
RENAMED = (
    *((f"{outer}audio_tower", "audio") for outer in ("model.", "")),
    *((f"{outer}multi_modal_projector.linear_1", "audio.connector_hidden") for outer in ("model.", "")),
    *((f"{outer}multi_modal_projector.linear_2", "audio.connector") for outer in ("model.", "")),
    *(("self_attn.out_proj", "self_attn.o_proj"), ("fc1", "mlp.up_proj"), ("fc2", "mlp.down_proj")),
    *(("self_attn_layer_norm", "input_layernorm"), ("final_layer_norm", "post_attention_layernorm")),
    ("ln_post", "norm"),
)


def read_tower(keys: Keys, hidden_size: int) -> AudioTowerConfig:
    """Read the ``audio_config``; defaults are transformers'."""
    token_id, keys = keys.integer("audio_token_id", 151_676), keys.inside("audio_config")
    keys.choice("model_type", ("qwen3_asr_encoder",), "qwen3_asr_encoder")
    keys.skip("conv_chunksize", "dropout", "activation_dropout")  # how many chunks at a time; training
    keys.fixed("scale_embedding", False, ", as it is published")
    keys.fixed("n_window", HALF_CHUNK, ", as it is published")
    keys.choice("activation_function", ("gelu",), "gelu")
    window, heads = keys.integer("n_window_infer", 800), keys.integer("encoder_attention_heads", 16)
    tower = AudioTowerConfig(
        bands=keys.integer("num_mel_bins", 128),
        chunk=2 * HALF_CHUNK,
        window=window // (2 * HALF_CHUNK),
        channels=keys.integer("downsample_hidden_size", 480),
        width=keys.integer("d_model", 1024),
        layers=keys.integer("encoder_layers", 24),
        heads=heads,
        inner=keys.integer("encoder_ffn_dim", 4096),
        outputs=keys.integer("output_dim", 3584),
        token_id=token_id,
        renamed=RENAMED,
    )
    keys.fixed("num_key_value_heads", heads, ", since every head has its own keys")
    places = halve(tower.chunk)
    if (stated := keys.integer("max_position_embeddings", places)) < places:
        raise keys.error("max_position_embeddings", stated, f"at least {places}, the rows of a chunk")
    keys.finish()
    if window % tower.chunk:
        raise keys.error("n_window_infer", window, f"a multiple of {tower.chunk}, the frames of a chunk")
    if tower.width % (2 * heads) or tower.width < 4:
        raise keys.error("encoder_attention_heads", heads, f"a divisor of d_model={tower.width}, with even heads")
    if tower.outputs != hidden_size:
        raise keys.error("output_dim", tower.outputs, f"{hidden_size}, the text part's hidden_size")
    return tower


def read_audio(folder: Path, tower: AudioTowerConfig, processor: dict[str, Any], features: dict[str, Any]) -> Audio:
    """The runtime's audio settings; ``processor`` and ``features`` are the contents of the two files.

    Since transformers 5 the first contains the second.
    """
    outer = Keys(processor, str(folder / PROCESSOR_FILE))
    outer.skip("processor_class", "chat_template", "timestamp_segment_time")
    nested = "feature_extractor" in outer
    keys = outer.inside("feature_extractor") if nested else Keys(features, str(folder / FEATURES_FILE))
    outer.finish()
    if not nested and not features:
        raise CheckpointError(
            f"{folder}: no {FEATURES_FILE}, which describes how to prepare audio for the tower; get it, or export only "
            "the text part with --text-only"
        )
    keys.choice("feature_extractor_type", EXTRACTORS, EXTRACTORS[0])
    keys.skip("processor_class", "chunk_length", "n_samples", "nb_max_frames", "padding_side", "return_attention_mask")
    keys.fixed("padding_value", 0.0, ", as it is published")
    keys.fixed("dither", 0.0, ", as it is published")
    keys.fixed("sampling_rate", RATE, ", as it is published")
    keys.fixed("n_window", tower.chunk // 2, ", as in the audio_config")
    keys.fixed("feature_size", tower.bands, ", the audio_config's num_mel_bins")
    spectrum = Spectrum(
        rate=RATE,
        bands=tower.bands,
        frame=keys.integer("n_fft", 400),
        hop=keys.integer("hop_length", 160),
        least=keys.integer("min_length", 8000),
    )
    keys.finish()
    if not spectrum.hop <= spectrum.frame < 2 * spectrum.least:
        raise keys.error("n_fft", spectrum.frame, "at least hop_length, and below twice min_length")
    return Audio(
        spectrum=spectrum,
        chunk=tower.chunk,
        window=tower.window,
        channels=tower.channels,
        token=TOKEN,
        token_id=tower.token_id,
        opening=OPENING,
        layers=tower.layers,
        linears=tower.linears,
    )
