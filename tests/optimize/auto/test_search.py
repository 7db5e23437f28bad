"""The automatic choice: a function of what was measured, kept in the cache, never beyond the budget."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.bundle import Budget, read_bundle, read_export
from llmc.errors import BuildError, UsageError
from llmc.inventory import Experts
from llmc.optimize.auto import search as auto
from llmc.optimize.auto.search import AutoReport, Trial, automatic, choose
from llmc.optimize.calibrate.request import CalibrationRequest
from llmc.optimize.recipe import Request
from llmc.runtime.bench.benchmark import benchmark

GOOD = Trial("good", 2, 1000.0, 100.0, 50_000_000, 40_000_000, 0.01, 0.97, 0.005)
LOOSE = Budget(max_kl=100.0)
EXPERTS = Experts("model.layers.0.experts", 0, count=8, chosen=3, inner=32, width=64)

# ----------------------------------------------------------------------------------------------------------- the choice


def test_a_slower_one_that_is_smaller_is_not_chosen_beyond_two_percent():
    speeds = {"a": 100.0, "b": 99.0, "c": 90.0}
    fast, near, far = (replace(GOOD, name=name, decode_tokens_per_s=speed) for name, speed in speeds.items())
    sizes = [replace(trial, memory=100 - number) for number, trial in enumerate((fast, near, far))]
    assert choose(sizes).name == "b"
    assert choose([fast, near]).name == "a"  # of equals the first
    assert choose([replace(fast, reason="out"), far]).name == "c"


def test_for_a_size_alone_the_closest_to_the_model_is_chosen_and_of_equals_the_fastest():
    far, near, slow = GOOD, replace(GOOD, name="near", mean_kl=0.001), replace(GOOD, name="slow", mean_kl=0.001)
    trials = [far, replace(slow, decode_tokens_per_s=50.0), near, replace(GOOD, name="out", mean_kl=0.0, reason="out")]
    assert choose(trials, closest=True).name == "near"


@pytest.mark.parametrize(
    ("budget", "memory", "size", "reason"),
    [
        (Budget(), 10**9, 40_000_000, ""),
        (Budget(max_kl=0.009), 10**9, None, "mean KL 0.01, at most 0.009 is allowed"),
        (Budget(max_kl=0.0), 1, None, "mean KL 0.01, at most 0 is allowed; 50 MB of 0"),
        (Budget(), 10**9, 39_999_999, "40.0 MB of files, at most 40.0"),
    ],
    ids=str,
)
def test_a_trial_that_is_out_says_why(budget, memory, size, reason):
    assert auto._within(GOOD, budget, memory, size).reason == reason


# ----------------------------------------------------------------------------------------------------------- the search


class Counted:
    """What the search builds and times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[Request] = []
        self.calibrations: list[Any] = []
        self.timed: list[tuple[str, int]] = []
        build = auto.build

        def counted_build(source: Path, folder: Path, **options: Any) -> Any:
            self.built.append(options["recipe"])
            self.calibrations.append(options["calibration"])
            return build(source, folder, **options)

        def counted_benchmark(folder: Path, **options: Any) -> Any:
            self.timed.append((folder.parents[1].name, options["threads"]))
            return benchmark(folder, **(options | {"repeats": 1, "prompt_length": 8, "new_tokens": 2}))

        monkeypatch.setattr(auto, "build", counted_build)
        monkeypatch.setattr(auto, "benchmark", counted_benchmark)


@pytest.fixture
def counted(monkeypatch, tmp_path) -> Counted:
    """Two candidates, one number of threads, and a cache of this test's own."""
    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "usable_threads", lambda: 1)
    candidates = {"int4": Request(precision="int4", phases="shared"), "fp32": Request(precision="fp32")}
    monkeypatch.setattr(auto, "CANDIDATES", candidates)
    return Counted(monkeypatch)


@pytest.fixture
def search(layer_export, tiny_checkpoint, tmp_path, counted):
    """Runs the search on a layer of the small model and a short text."""
    text = tmp_path / "text.txt"
    text.write_text((tiny_checkpoint.parent / "validation.txt").read_text()[:1700])

    def run(name: str = "out", budget: Budget | None = LOOSE, **options: Any) -> AutoReport:
        return automatic(layer_export, tmp_path / name, budget=budget, max_context=128, text=text, **options)

    return run


