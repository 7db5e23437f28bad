"""Benchmarks of the service: differences within rounds, ratios the right way up, servers that end with the block."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.planted_server import planted_server, whole

pytest.importorskip("uvicorn")


def medians(ttft: float, tpot: float) -> dict[str, Any]:
    return {"ttft": {"p50": ttft}, "tpot": {"p50": tpot}}


def test_overhead_is_the_median_over_rounds_of_the_difference_within_one(script):
    difference = script("serve_overhead").difference
    rounds = [
        {"8": {"process": medians(base, 0.001), "http": medians(base + added, 0.002)}}
        for base, added in ((1.0, 0.001), (2.0, 0.003), (5.0, 0.002))
    ]
    assert difference(rounds, 8, "ttft") == pytest.approx(2.0)
    assert difference(rounds, 8, "tpot") == pytest.approx(1.0)


def test_overhead_runs_on_the_small_model(script, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    work = ["--rounds", "1", "--requests", "1", "--words", "4", "--new-tokens", "3", "--streams", "9", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["x", str(tiny_bundle), *work, "--json", str(tmp_path / "o.json")])
    script("serve_overhead").main()
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["details"]["many"]["completed"] == 9
    eight = found["details"]["rounds"][0]["8"]
    [process, http] = [(eight[way]["completed"], eight[way]["output_tokens"]["mean"]) for way in ("process", "http")]
    assert process == http
    assert process[0] >= 8
    assert 2 <= process[1] <= 4, "answers of different lengths, of 3 tokens in the mean but for rounding"
    assert eight["http"]["loop_cpu_per_token_s"] > 0


def point(speed: float, ttft: float, tpot: float) -> dict[str, Any]:
    return {"output_tokens_per_s": speed, "ttft": {"p95": ttft}, "tpot": {"p95": tpot}}


def test_the_table_of_peers_says_how_many_times_better_llmc_is(script):
    module = script("serve_peers")
    found = {
        "llmc 4": [point(90.0, 0.2, 0.02), point(100.0, 0.1, 0.02), point(110.0, 0.1, 0.02)],
        "llama.cpp 4": [point(50.0, 0.4, 0.01)],
    }
    assert module.rows(found, [4]) == [
        ("concurrency 4: output tok/s", "100.0", "50.0", "2.00x"),
        ("concurrency 4: TTFT p95, ms", "100.0", "400.0", "4.00x"),
        ("concurrency 4: TPOT p95, ms", "20.0", "10.0", "0.50x"),
    ]


def test_both_peers_get_the_same_threads_rows_and_room(script):
    module = script("serve_peers")
    args = argparse.Namespace(
        bundle=Path("b"), gguf=Path("g"), python=Path("p"), concurrency=[1, 8], prompt=100, new_tokens=50, threads=2
    )
    commands = module.commands(args, {"llmc": 1, "llama.cpp": 2})
    ours, theirs = (" ".join(map(str, commands[name][0])) for name in ("llmc", "llama.cpp"))
    assert "serve b --port 1 --max-batch 8 --threads 2" in ours
    assert "g --port 2 --parallel 8 --context 214 --threads 2" in theirs


def test_a_server_is_waited_for_and_ends_with_the_block(script):
    serving = script("serving")
    port = serving.free_port()
    command = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1"]
    with serving.server(command, port, "/") as number:
        assert Path(f"/proc/{number}").exists() or not Path("/proc").exists()
    assert not Path(f"/proc/{number}").exists()


def test_a_server_that_ends_is_no_server(script):
    serving = script("serving")
    command = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with pytest.raises(SystemExit, match="ended with 1: no model"), serving.server(command, serving.free_port(), "/"):
        pass


def test_clients_are_a_process_whose_failure_is_told(script):
    serving = script("serving")
    with planted_server(whole) as double:
        [found] = serving.clients(double.url, "--requests", 2, "--max-tokens", 3)
        assert found["completed"] == 2
        assert double.asked[-1].body["ignore_eos"] is True and double.asked[-1].body["temperature"] == 0
        url = double.url
    with pytest.raises(SystemExit, match="llmc bench serve failed: llmc: error: "):
        serving.clients(url)


def test_processes_that_belong_to_the_measurement_do_not_disturb_it(script, monkeypatch, tmp_path: Path):
    machine = script("machine")
    clock, seconds = iter((0.0, 10.0)), iter((1.0, 6.0))
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(machine, "_cpu_seconds", lambda whose: 0.0)
    monkeypatch.setattr(machine, "_process_seconds", lambda number: next(seconds))
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text("cpu 1000 0 0 5000 0 0 0 0 0 0\n")
    disturbance = machine.Disturbance(0, [17])
    (tmp_path / "stat").write_text("cpu 1600 0 0 9000 0 0 0 0 0 0\n")  # 6 s busy at 100 ticks a second, 5 s our own
    assert disturbance.cpus() == pytest.approx(0.1)
