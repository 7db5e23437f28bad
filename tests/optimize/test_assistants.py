"""Gemma 4's assistants go the whole way: read, built, and drafting from their model's own cache without a trace.

transformers' assistant is what they are compared with, over caches that hold accepted tokens alone.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.speculators import Always
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from llmc.bundle import read_bundle
from llmc.errors import BuildError, CheckpointError, DraftError, UsageError
from llmc.export import export
from llmc.optimize import recipe
from llmc.optimize.build import build
from llmc.runtime import Model, load
from llmc.runtime.model import verify
from llmc.runtime.speculation.head_drafter import AssistantDrafter

# Of a vector's length: both sides sum in other orders, which costs about 1e-6; another position, key or norm costs more
# than 1e-3.
RELATIVE_TOLERANCE = 1e-4
V, N, CLUSTERS, BEST = 96, 64, 8, 3
GENERATOR = np.random.default_rng(5)
PROMPTS = [GENERATOR.integers(2, V, length).tolist() for length in (70, 3, 40)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 1, "seed": 3, "ignore_eos": True}
BUILT: dict[str, Any] = {"max_context": 128, "max_batch": 4, "recipe": recipe.Request(prefill_chunk=16)}
MODELS = ("gemma4-keys-are-values", "gemma4-shared-caches-per-layer-inputs")


class Made:
    """A model and its assistant, as checkpoints, exports and bundles in float32."""

    def __init__(self, checkpoint: Path, folder: Path, *, clustered: bool, planted: bool) -> None:
        self.model, self.head = shutil.copytree(checkpoint, folder / "model"), folder / "head"
        tensors = load_file(self.model / "model.safetensors")
        if planted:  # what comes next hangs on the last token and little else
            for name, tensor in tensors.items():
                if "post_" in name and name.endswith("norm.weight"):
                    tensor *= 0.002
            save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})
        write_assistant(self.head, json.loads((self.model / "config.json").read_text()), tensors, clustered, planted)
        self.exports = folder / "model-export", folder / "head-export"
        export(self.model, self.exports[0])
        export(self.head, self.exports[1], of=self.model)
        self.bundles = folder / "model-fp32", folder / "head-fp32"
        self.build(self.bundles, "fp32")

    def build(self, places: tuple[Path, Path], precision: str) -> None:
        build(self.exports[0], places[0], precision=precision, head=self.exports[1], **BUILT)
        build(self.exports[1], places[1], precision=precision, **BUILT)


def write_assistant(
    folder: Path, model: dict[str, Any], tensors: dict[str, Tensor], clustered: bool, planted: bool
) -> None:
    """Four layers with the heads of the model's."""
    text = {
        name: value
        for name, value in model.items()
        if name in ("num_key_value_heads", "head_dim", "vocab_size", "sliding_window", "rope_parameters")
        or name in ("attention_k_eq_v", "pad_token_id")
    }
    full = next(iter(model["per_layer_config"].values()))
    torch.manual_seed(1)
    config = Gemma4AssistantConfig(
        text_config=text
        | {"model_type": "gemma4_text", "hidden_size": N if planted else 48, "intermediate_size": 96}
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"per_layer_config": {"1": full, "3": full}, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        backbone_hidden_size=N,
        use_ordered_embeddings=clustered,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=BEST,
    )
    assistant = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, parameter in assistant.named_parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.25)
            if planted and "post_" in name and name.endswith("norm.weight"):
                parameter.zero_()
        for name, buffer in assistant.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(V))
        if planted:  # the embedding alone
            assistant.pre_projection.weight.copy_(torch.cat((torch.eye(N), torch.zeros(N, N)), 1))
            assistant.model.norm.weight.copy_(tensors["model.norm.weight"])
            assistant.lm_head.weight.copy_(tensors["model.embed_tokens.weight"])
    assistant.save_pretrained(folder)


class Reference:
    """transformers' assistant beside its model, in float32."""

    def __init__(self, made: Made) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(made.model, **options).eval().model
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(made.head, **options).eval()

    @torch.no_grad()
    def draft(self, tokens: list[int], drafts: list[int], *, ahead: int = 0, normed: bool = True) -> np.ndarray:
        """Logits [n, V] after ``tokens`` and all but the last of ``drafts``."""
        ids = torch.tensor([tokens[:-1]])
        seen: list[Tensor] = []
        hook = self.model.norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
        found = self.model(ids, use_cache=False, return_shared_kv_states=True)
        hook.remove()
        hidden, logits = (found.last_hidden_state if normed else seen[0])[:, -1:], []
        for token in [tokens[-1], *drafts[:-1]]:
            embedded = self.model.embed_tokens(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(tokens) - 1 + ahead]]),
                attention_mask=torch.ones(1, len(tokens)),
                shared_kv_states=dict(found.shared_kv_states),
            )
            hidden = out.last_hidden_state
            logits.append(out.logits[0, -1].numpy())
        return np.stack(logits)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of the logits that are there, which are those of ``wanted`` above its least."""
    known = np.isfinite(found)
    if not known.all():
        assert (known == (wanted > wanted.min(-1, keepdims=True))).all()
    return float(np.linalg.norm(found[known] - wanted[known]) / np.linalg.norm(wanted[known]))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, random_checkpoint_writer: Any) -> Callable[..., Made]:
    @cache
    def made(name: str, *, clustered: bool = False, planted: bool = False) -> Made:
        folder = tmp_path_factory.mktemp("assistant")
        random_checkpoint_writer(folder / "checkpoint", name, dtype="float32", tie_word_embeddings=True)
        return Made(folder / "checkpoint", folder, clustered=clustered, planted=planted)

    return made


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, make: Callable[..., Made]) -> Made:
    """A model and its assistant of random weights, of one with clusters."""
    return make(request.param, clustered=request.param == MODELS[1])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)


@contextmanager
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int], np.ndarray]]]:
    """What was proposed meanwhile: after which tokens, which drafts, and their logits [n, V]."""
    heard, logits = list[tuple[list[int], list[int], np.ndarray]](), list[np.ndarray]()
    propose, run = AssistantDrafter.propose, AssistantDrafter._run

    def propose_and_tell(self: Any, key: int, tokens: Any, count: int) -> list[int]:
        logits.clear()
        drafts = propose(self, key, tokens, count)
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


def answer(model: Model, **how: Any) -> list[Any]:
    """Results one by one and then side by side."""
    alone = [model.generate(prompt, **how) for prompt in PROMPTS]
    handles = [model.stream(prompt, **how) for prompt in PROMPTS]
    return [*alone, *(handle.result() for handle in handles)]


def test_drafts_are_those_of_transformers(made: Made, always: None, monkeypatch: pytest.MonkeyPatch):
    with load(made.bundles[0], prefill_chunk=16) as model:
        wanted = [result.token_ids for result in answer(model, **GREEDY)]
    with load(made.bundles[0], prefill_chunk=16, draft=made.bundles[1]) as model, listen(monkeypatch) as heard:
        assert [result.token_ids for result in answer(model, **GREEDY)] == wanted
    reference = Reference(made)
    assert len(heard) > 2 * len(PROMPTS)
    for tokens, drafts, logits in heard:
        found = reference.draft(tokens, drafts)
        assert relative(logits, found) <= RELATIVE_TOLERANCE
        assert found.argmax(-1).tolist() == drafts
