"""Models that see: tower and decoder compute what transformers does, and what is not understood is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import filled, towers
from doubles.images import draw
from PIL import ImageOps

from llmc.bundle import read_export
from llmc.errors import CheckpointError
from llmc.export import export
from llmc.export.families.smolvlm import SIDES
from llmc.export.sources.checkpoint import read_checkpoint
from llmc.runtime.vision.tower import Tower

# Float32 adds in another order, as a share of the largest value: 1e-6 here. Two pixels, patches or positions exchanged
# move some logit by more than a hundredth.
TOLERANCE = 1e-4
# Where images are cut one tile, and a row of four with the whole; of squares of 8 pixels 2 x 2, and 3 x 9 with windows
# that are not full; for LFM2-VL sizes that neither its processor nor llmc resizes, which round differently.
LLAMAS = ("lfm3_vl", "mistral3")
IMAGES = {kind: (draw("RGB", 32, 32), draw("RGBA", 200, 40)) for kind in towers.FAMILIES}
IMAGES |= {kind: (draw("L", 111, 30), draw("RGBA", 75, 26)) for kind in (*towers.QWEN, *LLAMAS)}
IMAGES["lfm2_vl"] = draw("RGB", 32, 32), draw("RGBA", 48, 16)


@pytest.fixture(scope="module", params=towers.FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory, kind) / "checkpoint"


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> Path:
    return checkpoint.parent / "export"


def about(*images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "def f(x):"}]}]


@pytest.fixture(scope="module")
def talks(kind: str) -> list[Any]:
    """One with an image, one with three, and one with none."""
    small, wide = IMAGES[kind]
    return [about(wide), about(small, wide, ImageOps.invert(small)), about()]


@pytest.fixture(scope="module")
def given(kind: str, checkpoint: Path, talks: list[Any]) -> list[dict[str, Any]]:
    """What transformers' processor makes of each."""
    return [towers.prepare(towers.read_processor(checkpoint, kind), talk) for talk in talks]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, given: list[dict[str, Any]]) -> list[np.ndarray]:
    """Logits [S, V] of transformers."""
    import torch

    reference = towers.open_reference(checkpoint)
    with torch.no_grad():
        return [reference(**each).logits[0].numpy() for each in given]


@pytest.fixture(scope="module")
def compute(exported: Path, talks: list[Any], given: list[dict[str, Any]]) -> Callable[..., list[np.ndarray]]:
    """Logits [S, V] of all talks in one batch, with what ``spoil`` does to the inputs of the tower or the decoder."""
    run, geometry = towers.open_graphs(exported), read_export(exported).geometry
    vision = geometry.vision
    assert vision is not None
    ids = [each["input_ids"][0].numpy() for each in given]

    def batch(spoil: Callable[[dict[str, np.ndarray]], object] = lambda feeds: None) -> list[np.ndarray]:
        def see(**feeds: np.ndarray) -> np.ndarray:
            spoil(feeds)
            return run("vision", feeds)

        tower, length = Tower(vision, see), max(map(len, ids))
        shape = len(ids), length
        feeds = {
            "input_ids": np.zeros(shape, np.int64),
            "past_lengths": np.zeros(len(ids), np.int64),
            "logit_indices": np.tile(range(length), (len(ids), 1)),
            "embedding_indices": np.full(shape, -1),
            "embeddings": np.zeros((0, geometry.row_width), np.float32),
        }
        feeds |= {"positions": np.tile(range(length), (3, len(ids), 1))} if vision.axes else {}
        feeds |= {"new_lengths": np.array([*map(len, ids)])} if geometry.has_states else {}
        for row, (talk, own) in enumerate(zip(talks, ids, strict=True)):
            feeds["input_ids"][row, : len(own)] = own
            images = [part["image"] for part in talk[0]["content"] if part["type"] == "image"]
            if images:
                mark = vision.markers.placeholder or vision.markers.image
                tiles = tower.write_images(mark * len(images), images, str, 10_000)[1]
                seen = tower.compute_rows(tiles, own)
                feeds["embedding_indices"][row, seen.positions] = len(feeds["embeddings"]) + np.arange(len(seen.rows))
                feeds["embeddings"] = np.concatenate([feeds["embeddings"], seen.rows])
                if vision.axes:
                    feeds["positions"][:, row] = seen.place(0, length)
        for cache in geometry.caches:
            feeds |= {name: np.zeros(cache.shape_of(len(ids), length), np.float32) for name in cache.inputs}
        spoil(feeds)
        return [row[: len(own)] for row, own in zip(run("decoder", feeds), ids, strict=True)]

    return batch


