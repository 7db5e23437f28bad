"""What single steps of the check of GPU targets compute, and that planted mistakes are found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.cuda import SERVER, FakeDriver

from llmc.errors import GpuError, MissingExtraError
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


def test_an_export_travels_as_a_header_and_becomes_what_it_was(part, tmp_path, monkeypatch):
    models = part("models")

    def make(geometry: str, output: Path) -> None:
        output.mkdir(parents=True)
        (output / "export.json").write_text("{}")
        safetensors(output / "model.safetensors", {"x.weight": ("F32", [1000], 4000)})
        models.randomize(output / "model.safetensors")

    monkeypatch.setattr(models, "make", make)
    make("0.5b", tmp_path / "original")
    models.prepare("0.5b", tmp_path / "carried")
    assert sum(models.sizes(tmp_path / "carried" / "0.5b").values()) < 200
    models.export("0.5b", str(tmp_path / "here"), str(tmp_path / "carried"))
    wanted = (tmp_path / "original" / "model.safetensors").read_bytes()
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == wanted
    models.prepare("tiny", tmp_path / "carried")  # is trained: its weights go along
    assert (tmp_path / "carried" / "tiny" / "model.safetensors").exists()


def test_what_is_carried_along_is_not_changed_by_what_is_made_of_it(part, tmp_path):
    models, carried = part("models"), tmp_path / "carried" / "1b"
    carried.mkdir(parents=True)
    (carried / "export.json").write_text("{}")
    head = safetensors(carried / "model.safetensors.header", {"x.weight": ("F32", [10], 0)})
    models.export("1b", str(tmp_path / "here"), str(tmp_path / "carried"))
    assert (carried / "model.safetensors.header").read_bytes() == head


def test_an_export_that_was_not_carried_along_is_not_run(part, tmp_path):
    with pytest.raises(part("work").NotHereError, match="--prepare"):
        part("models").export("1b", str(tmp_path / "x"), str(tmp_path))


# ----------------------------------------------------------------------------------------------- numbers of the model


def test_planted_mistakes_are_beyond_the_limits(part, tiny_bundle):
    limits, worst = part("verify").LIMITS, part("reference").worst
    ids = np.random.default_rng(5).integers(10, 4000, 40).tolist()
    with load(tiny_bundle, self_test=False) as model:
        logits = model.runner.logits(ids)
        short = model.runner.logits(ids[8:])  # as if a mask hid the first positions
    assert worst(np.roll(logits, 1, axis=0), logits) > max(limits.values())  # those of the position before
    assert worst(short[-24:], logits[-24:]) > limits["int8"]
    assert np.isnan(worst(logits * np.nan, logits))


def test_distances_are_relative_and_leave_constants_out(part):
    worst = part("reference").worst
    logits = np.random.default_rng(0).standard_normal((3, 1000))
    assert worst(logits + 3.0, logits) < CLOSE
    assert worst(logits * 1.1, logits) == pytest.approx(0.1, rel=CLOSE)
    assert worst(logits * [[1.1], [1.0], [1.3]], logits) == pytest.approx(0.3, rel=CLOSE)


def test_what_differs_from_the_reference_is_a_problem(part):
    verify = part("verify")
    golden = {"trouble": None}
    fine = {"paths": {"prefill": {"worst": 0.01}, "decode": {"worst": 0.02}}, "wrong_tokens": 0}
    assert verify.problems({"golden": golden, "reference": fine}, 0.02) == []
    assert verify.problems({"golden": golden, "reference": None}, 0.02) == []
    wrong = {"paths": {"prefill": {"worst": float("nan")}, "decode": {"worst": 0.5}}, "wrong_tokens": 2}
    planted = {"golden": {"trouble": "logits differ"}, "reference": wrong}
    assert [text.partition(":")[0] for text in verify.problems(planted, 0.02)] == [
        "logits differ",
        "prefill",
        "decode",
        "2 answers leave the reference's by more than a near choice",
    ]


def test_tokens_may_leave_the_reference_at_a_near_choice_alone(part, tiny_bundle):
    verify, case = part("verify"), part("reference").Case
    prompt = list(range(20, 30))
    with load(tiny_bundle, self_test=False) as model:
        right = list(model.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True).token_ids)
        other = [*right[:3], right[3] + 1, *right[4:]]
        assert verify.same_tokens(model, case(prompt, None, right, [1.0] * 6), 0.1) == (6, 0)
        assert verify.same_tokens(model, case(prompt, None, other, [0.1] * 6), 0.1) == (3, 0)
        assert verify.same_tokens(model, case(prompt, None, other, [1.0] * 6), 0.1) == (3, 1)


def test_cases_of_the_reference_are_read_as_they_were_written(part, tmp_path):
    reference = part("reference")
    cases = [
        reference.Case([1, 2], np.ones((2, 3)), [5], [0.5]),
        reference.Case([3], np.zeros((1, 3)), [], []),
    ]
    reference.save(cases, tmp_path / "x.npz")
    for found, wanted in zip(reference.cache.read(tmp_path / "x.npz"), cases, strict=True):
        assert (found.ids, found.tokens, found.leads) == (wanted.ids, wanted.tokens, wanted.leads)
        assert np.array_equal(found.logits, wanted.logits)


def without(monkeypatch: Any, machine: Any, *names: str) -> None:
    """Make some distributions look as if they were not installed."""
    installed = machine.installed
    monkeypatch.setattr(machine, "installed", lambda name: None if name in names else installed(name))


def test_without_transformers_the_portable_graph_is_the_reference(part, monkeypatch, tiny_export, tmp_path):
    reference = part("reference")
    without(monkeypatch, part("machine"), "transformers")
    monkeypatch.setattr(reference, "LONG_PROMPT", 40)
    found = reference.reference(str(tiny_export), str(tmp_path / "x.npz"))
    assert found["source"] == "the portable graph" and found["problems"] == []
    assert found["missing"] == ["transformers: transformers is not installed"]
    assert found["difference_of_both"] is None and len(reference.cache.read(tmp_path / "x.npz")) == 4


def test_without_any_reference_the_step_is_not_run(part, monkeypatch, tiny_export, tmp_path):
    reference = part("reference")
    without(monkeypatch, part("machine"), "transformers", "torch")

    def refuse(folder: Path) -> None:
        raise MissingExtraError("onnxruntime is not installed")

    monkeypatch.setattr("llmc.optimize.judge.reference.Reference", refuse)
    with pytest.raises(part("work").NotHereError) as caught:
        reference.reference(str(tiny_export), str(tmp_path / "x.npz"))
    assert str(caught.value) == (
        "transformers: torch and transformers are not installed; the portable graph: onnxruntime is not installed"
    )
    assert list(tmp_path.iterdir()) == []


def test_references_that_differ_are_a_problem(part):
    reference = part("reference")
    limit = reference.SAME_MODEL
    one, other = (reference.Case([1], scale * np.arange(6.0).reshape(2, 3), [], []) for scale in (1.0, 1.1))
    assert reference.problems(None) == reference.problems(limit) == []
    assert len(reference.problems(reference.difference([one], [other]))) == 1
    assert len(reference.problems(float("nan"))) == 1


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("transformers",), "transformers is not installed"),
        (("torch",), "torch is not installed"),
        (("torch", "transformers"), "torch and transformers are not installed"),
    ],
)
def test_torch_on_the_gpu_names_the_package_that_is_missing(part, monkeypatch, names, words):
    without(monkeypatch, part("machine"), *names)
    with pytest.raises(part("work").NotHereError, match=f"^{words}$"):
        part("baseline").baseline("nowhere", 1, "cuda", "inductor")


def test_divergence_is_in_nats(part):
    found = part("verify").divergence(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]]))
    assert found == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=CLOSE)


class Disturbed:
    """A session that adds noise to the second row's logits, or something to every decode step after the first."""

    def __init__(self, session: Any, second: float = 0.0, later: float = 0.0) -> None:
        self.session, self.second, self.later, self.steps = session, second, later, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, batch: Any) -> Any:
        logits = self.session.run(batch).copy()
        if len(logits) > 1:
            logits[1] += self.second * np.random.default_rng(0).standard_normal(logits.shape[-1])
        if batch.input_ids.shape[1] == 1:
            self.steps += 1
            logits[..., 0] += self.later * (self.steps > 1)
        return logits


