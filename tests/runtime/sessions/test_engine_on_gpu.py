"""The engine that serves requests, on TensorRT's session behind doubles: its tokens, and a GPU lost under it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doubles.speculators import Always

from llmc.errors import LlmcError
from llmc.runtime.api.options import EngineOptions
from llmc.runtime.api.request import Request
from llmc.runtime.engine.engine import Engine
from llmc.runtime.kv.prefix_cache import PrefixCache
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.text.tokenizer import Tokenizer

PATIENCE = 120
CONTEXT = 64
TOP_K = 3
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": TOP_K, "seed": 1},
    {"temperature": 1.2, "top_k": TOP_K, "top_p": 0.9, "seed": 2, "n": 2},
    {"temperature": 0.0, "max_tokens": 30},
]
# Some for which the most probable tokens suffice, some for which they may not, and some that need all logits.
MIXED: list[dict[str, Any]] = [
    *SETTINGS,
    {"temperature": 0.6, "top_p": 0.9, "seed": 3},
    {"top_p": 0.999, "seed": 4},
    {"min_p": 0.1, "temperature": 0.5, "seed": 5, "n": 3},
    {"seed": 6},
    {"temperature": 0.0, "logprobs": 3},
    {"repetition_penalty": 1.3, "top_k": TOP_K, "seed": 7},
    {"num_beams": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": ((5, 30.0),)},
]


def requests(settings: list[dict[str, Any]]) -> list[Request]:
    return [
        Request(
            [(7 * i + 3 * j) % 90 for j in range(4 + 3 * i)],
            SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **given}),
        )
        for i, given in enumerate(settings)
    ]


@pytest.fixture
def serve(tiny_tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[Engine, list[Any]]]]:
    """Serves requests, all of them there before the first step, on a setup's session; their tokens or errors."""
    engines: list[tuple[Engine, Any]] = []

    def outcomes(
        setup: Any, asked: list[Request], session: Any = None, drafter: Any = None
    ) -> tuple[Engine, list[Any]]:
        opened = session or setup.open()
        engine = Engine(
            opened,
            setup.manifest,
            tiny_tokenizer,
            max_context=CONTEXT,
            prefill_chunk=12,
            options=EngineOptions(),
            memory=1 << 40,
            prefixes=PrefixCache("gpu", block=4, max_bytes=1 << 20),
            drafter=drafter,
        )
        engines.append((engine, opened))
        handles: list[Any] = []
        engine.call(lambda: handles.extend(engine.submit(request) for request in asked))
        return engine, [outcome(handle) for handle in handles]

    yield outcomes
    for engine, opened in engines:
        engine.close(then=opened.close)


def outcome(handle: Any) -> Any:
    try:
        return [list(output.token_ids) for output in handle.result(PATIENCE).outputs]
    except LlmcError as error:
        return error


@pytest.mark.parametrize(("compute", "together"), [("float32", True), ("float32", False), ("float16", True)])
def test_tokens_are_those_of_whole_rows_of_onnx_runtime_on_the_same_graph(bundle, serve, compute, together):
    setup = bundle(compute)
    groups = [requests(MIXED)] if together else [[request] for request in requests(MIXED)]
    session, reference = setup.open(), setup.reference()
    for group in groups:
        found, wanted = serve(setup, group, session)[1], serve(setup, group, reference)[1]
        assert found == wanted
        assert not any(isinstance(item, LlmcError) for item in found)


class Known:
    """Drafts what is known to come, with every fourth token wrong."""

    costs_by_token, watch = False, None

    def __init__(self, known: list[int]) -> None:
        self._known = [token if place % 4 else 0 for place, token in enumerate(known)]
        self.steps = 0

    def propose(self, key: int, tokens: list[int], count: int) -> list[int]:
        self.steps += 1
        return self._known[len(tokens) : len(tokens) + count]

    def forget(self, key: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("given", [SETTINGS[0], SETTINGS[1], {"top_p": 0.999, "seed": 4}, {"seed": 6}], ids=str)
def test_drafts_are_verified_by_candidates_as_by_whole_rows(bundle, serve, monkeypatch, given):
    setup = bundle()
    [request] = requests([given])
    _, [[wanted]] = serve(setup, [request], setup.reference())
    monkeypatch.setattr("llmc.runtime.speculation.speculator.Speculator", Always)
    drafter = Known([*request.prompt, *wanted])
    _, [[found]] = serve(setup, [request], drafter=drafter)
    assert found == wanted
    assert 0 < drafter.steps < len(wanted) - 1


@pytest.mark.parametrize(("settings", "rows"), [({"temperature": 0.0}, 0), ({"seed": 1}, 1)])
def test_a_step_brings_down_candidates_and_a_row_only_where_it_is_needed(bundle, serve, settings, rows):
    found = []
    for tokens in (10, 11):
        setup = bundle()
        serve(setup, requests([{**settings, "max_tokens": tokens}]))
        found.append(setup.driver.copied["host", "device"])
    candidates, row = 256 * (4 + 8) + 256, 4 * 4096  # logits, ids, and the sum in a block of its own
    assert found[1] - found[0] == candidates + rows * row
