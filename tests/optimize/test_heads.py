"""Draft heads go the whole way: EAGLE-3's for a Llama, Qwen3.5's own and Gemma 4's assistants (whose rules are in
test_assistants.py); read, built, and drafting without a trace.

Weights are random, so a head is right by chance alone; the planted ones guess what a model whose layers add little does
next.
"""

import json
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from doubles.adapters import draw_factors, write_adapter
from doubles.assistants import write_assistant
from doubles.refusals import about
from doubles.speculators import Always
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from llmc.bundle import WEIGHTS_FILE, read_bundle, read_export, write_manifest
from llmc.errors import BundleError, CancelledError, CheckpointError, DraftError, UsageError
from llmc.export import export
from llmc.export.adapters import add_adapter
from llmc.optimize import recipe
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, Request, SamplingParams, load
from llmc.runtime.api.handle import Handle
from llmc.runtime.loading import verify
from llmc.runtime.runner.prefill import batch
from llmc.runtime.selftest.values import VECTOR_TOLERANCE
from llmc.runtime.sessions import Phase
from llmc.runtime.speculation.head_drafter import AssistantDrafter, HeadDrafter

# Of a vector's length: both sides sum in other orders, which costs about 1e-6; a norm, a tensor or a position that is
# another one costs more than 1e-2.
RELATIVE_TOLERANCE = 1e-4
# Of hidden states in 8 and 4 bits, of random weights: 0.08 was seen; in another basis they are off by 1.4.
ROUNDED_TOLERANCE = 0.2
KINDS = ("eagle", "mtp")
ALL_KINDS = (*KINDS, "assistant")
V, N, ROWS, EPS = 96, 64, 48, 1e-6
HEADS = {"eagle": (4, 16, 16), "mtp": (2, 32, 8)}  # of keys, their width, and what of it is rotated
GENERATOR = np.random.default_rng(5)
PROMPTS = [GENERATOR.integers(2, V, length).tolist() for length in (70, 7, 40)]
NEW = 12
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_tokens": NEW, "temperature": 1, "seed": 3, "ignore_eos": True}
BUILT: dict[str, Any] = {"max_context": 128, "max_batch": 4, "recipe": recipe.Request(prefill_chunk=16)}


class Made:
    """A model and its head, as checkpoints, exports and bundles in float32."""

    def __init__(self, kind: str, checkpoint: Path, folder: Path, *, planted: bool) -> None:
        self.kind, self.model = kind, shutil.copytree(checkpoint, folder / "model")
        tensors, random = load_file(self.model / "model.safetensors"), torch.Generator().manual_seed(1)
        if planted:  # what comes next hangs on the last token and little else
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                    tensor *= 0.002
                if kind == "assistant" and "_layernorm" in name and "post_" in name:  # norms behind these
                    tensor *= 0.002
            config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
            (self.model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
            tensors["lm_head.weight"] = torch.randn(V, N, generator=random)
        self.tensors = tensors
        if kind == "assistant":
            save_file(tensors, self.model / "model.safetensors")
            self.head = write_assistant(folder / "head", self.model, planted=planted)
        elif kind == "mtp":
            self.weights = make_mtp(tensors, random, planted=planted)
            self.head = self.model
            save_file(tensors | {f"mtp.{name}": tensor for name, tensor in self.weights.items()}, self.file)
        else:
            self.weights = make_eagle(tensors, random, planted=planted)
            save_file(tensors, self.model / "model.safetensors")
            self.head = folder / "head"
            self.head.mkdir()
            (self.head / "config.json").write_text(json.dumps(EAGLE))
            save_file(self.weights | {"t2d": torch.zeros(V, dtype=torch.bool)}, self.file)
        self.exports = folder / "model-export", folder / "head-export"
        export(self.model, self.exports[0])
        export(self.head, self.exports[1], of=self.model)
        self.bundles = folder / "model-fp32", folder / "head-fp32"
        self.build(self.bundles, "fp32")

    def build(self, places: tuple[Path, Path], precision: str) -> None:
        build(BuildRequest(self.exports[0], places[0], precision=precision, draft_head=self.exports[1], **BUILT))
        build(BuildRequest(self.exports[1], places[1], precision=precision, **BUILT))

    @property
    def file(self) -> Path:
        return self.head / "model.safetensors"


EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": N,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "vocab_size": V,
    "draft_vocab_size": ROWS,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
}
EAGLE_KEYS = ("draft_vocab_size", "eagle_config")
SPECULATOR = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "elsewhere"}},
    "draft_vocab_size": ROWS,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "target_hidden_size": None,
}
BORDERS = {"eagle": (1, 3, 5), "mtp": (2,)}