def measure(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_a_batch_of_texts_with_images_and_without_has_the_logits_of_transformers(compute, expected):
    for found, wanted in zip(compute(), expected, strict=True):
        assert measure(found, wanted) < TOLERANCE


def exchange(name: str, axis: int, one: int = 0, other: int = 7) -> Callable[[dict[str, np.ndarray]], None]:
    """Exchange two slices of an input of the tower."""

    def spoil(feeds: dict[str, np.ndarray]) -> None:
        if name in feeds and "past_lengths" not in feeds:
            values = np.moveaxis(feeds[name].copy(), axis, 0)
            values[[one, other]] = values[[other, one]]
            feeds[name] = np.moveaxis(values, 0, axis)

    return spoil


def exchange_windows(feeds: dict[str, np.ndarray]) -> None:
    """Exchange two patches of different windows."""
    if "windows" in feeds and len(feeds["windows"]) > 1:
        windows, places = feeds["windows"].copy(), feeds["window_places"].copy()
        windows[[0, 1], 0], places[windows[[0, 1], 0]] = windows[[1, 0], 0], places[windows[[1, 0], 0]]
        feeds |= {"windows": windows, "window_places": places}


def place_in_order(feeds: dict[str, np.ndarray]) -> None:
    """Number the decoder's positions as if there were no images."""
    if "past_lengths" in feeds:
        feeds["positions"] = np.broadcast_to(np.arange(feeds["positions"].shape[-1]), feeds["positions"].shape).copy()


def see_forward_alone(feeds: dict[str, np.ndarray]) -> None:
    """Shift the rows of images by one, which no position notices but the order does."""
    if "past_lengths" in feeds:
        feeds["embeddings"] = np.roll(feeds["embeddings"], 1, 0)


TILED, GRIDS, QWEN, FILLED = ("smolvlm", "idefics3", "gemma3"), ("lfm2_vl",), tuple(towers.QWEN), tuple(filled.CONFIGS)
PLANTS = [(kind, "pixels", exchange("pixel_values", -1)) for kind in TILED]
PLANTS += [(kind, "patches", exchange("pixel_values", 0)) for kind in (*GRIDS, *QWEN, *LLAMAS, *FILLED)]
PLANTS += [(kind, "positions", exchange("positions", 0)) for kind in (*QWEN, *LLAMAS, *FILLED)]
PLANTS += [("lfm3_vl", "neighbors", exchange("neighbors", 1))]
PLANTS += [("qwen2_5_vl", "windows", exchange_windows), *((kind, "axes", place_in_order) for kind in QWEN)]
PLANTS += [(kind, "rows", see_forward_alone) for kind in towers.FAMILIES]


@pytest.mark.parametrize(("kind", "plant"), [it[::2] for it in PLANTS], ids=[it[1] for it in PLANTS], indirect=["kind"])
def test_the_tolerance_notices_a_planted_error(compute, expected, plant):
    assert measure(compute(plant)[0], expected[0]) > 10 * TOLERANCE


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of PEFT
@pytest.mark.parametrize("kind", ["smolvlm"], indirect=True)
def test_an_adapter_changes_the_tower_too(checkpoint, exported, tmp_path):
    import torch

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trained = peft.get_peft_model(towers.open_reference(checkpoint), config)
    trained.save_pretrained(tmp_path / "adapter")
    merged = export(checkpoint, tmp_path / "export", adapters=[(tmp_path / "adapter", 1.0)]).output
    tiles = np.random.default_rng(0).normal(0, 1, (3, 3, towers.TILE, towers.TILE)).astype(np.float32)
    found, untrained = (towers.open_graphs(it)("vision", {"pixel_values": tiles}) for it in (merged, exported))
    with torch.no_grad():
        rows = trained.base_model.model.model.get_image_features(torch.from_numpy(tiles)[None]).pooler_output
    expected = torch.cat([*rows]).numpy()
    assert measure(found, expected) < TOLERANCE and measure(untrained, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", TILED, indirect=True)
def test_processors_of_both_layouts_are_read(kind, checkpoint, tmp_path, nested):
    """Since transformers 5 one file holds the other."""
    folder, family = towers.copy_checkpoint(checkpoint, tmp_path), towers.FAMILIES[kind]
    if nested:
        (folder / "preprocessor_config.json").unlink()
        towers.write_json(folder / "processor_config.json", {**family.processor, "image_processor": family.images})
    assert read_checkpoint(folder).geometry.vision == read_checkpoint(checkpoint).geometry.vision


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
    ("processor_config.json", {"image_seq_len": 64}, "image_seq_len=64 is unsupported; expected 4, the number of rows"),
    ("processor_config.json", {"audio_processor": {}}, "audio_processor={} is not known to llmc"),
    ("config.json", {"image_token_id": 4097}, "no token <image> with the id 4097"),
    ("config.json", {"scale_factor": 3}, "image_size=32 is unsupported; expected a multiple of 12"),
    ("config.json", {"vision_config": {"model_type": "clip_vision_model"}}, "model_type='clip_vision_model'"),
    ("config.json", {"vision_config": {"rope": 1}}, "rope=1 is not known to llmc"),
    ("config.json", {"vision_config": {"num_attention_heads": 5}}, "a divisor of"),
    ("config.json", {"vision_config": {"num_channels": 4}}, "3, for red, green"),
    ("config.json", {"vision_config": {"num_hidden_layers": 1}}, "is unused by"),
    ("config.json", {"vision_config": {"num_hidden_layers": 3}}, "is missing"),
    ("config.json", {"vision_config": {"image_size": 400}}, "image_size / patch_size"),
]

GEMMA_REFUSED = [
    ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan=True is unsupported; expected false"),
    ("preprocessor_config.json", {"size": {"height": 32, "width": 64}}, "width=64 is unsupported; expected 32"),
    ("preprocessor_config.json", {"size": {"longest_edge": 32}}, "height is missing"),
    (
        "processor_config.json",
        {"image_seq_length": 64},
        "image_seq_length=64 is unsupported; expected 16, the number of rows",
    ),
    ("config.json", {"mm_tokens_per_image": 15}, "expected the square of a divisor of the 8 patches"),
    ("config.json", {"mm_tokens_per_image": 9}, "expected the square of a divisor of the 8 patches"),
    ("config.json", {"image_token_index": 4097}, "no token <image_soft_token> with the id 4097"),
    ("config.json", {"vision_config": {"model_type": "siglip"}}, "model_type='siglip' is unsupported"),
]
LFM2_REFUSED = [
    ("preprocessor_config.json", {"use_thumbnail": False}, "use_thumbnail=False is unsupported; expected true"),
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is unsupported; expected false"),
    ("preprocessor_config.json", {"encoder_patch_size": 8}, "encoder_patch_size=8 is unsupported; expected 4"),
    ("preprocessor_config.json", {"tile_size": 36}, "tile_size=36 is unsupported; expected a multiple of 8"),
    ("preprocessor_config.json", {"min_tiles": 1}, "min_tiles=1 is unsupported; expected at least 2 and at most"),
    ("preprocessor_config.json", {"max_tiles": 1 << 20}, "max_tiles=1048576 is unsupported"),
    ("processor_config.json", {"use_image_special_tokens": False}, "use_image_special_tokens=False is unsupported"),
    ("config.json", {"vision_config": {"num_patches": 24}}, "num_patches=24 .* the square of a whole number"),
    ("config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act='relu' is unsupported"),
    ("config.json", {"projector_bias": False}, "vision.connector.bias .* is unused by"),
]
QWEN_REFUSED = [
    ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "expected one of Qwen2VLImagePr"),
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is not known to llmc"),
    ("preprocessor_config.json", {"patch_size": 14}, "patch_size=14 is unsupported; expected 4, as in the vision_c"),
    ("preprocessor_config.json", {"merge_size": 4}, "merge_size=4 is unsupported; expected 2"),
    ("preprocessor_config.json", {"temporal_patch_size": 1}, "temporal_patch_size=1 is unsupported; expected 2"),
    ("preprocessor_config.json", {"min_pixels": 5000}, "min_pixels=5000 .* at most max_pixels=4096"),
    ("preprocessor_config.json", {"max_pixels": 1 << 40}, "max_pixels=1099511627776 is unsupported"),
    ("config.json", {"image_token_id": 4097}, "no token <.image_pad.> with the id 4097"),
]
QWEN_VISION: list[tuple[dict[str, Any], str]] = [
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
QWEN_SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mrope_section": [2, 3, 4]}, "three numbers that add up to 8, the pairs of a head"),
    ({"mrope_section": [4, 4]}, "three whole numbers"),
    ({"mrope_interleaved": True}, "mrope_interleaved=True is unsupported; expected false"),
]
QWEN_REFUSED += [("config.json", {"vision_config": changes}, message) for changes, message in QWEN_VISION]
QWEN_REFUSED += [
    ("config.json", {"text_config": {"rope_parameters": changes}}, message) for changes, message in QWEN_SECTIONS
]
FILLED_IMAGES: list[tuple[dict[str, Any], str]] = [
    ({"image_processor_type": "CLIPImageProcessor"}, "expected one of Gemma4ImageProcessor"),
    ({"do_normalize": True}, "do_normalize=True is unsupported; expected false"),
    ({"do_resize": False}, "do_resize=False is unsupported; expected true"),
    ({"max_soft_tokens": 100}, "max_soft_tokens=100 is unsupported; expected one of 70, 140, 280, 560, 1120"),
    ({"pooling_kernel_size": 4}, "pooling_kernel_size=4 is unsupported; expected that of the vision_config"),
    ({"patch_size": 2}, "pooling_kernel_size=2 is unsupported; expected that of the vision_config, and so patch_size"),
    ({"do_pan_and_scan": True}, "do_pan_and_scan=True is not known to llmc"),
]
FILLED_VISION: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "siglip_vision_model"},
        "model_type='siglip_vision_model' is unsupported; expected one of gemma4_v",
    ),
    ({"hidden_activation": "silu"}, "hidden_activation='silu' is unsupported"),
    ({"num_key_value_heads": 1}, "num_key_value_heads=1 is unsupported; expected 2, as num_attention_heads"),
    ({"head_dim": 22}, "head_dim=22 is unsupported; expected a multiple of 4"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' is unsupported"),
    ({"use_clipped_linears": False}, "is unused by"),
    ({"standardize": False}, "is unused by"),
    ({"num_hidden_layers": 3}, "is missing"),
    ({"patch_bias": True}, "patch_bias=True is not known to llmc"),
]
FILLED_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("processor_config.json", {"image_processor": changes}, message) for changes, message in FILLED_IMAGES),
    *(("config.json", {"vision_config": changes}, message) for changes, message in FILLED_VISION),
    ("config.json", {"image_token_id": 4097}, "no token <.image.> with the id 4097"),
    (
        "config.json",
        {"text_config": {"use_bidirectional_attention": "vision"}},
        "use_bidirectional_attention='vision' is unsupported; expected null, where layers share caches",
    ),
]
UNIFIED_REFUSED = [
    (
        "config.json",
        {"vision_config": {"model_patch_size": 16}},
        "model_patch_size=16 is unsupported; expected 8, patch_si",
    ),
    (
        "config.json",
        {"vision_config": {"output_proj_dims": 64}},
        "output_proj_dims=64 is unsupported; expected 48, as mm",
    ),
    ("config.json", {"vision_config": {"mm_posemb_size": 80}}, "has shape .* but config.json asks for"),
]
LFM3_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"vision_config": changes}, message)
    for changes, message in (
        ({"conv_kernel_size": 2}, "conv_kernel_size=2 is unsupported; expected an odd number"),
        ({"layer_types": ["conv"]}, "layer_types=.* 3 entries, each one of conv, full_attention"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is unsupported; expected a divisor of a fourth"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 is unsupported; expected a divisor of num_attention"),
        ({"norm_bias": True}, "norm_bias=True is not known to llmc"),
    )
]
BY_KIND = {"smolvlm": REFUSED, "gemma3": GEMMA_REFUSED, "lfm2_vl": LFM2_REFUSED, "lfm3_vl": LFM3_REFUSED}
MISTRAL_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "expected one of PixtralImagePr"),
    ("preprocessor_config.json", {"size": {"height": 64, "width": 64}}, "longest_edge is missing"),
    ("preprocessor_config.json", {"do_center_crop": True}, "do_center_crop=True is unsupported; expected false"),
    ("processor_config.json", {"image_break_token": "\n"}, "image_break_token=.* expected .*IMG_BREAK"),
    ("processor_config.json", {"patch_size": 8}, "patch_size=8 is unsupported; expected 4, as config.json"),
    ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size=1 is unsupported; expected 2"),
    ("config.json", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer=.* expected -1, the last one"),
    ("config.json", {"vision_config": {"hidden_act": "mish"}}, "hidden_act='mish' is unsupported"),
    ("config.json", {"vision_config": {"head_dim": 8}}, "head_dim=8 is unsupported; expected 16, hidden_size"),
    ("config.json", {"vision_config": {"num_attention_heads": 3}}, "a divisor of a fourth of hidden_size=32"),
]
BY_KIND |= {"qwen2_5_vl": QWEN_REFUSED, "mistral3": MISTRAL_REFUSED}
BY_KIND |= {"gemma4": FILLED_REFUSED, "gemma4_unified": UNIFIED_REFUSED}
WRONG = [(kind, *wrong) for kind, table in BY_KIND.items() for wrong in table]