def test_a_search_publishes_the_fastest_and_repeats_nothing_that_it_knows(search, counted, monkeypatch, tmp_path):
    # An interrupted one publishes nothing, and the next one goes on where it stopped.
    build = auto.build

    def interrupted(source: Path, folder: Path, **options: Any) -> Any:
        if options["recipe"].precision == "fp32":
            raise KeyboardInterrupt
        return build(source, folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(auto, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search("first")
    assert not (tmp_path / "first").exists()
    first = search("first")
    assert [request.precision for request in counted.built] == ["int4", "fp32"]
    assert [trial.name for trial in first.trials] == ["int4", "fp32"]
    assert len(counted.built) == len(counted.timed) == 2
    assert first.chosen == choose(first.trials)
    manifest = read_bundle(tmp_path / "first")
    assert manifest == first.manifest
    assert (manifest.recipe.name, manifest.recipe.threads) == (f"auto: {first.chosen.name}", 1)
    assert manifest.recipe.budget == LOOSE
    assert first.trials[0].mean_kl > 100 * first.trials[1].mean_kl

    assert manifest.limits.max_batch == 8
    assert first.chosen.memory == manifest.memory.total(
        128, 1
    )  # of the one row that is served unless more are asked for

    assert search("again") == replace(first, output=tmp_path / "again")

    # Another budget chooses anew from what is known.
    strict = Budget(max_kl=first.trials[0].mean_kl / 2)
    second = search("strict", strict)
    assert second.chosen.name == "fp32"
    assert second.trials[0].reason.startswith("mean KL")
    assert second.manifest.recipe.budget == strict
    with pytest.raises(BuildError) as refused:
        search("none", Budget(max_kl=0.0, min_agreement=1.0))
    assert "none of 2 trials fits: the closest to the unquantized model is fp32 (mean KL" in str(refused.value)
    with pytest.raises(BuildError, match=r"the smallest int4 \(\d+ MB of 1\); give a larger budget or more room"):
        search("small", memory=1_000_000)
    sized = search("sized", Budget(), max_size=min(trial.size for trial in first.trials))
    assert (sized.chosen.name, sized.chosen.threads) == ("int4", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again",
        "cache",
        "first",
        "sized",
        "strict",
        "text.txt",
    ]
    assert len(counted.built) == len(counted.timed) == 2

    # A torn measurement is made again, the bundle is not.
    for number, content in enumerate((b"", b'{"name": "int4"}')):
        [trial] = (tmp_path / "cache" / "auto" / counted.timed[0][0]).glob("trial-*.json")
        trial.write_bytes(content)
        assert search(f"torn-{number}").trials[1] == first.trials[1]
        assert json.loads(trial.read_text())["name"] == "int4"
    assert (len(counted.built), len(counted.timed)) == (2, 4)

    # A truncated bundle is built again.
    entry = tmp_path / "cache" / "auto" / counted.timed[0][0]
    weights = entry / auto.BUILT / "weights.bin"
    weights.write_bytes(b"short")
    search("mended")
    assert [request.precision for request in counted.built] == ["int4", "fp32", "int4"]

    # One whose bytes changed is not published, and is gone.
    for broken in (tmp_path / "cache" / "auto").glob("*/built/bundle/weights.bin"):
        broken.write_bytes(broken.read_bytes()[:-1] + b"!")
    with pytest.raises(BuildError, match=r"the cache held a broken .* run again"):
        search("broken")
    assert not (tmp_path / "broken").exists()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_search_without_a_budget_is_refused(search, counted):
    for budget in (None, Budget()):
        with pytest.raises(UsageError, match=r"--auto needs a budget or a size: give --max-kl, .* or --max-size"):
            search(budget=budget)
    assert counted.built == []


# ---------------------------------------------------------------------------------------------------------- candidates


def candidates(
    request: Request, calibrates: bool = True, text: bool = False, coded: bool = False
) -> dict[str, Request]:
    from llmc.optimize.recipe import resolve
    from llmc.optimize.targets import capabilities

    def resolved(asked):
        return resolve(asked, capabilities("cpu"), 2048, "x", text, coded)[0]

    return auto._candidates(request, calibrates, resolved, coded)


def test_without_calibration_only_plain_rounding_is_tried():
    assert list(candidates(Request(), calibrates=False)) == [
        "int4-uncalibrated",
        "int8-small",
        "int8",
        "int8-exact",
        "fp32",
    ]
    assert list(candidates(Request())) == list(auto.CANDIDATES)


def test_a_quantized_checkpoints_own_integers_come_first():
    assert list(candidates(Request(), coded=True)) == [*auto.OF_CODES, *auto.CANDIDATES]


def test_candidates_that_contradict_the_request_drop_out():
    found = candidates(Request(precision="fp32"))
    assert "fp32" in found
    assert "int4" not in found
    assert {candidate.precision for candidate in found.values()} == {"fp32"}


@pytest.mark.parametrize(
    ("lines", "mixtures", "given"),
    [
        ('scheme = "rtn"', (), False),
        ('scheme = "rtn"\ncache = "int8"', (), True),
        ("", (), True),
        ("", (EXPERTS,), False),  # one graph for both phases, which rounds no activations
    ],
)
def test_the_text_goes_to_candidates_that_look_at_it(tiny_export, tmp_path, monkeypatch, lines, mixtures, given):
    asked: list[CalibrationRequest] = []

    def build(source: Path, folder: Path, **options: Any) -> None:
        asked.append(options["calibration"])
        raise KeyboardInterrupt

    monkeypatch.setenv("LLMC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "build", build)
    text, recipe = tmp_path / "mine.txt", tmp_path / "mine.toml"
    text.write_text("words")
    recipe.write_text(lines)
    manifest = read_export(tiny_export)
    manifest = replace(manifest, geometry=replace(manifest.geometry, mixtures=mixtures))
    monkeypatch.setattr(auto.bundle, "read_export", lambda folder: manifest)
    monkeypatch.setattr(auto, "CANDIDATES", {"int8": auto.CANDIDATES["int8"]})
    with pytest.raises(KeyboardInterrupt):
        automatic(
            tiny_export, tmp_path / "out", budget=LOOSE, recipe=recipe,
            calibration=CalibrationRequest(lambda *_: None, text),
        )  # fmt: skip
    assert asked[0].text == (text if given else None)
