"""OpenAI's completions: what the official client sends and reads, held against the engine in this process."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from doubles.serving import retold, serving

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects import completions
from llmc.runtime.server.dialects.openai import text_offsets

GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}


def test_the_text_is_that_of_the_engine(client, model):
    answer = client.completions.create(prompt="def add(a, b):", **GREEDY)
    wanted = model.generate("def add(a, b):", max_tokens=12, temperature=0)
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        wanted.usage.prompt_tokens,
        wanted.usage.completion_tokens,
    )


def test_a_stream_joins_to_the_whole_and_ends_with_the_usage_that_was_asked_for(client):
    whole = client.completions.create(prompt="import ", **GREEDY)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="import ", **options, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("path", "said"),
    [("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_a_stream_tells_at_its_end_what_was_asked_for_alone(http, path, said):
    body = {**said, "stream": True, "max_tokens": 2}
    lines = [line for line in http.post(f"/v1/{path}", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and not any('"usage"' in line for line in lines)
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("completions", {"prompt": ["def f(", "a"]}),
        ("completions", {"prompt": ["def f(", "a"], "echo": True, "logprobs": 1}),
        ("completions", {"prompt": ["def f(", "a"], "echo": True, "max_tokens": 0}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2, "temperature": 1}),
    ],
)
def test_each_chunk_of_a_stream_tells_the_usage_so_far_where_that_is_asked_for(http, path, said, include):
    options = {"include_usage": include, "continuous_usage_stats": True}
    body = {"max_tokens": 4, "temperature": 0, **said, "stream": True, "stream_options": options}
    lines = http.post(f"/v1/{path}", json=body).text.replace("data: [DONE]", "").split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    last = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks if chunk["choices"]}
    assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in last.values())
    assert [chunk["choices"] for chunk in chunks].count([]) == include
    if include:
        whole = chunks[-1]["usage"]
        assert sum(each["completion_tokens"] for each in last.values()) == whole["completion_tokens"]
        prompts = [each["prompt_tokens"] for each in last.values()]
        assert whole["prompt_tokens"] == (sum(prompts) if "prompt" in said else prompts[0])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts[0] < max(counts) or "echo" in said  # which comes whole


def test_several_prompts_and_outputs_are_numbered_prompt_by_prompt(client, model):
    prompts = ["def f(", "class A"]
    # One token each: later ones come from steps that the prompts share, whose graph is the one that is faster here.
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 2.0, "seed": 7, "n": 2}
    answer = client.completions.create(prompt=prompts, **given)
    wanted = [
        output.text
        for prompt in prompts
        for output in model.generate(prompt, max_tokens=1, temperature=2.0, seed=7, n=2).outputs
    ]
    assert [choice.text for choice in answer.choices] == wanted and len(set(wanted)) == 4
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=prompts, stream=True, **given):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == wanted


def test_logprobs_and_the_echo_cover_prompt_and_completion(client, model):
    answer = client.completions.create(prompt="def add(a, b):", logprobs=2, echo=True, **GREEDY)
    choice = answer.choices[0]
    wanted = model.generate("def add(a, b):", max_tokens=12, temperature=0, logprobs=2, prompt_logprobs=2)
    assert choice.text == "def add(a, b):" + wanted.text
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    expected = [found.logprob for found in (*(wanted.prompt_logprobs or ()), *(wanted.outputs[0].logprobs or ()))]
    assert choice.logprobs.token_logprobs == [None, *expected]
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert offsets[0] == 0 and len(tokens) == len(offsets) > 10
    assert all(choice.text.startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True))
    streamed = list(client.completions.create(prompt="def add(a, b):", logprobs=2, echo=True, stream=True, **GREEDY))
    assert streamed[0].choices[0].text == choice.text and streamed[0].choices[0].logprobs == choice.logprobs
    plain = list(client.completions.create(prompt="def add(a, b):", echo=True, stream=True, **GREEDY))
    assert plain[0].choices[0].text == "def add(a, b):"
    assert "".join(found.text for chunk in plain for found in chunk.choices) == choice.text


def test_the_log_probabilities_of_a_prompt_need_no_completion(client, model):
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.completions.create(prompt=["import os", "def f("], **given)
    for text, choice in zip(("import os", "def f("), answer.choices, strict=True):
        wanted = model.generate(text, max_tokens=1, prompt_logprobs=1).prompt_logprobs or ()
        assert choice.text == text and choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *(found.logprob for found in wanted)]
        for token, top in zip(choice.logprobs.tokens or [], choice.logprobs.top_logprobs or [], strict=True):
            assert top is None or token in top
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_tokens_that_are_not_in_the_text_take_no_room_there(model):
    text = "def naïve():"
    bos, ids = model.tokenizer.token_to_id("<|im_start|>"), model.tokenizer.encode(text)
    assert bos is not None
    offsets = text_offsets(model, [bos, *ids], text)
    assert offsets[:2] == [0, 0] and offsets[1:] == text_offsets(model, ids, text)
    assert text_offsets(model, model.tokenizer.encode("é:"), "é:")[-1] == 1
    assert text_offsets(model, model.tokenizer.encode(" a"), "a", 5)[0] == 5


def test_other_servers_spellings_are_read():
    def read(**given: Any) -> dict[str, Any]:
        return completions.CompletionRequest.model_validate({"prompt": "x", **given}).arguments()

    assert read(top_p=0)["temperature"] == 0 and read(top_k=-1)["top_k"] == 0
    assert read(max_tokens=-1).keys() == read(max_tokens=-1, seed=-1).keys() == set()
    assert read(structured_outputs={"regex": "[0-9]"})["regex"] == "[0-9]"
    assert read(structured_outputs={"json_object": True})["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "regex": "b"}, "structured_outputs"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(http, given, param):
    answer = http.post("/v1/completions", json={"prompt": "x", **given})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and param in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.threat("tokenize-cost")
def test_log_probabilities_of_prompts_are_bounded(http, monkeypatch):
    body = {"prompt": ["a b c", "a b c"], "max_tokens": 1, "echo": True, "logprobs": 4}
    whole = http.post("/v1/completions", json=body).json()
    entries = 5 * (whole["usage"]["prompt_tokens"])
    monkeypatch.setattr("llmc.runtime.server.dialects.completions.MOST_ENTRIES", entries)
    assert http.post("/v1/completions", json=body).json()["choices"] == whole["choices"]
    monkeypatch.setattr("llmc.runtime.server.dialects.completions.MOST_ENTRIES", entries - 1)
    error = http.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "prompt" and f"{entries - 1} at most" in error["message"]


def test_the_log_probabilities_of_an_echo_are_written_beside_the_event_loop(client, monkeypatch):
    """There may be millions of them, and everybody waits for the loop."""
    threads = []
    original = completions.CompletionTurn.choices

    def choices(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*given)

    monkeypatch.setattr(completions.CompletionTurn, "choices", choices)
    list(client.completions.create(prompt="def add(a, b):", logprobs=2, echo=True, stream=True, **GREEDY))
    assert threads and all("AnyIO worker" in name for name in threads), threads


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BEFORE, AFTER = "def f(", "return a"
GAP = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"


@pytest.fixture(scope="module")
def gaps(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service whose model fills gaps."""
    bundle = retold(tiny_bundle, tmp_path_factory.mktemp("gaps") / "bundle", marks=FIM)
    with serving(ServerConfig(models={"tiny": bundle}, threads=1)) as url, httpx.Client(base_url=url) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> Any:
    answer = client.post("/v1/completions", json={"max_tokens": 6, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_control_tokens_that_a_raw_prompt_spells_are_tokens_unless_the_request_says_otherwise(gaps):
    def count(prompt: str, **given: Any) -> int:
        return int(complete(gaps, prompt=prompt, **given)["usage"]["prompt_tokens"])

    written = count(GAP)
    assert written == count(BEFORE) + count(AFTER) + 3 == count(GAP, parse_special=True)
    assert count(GAP, parse_special=False) > written + 10
    echoed = complete(gaps, prompt=GAP, parse_special=False, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert "".join(echoed["logprobs"]["tokens"]) == GAP


def test_a_suffix_is_after_the_gap_that_the_completion_fills(gaps):
    wanted, filled = complete(gaps, prompt=GAP), complete(gaps, prompt=BEFORE, suffix=AFTER)
    assert filled["usage"] == wanted["usage"] and filled["choices"] == wanted["choices"]
    several = complete(gaps, prompt=[BEFORE, BEFORE], suffix=AFTER, echo=True)["choices"]
    assert [choice["text"] for choice in several] == [BEFORE + wanted["choices"][0]["text"]] * 2
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0, "stream": True}
    lines = gaps.post("/v1/completions", json=body).text.replace("data: [DONE]", "").split("\n\n")
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line)
    assert text == wanted["choices"][0]["text"]
    plain = complete(gaps, prompt=BEFORE)
    assert complete(gaps, prompt=BEFORE, suffix="")["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"suffix": AFTER, "echo": True, "logprobs": 1}, "suffix"),
        ({"suffix": AFTER, "on_overflow": "truncate_left"}, "on_overflow"),
        ({"suffix": "a " * 20_000}, "prompt"),
        ({"suffix": ["a"]}, "suffix"),
    ],
)
def test_a_gap_that_cannot_be_filled_is_refused(gaps, given, param):
    answer = gaps.post("/v1/completions", json={"prompt": BEFORE, **given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