def make_eagle(model: dict[str, Tensor], random: torch.Generator, *, planted: bool) -> dict[str, Tensor]:
    """Weights by the names of published heads, whose logits are those of every second token."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    weights = {
        "fc.weight": matrix(N, 3 * N),
        "midlayer.self_attn.q_proj.weight": matrix(N, 2 * N),
        "midlayer.self_attn.k_proj.weight": matrix(N, 2 * N),
        "midlayer.self_attn.v_proj.weight": matrix(N, 2 * N),
        "midlayer.self_attn.o_proj.weight": matrix(N, N),
        "midlayer.mlp.gate_proj.weight": matrix(96, N),
        "midlayer.mlp.up_proj.weight": matrix(96, N),
        "midlayer.mlp.down_proj.weight": matrix(N, 96),
        **{f"midlayer.{name}.weight": 1 + matrix(1, N)[0] for name in NORMS},
        "norm.weight": 1 + matrix(1, N)[0],
        "lm_head.weight": matrix(ROWS, N),
        "d2t": torch.arange(ROWS),  # 0, 2, 4, ...
    }
    if planted:  # each token attends to itself and hands its embedding on, in the place of what the stream began with
        eye, none = torch.eye(N), torch.zeros(N, N)
        self_attn = {"q": 8 * torch.cat((eye, none), 1), "v": torch.cat((eye, -eye), 1)}
        self_attn["k"] = self_attn["q"]
        weights |= {f"midlayer.self_attn.{part}_proj.weight": it.clone() for part, it in self_attn.items()}
        weights |= {f"midlayer.{name}.weight": torch.ones(N) for name in NORMS}
        weights["midlayer.self_attn.o_proj.weight"] = 100 * eye
        weights["fc.weight"] *= 0
        weights["lm_head.weight"] = model["lm_head.weight"][::2].clone()
        weights["midlayer.mlp.down_proj.weight"] *= 0
        weights["norm.weight"] = model["model.norm.weight"].clone()
    return weights


NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def make_mtp(model: dict[str, Tensor], random: torch.Generator, *, planted: bool) -> dict[str, Tensor]:
    """Weights by the names of published checkpoints; their norms are stored minus one."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    weights = {
        "fc.weight": matrix(N, 2 * N),
        "layers.0.self_attn.q_proj.weight": matrix(2 * 4 * 32, N),
        "layers.0.self_attn.k_proj.weight": matrix(64, N),
        "layers.0.self_attn.v_proj.weight": matrix(64, N),
        "layers.0.self_attn.o_proj.weight": matrix(N, 128),
        **{f"layers.0.self_attn.{part}_norm.weight": matrix(1, 32)[0] for part in "qk"},
        **{f"layers.0.{name}.weight": matrix(1, N)[0] for name in (NORMS[0], NORMS[2])},
        **{f"layers.0.mlp.{part}_proj.weight": matrix(96, N) for part in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": matrix(N, 96),
        **{f"{name}.weight": matrix(1, N)[0] for name in norms},
    }
    if planted:  # the embedding alone
        weights["fc.weight"] = torch.cat((torch.eye(N), torch.zeros(N, N)), 1)
        weights["layers.0.self_attn.o_proj.weight"] *= 0
        weights["layers.0.mlp.down_proj.weight"] *= 0
        weights["pre_fc_norm_embedding.weight"] *= 0
        weights["norm.weight"] = model["model.norm.weight"].clone()
    return weights


