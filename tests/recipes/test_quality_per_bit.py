"""What the comparison with llama.cpp does without llama.cpp: windows, bits per weight, checks, the table."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

WINDOWS, LENGTH, VOCABULARY = 3, 5, 16
MATRIX_WEIGHTS = 4096


@pytest.fixture
def quality(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("quality_per_bit")


@pytest.fixture
def task(quality: ModuleType, tmp_path: Path):
    generator = np.random.default_rng(0)
    reference = generator.normal(size=(WINDOWS, LENGTH, VOCABULARY)).astype(np.float32)
    windows = generator.integers(0, VOCABULARY, (WINDOWS, LENGTH))
    return quality.Task(windows, reference, MATRIX_WEIGHTS, tmp_path)


class Letters:
    """A tokenizer with a token per letter, in alphabetical order."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("a") for letter in text]


@pytest.fixture
def peer(quality: ModuleType, monkeypatch: pytest.MonkeyPatch, task):
    """A llama.cpp whose logits are the reference's times ``scale``; it notes what it is asked to do."""
    peer = SimpleNamespace(scale=1.0, weights=MATRIX_WEIGHTS, calls=[])

    def run(python: Path, script: str, *arguments: object) -> str:
        peer.calls.append((script, *map(str, arguments)))
        if script == "llamacpp_logits.py":
            np.save(arguments[2], task.reference * np.float32(peer.scale))
        return json.dumps({"matrix_weights": peer.weights, "bits_per_weight": 4.5, "detail": "1 x Q4_0"})

    monkeypatch.setattr(quality, "run_script", run)
    return peer


def test_windows_follow_each_other_without_overlap(quality, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghijklmnop")
    assert quality.read_windows(Letters(), text, 3, 5).tolist() == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14],
    ]


