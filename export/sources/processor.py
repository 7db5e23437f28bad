"""The files of a checkpoint's processor, read as strictly as its config: images to tiles, and the texts around them."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.export.keys import Keys
from llmc.export.vision import PatchTowerConfig, TowerConfig
from llmc.inventory import MOST_TILES, Channels, Filter, Markers, Patching, Tiling, Vision

PROCESSOR_FILE, IMAGES_FILE = "processor_config.json", "preprocessor_config.json"
KINDS = tuple(f"{family}ImageProcessor{form}" for family in ("SmolVLM", "Idefics3") for form in ("", "Fast", "Pil"))
# Pillow's numbers.
FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
# Of Idefics3's processor and those that follow it.
MARKERS = Markers(
    image=IMAGE,
    tile=(f"{FAKE}<row_{{row}}_col_{{column}}>",),
    row_end=("", ""),
    whole=("", f"{FAKE}{WHOLE}"),
    single=(f"{FAKE}{WHOLE}",),
    after=(FAKE,),
)
# Of Qwen's, in whose templates the marks stand themselves.
QWEN_KINDS = tuple(f"Qwen2VLImageProcessor{form}" for form in ("", "Fast", "Pil"))
QWEN_MARKERS = Markers("<|image_pad|>", ("",), ("",), ("",), ("",), ("",))


def read_vision(
    folder: Path, tower: TowerConfig | PatchTowerConfig, processor: dict[str, Any], images: dict[str, Any]
) -> Vision:
    """All that a runtime must know of images; ``processor`` and ``images`` are the contents of both files.

    Since transformers 5 the one holds the other.
    """
    outer = Keys(processor, str(folder / PROCESSOR_FILE))
    outer.skip("processor_class", "video_processor", "chat_template")
    own = outer.inside("image_processor") if "image_processor" in outer else Keys(images, str(folder / IMAGES_FILE))
    if not images and own.where == str(folder / IMAGES_FILE):
        raise CheckpointError(
            f"{folder}: no {IMAGES_FILE} here, which says how images are made ready for the tower; get it, or export "
            "the text part alone with --text-only"
        )
    if isinstance(tower, PatchTowerConfig):
        outer.finish()
        return _read_patching(own, tower)
    if (tokens := outer.integer("image_seq_len", 169)) != tower.tokens:
        raise outer.error("image_seq_len", tokens, f"{tower.tokens}, the rows that the tower makes of a tile")
    outer.finish()
    tiling = _read_tiling(own, tower)
    vision = Vision(tower.tile, tower.patch, tower.tokens, tower.token_id, tiling, MARKERS, tower.layers, tower.linears)
    if vision.most_tiles > MOST_TILES:
        most = f"a longest_edge that cuts an image into at most {MOST_TILES} tiles of {tower.tile} pixels"
        raise own.error("size", tiling.longest_edge, most)
    return vision


def _read_tiling(keys: Keys, tower: TowerConfig) -> Tiling:
    """Defaults are those of transformers. Every tile is full, so that padding has nothing to do."""
    _check_steps(keys, KINDS)
    (longest, tile) = (_read_edge(keys, name) for name in ("size", "max_image_size"))
    if tile != tower.tile:
        raise keys.error("max_image_size", tile, f"{tower.tile}, the vision_config's image_size")
    tiling = Tiling(longest_edge=longest, cut=keys.flag("do_image_splitting", True), **_read_values(keys, "lanczos"))
    keys.finish()
    return tiling


def _read_patching(keys: Keys, tower: PatchTowerConfig) -> Vision:
    """Defaults are those of transformers; older files have bounds of pixels by their own names."""
    _check_steps(keys, QWEN_KINDS)
    for name, value in (
        ("patch_size", tower.patch),
        ("temporal_patch_size", tower.frames),
        ("merge_size", tower.merged),
    ):
        if (found := keys.integer(name, value)) != value:
            raise keys.error(name, found, f"{value}, as in the vision_config")
    size = keys.inside("size") if keys.raw("size") is not None else Keys({}, keys.where)
    size.rename({"shortest_edge": "min_pixels", "longest_edge": "max_pixels"})
    least, most = size.integer("min_pixels", 56 * 56), size.integer("max_pixels", 28 * 28 * 1280)
    size.finish()
    patching = Patching(
        least_pixels=keys.integer("min_pixels", least),
        most_pixels=keys.integer("max_pixels", most),
        **_read_values(keys, "bicubic"),
        frames=tower.frames,
        window=tower.window,
        places=tower.places,
    )
    keys.finish()
    if patching.least_pixels > patching.most_pixels:
        raise keys.error("min_pixels", patching.least_pixels, f"at most max_pixels={patching.most_pixels}")
    return Vision(
        tile=tower.patch * tower.merged,
        patch=tower.patch,
        tokens=1,
        token_id=tower.token_id,
        tiling=None,
        markers=QWEN_MARKERS,
        layers=tower.layers,
        linears=tower.linears,
        patching=patching,
        axes=3,
        deep=len(tower.deep),
    )


def _check_steps(keys: Keys, kinds: tuple[str, ...]) -> None:
    keys.choice("image_processor_type", kinds, kinds[0])
    keys.skip("processor_class", "do_pad", "video_sampling", "data_format", "input_data_format", "return_row_col_info")
    for name in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
        if not keys.flag(name, True):
            raise keys.error(name, False, "true, for this is what the tower was trained on")


def _read_values(keys: Keys, default: Filter) -> dict[str, Any]:
    """The filter of resizing, and what is done with pixels' values."""
    return {
        "filter": FILTERS[keys.integer("resample", FILTERS.index(default))],
        "rescale": keys.number("rescale_factor", 1 / 255),
        "mean": _read_channels(keys, "image_mean"),
        "std": _read_channels(keys, "image_std"),
    }


def _read_edge(keys: Keys, name: str) -> int:
    inner = keys.inside(name)
    edge = inner.integer("longest_edge")
    inner.finish()
    return edge


def _read_channels(keys: Keys, name: str) -> Channels:
    values = keys.numbers(name)
    if len(values) != 3:
        raise keys.error(name, list(values), "three numbers, for red, green and blue")
    return values
