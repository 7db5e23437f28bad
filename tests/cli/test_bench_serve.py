"""``llmc bench serve``: flags become arguments, the report is a table or JSON, bundles go on."""

import json
from pathlib import Path

import pytest
from doubles.planted_server import planted_server, response, whole

SMALL = ("--requests", 3, "--max-tokens", "4", "--prompt-length", "30-40")


def test_the_table_has_what_became_of_requests_and_every_latency(llmc):
    with planted_server(whole) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--rate", "300,400")
    assert (ran.code, ran.err) == (0, "")
    for text in (f"{server.url}, model double", "rate 400: TTFT from when due", "ITL", "p99", "3 answered"):
        assert text in ran.out


def test_json_is_the_whole_report_and_keys_and_fields_come_from_where_the_flags_say(llmc, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-environment")
    options = ("--concurrency", "2", "--api-key-env", "A_KEY", "--extra-body", '{"temperature": 0}')
    with planted_server(whole) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, *options, "--json")
    report = json.loads(ran.out)
    assert (report["model"], report["arguments"]["concurrency"]) == ("double", [2])
    [point] = report["points"]
    assert (point["completed"], point["output_tokens"]["mean"]) == (3, 4.0)
    asked = server.asked[-1]
    assert (asked.headers["authorization"], asked.body["temperature"]) == ("Bearer sk-environment", 0)


def test_failures_are_notes_and_a_test_without_an_answer_fails(llmc):
    answers = iter([whole, whole])
    full = response(429, {"error": {"message": "\x1b[2Jfull"}})
    with planted_server(lambda asked: next(answers, lambda asked: [full])(asked)) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--model", "m", "--warm-up", 0)
    assert ran.code == 1
    assert "concurrency 1: 3 x HTTP 429:" in ran.out and "full" in ran.out and "\x1b" not in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "fast"], "'fast' is no list of numbers"),
        (["--rate", "nan"], "'nan' is no list of numbers"),
        (["--concurrency", "0"], "'0' is no list of numbers"),
        (["--requests", "0"], "'--requests'"),
        (["--duration", "-1"], "'--duration'"),
        (["--rate", "1", "--concurrency", "1"], "--rate is 1.0 and --concurrency is 1: give one"),
        (["--extra-body", "{"], "--extra-body is '{', expected a JSON object"),
        (["--api-key-env", "NOT_THERE"], "NOT_THERE is not set"),
    ],
)
def test_wrong_usage_is_one_sentence_that_names_the_flag(llmc, arguments: list[str], said: str):
    ran = llmc("bench", "serve", "http://127.0.0.1:9", *arguments)
    assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1


def test_a_folder_called_serve_is_still_a_bundle(llmc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "serve").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "llmc.json" in llmc("bench", "./serve").err
