"""Read a checkpoint's processor files as strictly as its config: how images become tiles, and the texts around them."""

from pathlib import Path
from typing import Any

from llmc.bundle.model.vision import MOST_TILES, Channels, Filter, Markers, Patching, Tiling, Vision
from llmc.errors import CheckpointError
from llmc.export.keys import Keys
from llmc.export.vision.axial import AxialTowerConfig
from llmc.export.vision.llama import LlamaTowerConfig
from llmc.export.vision.shapes import PatchTowerConfig, TowerConfig

PROCESSOR_FILE, IMAGES_FILE = "processor_config.json", "preprocessor_config.json"
FORMS = ("", "Fast", "Pil")
KINDS = tuple(f"{family}ImageProcessor{form}" for family in ("SmolVLM", "Idefics3") for form in FORMS)
# Pillow's numbers of filters.
FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
# Markers of Idefics3's processor and its successors.
MARKERS = Markers(
    image=IMAGE,
    tile=(f"{FAKE}<row_{{row}}_col_{{column}}>",),
    row_end=("", ""),
    whole=("", f"{FAKE}{WHOLE}"),
    single=(f"{FAKE}{WHOLE}",),
    after=(FAKE,),
)
# Qwen's templates write the markers.
QWEN_KINDS = tuple(f"Qwen2VLImageProcessor{form}" for form in FORMS)
QWEN_MARKERS = Markers("<|image_pad|>", ("",), ("",), ("",), ("",), ("",))
# LFM2-VL's processor.
NAFLEX_KINDS = tuple(f"Lfm2VlImageProcessor{form}" for form in FORMS)
NAFLEX_MARKERS = Markers(
    image=IMAGE,
    before=("<|image_start|>",),
    tile=("<|img_row_{row}_col_{column}|>",),
    row_end=("",),
    whole=("<|img_thumbnail|>",),
    single=("",),
    after=("<|image_end|>",),
)
# Pixtral's processor.
LINES_KINDS = tuple(f"PixtralImageProcessor{form}" for form in FORMS)
LINES_MARKERS = Markers(*("[IMG]", ("",), ("",), ("",), ("",), ("[IMG_END]",)), line_end=("[IMG_BREAK]",))
UNREAD = ("crop_size", "default_to_square", "device", "disable_grouping", "max_num_patches", "return_tensors", "size")
# Gemma 4's processors; they take budgets of so many tokens.
FILLED_KINDS = tuple(f"Gemma4{kind}ImageProcessor{form}" for kind in ("", "Unified") for form in FORMS)
BUDGETS = (70, 140, 280, 560, 1120)
FILLED_UNREAD = ("audio_seq_length", "audio_ms_per_token", "feature_extractor", "image_seq_length")
FILLED_MARKERS = Markers("<|image|>", ("",), ("",), ("",), single=("<|image>",), after=("<image|>",))
# Gemma 3's processor.
SOFT_KINDS = tuple(f"Gemma3ImageProcessor{form}" for form in FORMS)
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


def read_vision(
    folder: Path,
    tower: TowerConfig | PatchTowerConfig | AxialTowerConfig,
    processor: dict[str, Any],
    images: dict[str, Any],
) -> Vision:
    """The runtime's image settings; ``processor`` and ``images`` are the contents of the two files.

    Since transformers 5 the first contains the second.
    """
    outer = Keys(processor, str(folder / PROCESSOR_FILE))
    outer.skip("processor_class", "video_processor", "chat_template")
    inner = outer.inside("image_processor") if "image_processor" in outer else Keys(images, str(folder / IMAGES_FILE))
    if not images and inner.where == str(folder / IMAGES_FILE):
        raise CheckpointError(
            f"{folder}: no {IMAGES_FILE}, which describes how to prepare images for the tower; get it, or export only "
            "the text part with --text-only"
        )
    if isinstance(tower, AxialTowerConfig):
        outer.skip(*FILLED_UNREAD)  # of sound, and a number that nothing reads
        outer.finish()
        return _read_filled(inner, tower)
    if isinstance(tower, LlamaTowerConfig) and tower.lines:
        return _read_lines(outer, inner, tower)
    if isinstance(tower, PatchTowerConfig):
        outer.finish()
        return _read_patching(inner, tower)
    if tower.projector == "mlp":
        return _read_naflex(outer, inner, tower)
    pools = tower.projector == "pool"
    length, default = ("image_seq_length", 256) if pools else ("image_seq_len", 169)
    if (tokens := outer.integer(length, default)) != tower.tokens:
        raise outer.error(length, tokens, f"{tower.tokens}, the number of rows that the tower outputs for a tile")
    outer.finish()
    tiling = (_read_square if pools else _read_tiling)(inner, tower)
    vision = Vision(
        *(tower.tile, tower.patch, tower.tokens, tower.token_id, tiling),
        *(SOFT_MARKERS if pools else MARKERS, tower.layers, tower.linears),
        both_ways=pools,
        norms=count_norms(tower),
    )
    if vision.most_tiles > MOST_TILES:
        most = f"a longest_edge that cuts an image into at most {MOST_TILES} tiles of {tower.tile} pixels"
        raise inner.error("size", tiling.longest_edge, most)
    return vision


