"""Models that see: tower and decoder compute what transformers does, and what is not understood is refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import towers
from doubles.images import draw
from doubles.naflex import patch

from llmc.bundle import read_export
from llmc.bundle.model.vision import Tiling
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.families.smolvlm import SIDES
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.runtime.vision.decode import open_image
from llmc.runtime.vision.patches import cut_patches, make_feeds

# Float32 adds in another order, as a share of the largest value: rows here differ by 1e-6, and by 0.5 with two of the
# patches of a square exchanged.
TOLERANCE = 1e-4
Run = Callable[[str, dict[str, np.ndarray]], np.ndarray]


@pytest.fixture(scope="module", params=["smolvlm", "idefics3", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, kind) / "checkpoint"


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
def tiles() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (3, 3, towers.TILE, towers.TILE)).astype(np.float32)


def get_features(reference: Any, tiles: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        given = torch.from_numpy(tiles)
        found = reference.model.get_image_features(given if reference.config.model_type == "gemma3" else given[None])
    return torch.cat(list(found.pooler_output)).numpy()


def measure(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_rows_are_those_of_transformers(kind: str, run: Run, reference: Any, tiles: np.ndarray):
    found = run("vision", {"pixel_values": tiles})
    assert found.shape == (3 * towers.FAMILIES[kind].rows, 64)
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


def compute_logits(reference: Any, ids: np.ndarray, tiles: np.ndarray, **more: Any) -> np.ndarray:
    """Of rows of which the first has one tile, the second two."""
    import torch

    if reference.config.model_type != "gemma3":
        padded = np.zeros((2, 2, *tiles.shape[1:]), np.float32)
        padded[0, 0], padded[1] = tiles[0], tiles[1:]
        tiles = padded
    with torch.no_grad():
        found = reference(torch.from_numpy(ids), pixel_values=torch.from_numpy(tiles), **more)
    return found.logits.numpy()


def test_a_batch_with_images_has_the_logits_of_transformers(
    kind: str, run: Run, reference: Any, exported: Path, tiles: np.ndarray
):
    """Rows of an image see one another both ways in Gemma 3, and without them it would compute something else."""
    import torch

    rows = towers.FAMILIES[kind].rows
    ids = np.random.default_rng(1).integers(3, 4000, (2, 12 + 2 * rows))
    for row, start in ((0, 2), (1, 1), (1, 5 + rows)):
        ids[row, start : start + rows] = towers.IMAGE
    found = run("decoder", feed(exported, ids, run("vision", {"pixel_values": tiles})))
    if kind == "gemma3":
        assert measure(found, compute_logits(reference, ids, tiles)) > 1000 * TOLERANCE
        told = {"token_type_ids": torch.from_numpy(ids == towers.IMAGE).long(), "attention_mask": torch.ones(ids.shape)}
        expected = compute_logits(reference, ids, tiles, **told)
    else:
        expected = compute_logits(reference, ids, tiles)
    assert measure(found, expected) < TOLERANCE


def test_text_alone_has_the_logits_of_transformers(run: Run, reference: Any, exported: Path):
    import torch

    ids = np.random.default_rng(2).integers(3, 4000, (2, 9))
    found = run("decoder", feed(exported, ids, np.zeros((1, 64), np.float32)))
    with torch.no_grad():
        assert measure(found, reference(torch.from_numpy(ids)).logits.numpy()) < TOLERANCE


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of PEFT
@pytest.mark.parametrize("kind", ["smolvlm"], indirect=True)
def test_an_adapter_changes_the_tower_too(checkpoint: Path, run: Run, tiles: np.ndarray, tmp_path: Path):
    import torch
    from transformers import AutoModelForImageTextToText

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trained = peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="float32"), config)
    trained.save_pretrained(tmp_path / "adapter")
    merged = towers.open_graphs(export(checkpoint, tmp_path / "export", adapters=[(tmp_path / "adapter", 1.0)]).output)
    found, expected = merged("vision", {"pixel_values": tiles}), get_features(trained.base_model.model, tiles)
    untrained = run("vision", {"pixel_values": tiles})
    assert measure(found, expected) < TOLERANCE and measure(untrained, expected) > 100 * TOLERANCE


def test_the_manifest_tells_how_images_become_rows(kind: str, exported: Path):
    vision, rows = read_export(exported).geometry.vision, towers.FAMILIES[kind].rows
    assert vision is not None
    assert (vision.tile, vision.patch, vision.tokens, vision.token_id) == (32, 4, rows, towers.IMAGE)
    values = (0.00392156862745098, (0.5,) * 3, (0.5,) * 3)
    at_once = kind == "gemma3"
    assert vision.tiling == (
        Tiling(0, False, "bilinear", *values) if at_once else Tiling(128, True, "lanczos", *values)
    )
    assert (vision.most_tiles, vision.both_ways) == ((1, True) if at_once else (17, False))
    assert len(vision.linears) == 2 + 6 * vision.layers


@pytest.mark.parametrize("nested", [False, True])
def test_processors_of_both_layouts_are_read(kind: str, checkpoint: Path, tmp_path: Path, nested: bool):
    """Since transformers 5 one file holds the other."""
    folder, family = towers.copy_checkpoint(checkpoint, tmp_path), towers.FAMILIES[kind]
    if nested:
        (folder / "preprocessor_config.json").unlink()
        towers.write_json(folder / "processor_config.json", {**family.processor, "image_processor": family.images})
    assert read_checkpoint(folder).geometry.vision == read_checkpoint(checkpoint).geometry.vision


@pytest.mark.parametrize("kind", ["lfm2_vl"], indirect=True)
@pytest.mark.parametrize("size", [(32, 32), (200, 40), (20, 90), (8, 8)])
def test_rows_of_grids_of_any_shape_are_those_of_transformers(
    exported: Path, run: Run, reference: Any, size: tuple[int, int]
):
    import torch

    vision, most = read_export(exported).geometry.vision, 64
    assert vision is not None and vision.patching is not None
    tile = cut_patches(open_image(draw("RGB", *size)), vision, vision.patching).pixels[-1]
    found = run("vision", make_feeds(tile, vision))
    patches = patch(tile, vision.patch)
    values, mask = torch.zeros(1, most, patches.shape[1]), torch.zeros(1, most, dtype=torch.int32)
    values[0, : len(patches)], mask[0, : len(patches)] = torch.from_numpy(patches), 1
    shapes = torch.tensor([[side // vision.patch for side in tile.shape[1:]]])
    with torch.no_grad():
        given = {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        (expected,) = reference.model.get_image_features(**given).pooler_output
    assert found.shape == (math.prod(vision.grid(*tile.shape[1:])), 64)
    assert measure(found, expected.numpy()) < TOLERANCE
    assert measure(run("vision", make_feeds(tile[:, ::-1], vision)), expected.numpy()) > 100 * TOLERANCE


# ------------------------------------------------------------------------------------------------------- refusals


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

SIGLIP = towers.GEMMA_CONFIG["vision_config"]
GEMMA_REFUSED = [
    ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan=True is unsupported; expected false"),
    ("preprocessor_config.json", {"size": {"height": 32, "width": 64}}, "width=64 is unsupported; expected 32"),
    ("preprocessor_config.json", {"size": {"longest_edge": 32}}, "height is missing"),
    ("processor_config.json", {"image_seq_length": 64}, "image_seq_length=64 is unsupported; expected 16, the rows"),
    ("config.json", {"mm_tokens_per_image": 15}, "expected the square of a divisor of the 8 patches"),
    ("config.json", {"mm_tokens_per_image": 9}, "expected the square of a divisor of the 8 patches"),
    ("config.json", {"image_token_index": 4097}, "no token <image_soft_token> with the number 4097"),
    ("config.json", {"vision_config": {**SIGLIP, "model_type": "siglip"}}, "model_type='siglip' is unsupported"),
]
GRID = towers.LFM2_CONFIG["vision_config"]
LFM2_REFUSED = [
    ("preprocessor_config.json", {"use_thumbnail": False}, "use_thumbnail=False is unsupported; expected true"),
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is unsupported; expected false"),
    ("preprocessor_config.json", {"encoder_patch_size": 8}, "encoder_patch_size=8 is unsupported; expected 4"),
    ("preprocessor_config.json", {"tile_size": 36}, "tile_size=36 is unsupported; expected a multiple of 8"),
    ("preprocessor_config.json", {"min_tiles": 1}, "min_tiles=1 is unsupported; expected at least 2 and at most"),
    ("preprocessor_config.json", {"max_tiles": 1 << 20}, "max_tiles=1048576 is unsupported"),
    ("processor_config.json", {"use_image_special_tokens": False}, "use_image_special_tokens=False is unsupported"),
    ("config.json", {"vision_config": {**GRID, "num_patches": 24}}, "num_patches=24 .* the square of a whole number"),
    ("config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act='relu' is unsupported"),
    ("config.json", {"projector_bias": False}, "vision.connector.bias .* is unused by"),
]
WRONG = [("smolvlm", *wrong) for wrong in REFUSED]
WRONG += [*(("gemma3", *wrong) for wrong in GEMMA_REFUSED), *(("lfm2_vl", *wrong) for wrong in LFM2_REFUSED)]


@pytest.mark.threat("processor-settings")
@pytest.mark.parametrize(
    ("kind", "file", "changes", "message"), WRONG, ids=[message[:30] for *_, message in WRONG], indirect=["kind"]
)
def test_what_is_not_understood_is_refused(checkpoint: Path, tmp_path: Path, file: str, changes: Any, message: str):
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    towers.write_json(folder / file, {**json.loads((folder / file).read_text()), **changes})
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def rename_new(name: str) -> str:
    return f"model.{name}".replace(".language_model.model.", ".language_model.")


def rename_published(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
@pytest.mark.parametrize("rename", [rename_new, rename_published])
def test_names_of_all_ages_are_known(checkpoint: Path, tmp_path: Path, rename: Callable[[str], str]):
    """Also a head for one vector of each image, which is left out."""
    from safetensors.numpy import load_file, save_file

    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    stored = {rename(name): item for name, item in load_file(folder / "model.safetensors").items()}
    stored[rename("vision_tower.head.probe")] = np.zeros((1, 1, 32), np.float32)
    save_file(stored, folder / "model.safetensors")
    shapes = [{name: item.shape for name, item in read_checkpoint(it).tensors.items()} for it in (checkpoint, folder)]
    assert shapes[0] == shapes[1]


def test_a_checkpoint_without_its_processor_names_the_way_out(checkpoint: Path, tmp_path: Path):
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
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
