"""Every verb takes every source; what it cannot use is refused by name."""

from pathlib import Path

import pytest

from llmc.errors import LlmcError

RUNNING = ["run", "chat", "bench", "eval", "verify", "embed", "rank", "doctor", "serve"]
READING = ["inspect", "plan", "export", "build"]
REST = {"rank": ["query"], "export": ["-o", "OUT"], "build": ["-o", "OUT"]}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """A source of each kind, as far as names of files tell."""
    for folder, names in {
        "bundle": ("llmc.json",),
        "export": ("export.json", "config.json"),
        "checkpoint": ("config.json",),
        "adapter": ("adapter_config.json",),
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("{}")
    (tmp_path / "model.gguf").touch()
    folders = {name: str(tmp_path / name) for name in ("bundle", "export", "checkpoint", "adapter")}
    return {**folders, "gguf": str(tmp_path / "model.gguf"), "hub": "org/name:Q4_K_M"}


@pytest.mark.parametrize("verb", [*RUNNING, *READING])
def test_every_verb_hands_any_source_to_the_one_resolver(
    llmc, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch, verb: str
):
    def take(name: str | Path, offline: bool | None = None, **_: object) -> None:
        raise LlmcError(f"asked for {name}, offline {offline}")

    monkeypatch.setattr("llmc.sources.built.find_bundle", take)
    monkeypatch.setattr("llmc.cli.options.locate", take)
    for name in sources.values():
        for flags, offline in (([], None), (["--offline"], True)):
            ran = llmc(verb, name, *REST.get(verb, []), *flags)
            assert (ran.code, ran.out) == (1, "")
            assert ran.err == f"llmc: error: asked for {name}, offline {offline}\n"


def test_the_source_is_looked_for_after_the_whole_line_is_understood(llmc, sources: dict[str, str]):
    ran = llmc("run", sources["checkpoint"], "--max-batch", "0")
    assert (ran.code, "--max-batch" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("build BUNDLE -o OUT", "is a bundle, expected an export or a checkpoint or a GGUF file"),
        ("export BUNDLE -o OUT", "is a bundle, expected a checkpoint or a GGUF file; give what it was made from"),
        ("export EXPORT -o OUT", "is an export, expected a checkpoint or a GGUF file"),
        ("adapter add CHECKPOINT ADAPTER --name a", "is a checkpoint, expected a bundle; build one with --adapters"),
        ("eval BUNDLE --reference BUNDLE", "no export.json here"),
    ],
)
def test_a_source_of_a_kind_that_a_verb_cannot_use_is_named(
    llmc, tiny_bundle: Path, sources: dict[str, str], tmp_path: Path, order: str, said: str
):
    names = {name.upper(): path for name, path in sources.items()}
    names |= {"BUNDLE": str(tiny_bundle), "OUT": str(tmp_path / "out")}
    ran = llmc(*(names.get(word, word) for word in order.split()))
    assert (ran.code, ran.out) == (1 if "reference" in order else 2, "") and said in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", [*READING, "run"])
def test_an_adapter_is_refused_by_name_beside_base_weights_and_alone(
    llmc, sources: dict[str, str], tmp_path: Path, verb: str
):
    (tmp_path / "checkpoint" / "adapter_config.json").write_text("{}")
    for folder, words in ((sources["checkpoint"], "an adapter, which llmc would"), (sources["adapter"], "not a whole")):
        ran = llmc(verb, folder, *(["-o", tmp_path / "out"] if verb in ("export", "build") else []), stdin=b"x")
        assert (ran.code, ran.out) == (1, "") and words in ran.err and "export its base model with it" in ran.err


def test_a_damaged_bundle_is_for_the_reader_of_bundles(llmc, sources: dict[str, str]):
    assert "llmc.json is corrupt" in llmc("verify", sources["bundle"]).err