# ------------------------------------------------------------------------------------------- the published rules, plain


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of heads [heads, S, D] at the positions 0 ... S - 1."""
    _, _, turned = HEADS[kind]
    angles = torch.arange(q.shape[1])[:, None] * 10000.0 ** -(torch.arange(0, turned, 2) / turned)
    cos, sin = angles.cos(), angles.sin()

    def turn(x: Tensor) -> Tensor:
        a, b, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    k, v = (it.repeat_interleave(len(q) // len(it), 0) for it in (turn(k), v))
    products = turn(q) @ k.mT / q.shape[-1] ** 0.5
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    return (products.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def compute(made: Made, ids: Tensor, given: Tensor, own: Tensor, *, normed: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and hidden states [S, N] of a head for tokens [S], each of which reads the model's hidden states
    or, where these are zeros, the head's own; EAGLE-3's stream may go on from its norm."""
    w, embedded = made.weights, made.tensors["model.embed_tokens.weight"][ids]

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEADS[made.kind][1]).transpose(0, 1)

    if made.kind == "eagle":
        given = rms(given, w["input_norm.weight"]) if "input_norm.weight" in w else given
        at, x = "midlayer", given @ w["fc.weight"].T + own
        weights = {name: w[f"{at}.{name}.weight"] for name in NORMS}
        stream = rms(x, weights["hidden_norm"])
        read, x = torch.cat((rms(embedded, weights["input_layernorm"]), stream), -1), stream if normed else x
        q, k, v = (heads(read @ w[f"{at}.self_attn.{part}_proj.weight"].T) for part in "qkv")
        if f"{at}.self_attn.q_norm.weight" in w:
            q, k = (rms(it, w[f"{at}.self_attn.{part}_norm.weight"]) for it, part in ((q, "q"), (k, "k")))
        x = x + attend("eagle", q, k, v) @ w[f"{at}.self_attn.o_proj.weight"].T
    else:
        at, ours = "layers.0", made.tensors["model.norm.weight"] + 1
        hidden = torch.where(given.any(-1, keepdim=True), rms(given, ours), own)
        parts = (embedded, "pre_fc_norm_embedding"), (hidden, "pre_fc_norm_hidden")
        x = torch.cat([rms(part, w[f"{name}.weight"] + 1) for part, name in parts], -1) @ w["fc.weight"].T
        read = rms(x, w[f"{at}.input_layernorm.weight"] + 1)
        q, k, v = (heads(read @ w[f"{at}.self_attn.{part}_proj.weight"].T) for part in "qkv")
        q, gate = q.transpose(0, 1).reshape(len(x), 4, 64).transpose(0, 1).split(32, -1)
        q, k = (rms(it, w[f"{at}.self_attn.{part}_norm.weight"] + 1) for it, part in ((q, "q"), (k, "k")))
        attended = attend("mtp", q, k, v) * gate.transpose(0, 1).flatten(1).sigmoid()
        x = x + attended @ w[f"{at}.self_attn.o_proj.weight"].T
    offset = made.kind == "mtp"
    read = rms(x, w[f"{at}.post_attention_layernorm.weight"] + offset)
    inner = functional.silu(read @ w[f"{at}.mlp.gate_proj.weight"].T) * (read @ w[f"{at}.mlp.up_proj.weight"].T)
    x = x + inner @ w[f"{at}.mlp.down_proj.weight"].T
    last = rms(x, w["norm.weight"] + offset)
    if made.kind == "mtp":
        return last @ made.tensors.get("lm_head.weight", made.tensors["model.embed_tokens.weight"]).T, last
    logits = torch.full((len(x), V), -torch.inf)
    logits[:, torch.arange(ROWS) + w["d2t"]] = last @ w["lm_head.weight"].T
    return logits, x


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    known = np.isfinite(wanted)
    assert (known == np.isfinite(found)).all()
    return float(np.linalg.norm(found[known] - wanted[known]) / np.linalg.norm(wanted[known]))


# --------------------------------------------------------------------------------------------------------- fixtures