def test_disturbed_rows_and_replays_are_found(part, tiny_bundle):
    determinism = part("determinism")
    prompts = [list(range(20 + i, 40 + 2 * i)) for i in range(3)]
    with load(tiny_bundle, self_test=False) as model:
        session = model.runner.session
        assert determinism.rows_apart(session, prompts, 64)["relative"] <= determinism.ROUNDING
        assert determinism.graph_apart(session, prompts, 64) == {"rows_1": 0.0, "rows_3": 0.0}
        apart = determinism.rows_apart(Disturbed(session, second=1.0), prompts, 64)
        replayed = determinism.graph_apart(Disturbed(session, later=0.5), prompts, 64)
    assert apart["relative"] > determinism.ROUNDING and replayed["rows_1"] > 0.4
    tokens = {"prompts": 8, "equal_again": 7, "equal_in_batch": 3}
    found = {"prefill_twice": 0.5, "graph_apart": replayed, "rows_apart": apart, "tokens": tokens}
    assert len(determinism.problems(found)) == 4


def test_forms_that_differ_are_a_problem(part):
    lengths = part("lengths")
    assert lengths.problems({"prefill": 0.001, "decode": 0.0}) == []
    assert len(lengths.problems({"prefill": 0.5, "decode": float("nan")})) == 2