def change(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {name: change(values.get(name, {}), it) for name, it in changes.items() if isinstance(it, dict)}
    return {**values, **changes, **inner}


@pytest.mark.threat("processor-settings")
@pytest.mark.parametrize(
    ("kind", "file", "changes", "message"), WRONG, ids=[message[:30] for *_, message in WRONG], indirect=["kind"]
)
def test_what_is_not_understood_is_refused(checkpoint, tmp_path, file, changes, message):
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    before = json.loads((folder / file).read_text())
    towers.write_json(folder / file, change(before, changes) if "preproc" not in file else {**before, **changes})
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize("kind", ["qwen2_5_vl"], indirect=True)
def test_configs_as_published_are_read_as_those_that_transformers_writes(checkpoint, tmp_path):
    """The text part's keys stand beside those of images, positions are called mrope, and sizes are pixels."""
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"] |= {"model_type": "qwen2_5_vl", "in_chans": 3, "spatial_patch_size": towers.PATCH}
    towers.write_json(folder / "config.json", {**text, **config, "rope_theta": rope["rope_theta"]})
    images = {**towers.QWEN_IMAGES, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    towers.write_json(
        folder / "preprocessor_config.json", {k: v for k, v in images.items() if not k.endswith("_pixels")}
    )
    found, expected = read_checkpoint(folder), read_checkpoint(checkpoint)
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()


def rename_new(name: str) -> str:
    return f"model.{name}".replace(".language_model.model.", ".language_model.")


def rename_published(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
@pytest.mark.parametrize("rename", [rename_new, rename_published])
def test_names_of_all_ages_are_known(checkpoint, tmp_path, rename):
    """Also a head for one vector of each image, which is left out."""
    from safetensors.numpy import load_file, save_file

    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    stored = {rename(name): item for name, item in load_file(folder / "model.safetensors").items()}
    stored[rename("vision_tower.head.probe")] = np.zeros((1, 1, 32), np.float32)
    save_file(stored, folder / "model.safetensors")
    shapes = [{name: item.shape for name, item in read_checkpoint(it).tensors.items()} for it in (checkpoint, folder)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", ["mistral3"], indirect=True)
def test_without_its_key_the_activation_is_that_of_transformers(checkpoint, tmp_path):
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["vision_config"]["hidden_act"]
    towers.write_json(folder / "config.json", config)
    assert (read_checkpoint(checkpoint).config.tower.activation, read_checkpoint(folder).config.tower.activation) == (
        "silu",
        "gelu",
    )


@pytest.mark.parametrize("kind", ["gemma4"], indirect=True)
def test_keys_and_values_that_published_checkpoints_store_without_use_are_left_out(checkpoint, tmp_path):
    """Of the layers that read caches of others."""
    from safetensors.numpy import load_file, save_file

    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if ".layers.0.self_attn.k_" in name or ".layers.0.self_attn.v_" in name]:
        if "language_model" in name:
            stored[name.replace("layers.0", "layers.2")] = stored[name]
    save_file(stored, folder / "model.safetensors")
    assert len(load_file(folder / "model.safetensors")) == len(load_file(checkpoint / "model.safetensors")) + 3
    assert read_checkpoint(folder).tensors.keys() == read_checkpoint(checkpoint).tensors.keys()


def test_a_checkpoint_without_its_processor_names_the_way_out(checkpoint, tmp_path):
    folder = towers.copy_checkpoint(checkpoint, tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"no preprocessor_config.json, .*; get it, or .* with --text-only"):
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
