"""Models that see: tower and decoder compute what transformers does, and what is not understood is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import towers

from llmc.bundle import read_export
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.families.smolvlm import SIDES
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.inventory import Tiling

# Float32 adds in another order, as a share of the largest value: rows here differ by 1e-6, and by 0.5 with two of the
# patches of a square exchanged.
TOLERANCE = 1e-4
KINDS = ("smolvlm", "idefics3")
Run = Callable[[str, dict[str, np.ndarray]], np.ndarray]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.write_seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(checkpoint, tmp_path_factory.mktemp("export") / "export").output


@pytest.fixture(scope="module")
def run(exported: Path) -> Run:
    """The first output of one of the export's graphs."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the cache is copied, since nothing is bound in place here
    graphs = {name: ort.InferenceSession(exported / f"{name}.onnx", options) for name in ("vision", "decoder")}
    return lambda name, feeds: graphs[name].run(None, feeds)[0]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def tiles() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (3, 3, towers.TILE, towers.TILE)).astype(np.float32)


def get_features(reference: Any, tiles: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        (found,) = reference.model.get_image_features(torch.from_numpy(tiles)[None]).pooler_output
    return found.numpy()


def measure(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_rows_are_those_of_transformers(run: Run, reference: Any, tiles: np.ndarray):
    found = run("vision", {"pixel_values": tiles})
    assert found.shape == (3 * towers.TOKENS, 64)
    assert measure(found, get_features(reference, tiles)) < TOLERANCE


def test_the_tolerance_notices_exchanged_pixels(run: Run, reference: Any, tiles: np.ndarray):
    exchanged = tiles.copy()
    exchanged[0, 0, 0, [0, 1]] = tiles[0, 0, 0, [1, 0]]
    assert measure(run("vision", {"pixel_values": exchanged}), get_features(reference, tiles)) > 10 * TOLERANCE


def feed(exported: Path, ids: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of the decoder, whose image tokens are the rows in their order."""
    batch, length = ids.shape
    indices = np.full(ids.shape, -1)
    indices[ids == towers.IMAGE] = np.arange((ids == towers.IMAGE).sum())
    feeds = {
        "input_ids": ids,
        "past_lengths": np.zeros(batch, np.int64),
        "logit_indices": np.tile(range(length), (2, 1)),
    }
    for cache in read_export(exported).geometry.caches:
        feeds |= {name: np.zeros(cache.shape_of(batch, length), np.float32) for name in cache.inputs}
    return feeds | {"embedding_indices": indices, "embeddings": rows}


def test_a_batch_with_images_has_the_logits_of_transformers(
    run: Run, reference: Any, exported: Path, tiles: np.ndarray
):
    """The first row has one tile, the second two."""
    import torch

    ids = np.random.default_rng(1).integers(3, 4000, (2, 20))
    ids[0, 2:6] = ids[1, 1:5] = ids[1, 9:13] = towers.IMAGE
    found = run("decoder", feed(exported, ids, run("vision", {"pixel_values": tiles})))
    pixels = np.zeros((2, 2, *tiles.shape[1:]), np.float32)
    pixels[0, 0], pixels[1] = tiles[0], tiles[1:]
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids), pixel_values=torch.from_numpy(pixels)).logits.numpy()
    assert measure(found, expected) < TOLERANCE


def test_text_alone_has_the_logits_of_transformers(run: Run, reference: Any, exported: Path):
    import torch

    ids = np.random.default_rng(2).integers(3, 4000, (2, 9))
    found = run("decoder", feed(exported, ids, np.zeros((1, 64), np.float32)))
    with torch.no_grad():
        assert measure(found, reference(torch.from_numpy(ids)).logits.numpy()) < TOLERANCE


def test_the_manifest_tells_how_images_become_rows(exported: Path):
    vision = read_export(exported).geometry.vision
    assert vision is not None
    assert (vision.tile, vision.patch, vision.tokens, vision.token_id) == (32, 4, towers.TOKENS, towers.IMAGE)
    assert vision.tiling == Tiling(128, True, "lanczos", 0.00392156862745098, (0.5,) * 3, (0.5,) * 3)
    assert vision.most_tiles == 17
    assert len(vision.linears) == 2 + 6 * vision.layers


def test_the_text_part_alone_takes_no_rows_and_says_what_it_lacks(checkpoint: Path, tmp_path: Path):
    report = export(checkpoint, tmp_path / "export", text_only=True)
    assert report.notes[-1] == "config.json: only the text part was exported, which sees no images"
    assert read_export(report.output).geometry.vision is None
    assert not (report.output / "vision.onnx").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_processors_of_both_layouts_are_read(checkpoint: Path, tmp_path: Path, nested: bool):
    """Since transformers 5 one file holds the other."""
    folder = copy(checkpoint, tmp_path)
    if nested:
        (folder / "preprocessor_config.json").unlink()
        towers.write_json(folder / "processor_config.json", {**towers.PROCESSOR, "image_processor": towers.IMAGES})
    assert read_checkpoint(folder).geometry.vision == read_checkpoint(checkpoint).geometry.vision


# ------------------------------------------------------------------------------------------------------- refusals


def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose files may be changed."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


REFUSED = [
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is not known to llmc"),
    ("preprocessor_config.json", {"do_resize": False}, "do_resize=False is unsupported; expected true"),
    ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "expected one of SmolVLMImageProc"),
    ("preprocessor_config.json", {"image_mean": [0.5]}, r"image_mean=\[0.5\] is unsupported; expected three numbers"),
    ("preprocessor_config.json", {"image_std": [0.5, 0.5, 0]}, "image_std=.* a list of numbers from 1e-06"),
    ("preprocessor_config.json", {"max_image_size": {"longest_edge": 64}}, "max_image_size=64 .* 32, the vision_conf"),
    ("preprocessor_config.json", {"size": {"height": 8}}, "longest_edge is missing"),
    ("preprocessor_config.json", {"size": {"longest_edge": 1 << 40}}, "longest_edge=1099511627776 is unsupported"),
    ("preprocessor_config.json", {"size": {"longest_edge": 544}}, "size=544 .* at most 257 tiles of 32 pixels"),
    ("preprocessor_config.json", {"resample": 6}, "resample=6 is unsupported"),
    ("processor_config.json", {"image_seq_len": 64}, "image_seq_len=64 is unsupported; expected 4, the rows"),
    ("processor_config.json", {"audio_processor": {}}, "audio_processor={} is not known to llmc"),
    ("config.json", {"image_token_id": 4097}, "no token <image> with the number 4097"),
    ("config.json", {"scale_factor": 3}, "image_size=32 is unsupported; expected a multiple of 12"),
    ("config.json", {"vision_config": {"model_type": "clip_vision_model"}}, "model_type='clip_vision_model'"),
    ("config.json", {"vision_config": {**towers.CONFIG["vision_config"], "rope": 1}}, "rope=1 is not known to llmc"),
    ("config.json", {"vision_config": {**towers.CONFIG["vision_config"], "num_attention_heads": 5}}, "a divisor of"),
    ("config.json", {"vision_config": {**towers.CONFIG["vision_config"], "num_channels": 4}}, "3, for red, green"),
    ("config.json", {"vision_config": {**towers.CONFIG["vision_config"], "num_hidden_layers": 1}}, "is unused by"),
    ("config.json", {"vision_config": {**towers.CONFIG["vision_config"], "num_hidden_layers": 3}}, "is missing"),
    (
        "config.json",
        {"vision_config": {**towers.CONFIG["vision_config"], "image_size": 400}},
        "image_size / patch_size",
    ),
]


@pytest.mark.parametrize(("file", "changes", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_is_not_understood_is_refused(checkpoint: Path, tmp_path: Path, file: str, changes: Any, message: str):
    folder = copy(checkpoint, tmp_path)
    towers.write_json(folder / file, {**json.loads((folder / file).read_text()), **changes})
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_a_checkpoint_without_its_processor_names_the_way_out(checkpoint: Path, tmp_path: Path):
    folder = copy(checkpoint, tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no preprocessor_config.json .*; get it, or .* with --text-only"):
        read_checkpoint(folder)


def test_transformers_looks_positions_up_in_order_on_the_sides_that_are_read():
    """And on others, such as 19, it does not."""
    import torch
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    def is_in_order(side: int) -> bool:
        module = SmolVLMVisionEmbeddings(SmolVLMVisionConfig(hidden_size=1, image_size=side, patch_size=1))
        with torch.no_grad():
            module.patch_embedding.weight.zero_()
            module.patch_embedding.bias.zero_()
            module.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
            found = module(torch.zeros(1, 3, side, side), torch.ones(1, side, side, dtype=torch.bool))
        return torch.equal(found.flatten(), torch.arange(float(side**2)))

    assert all(map(is_in_order, SIDES))
    assert not is_in_order(19)