def test_two_bundles_are_compared_by_both_paths_and_in_ragged_rows(part, tiny_bundle):
    found = part("lengths").lengths(str(tiny_bundle), str(tiny_bundle))
    assert found["relative"] == {"prefill": 0.0, "decode": 0.0, "rows": 0.0} and found["problems"] == []
    assert [step["positions"] for step in found["steps"][0]] == [128, 512, 1024, 2048]


# -------------------------------------------------------------------------------------------------------------- speeds


def test_bandwidth_counts_what_is_read_and_what_is_written(part, monkeypatch):
    machine = part("machine")
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0, 30.0, 33.0, 40.0, 43.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    called: list[int] = []
    found = machine.rates_of(lambda: called.append(1), 600)
    assert found == {"bytes_per_s": 600.0, "median_bytes_per_s": 200.0}
    assert len(called) == 6  # one of them is not counted


def test_bandwidth_of_a_device_is_that_of_copies_on_it(part, monkeypatch):
    machine, driver = part("machine"), FakeDriver()
    monkeypatch.setattr(machine, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr("llmc.runtime.host.cuda.open_driver", lambda: driver)
    found = machine.bandwidth(True)
    assert (found["kind"], found["device"]["name"], found["buffer_bytes"]) == ("device", SERVER.name, 1 << 16)
    assert driver.copied == {("device", "device"): (1 << 16) * machine.COPIES * (machine.ROUNDS + 1)}
    assert driver.closed and driver.leaks == []


def test_without_a_gpu_nothing_is_measured_on_one(part, monkeypatch):
    def refuse() -> None:
        raise GpuError("no driver")

    monkeypatch.setattr("llmc.runtime.host.cuda.open_driver", refuse)
    with pytest.raises(part("work").NotHereError, match="no driver"):
        part("machine").bandwidth(True)


def test_a_gpu_gives_back_what_measuring_took(part, monkeypatch, tiny_bundle):
    measure, driver = part("measure"), FakeDriver()
    monkeypatch.setattr("llmc.runtime.host.cuda.open_driver", lambda: driver)
    monkeypatch.setattr(measure, "PROMPTS", (8,))
    monkeypatch.setattr(measure, "NEW_TOKENS", 4)
    found = measure.measure(str(tiny_bundle), False, True, 1)
    assert found["device_bytes"] == {"loaded": 0, "after_runs": 0}
    assert [part["prompt"] for part in found["alone"]] == [8] and found["batch"]["decode_tokens_per_s"] > 0
    assert driver.closed


def test_the_longest_prompt_is_shortened_to_the_context(part):
    fitting = part("measure").fitting
    assert fitting(4096, 128) == [128, 512, 2048]
    assert fitting(2048, 128) == [128, 512, 1920]
    assert fitting(256, 64) == [128, 192]


def test_torch_on_the_gpu_is_not_run_without_one(part, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(part("work").NotHereError, match="sees no GPU"):
        part("baseline").baseline("nowhere", 1, "cuda", "inductor")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, of its compiler
def test_transformers_decodes_in_one_compiled_graph(part):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    baseline = part("baseline")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)).eval()
    with torch.no_grad():
        assert baseline.decode(model, 8, 4, 2, "eager") > 0
        assert baseline.prefill(model, 16, 1) > 0
    assert baseline.options("inductor") == {"mode": "reduce-overhead"}
    assert baseline.options("eager") == {"backend": "eager"}
