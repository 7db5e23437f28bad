"""Benchmark scripts: each runs with tiny sizes and prints its table; what they divide, make and refuse is right."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from doubles.planted_server import END, STREAM, event, planted_server, response, text, whole

from llmc.export.sources.checkpoint import read_checkpoint


@pytest.fixture
def run(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a script as from the command line; what it wrote."""

    def run_script(name: str, *arguments: object) -> Any:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--json", str(out)])
        assert not script(name).main()
        return json.loads(out.read_text(encoding="utf-8"))

    return run_script


def test_ways_take_turns_after_a_round_that_does_not_count(script):
    order: list[str] = []
    ways = {name: (lambda number, name=name: order.append(name) or number) for name in "ab"}
    assert script("machine").in_turns(ways, 2) == {"a": [1, 2], "b": [1, 2]}
    assert "".join(order) == "baabba"


def test_a_message_arrives_its_latency_and_its_bytes_over_the_rate_after_it_was_sent(script, monkeypatch):
    pytest.importorskip("ray.serve", reason="needs Ray Serve")
    stages, waited = script("stages"), list[float]()
    monkeypatch.setattr(stages, "time", SimpleNamespace(time=lambda: 100.0, sleep=waited.append))
    values = np.zeros((1, 500), np.float16), np.zeros((1, 1), np.int32)
    assert stages.receive(stages.send((0.005, 8e-8), values)) is values
    assert stages.receive((99.0, (0.005, 8e-8), None)) is None
    assert waited == pytest.approx([0.005 + 8e-8 * 1004, 0])


def test_what_belongs_to_the_measurement_does_not_disturb_it(script, monkeypatch, tmp_path, capsys):
    machine = script("machine")
    clock, seconds = iter((0.0, 10.0)), iter((1.0, 6.0))
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(machine, "_cpu_seconds", lambda whose: 0.0)
    monkeypatch.setattr(machine, "_process_seconds", lambda number: next(seconds))
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text("cpu 1000 0 0 5000 0 0 0 0 0 0\n")
    disturbance = machine.Disturbance([17])
    (tmp_path / "stat").write_text("cpu 1620 0 0 9000 0 0 0 0 0 0\n")  # 6.2 s busy at 100 ticks a second, 5 s our own
    assert disturbance.cpus() == pytest.approx(0.12)
    machine.publish(None, 0.12, ["table"])
    assert "DISTURBED: 0.12 CPUs" in capsys.readouterr().out


def test_service_runs_on_the_small_model(run, tiny_bundle):
    pytest.importorskip("uvicorn")
    sizes = ("--rounds", 1, "--requests", 1, "--new-tokens", 3, "--concurrency", 2, "--threads", 1)
    found = run("service", "overhead", tiny_bundle, *sizes)["rounds"]["2 clients"]
    inside, outside = (found[way][0] for way in ("in the process", "llmc serve"))
    assert inside["completed"] == outside["completed"] == 2
    assert inside["output_tokens"]["mean"] == outside["output_tokens"]["mean"] == 3
    assert inside["prompt_tokens"] == outside["prompt_tokens"]


def test_clients_count_what_the_server_counts_and_time_text_alone(script):
    clients = script("clients")
    with planted_server(whole) as server, closing(HTTPConnection("127.0.0.1", server.port)) as connection:
        found = clients.ask(connection, "a b c d", 3)
        prompts = clients.make_prompts(lambda text: clients.ask(connection, text, 1).prompt_tokens, 40, 2, 0)
    assert (found.prompt_tokens, found.tokens, len(found.pieces)) == (12, 3, 3)
    # Of 40 tokens: 26 words are 32, and 7 more.
    assert [len(prompt.split()) for prompt in prompts] == [26, 26] and prompts[0] != prompts[1]
    assert server.connections == 1, "a client keeps its connection"
    early, late = clients.Exchange(10.0, [11.0, 13.0], 5, 3), clients.Exchange(10.5, [13.5, 14.5], 5, 3)
    figures = clients.figures([early, late])
    assert (figures["output_tokens_per_s"], figures["ttft"]["p50"], figures["tpot"]["p50"]) == (6 / 4.5, 2.0, 0.75)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([response(429, {"error": "full"})], "HTTP 429"),
        ([STREAM, event({"error": "out of memory"}), END], "out of memory"),
        ([STREAM, event(text("a")), END], "ended without"),
        ([STREAM, event(text("a")), event(b"[DONE]"), END], "counts of tokens"),
    ],
    ids=["status", "error", "cut", "uncounted"],
)
def test_a_server_that_does_not_answer_ends_the_measurement(script, pieces, problem):
    with (
        planted_server(lambda asked: pieces) as server,
        closing(HTTPConnection("127.0.0.1", server.port)) as connection,
    ):
        with pytest.raises(SystemExit, match=problem):
            script("clients").ask(connection, "a", 1)


