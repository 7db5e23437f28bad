"""An export or a checkpoint in the place of a bundle: every verb says which it is and how to build one."""

from pathlib import Path

import pytest

VERBS = [("run", "-p", "x"), ("chat",), ("bench",), ("eval",), ("verify",)]


@pytest.fixture
def unbuilt(tmp_path: Path) -> dict[str, Path]:
    """An export and a checkpoint, as far as names of files tell."""
    for folder, names in (("export", ("export.json", "config.json")), ("checkpoint", ("config.json",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("{}")
    return {"an export": tmp_path / "export", "a checkpoint": tmp_path / "checkpoint"}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(map(str, verb)))
def test_what_has_yet_to_be_built_is_named_with_the_command(llmc, unbuilt: dict[str, Path], verb: tuple):
    for kind, folder in unbuilt.items():
        ran = llmc(verb[0], folder, *verb[1:])
        expected = f"{folder} is {kind}, expected a bundle; build one with: llmc build {folder} -o BUNDLE"
        assert (ran.code, ran.out, ran.err) == (2, "", f"llmc: error: {expected}\n")


@pytest.mark.parametrize("order", [("export",), ("build",), ("plan",), ("inspect",)], ids=lambda order: order[0])
def test_an_adapter_is_refused_by_name_beside_base_weights_and_alone(llmc, unbuilt, tmp_path: Path, order: tuple):
    (tmp_path / "alone").mkdir()
    for folder, words in (
        (unbuilt["a checkpoint"], "an adapter, which llmc would"),
        (tmp_path / "alone", "not a whole"),
    ):
        (folder / "adapter_config.json").write_text("{}")
        ran = llmc(*order, folder, *(("-o", tmp_path / "out") if order[0] in ("export", "build") else ()))
        assert (ran.code, ran.out) == (1, "") and words in ran.err and "export its base model with it" in ran.err


def test_a_damaged_bundle_and_any_other_folder_are_for_the_reader_of_bundles(llmc, tmp_path: Path):
    assert "no llmc.json here" in llmc("verify", tmp_path).err
    for name in ("llmc.json", "export.json"):
        (tmp_path / name).write_text("{}")
    assert "llmc.json is corrupt" in llmc("verify", tmp_path).err


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (("build", "BUNDLE", "-o", "OUT"), "an export or a checkpoint"),
        (("eval", "BUNDLE", "--reference", "BUNDLE"), "an export"),
        (("export", "BUNDLE", "-o", "OUT"), "a checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_bundle_in_the_place_of_what_it_was_built_from_is_named(
    llmc, tiny_bundle: Path, tmp_path: Path, order: tuple[str, ...], expected: str
):
    paths = {"BUNDLE": tiny_bundle, "OUT": tmp_path / "out"}
    ran = llmc(*(paths.get(word, word) for word in order))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.endswith(f"{tiny_bundle} is a bundle, expected {expected}; give what it was built from\n")
    assert not (tmp_path / "out").exists()
