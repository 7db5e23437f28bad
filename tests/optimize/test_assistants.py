"""Gemma 4's assistants draft what transformers' do, from their model's own cache, and leave it as it is.

transformers' assistant gets caches that hold accepted tokens alone. test_heads.py has what all heads must do.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from doubles.assistants import write_assistant
from doubles.decoders import load_decoder
from doubles.refusals import about
from doubles.speculators import Always
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

from llmc.bundle import DECODER_FILE, read_bundle, write_manifest
from llmc.errors import CheckpointError, DraftError, UsageError
from llmc.export import export
from llmc.export.sources.heads import read_head
from llmc.optimize import recipe
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.runtime import Model, load
from llmc.runtime.loading import verify
from llmc.runtime.runner.prefill import batch
from llmc.runtime.sessions import Phase
from llmc.runtime.speculation.head_drafter import AssistantDrafter

# Of a vector's length: both sides sum in other orders, which costs about 1e-6; another position, key or norm costs more
# than 1e-3.
RELATIVE_TOLERANCE = 1e-4
# The same over keys and values in float16, which are off by 2^-11 of themselves at most.
HALF_TOLERANCE = 1e-2
V = 96
GENERATOR = np.random.default_rng(5)
# The longest one leaves so much behind its windows that the cache lets go of it.
PROMPTS = [GENERATOR.integers(2, V, length).tolist() for length in (400, 3, 40)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
MODELS = ("gemma4-keys-are-values", "gemma4-shared-caches-per-layer-inputs")


class Made:
    """A model and its assistant of random weights, as checkpoints, exports and bundles in float32."""

    def __init__(self, folder: Path, model: Path, *, clustered: bool) -> None:
        self.model, self.head = model, write_assistant(folder / "head", model, clustered=clustered)
        self.exports = folder / "model-export", folder / "head-export"
        export(self.model, self.exports[0])
        export(self.head, self.exports[1], of=self.model)
        self.bundles = self.build(folder)

    def build(self, folder: Path, precision: str = "fp32", **asked: Any) -> tuple[Path, Path]:
        asked = {"max_context": 512, "max_batch": 4, "recipe": recipe.Request(prefill_chunk=16, **asked)}
        places = folder / "model-bundle", folder / "head-bundle"
        build(BuildRequest(self.exports[0], places[0], precision=precision, draft_head=self.exports[1], **asked))
        build(BuildRequest(self.exports[1], places[1], precision=precision, **asked))
        return places


class Reference:
    """transformers' assistant beside its model, in float32."""

    def __init__(self, made: Made) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(made.model, **options).eval().model
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(made.head, **options).eval()

    @torch.no_grad()
    def draft(
        self, tokens: list[int], drafts: list[int], *, ahead: int = 0, more: int = 0, normed: bool = True
    ) -> np.ndarray:
        """Logits [n, V] after ``tokens`` and all but the last of ``drafts``. Errors are planted by a position that is
        ``ahead``, by ``more`` tokens in the cache and by hidden states before the norm."""
        seen: list[Tensor] = []
        hook = self.model.norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
        cached = torch.tensor([tokens[: len(tokens) - 1 + more]])
        found = self.model(cached, use_cache=False, return_shared_kv_states=True)
        hook.remove()
        hidden, logits = (found.last_hidden_state if normed else seen[0])[:, [len(tokens) - 2]], []
        for token in [tokens[-1], *drafts[:-1]]:
            embedded = self.model.embed_tokens(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(tokens) - 1 + ahead]]),
                attention_mask=torch.ones_like(cached),
                shared_kv_states=dict(found.shared_kv_states),
            )
            hidden = out.last_hidden_state
            logits.append(out.logits[0, -1].numpy())
        return np.stack(logits)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Between logits [n, V]; where some are left out, transformers has all those at its least."""
    known = np.isfinite(found)
    assert known.all() or (known == (wanted > wanted.min(-1, keepdims=True))).all()
    return float(np.linalg.norm(found[known] - wanted[known]) / np.linalg.norm(wanted[known]))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, random_checkpoint_writer: Any) -> Callable[[str], Made]:
    @cache
    def made(name: str) -> Made:
        folder = tmp_path_factory.mktemp("assistant")
        model = random_checkpoint_writer(folder / "model", name, dtype="float32", max_position_embeddings=512)
        return Made(folder, model, clustered=name == MODELS[1])

    return made


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, make: Callable[[str], Made]) -> Made:
    """One whose assistant scores all tokens, and one that shares caches itself, whose assistant chooses clusters."""
    return make(request.param)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)


@contextmanager
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int], np.ndarray]]]:
    """What was proposed meanwhile: after which tokens, which drafts, and their logits [n, V]. The model's cache must
    stay as it is."""
    heard, logits = list[tuple[list[int], list[int], np.ndarray]](), list[np.ndarray]()
    propose, run = AssistantDrafter.propose, AssistantDrafter._run

    def propose_and_tell(self: Any, key: int, tokens: Any, count: int) -> list[int]:
        logits.clear()
        before = [array.copy() for array in self._session.cache._of.arrays]
        drafts = propose(self, key, tokens, count)
        assert all(np.array_equal(*both) for both in zip(before, self._session.cache._of.arrays, strict=True))
        if drafts:
            heard.append((list(tokens), drafts, np.stack(logits)))
        return drafts

    def run_and_tell(self: Any, *args: Any) -> Any:
        logits.append(found := run(self, *args).copy())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(AssistantDrafter, "propose", propose_and_tell)
        patch.setattr(AssistantDrafter, "_run", run_and_tell)
        yield heard


def answer(model: Model) -> list[tuple[int, ...]]:
    """Answers one by one, and then side by side, behind cached prefixes."""
    alone = [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
    handles = [model.stream(prompt, **GREEDY) for prompt in PROMPTS]
    return [result.token_ids for result in (*alone, *(handle.result() for handle in handles))]


def draft(
    bundles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, level: str = "fast"
) -> list[tuple[list[int], list[int], np.ndarray]]:
    """What was proposed for answers, which are those without drafts."""
    with load(bundles[0], determinism=level) as model:
        wanted = answer(model)
    with load(bundles[0], determinism=level, draft=bundles[1]) as model, listen(monkeypatch) as heard:
        assert answer(model) == wanted
    assert len(heard) > 2 * 2 * len(PROMPTS) and {len(drafts) for _, drafts, _ in heard} >= {1, 3}
    return heard


@pytest.mark.parametrize("level", ["fast", "strict"])
def test_drafts_are_those_of_transformers(made, level, always, monkeypatch):
    heard, reference = draft(made.bundles, monkeypatch, level), Reference(made)
    for tokens, drafts, logits in heard:
        found = reference.draft(tokens, drafts)
        assert relative(logits, found) <= RELATIVE_TOLERANCE
        assert found.argmax(-1).tolist() == drafts
    if level == "strict":
        return
    errors: list[dict[str, Any]] = [{"ahead": 1}, {"ahead": -1}, {"more": 1}, {"normed": False}, {"window": 1}]
    errors.append({"window": -1})
    for error in errors:
        reference.assistant.config.text_config.sliding_window += (window := error.pop("window", 0))
        apart = [np.abs(logits - reference.draft(tokens, drafts, **error)) for tokens, drafts, logits in heard[::5]]
        reference.assistant.config.text_config.sliding_window -= window
        assert max(it[np.isfinite(it)].max() for it in apart) > 10 * RELATIVE_TOLERANCE, (error, window)


def test_the_portable_graph_and_its_module_compute_the_same(made):
    """Attention is in standard operators there, over caches in which anything may follow what is seen."""
    random, past = np.random.default_rng(3), 30
    with load(made.bundles[1]) as head:
        session, width = head.runner.session, head.manifest.geometry.row_width
        session.cache.reserve(1, 40)
        (count,), _ = session.cache.form(40)
        session.cache.write(0, 0, 40, random.standard_normal(count).astype(np.float32))
        rows = random.standard_normal((1, width)).astype(np.float32)
        call = batch(Phase.DECODE, np.array([[7]]), [past], [0])
        logits = session.run(call.feed(embedding_indices=np.array([[0]]), embeddings=rows))[0].copy()
        hidden = session.hidden[0].copy()
        caches = {tensor.past: array for tensor, array in zip(session.cache.tensors, session.cache.arrays, strict=True)}
        decoder = load_decoder(made.head, read_head(made.head, made.model))
        graph = onnxruntime.InferenceSession(made.exports[1] / DECODER_FILE, providers=["CPUExecutionProvider"])
        for seen, alike in ((past, True), (past - 1, False)):
            numbers = {"input_ids": [[7]], "past_lengths": [seen], "logit_indices": [[0]], "embedding_indices": [[0]]}
            feeds = {**{name: np.array(value) for name, value in numbers.items()}, "embeddings": rows, **caches}
            tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
            places = [tensors[name] for name in ("input_ids", "past_lengths", "logit_indices")]
            pasts = [tuple(tensors[name] for name in cache.inputs) for cache in head.manifest.geometry.caches]
            with torch.no_grad():
                eager, given, *_ = decoder(*places, pasts, None, tensors["embedding_indices"], tensors["embeddings"])
            found = [*graph.run(["logits", "hidden"], feeds), eager.numpy(), given[-1][0].numpy()]
            pairs = zip((logits, hidden, logits, hidden), found, strict=True)
            close = [np.allclose(*both, RELATIVE_TOLERANCE, RELATIVE_TOLERANCE) for both in pairs]
            assert close == [alike] * 4


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_models_that_share_caches_are_drafted_for(make, precision, tmp_path, always, monkeypatch):
    bundles = make(MODELS[1]).build(tmp_path, precision)
    draft(bundles, monkeypatch, "strict")
    assert verify(bundles[1]).largest_difference == 0
    assert read_bundle(bundles[1]).recipe.phases == "shared"  # it reads one token at a time


def test_a_cache_in_float16_is_read_as_it_is(make, tmp_path, always, monkeypatch):
    made = make(MODELS[0])
    reference, bundles = Reference(made), made.build(tmp_path, cache="float16")
    for tokens, drafts, logits in draft(bundles, monkeypatch):
        assert relative(logits, reference.draft(tokens, drafts)) <= HALF_TOLERANCE
    with pytest.raises(
        DraftError, match=r"caches of layers 0 and 1 in float32, .* has them in float16; .* one type of"
    ):
        load(bundles[0], draft=made.bundles[1]).engine  # noqa: B018


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"backbone_hidden_size": 32}, {}, "drafts for a Gemma 4 of 32 values, 96 tokens and .* is a gemma4_text of 64"),
    ({}, {"vocab_size": 128}, "drafts for a Gemma 4 of 64 values, 128 tokens"),
    ({}, {"rms_norm_eps": 1e-3}, "and 0.001 in norms"),
    ({"use_ordered_embeddings": True}, {}, "token_ordering is not a tensor I64"),
    ({"more": 1}, {}, "more=1 is not known"),
    ({}, {"more": 1}, "text_config: more=1 is not known"),
    ({}, {"hidden_size_per_layer_input": 8}, "dense layers without per-layer inputs"),
    ({}, {"use_double_wide_mlp": True}, "dense layers without per-layer inputs"),
    ({}, {"sliding_window": 5}, "layer 0 reads 2 heads of 16 values in a window of 5"),
    ({}, {"head_dim": 32}, "layer 0 reads 2 heads of 32 values"),
    ({}, {"per_layer_config": None, "global_head_dim": 16}, "layer 1 reads 2 heads of 16 values in a window of 0"),
    ({}, {"intermediate_size": 64}, "has shape"),
]


def test_what_does_not_fit_is_refused_by_name_and_a_nested_config_is_not(make, tmp_path):
    made = make(MODELS[0])
    stated = json.loads((made.head / "config.json").read_text(encoding="utf-8"))
    refuse = partial(export, output=tmp_path / "export", of=made.model)
    for number, (keys, inner, message) in enumerate(CHANGES):
        folder = shutil.copytree(made.head, tmp_path / str(number))
        changed = {**stated, **keys, "text_config": stated["text_config"] | inner}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            refuse(folder)
    nested = shutil.copytree(made.model, tmp_path / "nested")  # as published
    text = json.loads((nested / "config.json").read_text(encoding="utf-8"))
    (nested / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    tensors = load_file(nested / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, nested / "model.safetensors")
    more = shutil.copytree(made.head, tmp_path / "more")
    (more / "config.json").write_text(json.dumps(stated | {"eos_token_id": [1], "image_token_id": 9}))
    assert read_head(more, nested).config == read_head(made.head, made.model).config
    clustered = shutil.copytree(make(MODELS[1]).head, tmp_path / "clustered")
    tensors = load_file(clustered / "model.safetensors")
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]
    save_file(tensors, clustered / "model.safetensors")
    with pytest.raises(CheckpointError, match="token_ordering does not name each of the 96 tokens once"):
        export(clustered, tmp_path / "export", of=make(MODELS[1]).model)


def test_an_assistant_and_a_model_that_do_not_fit_are_refused(make, tmp_path):
    one, other = make(MODELS[0]), make(MODELS[1])
    with pytest.raises(UsageError, check=about("draft_head")):
        build(BuildRequest(one.exports[0], tmp_path / "bundle", draft_head=other.exports[1]))
    with pytest.raises(DraftError, match="build the model with --head"):
        load(one.bundles[0], draft=other.bundles[1]).engine  # noqa: B018
    head = shutil.copytree(one.bundles[1], tmp_path / "head")
    manifest = read_bundle(head)
    caches = tuple(replace(cache, window=cache.window and 9) for cache in manifest.geometry.caches)
    write_manifest(replace(manifest, geometry=replace(manifest.geometry, caches=caches)), head)
    with pytest.raises(DraftError, match=r"has others in float32; export the head --of that model"):
        load(one.bundles[0], draft=head).engine  # noqa: B018
    lent = replace(manifest.geometry, caches=tuple(replace(cache, lent=False) for cache in caches))
    assert manifest.geometry.is_sound and not lent.is_sound
