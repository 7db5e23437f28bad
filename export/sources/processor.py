"""The files of a checkpoint's processor, read as strictly as its config: images to tiles, and the texts around them."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.export.keys import Keys
from llmc.export.vision import TowerConfig
from llmc.inventory import MOST_TILES, Channels, Filter, Grids, Markers, Tiling, Vision

PROCESSOR_FILE, IMAGES_FILE = "processor_config.json", "preprocessor_config.json"
FORMS = ("", "Fast", "Pil")
KINDS = tuple(f"{family}ImageProcessor{form}" for family in ("SmolVLM", "Idefics3") for form in FORMS)
# What changes no pixel, and what must be done to them all, for the tower was trained on it.
UNREAD = ("processor_class", "do_pad", "data_format", "input_data_format")
STEPS = ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize")
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
# Of LFM2-VL's.
GRID_MARKERS = Markers(
    image=IMAGE,
    before=("<|image_start|>",),
    tile=("<|img_row_{row}_col_{column}|>",),
    row_end=("",),
    whole=("<|img_thumbnail|>",),
    single=("",),
    after=("<|image_end|>",),
)
UNREAD_OF_GRIDS = (
    *("crop_size", "default_to_square", "device", "disable_grouping", "max_num_patches", "return_row_col_info"),
    *("return_tensors", "size"),
)
# Of Gemma 3's.
PANS = ("pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")
SOFT_MARKERS = Markers(
    image="<image_soft_token>",
    tile=("",),
    row_end=("",),
    whole=("",),
    single=("", "", "<start_of_image>"),
    after=("<end_of_image>", "", ""),
    placeholder="<start_of_image>",
)


def read_vision(folder: Path, tower: TowerConfig, processor: dict[str, Any], images: dict[str, Any]) -> Vision:
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
    if tower.projector == "mlp":
        return _read_grids(outer, own, tower)
    pools = tower.projector == "pool"
    length, default = ("image_seq_length", 256) if pools else ("image_seq_len", 169)
    if (tokens := outer.integer(length, default)) != tower.tokens:
        raise outer.error(length, tokens, f"{tower.tokens}, the rows that the tower makes of a tile")
    outer.finish()
    tiling = (_read_square if pools else _read_tiling)(own, tower)
    vision = Vision(
        *(tower.tile, tower.patch, tower.tokens, tower.token_id, tiling),
        *(SOFT_MARKERS if pools else MARKERS, tower.layers, tower.linears),
        both_ways=pools,
    )
    if vision.most_tiles > MOST_TILES:
        most = f"a longest_edge that cuts an image into at most {MOST_TILES} tiles of {tower.tile} pixels"
        raise own.error("size", tiling.longest_edge, most)
    return vision


def _read_tiling(keys: Keys, tower: TowerConfig) -> Tiling:
    """Defaults are those of transformers. Every tile is full, so that padding has nothing to do."""
    keys.choice("image_processor_type", KINDS, KINDS[0])
    keys.skip("video_sampling", "return_row_col_info")
    (longest, tile) = (_read_edge(keys, name) for name in ("size", "max_image_size"))
    if tile != tower.tile:
        raise keys.error("max_image_size", tile, f"{tower.tile}, the vision_config's image_size")
    return _finish_tiling(keys, "lanczos", longest, cut=keys.flag("do_image_splitting", True))


def _read_square(keys: Keys, tower: TowerConfig) -> Tiling:
    """Images are resized to one tile. Gemma 3's processor can show crops of long ones too, where it is told to."""
    keys.choice("image_processor_type", tuple(f"Gemma3ImageProcessor{form}" for form in FORMS))
    keys.skip("image_seq_length", *PANS)
    if keys.flag("do_pan_and_scan"):
        raise keys.error("do_pan_and_scan", True, "false, as it is published")
    size = keys.inside("size")
    for name in ("height", "width"):
        if (edge := size.integer(name)) != tower.tile:
            raise size.error(name, edge, f"{tower.tile}, the vision_config's image_size")
    size.finish()
    return _finish_tiling(keys, "bilinear", 0, cut=False)


def _read_grids(outer: Keys, keys: Keys, tower: TowerConfig) -> Vision:
    """Tiles of grids of any shape. Defaults are those of transformers."""
    for where, name in ((outer, "use_image_special_tokens"), (keys, "use_thumbnail")):
        if not where.flag(name, True):
            raise where.error(name, False, "true, as it is published")
    outer.finish()
    keys.choice("image_processor_type", tuple(f"Lfm2VlImageProcessor{form}" for form in FORMS), "Lfm2VlImageProcessor")
    keys.skip(*UNREAD_OF_GRIDS)
    if keys.flag("do_center_crop"):
        raise keys.error("do_center_crop", True, "false, as it is published")
    for name, default, own in (("encoder_patch_size", 16, tower.patch), ("downsample_factor", 2, tower.merged)):
        if (stated := keys.integer(name, default)) != own:
            raise keys.error(name, stated, f"{own}, as config.json has it")
    unit, tile = tower.patch * tower.merged, keys.integer("tile_size", 512)
    if tile % unit:
        raise keys.error(
            "tile_size", tile, f"a multiple of {unit}, for {tower.merged} x {tower.merged} patches become a row"
        )
    cut, tiles = keys.flag("do_image_splitting", True), (keys.integer("min_tiles", 2), keys.integer("max_tiles", 10))
    if cut and not (1 < tiles[0] <= tiles[1] or tiles == (1, 1)):
        raise keys.error("min_tiles", tiles[0], f"at least 2 and at most max_tiles={tiles[1]}")
    grids = Grids(
        merged=tower.merged,
        places=tower.side,
        least_tokens=keys.integer("min_image_tokens", 64),
        most_tokens=keys.integer("max_image_tokens", 256),
        tolerance=keys.number("max_pixels_tolerance", 2.0),
        least_tiles=tiles[0] if cut else 1,
        most_tiles=tiles[1] if cut else 1,
    )
    tiling = _finish_tiling(keys, "bilinear", 0, cut=cut)
    return Vision(
        *(tile, tower.patch, (tile // unit) ** 2, tower.token_id, tiling, GRID_MARKERS, tower.layers, tower.linears),
        grids=grids,
    )


def _finish_tiling(keys: Keys, default_filter: Filter, longest: int, *, cut: bool) -> Tiling:
    keys.skip(*UNREAD)
    for name in STEPS:
        if not keys.flag(name, True):
            raise keys.error(name, False, "true, for this is what the tower was trained on")
    tiling = Tiling(
        longest_edge=longest,
        cut=cut,
        filter=FILTERS[keys.integer("resample", FILTERS.index(default_filter))],
        rescale=keys.number("rescale_factor", 1 / 255),
        mean=_read_channels(keys, "image_mean"),
        std=_read_channels(keys, "image_std"),
    )
    keys.finish()
    return tiling


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