@pytest.fixture
def systems(tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a TOML file of systems of these names and runners, all of the small model's bundle."""

    def write(*systems: tuple[str, str]) -> Path:
        path, text = tmp_path / "systems.toml", tiny_checkpoint.parent / "validation.txt"
        parts = [
            f'[quality]\ncheckpoint = "{tiny_checkpoint}"\ntext = "{text}"\n[python]\nllamacpp = "{sys.executable}"'
        ]
        for name, runner in systems:
            models = f'model = "{tiny_bundle}"\nquality = "{tiny_bundle}"'
            parts.append(f'[[system]]\nname = "{name}"\nrunner = "{runner}"\n{models}')
        path.write_text("\n".join(parts))
        return path

    return write


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ((), {"prefill 8", "decode after 8", "MB on disk", "MB at the peak"}),
        (("--together", 1, 2), {"1 at once", "2 at once"}),
        (("--first",), {"cold, s", "again, s", "cold, MB read", "again, MB read"}),
    ],
    ids=["one", "together", "first"],
)
def test_peers_run_on_the_small_model(run, systems, options, columns):
    pytest.importorskip("transformers")
    sizes = ("--rounds", 1, "--prompts", 8, "--new-tokens", 4, "--windows", 2, "--length", 16)
    ours, other = run("peers", systems(("ours", "llmc"), ("other", "openvino")), *sizes, *options)["rows"]
    assert set(ours["rounds"][0]) == columns
    decode = ours["quality"]["decode"]
    assert 8 < decode["bits"] < 10 and 0 < decode["mean_kl"] < 0.002
    assert other["trouble"].startswith("not run")


def test_peers_compare_at_equal_quality_and_time_nothing_without_it(
    script, run, systems, monkeypatch, tmp_path, capsys
):
    """Every system is played by the reference, with planted errors: logits times so much, or one too few."""
    pytest.importorskip("transformers")
    peers, factors = script("peers"), {"close": 0.99, "small": 0.8, "far": 0.9}
    names = iter(("close", "small", "far", "broken"))

    def play(python: Path, *arguments: Any, **options: Any) -> str:
        if "--logits" not in arguments:
            return '{"decode": 6.0}'
        folder, name = arguments[-1], next(names)
        reference = np.load(folder / "reference.npy")
        for phase in ("prefill", "decode"):
            np.save(folder / f"{phase}.npy", reference * factors[name] if name in factors else reference[:, 1:])
        return json.dumps(dict.fromkeys(("prefill", "decode"), 1000 if name == "small" else 2000))

    monkeypatch.setattr(peers, "run_script", play)
    path = systems(("close", "llmc"), ("small", "llmc"), ("far", "llamacpp"), ("broken", "llamacpp"))
    given, earlier = ("--windows", "2", "--length", "16", "--rounds", "1"), tmp_path / "earlier.json"
    monkeypatch.setattr(sys, "argv", ["peers", str(path), *given, "--json", str(earlier)])
    assert peers.main() == 1
    far, broken = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:6])
    assert far[4:] == ["6 (1.00x; 1.00 to 1.00)", "close |"]  # and not the smaller one, which is worse
    assert "prefill" in broken[-1] and broken[1:5] == [""] * 4
    rows = run("peers", path, "--rounds", 1, "--quality", earlier)["rows"]
    assert [len(row["rounds"]) for row in rows] == [1, 1, 1, 0] and "has no KL" in rows[-1]["trouble"]


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "vocab_size_per_layer_input": 5000,
    "num_experts": 8,
    "num_local_experts": 8,
    "moe_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
SMALL_HALVES = {
    "text_config": {**{key: SMALL[key] for key in (*list(SMALL)[:4], "vocab_size")}, "model_type": "llama"},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 512,
        "patch_size": 16,
    },
    "image_token_id": 4981,
}


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "gemma-4-e2b", "qwen3-30b-a3b", "gpt-oss-20b", "smolvlm-256m"])
def test_a_checkpoint_made_layer_by_layer_is_whole(name, script, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    made, own = script("make_model"), {"hidden_size": 64, "intermediate_size": 64} if name == "gpt-oss-20b" else {}
    small = {key: value for key, value in (SMALL | SMALL_HALVES).items() if key in made.GEOMETRIES[name]}
    made.write_checkpoint({**made.GEOMETRIES[name], **small, **own}, tmp_path)
    found = read_checkpoint(tmp_path)  # which refuses what is missing, and what is too much
    assert found.config.vocab_size == 5000
    for tensor in (value for file in tmp_path.glob("*.safetensors") for value in load_file(file).values()):
        assert tensor.isfinite().all()


def timed(name: str, runner: str, speeds: list[float], kl: float) -> dict[str, Any]:
    quality = {"prefill": {"mean_kl": kl}} if kl else {}
    return {
        "entry": {"name": name, "runner": runner},
        "quality": quality,
        "rounds": [{"prefill 512": s} for s in speeds],
    }


ROWS = [
    timed("llmc int8", "llmc", [280.0, 300.0, 290.0], 0.0013),
    timed("llmc int8-fast", "llmc", [260.0], 0.0013),
    timed("peer <8>", "llamacpp", [160.0], 0.0008),
    timed("not judged", "llamacpp", [500.0], 0.0),
]
DOCUMENT = {"rows": ROWS, "machine": {"cpu": "AMD"}, "date": "2026-11-28T15:34:11+00:00"}


def test_the_picture_has_the_median_speed_to_the_right_and_the_lower_kl_at_the_top(script):
    picture = ElementTree.fromstring(script("picture").draw(DOCUMENT, ["prefill 512"]))
    dots = [dot.attrib for dot in picture.iter("{http://www.w3.org/2000/svg}circle")]
    (int8, fast, peer), pixels = dots, [float(dot["cx"]) for dot in dots]
    assert [dot["class"] for dot in dots] == ["llmc", "llmc", "peer"]
    assert (pixels[0] - pixels[1]) / (pixels[1] - pixels[2]) == pytest.approx((290 - 260) / (260 - 160), rel=0.01)
    assert float(peer["cy"]) < float(int8["cy"]) == float(fast["cy"])


def test_a_column_that_nobody_timed_is_no_picture(script):
    with pytest.raises(ValueError, match="decode after 512"):
        script("picture").draw(DOCUMENT, ["decode after 512"])
