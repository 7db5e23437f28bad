"""What single steps of the check of GPU targets compute, and that planted mistakes are found."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import BuildError, MissingExtraError
from llmc.runtime import load

# Shares of a float64 sum over a vocabulary.
CLOSE = 1e-9


# -------------------------------------------------------------------------------------------------------------- models


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """Write a file of zeros and return its header."""
    entries, position = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode()
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + bytes(position))
    return head


def test_random_weights_are_the_same_everywhere_and_of_the_right_kind(part, tmp_path):
    from safetensors.numpy import load_file

    models, path = part("models"), tmp_path / "model.safetensors"
    tensors = {
        "b.norm.weight": ("F32", [8], 32),
        "a.proj.weight": ("F16", [64, 32], 4096),
        "a.proj.bias": ("F32", [500], 2000),
        "c.proj.weight": ("BF16", [16, 8], 256),
    }
    head = safetensors(path, tensors)
    models.randomize(path)
    first = path.read_bytes()
    assert first.startswith(head) and len(first) == len(head) + 32 + 4096 + 2000 + 256
    path.write_bytes(head)  # as it is carried along
    models.randomize(path)
    assert path.read_bytes() == first
    del tensors["c.proj.weight"]  # numpy has no such type
    safetensors(path, tensors)
    models.randomize(path)
    found = load_file(path)
    assert found["b.norm.weight"].tolist() == [1.0] * 8
    assert 0.018 < found["a.proj.weight"].astype(np.float64).std() < 0.022
    assert 0.09 < found["a.proj.bias"].std() < 0.11


def test_bfloat16_is_rounded_to_nearest_even(part):
    import torch

    values = np.concatenate([np.random.default_rng(0).standard_normal(5000), [1 + 2**-8, 1 + 3 * 2**-8, 0.0]])
    values = values.astype(np.float32)
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(part("models").stored(values, "BF16"), wanted)


@pytest.fixture
def options(part, tmp_path):
    """Folders of what is made here, and of what was carried along."""
    (tmp_path / "carried").mkdir()
    return part("steps").Options(tmp_path / "work", tmp_path / "carried")


def test_an_export_travels_as_a_header_and_becomes_what_it_was(part, tmp_path, monkeypatch, options):
    models = part("models")

    def make(geometry: str, output: Path) -> None:
        output.mkdir(parents=True)
        (output / "export.json").write_text("{}")
        safetensors(output / "model.safetensors", {"x.weight": ("F32", [1000], 4000)})
        models.randomize(output / "model.safetensors")

    referred: list[tuple[int, Path]] = []

    def reference_of(folder: Path, file: Path) -> dict[str, Any]:
        referred.append(((folder / "model.safetensors").stat().st_size, file))  # while the weights are there
        return {"problems": []}

    monkeypatch.setattr(models, "make", make)
    monkeypatch.setattr(part("correctness"), "reference_of", reference_of)
    make("0.5b", tmp_path / "original")
    models.prepare("0.5b", options.models)
    assert sum(path.stat().st_size for path in (options.models / "0.5b").iterdir()) < 200
    assert referred[0][0] > 4000 and referred[0][1] == options.models / "0.5b.npz"
    here = models.export("0.5b", options)
    assert (here / "model.safetensors").read_bytes() == (tmp_path / "original" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in here.iterdir()) == ["export.json", "model.safetensors"]


def test_the_small_models_weights_come_from_the_repository(part, monkeypatch, options):
    models = part("models")

    def make(geometry: str, output: Path) -> None:
        output.mkdir(parents=True)
        (output / "export.json").write_text("{}")
        os.link(models.CHECKPOINT / "model.safetensors", output / "model.safetensors")

    monkeypatch.setattr(models, "make", make)
    monkeypatch.setattr(part("correctness"), "reference_of", lambda folder, file: {"problems": []})
    before = (models.CHECKPOINT / "model.safetensors").read_bytes()
    models.prepare("tiny", options.models)
    assert sorted(path.name for path in (options.models / "tiny").iterdir()) == [
        "export.json",
        "model.safetensors.header",
    ]
    assert (models.export("tiny", options) / "model.safetensors").read_bytes() == before
    assert (models.CHECKPOINT / "model.safetensors").read_bytes() == before


def test_references_that_differ_are_not_carried_along(part, monkeypatch, options):
    models = part("models")
    monkeypatch.setattr(models, "make", lambda geometry, output: None)
    monkeypatch.setattr(part("correctness"), "reference_of", lambda folder, file: {"problems": ["0.1 from"]})
    with pytest.raises(BuildError, match=r"1b: 0\.1 from"):
        models.prepare("1b", options.models)


def test_what_is_carried_along_is_not_changed_by_what_is_made_of_it(part, options):
    carried = options.models / "1b"
    carried.mkdir()
    (carried / "export.json").write_text("{}")
    head = safetensors(carried / "model.safetensors.header", {"x.weight": ("F32", [10], 0)})
    part("models").export("1b", options)
    assert (carried / "model.safetensors.header").read_bytes() == head


def test_an_export_that_was_not_carried_along_is_not_run(part, options):
    with pytest.raises(part("steps").NotHereError, match="--prepare"):
        part("models").export("1b", options)


def test_a_bundle_is_built_once_and_one_that_fails_is_not_waited_for_again(part, monkeypatch, options, tiny_export):
    models, calls = part("models"), []
    (options.models / "tiny").symlink_to(tiny_export)

    def build(source: Path, folder: Path, *, target: str, **limits: Any) -> None:
        calls.append(target)
        if target == "cuda":
            raise BuildError("float16 overflows")
        folder.mkdir()
        (folder / "llmc.json").write_text('{"files": {"a": {"size": 2}, "b": {"size": 3}}, "quality": "good"}')

    monkeypatch.setattr("llmc.optimize.build.build", build)
    for _ in range(2):
        assert (models.built("cpu", "tiny", "int8", options) / "llmc.json").exists()
    assert calls == ["cpu"]
    with pytest.raises(BuildError):
        models.built("cuda", "tiny", "int8", options)
    with pytest.raises(part("steps").NotHereError, match="no bundle: float16 overflows"):
        models.built("cuda", "tiny", "int8", options)
    assert calls == ["cpu", "cuda"]
    with pytest.raises(BuildError):  # the step that is about building tries again
        models.build("cuda", "tiny", "int8", options)
    found = models.build("cpu", "tiny", "int8", options)
    assert (found["bytes"], found["quality"], calls[2:]) == (5, "good", ["cuda", "cpu"])


def test_what_a_build_says_of_its_engine_is_recorded(part, monkeypatch, options, tiny_export):
    engine = {"flags": "-x", "fallback": "fp16", "decomposed": ["decode"], "log": "build-log.json"}
    said = [["WARNING", "a kernel is slow"]]

    def build(source: Path, folder: Path, **limits: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "llmc.json").write_text(json.dumps({"files": {}, "engine": engine, "notes": ["int8 is slower"]}))
        (folder / "build-log.json").write_text(json.dumps(said))

    (options.models / "tiny").symlink_to(tiny_export)
    monkeypatch.setattr("llmc.optimize.build.build", build)
    found = part("models").build("tensorrt", "tiny", "int8", options)
    assert (found["engine"], found["notes"], found["build_log"]) == (engine, ["int8 is slower"], said)


def test_a_build_that_was_cut_off_is_not_waited_for_again(part, monkeypatch, options, tiny_export):
    def killed(*arguments: Any, **limits: Any) -> None:
        raise KeyboardInterrupt

    (options.models / "tiny").symlink_to(tiny_export)
    monkeypatch.setattr("llmc.optimize.build.build", killed)
    with pytest.raises(KeyboardInterrupt):
        part("models").built("cpu", "tiny", "int8", options)
    with pytest.raises(part("steps").NotHereError, match="cut off"):
        part("models").built("cpu", "tiny", "int8", options)


# ----------------------------------------------------------------------------------------------- numbers of the model


def test_planted_mistakes_are_beyond_the_limits(part, tiny_bundle):
    limits, worst = part("correctness").LIMITS, part("correctness").worst
    ids = np.random.default_rng(5).integers(10, 4000, 40).tolist()
    with load(tiny_bundle, self_test=False) as model:
        logits = model.runner.logits(ids)
        short = model.runner.logits(ids[8:])  # as if a mask hid the first positions
    assert worst(np.roll(logits, 1, axis=0), logits) > max(limits.values())  # those of the position before
    assert worst(short[-24:], logits[-24:]) > limits["int8"]
    assert np.isnan(worst(logits * np.nan, logits))


def test_distances_are_relative_and_leave_constants_out(part):
    worst = part("correctness").worst
    logits = np.random.default_rng(0).standard_normal((3, 1000))
    assert worst(logits + 3.0, logits) < CLOSE
    assert worst(logits * 1.1, logits) == pytest.approx(0.1, rel=CLOSE)
    assert worst(logits * [[1.1], [1.0], [1.3]], logits) == pytest.approx(0.3, rel=CLOSE)


def test_a_sample_of_the_vocabulary_shows_planted_mistakes_as_large_as_they_are(part):
    reference, random = part("correctness"), np.random.default_rng(0)
    logits = random.standard_normal((5, 100_000))
    apart = logits + 0.3 * random.standard_normal(logits.shape)
    few = reference.sampled(logits)
    assert few.shape == (5, reference.SAMPLE) and np.array_equal(few, reference.sampled(logits.copy()))
    assert len(np.unique(few[0])) == reference.SAMPLE
    assert reference.worst(reference.sampled(apart), few) == pytest.approx(reference.worst(apart, logits), rel=0.05)


def test_what_is_no_number_is_the_largest_distance(part):
    assert part("correctness").largest([0.1, 0.3, 0.2]) == 0.3
    assert np.isnan(part("correctness").largest([0.1, float("nan"), 0.2]))


def test_what_differs_from_the_reference_is_a_problem(part):
    problems = part("correctness").mistakes
    assert problems({"trouble": None}, {"prefill": 0.01, "decode": 0.02}, 0.02) == []
    assert problems({"trouble": None}, {}, 0.02) == []
    found = problems({"trouble": "logits differ"}, {"prefill": float("nan"), "decode": 0.5}, 0.02)
    assert [text.partition(":")[0] for text in found] == ["logits differ", "prefill", "decode"]


def test_cases_of_the_reference_are_read_as_they_were_written(part, tmp_path):
    reference = part("correctness")
    cases = [([1, 2], np.ones((2, 3))), ([3], np.zeros((1, 3)))]  # a vocabulary that is kept whole
    reference.save(cases, tmp_path / "x.npz")
    for (ids, logits), (wanted_ids, wanted) in zip(reference.read(tmp_path / "x.npz"), cases, strict=True):
        assert ids == wanted_ids and np.array_equal(logits, wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


@pytest.fixture
def tiny(part, tmp_path, tiny_export, monkeypatch):
    """Folders with the small model's export, of which a short prompt is asked."""
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "tiny").symlink_to(tiny_export)
    monkeypatch.setattr(part("correctness"), "LONG_PROMPT", 40)
    return part("steps").Options(tmp_path, None)


