"""Geometries of decoders whose layers are all alike, for tests that need no checkpoint."""

from llmc.bundle import Geometry
from llmc.bundle.model.audio import Audio, Spectrum
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.vision import Markers, Tiling, Vision
from llmc.export.config import DecoderConfig, Layer
from llmc.export.parts.attention import AttentionConfig
from llmc.export.parts.mlp import MlpConfig
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.rope import Rope

# What export writes for SmolVLM2.
VISION = Vision(
    tile=512,
    patch=16,
    tokens=64,
    token_id=49190,
    tiling=Tiling(2048, True, "lanczos", 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    markers=Markers(
        image="<image>",
        tile=("<fake_token_around_image><row_{row}_col_{column}>",),
        row_end=("", ""),
        whole=("", "<fake_token_around_image><global-img>"),
        single=("<fake_token_around_image><global-img>",),
        after=("<fake_token_around_image>",),
    ),
    layers=12,
    linears=(Linear("vision.patch_embedding", 768, 768, True, "vision", "", None, exact=True),),
)

# What export writes for Qwen3-ASR 0.6B.
AUDIO = Audio(
    spectrum=Spectrum(rate=16_000, bands=128, frame=400, hop=160, least=8000),
    chunk=100,
    window=8,
    channels=480,
    token="<|audio_pad|>",
    token_id=151_676,
    opening="language {language}<asr_text>",
    layers=18,
    linears=(Linear("audio.conv_out", 896, 7680, False, "audio", "", None, exact=True),),
)


def uniform(
    model_type: str,
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_positions: int,
    tied_head: bool,
    windows: tuple[int, ...],
) -> Geometry:
    """What export would write for such a decoder."""
    assert len(windows) == layers
    attentions = (
        AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window) for window in windows
    )
    return DecoderConfig(
        model_type=model_type,
        layers=tuple(Layer(attention, MlpConfig(inner=intermediate_size)) for attention in attentions),
        ropes=(Rope(head_dim, 10_000.0),),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        norm=NormConfig(1e-6),
        tied_head=tied_head,
    ).geometry
