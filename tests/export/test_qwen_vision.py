"""Qwen's models that see: tower and decoder compute what transformers does, and what is not understood is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import qwen_towers, towers
from doubles.lowerings import open_session
from doubles.towers import write_json

from llmc.bundle import read_export
from llmc.bundle.model.vision import Patching
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.runtime.vision.patches import make_feeds
from llmc.runtime.vision.rows import place_tokens

# Float32 adds in another order, as a share of the largest value: 1e-6 here. Two rows or positions exchanged move some
# value by more than a hundredth.
TOLERANCE = 1e-4
# Squares of patches: one window, several that are not full, and one row.
GRIDS = [(2, 2), (3, 5), (1, 4)]
Run = Callable[[str, dict[str, np.ndarray]], np.ndarray]


@pytest.fixture(scope="module", params=qwen_towers.CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, request.param) / "checkpoint"


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> Path:
    return checkpoint.parent / "export"


@pytest.fixture(scope="module")
def run(exported: Path) -> Run:
    return towers.open_graphs(exported)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return towers.open_reference(checkpoint)


@pytest.fixture(scope="module")
def feeds(exported: Path) -> list[dict[str, np.ndarray]]:
    """What the tower reads of an image of each grid."""
    vision, generator = read_export(exported).geometry.vision, np.random.default_rng(0)
    assert vision is not None
    sizes = [(3, vision.tile * rows, vision.tile * columns) for rows, columns in GRIDS]
    return [make_feeds(generator.integers(0, 256, size, np.uint8), vision) for size in sizes]


def sizes_of(grids: list[tuple[int, int]]) -> Any:
    import torch

    return torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])


def get_rows(reference: Any, feeds: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Rows of each image, with the parts that are added behind layers side by side."""
    import torch

    pixels = torch.from_numpy(np.concatenate([each["pixel_values"] for each in feeds]))
    with torch.no_grad():
        found = reference.model.get_image_features(pixels, sizes_of(GRIDS))
    deep = [torch.cat([*part]) for part in getattr(found, "deepstack_features", None) or []]
    whole = torch.cat([torch.cat([*found.pooler_output]), *deep], 1).numpy()
    return np.split(whole, np.cumsum([rows * columns for rows, columns in GRIDS])[:-1])