def missing(name: str) -> Any:
    """A way to a reference that is not installed."""

    def way(folder: Path, prompts: Any) -> None:
        raise MissingExtraError(f"no {name}")

    way.__name__ = f"by_{name}"
    return way


def test_both_references_say_the_same_of_the_small_model(part, tiny):
    found = part("correctness").reference("tiny", tiny)
    assert (found["source"], found["missing"], found["problems"]) == ("by_transformers", [], [])
    assert 0 < found["difference_of_both"] <= part("correctness").SAME_MODEL


def test_without_transformers_the_portable_graph_is_the_reference(part, monkeypatch, tiny):
    reference = part("correctness")
    monkeypatch.setattr(reference, "by_transformers", missing("transformers"))
    found = reference.reference("tiny", tiny)
    assert (found["source"], found["problems"], found["difference_of_both"]) == ("by_portable_graph", [], None)
    assert found["missing"] == ["by_transformers: no transformers"]
    assert [len(logits) for _, logits in reference.read(tiny.work / "tiny.npz")][-1] == reference.POSITIONS


def test_without_any_reference_the_step_is_not_run(part, monkeypatch, tiny):
    reference = part("correctness")
    for name in ("transformers", "portable_graph"):
        monkeypatch.setattr(reference, f"by_{name}", missing(name))
    with pytest.raises(part("steps").NotHereError) as caught:
        reference.reference("tiny", tiny)
    assert str(caught.value) == "by_transformers: no transformers; by_portable_graph: no portable_graph"
    assert not (tiny.work / "tiny.npz").exists()