def test_a_text_too_short_is_refused_with_what_it_has(quality, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghijklmn")
    with pytest.raises(ValueError, match=r"has 14 tokens, 3 windows of 5 need 15; ask for fewer windows"):
        quality.read_windows(Letters(), text, 3, 5)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A block-quantized matrix of 64 x 64, read as embedding and as head, beside a norm and rotary tables."""

    def stored(name: str, array: np.ndarray) -> ir.Value:
        return ir.Value(name=name, const_value=ir.tensor(array, name=name))

    integers, rows = stored("w", np.zeros((64, 2, 16), np.uint8)), stored("w.rows", np.zeros((64, 32), np.uint8))
    scales, norm = stored("w.scales", np.ones((64, 2), np.float32)), stored("norm", np.ones(64, np.float32))
    tables = stored("rotary_emb.cos", np.ones((2048, 16), np.float32))
    x = ir.val("x", ir.DataType.FLOAT, [1, 64])
    nodes = [
        ir.node("SimplifiedLayerNormalization", [x, norm]),
        ir.node("GroupQueryAttention", [x, tables], domain="com.microsoft"),
        ir.node("GatherBlockQuantized", [rows, x, scales], domain="com.microsoft"),
        ir.node("MatMulNBits", [x, integers, scales], domain="com.microsoft"),
    ]
    stored_values = [integers, rows, scales, norm, tables]
    model = ir.Model(
        ir.Graph([x], [], nodes=nodes, initializers=stored_values, opset_imports={"": 21, "com.microsoft": 1}),
        ir_version=10,
    )
    path = tmp_path / "graph.onnx"
    ir.save(model, path, external_data="weights.bin", size_threshold_bytes=0)
    return path


def share(graph: Path, name: str, other: str) -> None:
    """Let a stored value point at another one's bytes."""
    model = ir.load(graph)
    values = model.graph.initializers
    target, source = values[name].const_value, values[other].const_value
    assert target.nbytes == source.nbytes
    values[name].const_value = ir.ExternalTensor(
        source.location,
        source.offset,
        source.length,
        target.dtype,
        shape=target.shape,
        name=name,
        base_dir=graph.parent,
    )
    ir.save(model, graph)


def test_bits_count_integers_and_scales_and_no_vectors(quality, graph):
    both = 64 * 2 * 16 + 64 * 32 + 64 * 2 * 4
    assert quality.graph_bits(graph, MATRIX_WEIGHTS) == 8 * both / MATRIX_WEIGHTS


def test_bytes_that_two_nodes_share_count_once(quality, graph):
    share(graph, "w.rows", "w")
    assert quality.graph_bits(graph, MATRIX_WEIGHTS) == 4 + 32 * 2 * 64 / MATRIX_WEIGHTS


def test_the_peer_quantizes_once_and_runs_both_paths(quality, task, peer):
    found = list(quality.llamacpp(Path("python"), Path("model"), ["q4_0", "q8_0"], task))
    assert [(f.system, f.phase.value) for f in found] == [
        (f"llama.cpp {scheme}", phase) for scheme in ("q4_0", "q8_0") for phase in ("prefill", "decode")
    ]
    assert [call[0] for call in peer.calls] == ["convert_gguf.py"] + ["llamacpp_logits.py"] * 4
    assert all(f.score.quality.mean_kl == 0 for f in found)


def test_importances_reach_the_conversion_and_the_name(quality, task, peer):
    (found, _) = quality.llamacpp(Path("python"), Path("model"), ["q4_0"], task, Path("squares.npz"))
    assert found.system == "llama.cpp q4_0 + imatrix"
    assert peer.calls[0][-2:] == ("--importance", "squares.npz")


def test_a_conversion_that_lost_a_tensor_is_refused(quality, task, peer):
    peer.weights -= 64
    with pytest.raises(RuntimeError, match="has 4032 weights in matrices, the checkpoint 4096"):
        list(quality.llamacpp(Path("python"), Path("model"), ["q4_0"], task))


def arguments(**changes: object) -> SimpleNamespace:
    defaults = {
        "llamacpp_python": Path("python"),
        "checkpoint": Path("model"),
        "schemes": ["q4_0"],
        "calibration": None,
    }
    return SimpleNamespace(**defaults | changes)


def test_without_the_peers_interpreter_nothing_of_it_runs(quality, task, peer):
    assert quality.peers(arguments(llamacpp_python=None), None, task, {}) == []
    assert peer.calls == []


def test_the_float16_file_is_checked_first_and_noted(quality, task, peer):
    checks: dict[str, float] = {}
    found = quality.peers(arguments(), None, task, checks)
    assert [f.system for f in found] == ["llama.cpp q4_0"] * 2
    assert checks == {"llama.cpp f16, prefill": 0, "llama.cpp f16, decode": 0}


def test_a_float16_file_that_computes_another_model_stops_the_comparison(quality, task, peer):
    peer.scale = 1.1
    with pytest.raises(RuntimeError, match="it computes another model, so nothing can be compared"):
        quality.peers(arguments(), None, task, {})


def test_the_tolerances_part_rounding_from_quantization(quality, task):
    """A thousandth of the logits, which is more than float16 rounds and less than 8 bits, is told from both."""
    rounding, quantization = (task.score(task.reference * np.float32(1 + by)) for by in (1e-4, 3e-2))
    assert quality.check("rounding", rounding, quality.SAME_KL) <= quality.SAME_KL
    with pytest.raises(RuntimeError, match="mean KL of"):
        quality.check("quantization", quantization, quality.CONVERTED_KL)


def test_a_check_that_is_not_a_number_fails(quality):
    with pytest.raises(RuntimeError, match="mean KL of nan"):
        quality.check("broken", SimpleNamespace(kl=np.array([0.0, np.nan])), 1.0)


def measured(quality: ModuleType, task, system: str, phase: str, scale: float):
    score = task.score(task.reference * np.float32(scale))
    return quality.Measured(system, quality.Phase(phase), 4.5, "1 x Q4_0", score)


def test_rows_are_compared_with_the_baseline_on_the_same_path(quality, task):
    found = [
        measured(quality, task, "base", "prefill", 0.5),
        measured(quality, task, "base", "decode", 0.9),
        measured(quality, task, "ours", "prefill", 0.9),
        measured(quality, task, "ours", "decode", 0.9),
    ]
    rows = quality.rows(found, "base")
    assert [row["ratio"] for row in rows][::3] == [1, 1]
    assert rows[2]["ratio"] == pytest.approx(found[2].score.quality.mean_kl / found[0].score.quality.mean_kl)
    assert rows[2]["ratio"] < 0.5


def test_rows_have_no_ratio_without_the_baseline(quality, task):
    (row,) = quality.rows([measured(quality, task, "ours", "decode", 0.9)], "base")
    assert (row["ratio"], row["ratio_error"]) == (None, None)


def test_the_table_has_a_line_per_row_and_says_what_was_scored(quality, task):
    rows = quality.rows([measured(quality, task, "base", "decode", 0.9)], "base")
    sizes = {"windows": WINDOWS, "length": LENGTH, "reference_perplexity": 7.5}
    results = {**sizes, "checks": {"llmc's reference": 2e-12}, "rows": rows}
    header, _, line, *rest = quality.table(results, "base").splitlines()
    assert line.startswith("| base | decode | 4.500 | ")
    assert "| 1.000 ± 0.000 | 1 x Q4_0 |" in line
    assert header.count("|") == line.count("|")
    assert "12 positions (3 windows of 5 tokens)" in rest[-1]
    assert "llmc's reference 2.0e-12" in rest[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to measure"),
        (["bundle", "--windows", "0"], "windows must be at least 1"),
        (["bundle", "--length", "1"], "their length at least 2"),
        (["--schemes", "q4_0", "bundle"], "invalid choice: 'bundle'"),
    ],
)
def test_requests_that_measure_nothing_are_usage_errors(quality, monkeypatch, capsys, options, message):
    monkeypatch.setattr("sys.argv", ["quality_per_bit.py", "--checkpoint", "c", "--text", "t", *options])
    with pytest.raises(SystemExit) as stopped:
        quality.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failure_is_one_sentence_and_leaves_no_json(quality, monkeypatch, capsys, tmp_path):
    output = tmp_path / "q.json"
    options = ["--checkpoint", str(tmp_path / "none"), "--text", "t", "--json", str(output), "bundle"]
    monkeypatch.setattr("sys.argv", ["quality_per_bit.py", *options])
    assert quality.main() == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not output.exists()