def measure(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_rows_are_those_of_transformers_and_exchanged_patches_are_noticed(
    run: Run, reference: Any, feeds: list[dict[str, np.ndarray]]
):
    expected = get_rows(reference, feeds)
    for each, rows in zip(feeds, expected, strict=True):
        assert measure(run("vision", each), rows) < TOLERANCE
    for name in ("pixel_values", "positions"):
        exchanged = feeds[1][name].copy()
        exchanged[[0, 7]] = exchanged[[7, 0]]
        assert measure(run("vision", {**feeds[1], name: exchanged}), expected[1]) > 10 * TOLERANCE
    if "windows" in feeds[1]:  # two patches of other windows
        windows, places = feeds[1]["windows"].copy(), feeds[1]["window_places"].copy()
        windows[[0, 1], 0], places[windows[[0, 1], 0]] = windows[[1, 0], 0], places[windows[[1, 0], 0]]
        others = {**feeds[1], "windows": windows, "window_places": places}
        assert measure(run("vision", others), expected[1]) > 10 * TOLERANCE


def place(exported: Path, ids: np.ndarray, rows: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of the decoder, whose image tokens are the rows in their order."""
    batch, length = ids.shape
    indices = np.full(ids.shape, -1)
    indices[ids == qwen_towers.IMAGE] = np.arange((ids == qwen_towers.IMAGE).sum())
    feeds = {
        "input_ids": ids,
        "past_lengths": np.zeros(batch, np.int64),
        "logit_indices": np.tile(range(length), (batch, 1)),
        "embedding_indices": indices,
        "embeddings": rows,
        "positions": places,
    }
    geometry = read_export(exported).geometry
    if geometry.has_states:
        feeds["new_lengths"] = np.full(batch, length)
    for cache in geometry.caches:
        feeds |= {name: np.zeros(cache.shape_of(batch, length), np.float32) for name in cache.inputs}
    return feeds


def test_a_batch_with_images_has_the_logits_of_transformers_and_plain_positions_are_noticed(
    run: Run, reference: Any, exported: Path, feeds: list[dict[str, np.ndarray]]
):
    """The first row has an image of 3 x 5, the second those of 2 x 2 and 1 x 4."""
    import torch

    ids = np.random.default_rng(1).integers(3, 4000, (2, 24))
    ids[0, 2:17] = ids[1, 1:5] = ids[1, 9:13] = qwen_towers.IMAGE
    places = np.stack([place_tokens(24, [(2, (3, 5))]), place_tokens(24, [(1, (2, 2)), (9, (1, 4))])], axis=1)
    order = [1, 0, 2]
    rows = np.concatenate([run("vision", feeds[number]) for number in order])
    given = place(exported, ids, rows, places)
    found = run("decoder", given)
    with torch.no_grad():
        expected = reference(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.ones(ids.shape, dtype=torch.int64),
            mm_token_type_ids=torch.from_numpy(ids == qwen_towers.IMAGE).int(),
            pixel_values=torch.from_numpy(np.concatenate([feeds[number]["pixel_values"] for number in order])),
            image_grid_thw=sizes_of([GRIDS[number] for number in order]),
        ).logits.numpy()
    assert measure(found, expected) < TOLERANCE
    plain = np.broadcast_to(np.arange(24), places.shape).copy()
    assert measure(run("decoder", {**given, "positions": plain}), expected) > 10 * TOLERANCE


def test_text_alone_has_the_logits_of_the_text_part(
    run: Run, reference: Any, exported: Path, checkpoint: Path, tmp_path: Path
):
    """And these are of a graph without rows and axes."""
    import torch

    ids = np.random.default_rng(2).integers(3, 4000, (2, 9))
    width = read_export(exported).geometry.row_width
    given = place(exported, ids, np.zeros((1, width), np.float32), np.tile(np.arange(9), (3, 2, 1)))
    found = run("decoder", given)
    report = export(checkpoint, tmp_path / "export", text_only=True)
    assert report.notes[-1] == "config.json: only the text part was exported, which sees no images"
    text = open_session(report.output / "decoder.onnx")
    names = {value.name for value in text.get_inputs()}
    assert given.keys() - names == {"embedding_indices", "embeddings", "positions"}
    (alone,) = text.run(["logits"], {name: value for name, value in given.items() if name in names})
    assert measure(found, alone) < TOLERANCE
    with torch.no_grad():
        assert measure(found, reference(torch.from_numpy(ids)).logits.numpy()) < TOLERANCE


def test_the_manifest_tells_how_images_become_patches(exported: Path):
    geometry = read_export(exported).geometry
    vision, windowed = geometry.vision, geometry.model_type == "qwen2_5_vl"
    assert vision is not None
    mean, std = qwen_towers.IMAGES["image_mean"], qwen_towers.IMAGES["image_std"]
    assert vision.patching == Patching(
        256, 4096, "bicubic", 1 / 255, tuple(mean), tuple(std), 2, 2 * windowed, 6 * (not windowed)
    )
    assert (vision.tile, vision.patch, vision.tokens, vision.token_id, vision.axes) == (8, 4, 1, qwen_towers.IMAGE, 3)
    assert vision.deep == 2 * (geometry.model_type == "qwen3_vl") and geometry.row_width == 64 * (1 + vision.deep)
    assert vision.most_tokens == 64


# ------------------------------------------------------------------------------------------- other layouts, refusals


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_towers.write_qwen(tmp_path_factory.mktemp("windowed"), "qwen2_5_vl")


def test_configs_as_published_are_read_as_those_that_transformers_writes(windowed: Path, tmp_path: Path):
    """The text part's keys stand beside those of images, positions are called mrope, and sizes are pixels."""
    folder = towers.copy_checkpoint(windowed, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"] |= {"model_type": "qwen2_5_vl", "in_chans": 3, "spatial_patch_size": qwen_towers.PATCH}
    write_json(folder / "config.json", {**text, **config, "rope_theta": rope["rope_theta"]})
    images = {**qwen_towers.IMAGES, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    write_json(folder / "preprocessor_config.json", {k: v for k, v in images.items() if not k.endswith("_pixels")})
    found, expected = read_checkpoint(folder), read_checkpoint(windowed)
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "expected one of Qwen2VLImagePr"),
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is not known to llmc"),
    ("preprocessor_config.json", {"patch_size": 14}, "patch_size=14 is unsupported; expected 4, as in the vision_c"),
    ("preprocessor_config.json", {"merge_size": 4}, "merge_size=4 is unsupported; expected 2"),
    ("preprocessor_config.json", {"temporal_patch_size": 1}, "temporal_patch_size=1 is unsupported; expected 2"),
    ("preprocessor_config.json", {"min_pixels": 5000}, "min_pixels=5000 .* at most max_pixels=4096"),
    ("preprocessor_config.json", {"max_pixels": 1 << 40}, "max_pixels=1099511627776 is unsupported"),
    ("config.json", {"image_token_id": 4097}, "no token <.image_pad.> with the number 4097"),
]
VISION: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3}, "num_heads=3 is unsupported; expected a divisor of a fourth"),
    ({"in_channels": 4}, "3, for red, green and blue"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is unsupported; expected one of silu"),
    ({"out_hidden_size": 32}, "out_hidden_size=32 is unsupported; expected 64, the text part's"),
    ({"window_size": 7}, "window_size=7 is unsupported; expected at least 8"),
    ({"fullatt_block_indexes": [3, 1]}, "layers in their order"),
    ({"fullatt_block_indexes": [-1]}, "a list of layers"),
    ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "axial"}}, "rope_theta=5.0 is unsupported; expected 10000"),
    ({"depth": 3}, "is unused by"),
    ({"depth": 5}, "is missing"),
    ({"patch_bias": True}, "patch_bias=True is not known to llmc"),
]
REFUSED += [("config.json", {"vision_config": changes}, message) for changes, message in VISION]
SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mrope_section": [2, 3, 4]}, "three numbers that add up to 8, the pairs of a head"),
    ({"mrope_section": [4, 4]}, "three whole numbers"),
    ({"mrope_interleaved": True}, "mrope_interleaved=True is unsupported; expected false"),
]
REFUSED += [("config.json", {"text_config": {"rope_parameters": changes}}, message) for changes, message in SECTIONS]


def change(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {name: change(values[name], it) for name, it in changes.items() if isinstance(it, dict)}
    return {**values, **changes, **inner}


@pytest.mark.threat("processor-settings")
@pytest.mark.parametrize(("file", "changes", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_is_not_understood_is_refused(windowed: Path, tmp_path: Path, file: str, changes: Any, message: str):
    folder = towers.copy_checkpoint(windowed, tmp_path)
    write_json(folder / file, change(json.loads((folder / file).read_text()), changes))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)