@pytest.mark.vnni
def test_verifying_without_any_reference_still_replays_the_golden_prompts(part, monkeypatch, tiny, tiny_bundle):
    (tiny.work / "cpu-tiny-int8").symlink_to(tiny_bundle)
    for name in ("transformers", "portable_graph"):
        monkeypatch.setattr(part("correctness"), f"by_{name}", missing(name))
    found = part("correctness").verify("cpu", "tiny", "int8", tiny)
    assert found["problems"] == [] and found["golden"]["equal_tokens"] == found["golden"]["tokens"] > 0
    assert found["reference"] == {} and "no transformers" in found["missing"]


def test_references_that_differ_are_a_problem(part):
    reference = part("correctness")
    limit = reference.SAME_MODEL

    def disagreement(apart: float) -> list[str]:
        found: list[str] = reference.beyond({"portable graph": apart}, limit, "from transformers")
        return found

    one, other = (scale * np.arange(6.0).reshape(2, 3) for scale in (1.0, 1.1))
    assert disagreement(limit) == []
    assert len(disagreement(reference.worst(other, one))) == 1
    assert len(disagreement(float("nan"))) == 1


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_torch_on_the_gpu_names_the_package_that_is_missing(part, monkeypatch, tiny, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(part("steps").NotHereError, match=f"{name}"):
        part("baseline").baseline("tiny", tiny)


class Disturbed:
    """A session that adds noise to the second row's logits, or to those of steps by their number."""

    def __init__(self, session: Any, second: float = 0.0, steps: Any = ()) -> None:
        self.session, self.second, self.disturbed, self.steps = session, second, steps, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, batch: Any) -> Any:
        logits = self.session.run(batch).copy()
        noise = np.random.default_rng(0).standard_normal(logits.shape[-1])
        if len(logits) > 1:
            logits[1] += self.second * noise
        if batch.input_ids.shape[1] == 1:
            logits += (self.steps in self.disturbed) * noise
            self.steps += 1
        return logits


