"""Kinds of models, and the features of builds and loads that each kind cannot be combined with."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from llmc.bundle.model.geometry import Geometry
from llmc.errors import UsageError


class Feature(NamedTuple):
    """Something that a caller can ask for."""

    words: str  # noun phrase for the sentence
    parameter: str = ""  # that asks for it; empty: the feature's own name
    advice: str = "leave it out"


_PREFIXES = ("prefix_cache_bytes", "prefix_cache_folder", "prefix_cache_disk_bytes")
_ENGINE = ("max_batch", "max_queue", "decode_steps_per_chunk", "default_max_tokens", "tool_format", "determinism")
_CALIBRATION = ("calibration", "samples", "length")
_CHAT = ("tools", "reasoning_budget")
FEATURES = {
    "gpu": Feature("a GPU", "target", "build for cpu, or export without the part (--text-only leaves out a tower)"),
    "stages": Feature("parts on several boxes"),
    "adapters": Feature("adapters beside the model", advice="merge them at export (llmc export --adapter)"),
    "draft_head": Feature("hidden states for a draft head"),
    **dict.fromkeys(("text", "report"), Feature("a text to judge answers on")),
    **dict.fromkeys(_CALIBRATION, Feature("a calibration text")),
    "budget": Feature("a limit on the loss of quality"),
    **dict.fromkeys(("sparsity", "pruning"), Feature("pruned weights")),
    "scheme": Feature("weights rounded by a text"),
    **dict.fromkeys(("activations", "smoothing"), Feature("a choice of rounded activations")),
    "phases": Feature("a graph for each phase"),
    "cache": Feature("a KV cache"),
    "float16 cache": Feature("a float16 cache", "cache"),
    "int8 cache": Feature("an int8 cache", "cache"),
    **dict.fromkeys(_ENGINE, Feature("an engine")),
    **dict.fromkeys(_PREFIXES, Feature("a prefix cache")),
    "draft": Feature("speculative decoding"),
    "drafting": Feature("drafting token by token", "draft", "name another bundle"),
    "answers": Feature("generating answers", "bundle", "load its model, with this bundle as draft"),
    "timing": Feature("timing prefill and decode", "bundle", "time whole calls: llmc run --stats, or llmc embed"),
    **dict.fromkeys(_CHAT, Feature("tool calls or bounded reasoning")),
}
# Features that do not go together, whatever the model is.
CLASHES = {"stages": ("gpu", "adapters", "draft_head"), "adapters": ("gpu",), "draft_head": ("gpu",)}


# What a build records for the self-test: prompts with answers, texts with vectors, or values from made-up inputs.
Evidence = Literal["prompts", "texts", "values"]


class Kind(NamedTuple):
    """One property of models, and what follows from it."""

    words: str  # completes "a model that ..."
    holds: Callable[[Geometry], object]  # true of geometries that have the property
    bars: tuple[str, ...]  # features that it cannot be combined with
    one_graph: bool = False  # a second graph, for decode, would be of no use
    float_activations: bool = False  # that graph leaves activations in floats unless a recipe says otherwise
    whole_texts: bool = False  # calls take whole texts, and attention scores each against itself
    float32_cache: bool = False  # the cache stays float32 unless a recipe says otherwise
    evidence: Evidence = "prompts"


KINDS = (
    Kind(
        "embeds or ranks texts",
        lambda geometry: geometry.encoder,
        tuple(name for name in FEATURES if name != "activations"),
        one_graph=True,
        float_activations=True,
        whole_texts=True,
        float32_cache=True,
        evidence="texts",
    ),
    Kind(
        "fills masks",
        lambda geometry: geometry.diffusion,
        ("gpu", "stages", "adapters", "int8 cache", *_PREFIXES, "draft", "drafting", "timing", *_CHAT),
        one_graph=True,
        whole_texts=True,
        float32_cache=True,
    ),
    Kind(
        "drafts for another model",
        lambda geometry: geometry.head,
        ("gpu", "stages", "adapters", "draft_head", "text", "report", *_CALIBRATION, "answers"),
        float32_cache=True,
        evidence="values",
    ),
    Kind(
        "reads the caches of another model",
        lambda geometry: geometry.borrows,
        (),
        one_graph=True,
        float_activations=True,
    ),
    Kind(
        "has layers that read the caches of others",
        lambda geometry: geometry.shares,
        ("gpu", "stages", "int8 cache"),
        float32_cache=True,
    ),
    Kind(
        "shares caches among its own layers",
        lambda geometry: geometry.shares and not geometry.borrows,
        ("float16 cache",),
    ),
    Kind(
        "has experts", lambda geometry: geometry.mixtures, ("gpu", "sparsity"), one_graph=True, float_activations=True
    ),
    # A W8A8 graph for prompts would take four times the memory of what such a model is chosen for.
    Kind("has weights of 2 bits", lambda geometry: geometry.two_bits, (), float_activations=True),
    Kind("sees images", lambda geometry: geometry.vision, ("gpu", "stages")),
    Kind("hears audio", lambda geometry: geometry.audio, ("gpu", "stages")),
    Kind("has recurrent layers", lambda geometry: geometry.recurrents, ("gpu",)),
    Kind("has activations with learned scalars", lambda geometry: any(it.learned for it in geometry.mlps), ("gpu",)),
    Kind("has latent attention", lambda geometry: any(it.latent for it in geometry.attentions), ("gpu",)),
    Kind("has attention with sinks", lambda geometry: any(it.sinks for it in geometry.attentions), ("gpu",)),
    Kind("scales its layers", lambda geometry: geometry.layer_scalars, ("gpu",)),
    Kind("has inputs for each layer", lambda geometry: geometry.per_layer, ("stages",)),
)


def kinds_of(geometry: Geometry) -> list[Kind]:
    """The kinds that a model belongs to."""
    return [kind for kind in KINDS if kind.holds(geometry)]


def takes_whole_texts(geometry: Geometry) -> bool:
    """True if calls take whole texts, and attention scores each against itself."""
    return any(kind.whole_texts for kind in kinds_of(geometry))


def find_evidence(geometry: Geometry) -> Evidence:
    """The results that a build of the model records for the self-test."""
    return next((kind.evidence for kind in kinds_of(geometry) if kind.evidence != "prompts"), "prompts")


def allows(geometry: Geometry, feature: str) -> bool:
    """True if the model can be combined with a feature, a key of :data:`FEATURES` or any other name."""
    return not any(feature in kind.bars for kind in kinds_of(geometry))


def refuse(geometry: Geometry, *features: str) -> None:
    """Refuse features that do not go with the model or with each other.

    Args:
        features: keys of :data:`FEATURES`; other names are accepted.

    Raises:
        UsageError: about the parameter of the first such feature.
    """
    barred = [(name, f"a model that {kind.words}") for kind in kinds_of(geometry) for name in kind.bars]
    barred += [
        (name, FEATURES[other].words) for name, others in CLASHES.items() for other in others if other in features
    ]
    for name, what in barred:
        if name in features:
            feature = FEATURES[name]
            problem = f"is given for {feature.words}, which does not go with {what}"
            raise UsageError(feature.parameter or name, problem, feature.advice)
