"""``llmc bench serve``: flags become arguments, the report is a table or JSON, bundles go on."""

import json
from pathlib import Path

import pytest
from doubles.planted_server import planted_server, response, whole

from llmc.runtime.bench import serve_load as module

SMALL = ("--requests", 3, "--max-tokens", "4", "--prompt-length", "30-40")


def test_the_table_has_what_became_of_requests_and_every_latency(llmc):
    with planted_server(whole) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--rate", "300,400", "--slo", "ttft=60")
    assert (ran.code, ran.err) == (0, "")
    for text in (f"{server.url}, model double", "rate 300", "rate 400: TTFT from when due", "ITL", "p99", "(100%)"):
        assert text in ran.out


def test_json_is_the_whole_report(llmc):
    with planted_server(whole) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--concurrency", "2", "--json")
    report = json.loads(ran.out)
    assert (report["schema"], report["model"], report["arguments"]["concurrency"]) == (1, "double", [2])
    [point] = report["points"]
    assert (point["completed"], point["goodput"], point["output_tokens"]["mean"]) == (3, None, 4.0)


def test_a_plot_is_written_and_named(llmc, tmp_path: Path):
    pytest.importorskip("matplotlib")
    with planted_server(whole) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--plot", tmp_path / "p.png")
    assert (tmp_path / "p.png").exists() and f"wrote {tmp_path / 'p.png'}" in ran.out


def test_failures_are_notes_and_a_test_without_an_answer_fails(llmc):
    with planted_server(lambda asked: [response(429, {"error": {"message": "\x1b[2Jfull"}})]) as server:
        ran = llmc("bench", "serve", server.url, *SMALL, "--model", "m", "--warm-up", 0, "--no-usage")
    assert ran.code == 1
    assert "concurrency 1: 3 x HTTP 429:" in ran.out and "full" in ran.out and "\x1b" not in ran.out


def test_keys_and_fields_come_from_where_the_flags_say(llmc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "key").write_text("sk-file\n")
    (tmp_path / "body.json").write_text('{"top_k": 3}')
    monkeypatch.setenv("A_KEY", "sk-environment")
    with planted_server(whole) as server:
        llmc("bench", "serve", server.url, *SMALL, "--api-key-env", "A_KEY", "--extra-body", '{"temperature": 0}')
        llmc(
            "bench",
            "serve",
            server.url,
            *SMALL,
            "--api-key-file",
            tmp_path / "key",
            "--extra-body",
            f"@{tmp_path}/body.json",
        )
    first, last = server.asked[3], server.asked[-1]
    assert (first.headers["authorization"], first.body["temperature"]) == ("Bearer sk-environment", 0)
    assert (last.headers["authorization"], last.body["top_k"]) == ("Bearer sk-file", 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "fast"], "'fast' is no list of numbers"),
        (["--rate", "1", "--concurrency", "1"], "--rate is 1.0 and --concurrency is 1: give one"),
        (["--max-tokens", "0"], "--max-tokens is '0'"),
        (["--extra-body", "{"], "--extra-body: Expecting"),
        (["--extra-body", "[]"], "--extra-body is '[]', expected a JSON object"),
        (["--api-key-env", "NOT_THERE"], "NOT_THERE is not set"),
        (["--api-key-env", "A", "--api-key-file", __file__], "contradict each other"),
    ],
)
def test_wrong_usage_is_one_sentence_that_names_the_flag(llmc, arguments: list[str], said: str):
    ran = llmc("bench", "serve", "http://127.0.0.1:9", *arguments)
    assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1


def test_without_the_extra_it_is_named(llmc, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "httptools", None)
    ran = llmc("bench", "serve", "http://127.0.0.1:9")
    assert ran.code == 1 and "extra 'serve'" in ran.err


def test_a_folder_called_serve_is_still_a_bundle(llmc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "serve_load", None)
    (tmp_path / "serve").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "llmc.json" in llmc("bench", "./serve").err