# Random checkpoints by their names, with changes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("llama-biases", {"attention_bias": False, "mlp_bias": False, "num_hidden_layers": 6}),
    "mtp": (
        "qwen3_5-delta-and-gates",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ),
    "assistant": ("gemma4-keys-are-values", {}),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, random_checkpoint_writer: Any) -> Callable[..., Made]:
    @cache
    def made(kind: str, *, planted: bool) -> Made:
        folder, (name, changes) = tmp_path_factory.mktemp(kind), MODELS[kind]
        random_checkpoint_writer(folder / "checkpoint", name, **changes, rms_norm_eps=EPS, tie_word_embeddings=True)
        return Made(kind, folder / "checkpoint", folder, planted=planted)

    return made


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, make: Callable[..., Made]) -> Made:
    """A model and its head of random weights."""
    return make(request.param, planted=False)


@pytest.fixture(scope="module", params=ALL_KINDS)
def planted(request: pytest.FixtureRequest, make: Callable[..., Made]) -> Made:
    """A model of which the head guesses much."""
    return make(request.param, planted=True)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)


def feed(model: Model, ids: list[int], past: int = 0) -> np.ndarray:
    """Hidden states [S, W] that the model gives for tokens."""
    session = model.runner.session
    session.cache.grow(1, 128, 128)
    session.run(batch(Phase.PREFILL if len(ids) > 4 else Phase.DECODE, np.array([ids]), [past], [0]))
    assert session.hidden is not None
    return session.hidden[0].copy()


