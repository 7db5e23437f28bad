"""The examples run, and do what they say."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles.clocks import even_costs
from doubles.modules import load_file
from doubles.serving import serving

from llmc.runtime.server.config import ServerConfig

EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"
CLIENTS = ("openai_client", "anthropic_client")  # of a service that runs


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[str]:
    with serving(ServerConfig(models={"tiny": tiny_bundle}, threads=1)) as address:
        yield address


def example(name: str) -> ModuleType:
    return load_file(EXAMPLES / f"{name}.py")


def run(name: str, bundle: Path) -> Any:
    return example(name).main(str(bundle))


def test_every_example_is_tried_here():
    tried = set(Path(__file__).read_text().split('"'))
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tried


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_without_its_bundle_says_how_it_is_run(path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(path)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == f"usage: python {path} {'ADDRESS' if path.stem in CLIENTS else 'BUNDLE'}"


@pytest.mark.parametrize("name", CLIENTS)
def test_the_official_clients_get_answers(served, name):
    assert example(name).main(served)


@pytest.mark.parametrize("name", ["embed_in_threads", "embed_in_asyncio"])
def test_answers_of_a_service_do_not_fail(tiny_bundle, name):
    answers = run(name, tiny_bundle)
    assert len(answers) in (2, 4) and all(answers) and not any(answer.startswith("(") for answer in answers)


def test_a_processor_forbids_and_a_criterion_stops(tiny_bundle):
    text = run("logits_processor", tiny_bundle)
    assert text and not any(character.isdigit() for character in text) and "\n" not in text.rstrip("\n")


def test_guided_output_holds_to_the_schema(tiny_bundle):
    found = run("json_schema", tiny_bundle)
    assert found.keys() == {"size", "open"} and isinstance(found["open"], bool) and 0 <= found["size"] <= 99


def test_a_tool_is_called_and_its_result_goes_into_the_conversation(tiny_bundle):
    asked, called, result = run("tools", tiny_bundle)
    (call,) = called["tool_calls"]
    assert asked["role"] == "user" and result["tool_call_id"] == call["id"]
    assert result["content"] == {"front": "open", "back": "closed"}[json.loads(call["function"]["arguments"])["door"]]


def test_ranked_outputs_come_best_first(tiny_bundle):
    results = run("beams", tiny_bundle)
    assert [len(result.outputs) for result in results.values()] == [2, 2, 6]
    for result in results.values():
        scores = [output.score for output in result.outputs]
        assert scores == sorted(scores, reverse=True)


def test_speculation_changes_nothing_but_the_speed(tiny_bundle, monkeypatch):
    even_costs(monkeypatch)
    assert run("speculation", tiny_bundle).metrics.accepted > 0