def test_disturbed_rows_and_replays_are_found(part, tiny_bundle):
    determinism = part("correctness")
    prompts = [list(range(20 + i, 40 + 2 * i)) for i in range(3)]
    with load(tiny_bundle, self_test=False) as model:
        session = model.runner.session
        assert determinism.rows_apart(session, prompts) <= determinism.ROUNDING
        same = determinism.graphs_apart(session, prompts)
        assert same == {"graph A": 0.0, "graph B": 0.0, "graph A again": 0.0} and determinism.differences(same) == []
        apart = {"batch": determinism.rows_apart(Disturbed(session, second=1.0), prompts)}
        count = determinism.STEPS
        for name, number in {"graph A": 1, "graph B": count + 2, "graph A again": 3 * count - 1}.items():
            found = determinism.graphs_apart(Disturbed(session, steps=[number]), prompts)
            assert [where for where, distance in found.items() if distance > 0] == [name]
            apart |= {name: found[name]}
    assert len(determinism.differences(apart)) == 4


def test_differences_within_rounding_are_figures_and_no_failure(part):
    determinism = part("correctness")
    limit = determinism.ROUNDING
    assert determinism.differences({"graph A": limit, "batch": limit / 2, "prefill again": 0.0}) == []
    found = determinism.differences({"graph A": 2 * limit, "prefill again": float("nan")})
    assert found == [
        f"graph A: logits are 0.2 apart (relative), at most {limit} is expected",
        f"prefill again: logits are nan apart (relative), at most {limit} is expected",
    ]