def count_norms(tower: TowerConfig | PatchTowerConfig | AxialTowerConfig) -> int:
    """Number of norms of a tower: each has one vector called ``weight``, and nothing else has."""
    shapes = tower.parameter_shapes.items()
    return sum(len(shape) == 1 and name.endswith(".weight") for name, shape in shapes)


def _read_tiling(keys: Keys, tower: TowerConfig) -> Tiling:
    """The tiling; defaults are transformers'. Every tile is full, so there is no padding."""
    _check_steps(keys, KINDS)
    (longest, tile) = (_read_edge(keys, name) for name in ("size", "max_image_size"))
    if tile != tower.tile:
        raise keys.error("max_image_size", tile, f"{tower.tile}, the vision_config's image_size")
    tiling = Tiling(longest_edge=longest, cut=keys.flag("do_image_splitting", True), **_read_values(keys, "lanczos"))
    keys.finish()
    return tiling


def _read_square(keys: Keys, tower: TowerConfig) -> Tiling:
    """Settings to resize images to one tile. Gemma 3's processor can also crop long ones, which is refused."""
    _check_steps(keys, SOFT_KINDS)
    keys.skip("image_seq_length", *PANS)
    keys.fixed("do_pan_and_scan", False, ", as it is published")
    size = keys.inside("size")
    for name in ("height", "width"):
        if (edge := size.integer(name)) != tower.tile:
            raise size.error(name, edge, f"{tower.tile}, the vision_config's image_size")
    size.finish()
    tiling = Tiling(longest_edge=0, cut=False, **_read_values(keys, "bilinear"))
    keys.finish()
    return tiling