def read(model: Model, ids: list[int], rows: np.ndarray, past: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, V] and hidden states [S, N] that a head gives for tokens and rows [S, W]."""
    session, places = model.runner.session, np.arange(len(ids))
    session.cache.grow(1, 128, 128)
    call = batch(Phase.PREFILL, np.array([ids]), [past], places.tolist())
    logits = session.run(call.feed(embedding_indices=places[None], embeddings=rows.astype(np.float32)))
    return logits[0].copy(), session.hidden[0].copy()


# -------------------------------------------------------------------------------------------------- numbers


def test_the_model_gives_the_hidden_states_of_transformers(made: Made):
    from transformers import AutoModelForCausalLM

    reference, found = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32).eval(), {}
    for border in BORDERS[made.kind]:
        layer = reference.model.layers[border - 1]
        layer.register_forward_hook(lambda _, __, output, at=border: found.update({at: output}))
    with torch.no_grad():
        reference(torch.tensor([PROMPTS[0]]))
    outputs = [it[0] if isinstance(it, tuple) else it for it in found.values()]
    wanted = torch.cat([it.view(-1, N) for it in outputs], -1).numpy()
    assert read_bundle(made.bundles[0]).hidden == BORDERS[made.kind]
    with load(made.bundles[0]) as model:
        hidden = np.concatenate(
            [feed(model, PROMPTS[0][:33]), *(feed(model, PROMPTS[0][i : i + 1], i) for i in (33, 34))]
        )
    assert relative(hidden, wanted[:35]) <= RELATIVE_TOLERANCE
    assert relative(hidden[1:], wanted[:34]) > RELATIVE_TOLERANCE


def compare_with_rule(made: Made, bundle: Path, *, normed: bool = False) -> None:
    """In two calls; the last three tokens behind its own hidden states, of which any will do."""
    random, width = np.random.default_rng(2), len(BORDERS[made.kind]) * N
    ids, rows = PROMPTS[2], random.standard_normal((40, width + N)).astype(np.float32)
    rows[:37, width:], rows[37:, :width] = 0, 0
    given, own = torch.from_numpy(rows[:, :width]), torch.from_numpy(rows[:, width:])
    with load(bundle) as model:
        parts = [read(model, ids[:20], rows[:20]), read(model, ids[20:], rows[20:], 20)]
    logits, hidden = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    wanted = compute(made, torch.tensor(ids), given, own, normed=normed)
    assert relative(logits, wanted[0].numpy()) <= RELATIVE_TOLERANCE
    assert relative(hidden, wanted[1].numpy()) <= RELATIVE_TOLERANCE
    if made.kind == "eagle":
        other = compute(made, torch.tensor(ids), given, own, normed=not normed)
        assert relative(logits, other[0].numpy()) > RELATIVE_TOLERANCE
    for name, tensor in made.weights.items():  # each of them counts
        if tensor.is_floating_point():
            tensor[..., 0] += 0.1
            moved = relative(logits, compute(made, torch.tensor(ids), given, own, normed=normed)[0].numpy())
            tensor[..., 0] -= 0.1
            assert moved > RELATIVE_TOLERANCE, name


def test_the_head_computes_the_published_rule(made: Made):
    compare_with_rule(made, made.bundles[1])


@pytest.mark.parametrize("input_norm", [False, True])
def test_the_layout_of_speculators_is_read(eagle: Made, tmp_path: Path, input_norm: bool):
    """Its stream goes on from its norm, its layers are numbered by what they read, and its own may be Qwen 3's; that of
    gpt-oss norms what it is given."""
    made, random = copy(eagle), torch.Generator().manual_seed(4)
    normed = {f"midlayer.self_attn.{part}_norm.weight": 1 + torch.randn(16, generator=random) / 4 for part in "qk"}
    if input_norm:
        normed["input_norm.weight"] = 1 + torch.randn(3 * N, generator=random) / 4
    made.weights, made.head = eagle.weights | normed, tmp_path / "speculator"
    made.head.mkdir()
    layer = {name: value for name, value in EAGLE.items() if name not in ("architectures", *EAGLE_KEYS)}
    layer |= {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
    flags = {"norm_before_fc": input_norm, "fc_norm": False, "norm_output": False}
    (made.head / "config.json").write_text(json.dumps(SPECULATOR | flags | {"transformer_layer_config": layer}))
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in made.weights.items()}
    save_file(renamed | {"t2d": torch.zeros(V, dtype=torch.bool)}, made.file)
    export(made.head, tmp_path / "export", of=made.model)
    build(BuildRequest(tmp_path / "export", tmp_path / "bundle", precision="fp32", **BUILT))
    assert read_bundle(tmp_path / "bundle").geometry.head == read_bundle(eagle.bundles[1]).geometry.head
    compare_with_rule(made, tmp_path / "bundle", normed=True)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_change_of_any_weight_of_a_head_is_found(make: Callable[..., Made], kind: str, tmp_path: Path):
    bundle = make(kind, planted=False).bundles[1]
    assert verify(bundle).largest_difference == 0
    folder = Path(shutil.copytree(bundle, tmp_path / "head"))
    values = np.memmap(folder / WEIGHTS_FILE, np.uint8, "r+")
    graph = onnx.load(folder / read_bundle(folder).graphs["decode"].file, load_external_data=False).graph
    stored = [it for it in graph.initializer if it.external_data]
    assert len(stored) > 8
    for tensor in stored:
        place = {entry.key: entry.value for entry in tensor.external_data}
        start, size = int(place["offset"]), int(place["length"])
        part = values[start : start + size].view(np.float32)
        kept = part.copy()
        part *= -1
        values.flush()
        with pytest.raises(BundleError, match=rf"(logits|states) differ by .*at most {VECTOR_TOLERANCE} is expected"):
            load(folder, self_test=True, verify=False).close()
        part[:] = kept
    manifest = read_bundle(folder)
    write_manifest(replace(manifest, vectors=()), folder)
    with pytest.raises(BundleError, match="no golden values of a draft head; build the bundle again"):
        verify(folder)


# -------------------------------------------------------------------------------------------------- drafts


def answer(model: Model, **how: Any) -> list[Any]:
    """Results one by one and then side by side."""
    alone = [model.generate(prompt, **how) for prompt in PROMPTS]
    handles = [model.stream(prompt, **how) for prompt in PROMPTS]
    return [*alone, *(handle.result() for handle in handles)]


@pytest.mark.parametrize("level", ["fast", "strict"])
def test_tokens_are_those_without_drafts(planted: Made, level: str, always: None):
    how: dict[str, Any] = {"determinism": level, "prefix_cache_bytes": 0, "prefill_chunk": 16}
    with load(planted.bundles[0], **how) as model:
        wanted = [[result.token_ids for result in answer(model, **each)] for each in (GREEDY, SAMPLED)]
    with load(planted.bundles[0], **how, draft=planted.bundles[1]) as model:
        for each, tokens in zip((GREEDY, SAMPLED), wanted, strict=True):
            results = answer(model, **each)
            assert [result.token_ids for result in results] == tokens
            assert sum(result.metrics.drafted for result in results) > 0
            if each is GREEDY:
                assert sum(result.metrics.accepted for result in results) > len(results)
        samples = model.generate(PROMPTS[0], **SAMPLED, n=2)
        assert samples.outputs[0].token_ids == wanted[1][0]


def test_a_cached_prefix_is_drafted_behind(planted: Made, always: None):
    with load(planted.bundles[0], prefix_cache_bytes=0) as model:
        wanted = model.generate(PROMPTS[0], **GREEDY).token_ids
    with load(planted.bundles[0], draft=planted.bundles[1]) as model:
        first, second = (model.generate(PROMPTS[0], **GREEDY) for _ in range(2))
        assert first.token_ids == second.token_ids == wanted
        assert second.usage.cached_tokens > 0 and second.metrics.drafted > 0


def test_what_ends_or_is_cancelled_leaves_nothing_in_the_drafter(planted: Made, always: None):
    with load(planted.bundles[0], draft=planted.bundles[1]) as model:
        started: list[Handle] = []
        asked = SamplingParams(**GREEDY | {"max_tokens": 100})
        stopping = Request(PROMPTS[1], asked, on_delta=lambda _: [handle.cancel() for handle in started])
        started.append(first := model.submit(stopping))
        handles = [model.stream(prompt, **GREEDY) for prompt in PROMPTS]
        with pytest.raises(CancelledError):
            first.result()
        for handle in handles:
            handle.result()
        drafter = model.engine.call(lambda: model.engine._runner.watch.__self__)  # type: ignore[union-attr]
        assert (
            not drafter._sequences
            and not getattr(drafter, "_seen", ())
            and sorted(drafter._free) == list(range(len(drafter._free)))
        )


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_models_and_heads_draft_too(planted: Made, precision: str, tmp_path: Path, always: None):
    """Both graphs of the model give hidden states in the basis of the checkpoint, also where rows share a call."""
    places = tmp_path / "model", tmp_path / "head"
    planted.build(places, precision)
    assert verify(places[1]).largest_difference == 0
    with load(planted.bundles[0]) as exact, load(places[0]) as rounded:
        assert bool(rounded.manifest.recipe.rotated) == (planted.kind != "assistant")
        for prompt in PROMPTS:
            assert relative(feed(rounded, prompt), feed(exact, prompt)) < ROUNDED_TOLERANCE
            assert relative(feed(rounded, prompt[:2], 0), feed(exact, prompt[:2], 0)) < ROUNDED_TOLERANCE
        if rounded.runner.session.packs_rows:
            rounded.runner.prefill_beside(PROMPTS[1], PROMPTS[2])
            for row, prompt in zip(rounded.runner.session.hidden.copy(), PROMPTS[1:], strict=True):
                assert relative(row[: len(prompt)], feed(exact, prompt)) < ROUNDED_TOLERANCE
    with load(places[0], determinism="strict") as model:
        wanted = [result.token_ids for result in answer(model, **GREEDY)]
    with load(places[0], determinism="strict", draft=places[1]) as model:
        results = answer(model, **GREEDY)
        assert [result.token_ids for result in results] == wanted
        assert sum(result.metrics.accepted for result in results) > 0


def test_a_head_drafts_for_rows_with_adapters(
    planted: Made, tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch
):
    """It reads the hidden states of the model with the adapter, as if this were a part of its weights."""
    seen: list[np.ndarray] = []
    kind = AssistantDrafter if planted.kind == "assistant" else HeadDrafter
    watch = kind.watch
    monkeypatch.setattr(kind, "watch", lambda *args: [seen.append(args[3].copy()), watch(*args)])
    folder = write_adapter(
        tmp_path / "sql", draw_factors(read_export(planted.exports[0]).geometry, 4, deviation=0.01), r=4
    )
    build(
        BuildRequest(
            planted.exports[0],
            tmp_path / "beside",
            precision="fp32",
            draft_head=planted.exports[1],
            adapters=1,
            **BUILT,
        )
    )
    add_adapter(tmp_path / "beside", folder, "sql")
    merged = export(planted.model, tmp_path / "export", adapters=[(folder, 1.0)]).output
    build(BuildRequest(merged, tmp_path / "merged", precision="fp32", draft_head=planted.exports[1], **BUILT))
    asked = [("beside", None), ("beside", "sql"), ("merged", None)]
    hidden, results = [], []
    for name, adapter in asked:
        with load(tmp_path / name, draft=planted.bundles[1], determinism="strict", prefill_chunk=16) as model:
            seen.clear()
            results.append(model.stream(PROMPTS[0], adapter=adapter, **GREEDY).result())
            hidden.append(np.concatenate(seen)[: len(PROMPTS[0])])
    assert relative(hidden[1], hidden[2]) <= RELATIVE_TOLERANCE < relative(hidden[0], hidden[2])
    assert all(result.metrics.accepted > 0 for result in results)
    with load(tmp_path / "beside", determinism="strict") as model:
        for (name, adapter), result in zip(asked[:2], results, strict=False):
            assert model.stream(PROMPTS[0], adapter=adapter, **GREEDY).result().token_ids == result.token_ids, name


# -------------------------------------------------------------------------------------------------- refusals


def test_a_head_and_a_model_that_do_not_fit_are_refused(made: Made, tmp_path: Path):
    build(BuildRequest(made.exports[0], tmp_path / "plain", precision="fp32", max_context=64))
    with pytest.raises(DraftError, match="build the model with --head"):
        load(tmp_path / "plain", draft=made.bundles[1])
    with load(made.bundles[1]) as head, pytest.raises(UsageError, check=about("bundle")):
        head.generate([1, 2], max_tokens=2)
    with pytest.raises(UsageError, check=about("draft_head")):
        build(BuildRequest(made.exports[0], tmp_path / "bundle", draft_head=made.exports[0]))
    with pytest.raises(UsageError, check=about("adapters")):
        export(made.head, tmp_path / "bundle", of=made.model, adapters=[(tmp_path, 1.0)])
    assert read_export(made.exports[1]).geometry.head is not None


@pytest.fixture(scope="module")
def eagle(make: Callable[..., Made]) -> Made:
    return make("eagle", planted=False)


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures=.* expected .*LlamaForCausalLMEagle3"),
    ({"num_hidden_layers": 2}, {}, "num_hidden_layers=2"),
    ({"norm_before_fc": True}, {}, "tensor model.input_norm.weight is missing"),
    ({"fc_norm": True}, {}, "fc_norm=True is unsupported; expected false"),
    ({"norm_output": True}, {}, "norm_output=True is unsupported; expected false"),
    ({"speculators_model_type": "dflash"}, {}, "speculators_model_type='dflash' is unsupported"),
    (
        {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        {},
        "transformer_layer_config=None is unsupported",
    ),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state=False"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, "1"]}}, {}, "expected a list of layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, {}, "some of the 6 of the model"),
    ({}, {"d2t": torch.zeros(ROWS, dtype=torch.int64) - torch.arange(ROWS)}, "repeats tokens"),
    ({}, {"d2t": torch.arange(ROWS) * 3}, "exceeds the model's 96"),
    ({}, {"d2t": torch.zeros(ROWS)}, "not a tensor I64"),
    ({}, {"fc.weight": torch.zeros(N, 2 * N)}, "model.fc.weight has shape"),
]


def test_other_layouts_are_refused_by_name(eagle: Made, tmp_path: Path):
    for number, (keys, tensors, message) in enumerate(CHANGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(EAGLE | keys))
        save_file(eagle.weights | tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            export(folder, tmp_path / "export", of=eagle.model)
    with pytest.raises(CheckpointError, match="without tensors mtp"):
        export(eagle.model, tmp_path / "export", of=eagle.model)