# -------------------------------------------------------------------------------------------------------------- speeds


def test_bandwidth_counts_what_is_read_and_what_is_written(part, monkeypatch):
    machine = part("machine")
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0, 30.0, 33.0, 40.0, 43.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    called: list[int] = []
    found = machine.rates_of(lambda: called.append(1), 600)
    assert found == {"bytes_per_s": 600.0, "median_bytes_per_s": 200.0}
    assert len(called) == 6  # one of them is not counted


def test_medians_and_late_steps_are_told_apart(part):
    found = part("measure").spread([0.1 * i for i in range(100, 0, -1)])
    assert found == pytest.approx({"p50_s": 5.05, "p95_s": 9.5, "best_s": 0.1}, rel=CLOSE)
    assert part("measure").spread([3.0, 1.0]) == {"p50_s": 2.0, "p95_s": 3.0, "best_s": 1.0}


def test_a_bundle_without_a_gpu_is_timed_all_the_same(part, monkeypatch, tiny, tiny_bundle):
    measure = part("measure")
    (tiny.work / "cpu-tiny-int8").symlink_to(tiny_bundle)
    for name, value in {"PROMPTS": (8,), "NEW_TOKENS": 4, "ROUNDS": 2, "STEPS": 2, "LENGTHS": (16, 32)}.items():
        monkeypatch.setattr(measure, name, value)
    found = measure.measure("cpu", "tiny", "int8", tiny)
    assert [entry["prompt"] for entry in found["alone"]] == [8] and found["batch"]["tokens_per_s"] > 0
    assert found["captures"] is None and "device_bytes" not in found and "step_without_graphs" not in found
    assert found["first_calls_s"].keys() == {"prefill_1", "prefill_2", "step_1", "step_2", "step_3"}
    assert [step["positions"] for step in measure.buckets("cpu", "tiny", "int8", tiny)["steps"]] == [16, 32]


def test_kernels_are_added_up_by_operator(part):
    node = {"cat": "Node", "name": "/x_kernel_time", "dur": 20, "args": {"op_name": "MatMulNBits"}}
    events = [
        node,
        {**node, "dur": 40},
        {**node, "name": "/x_fence_before"},
        {"cat": "Session", "name": "model_run", "dur": 900},
        {"cat": "Kernel", "name": "gemv<half>", "dur": 300, "args": {"op_name": "MatMulNBits"}},
        {"cat": "Kernel", "name": "xqa", "dur": 600, "args": {"op_name": "GroupQueryAttention"}},
    ]
    found = part("kernels").by_operator(events, 3)
    assert list(found.items()) == [
        ("GroupQueryAttention", {"host_us": 0.0, "gpu_us": {"xqa": 200.0}}),
        ("MatMulNBits", {"host_us": 20.0, "gpu_us": {"gemv<half>": 100.0}}),
    ]


def test_the_longest_prompt_is_shortened_to_the_context(part):
    fitting = part("measure").fitting
    assert fitting(4096, 128) == [128, 512, 2048]
    assert fitting(2048, 128) == [128, 512, 1920]
    assert fitting(256, 64) == [128, 192]


def test_torch_on_the_gpu_is_not_run_without_one(part, monkeypatch, tiny):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(part("steps").NotHereError, match="sees no GPU"):
        part("baseline").baseline("tiny", tiny)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, of its compiler
def test_transformers_decodes_in_one_compiled_graph(part, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    baseline = part("baseline")
    monkeypatch.setattr(baseline, "ROUNDS", 2)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)).eval()
    with torch.no_grad():
        assert baseline.decode(model, 8, 4, {"backend": "eager"}) > 0
        assert baseline.prefill(model, 16) > 0
    assert baseline.FASTEST == {"mode": "reduce-overhead"}