def _read_naflex(outer: Keys, keys: Keys, tower: TowerConfig) -> Vision:
    """LFM2-VL's settings; defaults are transformers'."""
    for where, name in ((outer, "use_image_special_tokens"), (keys, "use_thumbnail")):
        where.fixed(name, True, ", as it is published")
    outer.finish()
    _check_steps(keys, NAFLEX_KINDS)
    keys.skip(*UNREAD)
    keys.fixed("do_center_crop", False, ", as it is published")
    for name, default, own in (("encoder_patch_size", 16, tower.patch), ("downsample_factor", 2, tower.merged)):
        if (stated := keys.integer(name, default)) != own:
            raise keys.error(name, stated, f"{own}, as config.json has it")
    square, tile = tower.patch * tower.merged, keys.integer("tile_size", 512)
    if tile % square:
        squares = f"a multiple of {square}, since {tower.merged} x {tower.merged} patches become a row"
        raise keys.error("tile_size", tile, squares)
    tiles = keys.integer("min_tiles", 2), keys.integer("max_tiles", 10)
    if not keys.flag("do_image_splitting", True):
        tiles = 1, 1
    elif not (1 < tiles[0] <= tiles[1] or tiles == (1, 1)):
        raise keys.error("min_tiles", tiles[0], f"at least 2 and at most max_tiles={tiles[1]}")
    least, most = keys.integer("min_image_tokens", 64), keys.integer("max_image_tokens", 256)
    if least > most or most * square**2 >= 1 << 26:
        raise keys.error("max_image_tokens", most, f"at least min_image_tokens={least}, and below 67 million pixels")
    patching = Patching(
        least_pixels=least * square**2,
        most_pixels=most * square**2,
        **_read_values(keys, "bilinear"),
        frames=1,
        window=0,
        places=tower.side,
        naflex=True,
        least_tiles=tiles[0],
        most_tiles=tiles[1],
        tolerance=keys.number("max_pixels_tolerance", 2.0),
    )
    keys.finish()
    return Vision(
        *(tile, tower.patch, (tile // square) ** 2, tower.token_id, None),
        *(NAFLEX_MARKERS, tower.layers, tower.linears, patching),
        norms=count_norms(tower),
    )


def _read_lines(outer: Keys, keys: Keys, tower: LlamaTowerConfig) -> Vision:
    """Pixtral's settings; defaults are transformers'. The size of patches is that of the outer file."""
    for name, text in (
        ("image_token", LINES_MARKERS.image),
        ("image_break_token", LINES_MARKERS.line_end[0]),
        ("image_end_token", LINES_MARKERS.after[0]),
    ):
        outer.fixed(name, text, ", as it is published")
    for name, default, own in (("patch_size", 16, tower.patch), ("spatial_merge_size", 1, tower.merged)):
        if (stated := outer.integer(name, default)) != own:
            raise outer.error(name, stated, f"{own}, as config.json has it")
    outer.finish()
    _check_steps(keys, LINES_KINDS)
    keys.skip("patch_size", *(name for name in UNREAD if name != "size"))
    keys.fixed("do_center_crop", False, ", as it is published")
    longest, square = _read_edge(keys, "size"), tower.patch * tower.merged
    patching = Patching(
        least_pixels=1,
        most_pixels=(-(-longest // square) * square) ** 2,
        **_read_values(keys, "bicubic"),
        frames=1,
        window=0,
        places=0,
        longest_edge=longest,
    )
    keys.finish()
    return Vision(
        *(square, tower.patch, 1, tower.token_id, None, LINES_MARKERS, tower.layers, tower.linears, patching),
        norms=count_norms(tower),
    )


def _read_patching(keys: Keys, tower: PatchTowerConfig) -> Vision:
    """Qwen's settings; defaults are transformers'; older files have other names for the bounds of pixels."""
    _check_steps(keys, QWEN_KINDS)
    sizes = {"patch_size": tower.patch, "temporal_patch_size": tower.frames, "merge_size": tower.merged}
    for name, value in sizes.items():
        keys.fixed(name, value, ", as in the vision_config")
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
        kernel=tower.kernel,
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
        axes=tower.axes,
        deep=len(tower.deep),
        norms=count_norms(tower),
    )


def _read_filled(keys: Keys, tower: AxialTowerConfig) -> Vision:
    """Gemma 4's settings; defaults are transformers'. Towers take values from -1 to 1, linears alone those from 0."""
    _check_steps(keys, FILLED_KINDS, normalized=False)
    # Means and deviations of a step that is left out, and sizes that nothing reads.
    keys.skip("image_mean", "image_std", "image_seq_length", "size", "default_to_square", "model_patch_size")
    patch, pooled, square = keys.integer("patch_size", 16), keys.integer("pooling_kernel_size", 3), tower.square
    if patch * pooled != square or (tower.layers and pooled != tower.merged):
        raise keys.error("pooling_kernel_size", pooled, "that of the vision_config, and so patch_size")
    tokens = keys.integer("max_soft_tokens", tower.most_tokens)
    if tokens not in BUDGETS:
        raise keys.error("max_soft_tokens", tokens, f"one of {', '.join(map(str, BUDGETS))}")
    middle, reach = (0.5, 0.5) if tower.layers else (0.0, 1.0)
    patching = Patching(
        least_pixels=square**2,
        most_pixels=tokens * square**2,
        filter=_read_filter(keys, "bicubic"),
        rescale=keys.number("rescale_factor", 1 / 255),
        mean=(middle,) * 3,
        std=(reach,) * 3,
        frames=1,
        window=0,
        places=0,
        filled=True,
    )
    keys.finish()
    return Vision(
        *(square, tower.patch, 1, tower.token_id, None),
        *(FILLED_MARKERS, tower.layers, tower.linears, patching),
        both_ways=tower.both_ways,
        norms=count_norms(tower),
    )


def _check_steps(keys: Keys, kinds: tuple[str, ...], *, normalized: bool = True) -> None:
    keys.choice("image_processor_type", kinds, kinds[0])
    keys.skip("processor_class", "do_pad", "video_sampling", "data_format", "input_data_format", "return_row_col_info")
    for name in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
        keys.fixed(name, name != "do_normalize" or normalized, ", as the tower was trained")


def _read_values(keys: Keys, default: Filter) -> dict[str, Any]:
    """The filter for resizing, and how pixel values are scaled."""
    return {
        "filter": _read_filter(keys, default),
        "rescale": keys.number("rescale_factor", 1 / 255),
        "mean": _read_channels(keys, "image_mean"),
        "std": _read_channels(keys, "image_std"),
    }


def _read_filter(keys: Keys, default: Filter) -> Filter:
    return FILTERS[keys.integer("resample", FILTERS.index(default))]


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
