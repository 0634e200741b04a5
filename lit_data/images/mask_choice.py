"""Options of masks that follow from the values in the masks of a dataset."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.files import is_there
from lit_data.core.opening import open_source
from lit_data.core.progress import count_threads, ordered_map
from lit_data.core.types import IGNORED, Array, Ints
from lit_data.images.header import read_header
from lit_data.images.masks import (
    MaskOptions,
    pack_colours,
    show_values,
    to_whole_numbers,
    unpack_colours,
    widen_bits,
)
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image
from lit_inspect.counts import counted, inflect

log = logging.getLogger(__name__)

_VOC_FOLDER = "SegmentationClass"
"""Beginning of the name of a folder whose masks may hold 255 for ignored pixels."""

_SAMPLED_MASKS = 64
_SAMPLED_PIXELS = 2**16  # of an image; a picture has more colors there than a mask
_MOST_LABEL_BYTES = 100_000
_MOST_COLOURS = 32  # of classes; pictures have far more
_MOST_CLASSES = 16  # small numbers that count as classes
_MOST_VOC = 32  # numbers of classes, beside 255
_END = 32  # grey levels next to black and to white
# Values that class numbers beside 255 for ignored pixels do not use.
_NEARLY_WHITE = slice(240, 255)
_MOST_BETWEEN = 0.1  # of the pixels of masks whose edges alone are grey
_THRESHOLD = 128
_HALF = 0.5  # fraction of the pixels
_TIFF_SUFFIXES = (".tif", ".tiff")
_MOST_HEADERS = 4096  # of TIFF masks, a fraction of a second
_STORED = replace(MaskOptions().read, alpha="drop")


def choose_mask_options(
    masks: Sequence[Path], options: MaskOptions, classes: Sequence[str] = ()
) -> MaskOptions:
    """Return options that fit the masks of a dataset, and log the choice.

    Masks that are transparent outside the defect are read from their alpha channel. A small number
    of colors counts as one color for each class; with two classes, any color on black is the
    defect. Masks that were scaled smoothly or saved as JPEG have gray edges: nearly all of their
    pixels are almost black or almost white, and the rest is in between. In masks of two values,
    such as 0 and 38, or of a few small numbers, all values but 0 are the defect. If palettes number
    the same colors differently, as programs that choose a palette for each file do, colors count.

    Args:
        masks: All masks of the dataset; up to 64 of them are read.
        options: Options to complete. If they have a scale, a threshold or colors, they are returned
            unchanged; with more than two classes, only colors are searched for.
        classes: Names of the classes after the background, if the options have several.
    """
    options = choose_inversion(masks, options)
    is_open = options.scale == "auto" and options.threshold is None and options.ignore is None
    if not masks or not is_open or options.colors is not None:
        return options
    sampled = _sample(masks)
    if _are_palettes_mixed(sampled, options):
        log.warning("palettes of masks number the same colors differently, so their colors count")
        options = replace(options, palette="expand")
    readable = _count_readable(sampled, options)
    if len(readable) < len(sampled):
        options, readable = _choose_channels(sampled, options, readable, classes)
    if options.classes > 2 or options.colors is not None:
        return options
    counts = sum(readable, np.zeros(256, np.int64))
    if name_folder(sampled[0]) == _VOC_FOLDER and _has_voc_values(counts):
        reason = (
            "masks in the style of VOC, where 255 is ignored (data.mask_read.ignore=255): "
            "values from"
        )
        return replace(_set_threshold(options, 1, reason), ignore=IGNORED)
    return _choose_threshold(counts, len(sampled), options)


def name_folder(mask: Path) -> str:
    """Return the name of a folder in which a copy of a mask is read like the mask itself."""
    return _VOC_FOLDER if mask.parent.name.startswith(_VOC_FOLDER) else "masks"


def _sample(masks: Sequence[Path], most: int = _SAMPLED_MASKS) -> list[Path]:
    numbers = np.linspace(0, len(masks) - 1, min(most, len(masks))).astype(np.int64)
    return [masks[number] for number in np.unique(numbers)]


def choose_inversion(masks: Sequence[Path], options: MaskOptions) -> MaskOptions:
    """Return options that decide whether masks that store white as 0 are read as shown or as stored.

    Some programs invert the pixels when they write that tag; others write it although 0 is the
    background. Defects are the smaller part, so the majority of pixels tells which.

    Args:
        masks: All masks of the dataset; the headers of up to 4096 TIFF files are read.
        options: Options to complete. If ``invert`` is not ``auto``, or they name colors or classes,
            they are returned unchanged.
    """
    if options.invert != "auto" or options.classes > 2 or options.colors is not None:
        return options
    tiffs = [path for path in masks if path.suffix.lower() in _TIFF_SUFFIXES]
    inverted = [path for path in _sample(tiffs, _MOST_HEADERS) if _stores_white_as_zero(path)]
    if not inverted:
        return options
    if np.mean([_measure_zeros(path) for path in _sample(inverted)]) > _HALF:
        reason = "stored, because most of their pixels are 0 (data.mask_read.invert=false)"
        options = replace(options, invert=False)
    else:
        reason = "seen (data.mask_read.invert=photometric)"
        options = replace(options, invert="photometric")
    masks_are = inflect(
        "[mask stores white as 0, and is read as it is|masks store white as 0, and are read as they are]",
        len(inverted),
    )
    log.info("%d %s %s", len(inverted), masks_are, reason)
    return options


def _stores_white_as_zero(path: Path) -> bool:
    """Return True if the tags of a TIFF say so, and False if it cannot be read."""
    try:
        return read_header(path, _STORED).stored.white_is_zero
    except DataError:  # named where all masks are read
        return False


def _measure_zeros(path: Path) -> float:
    """Return the fraction of pixels that are stored as 0, or 0 if the file cannot be read."""
    try:
        return float(np.mean(read_image(path, _STORED) == 0))
    except DataError:  # named where all masks are read
        return 0.0


def _has_voc_values(counts: Ints) -> bool:
    """Return True if masks have small numbers, and 255 for ignored pixels."""
    return bool(counts[0] and counts[IGNORED] and not counts[_MOST_VOC:IGNORED].any())


def _are_palettes_mixed(masks: Sequence[Path], options: MaskOptions) -> bool:
    """Return True if a color has several numbers in palettes of masks."""
    if options.palette == "expand":
        return False
    numbers_of: defaultdict[int, set[int]] = defaultdict(set)
    for number_of in ordered_map(partial(_read_palette, options), masks, count_threads()):
        for colour, number in number_of.items():
            numbers_of[colour].add(number)
    return max(map(len, numbers_of.values()), default=0) > 1


def _read_palette(options: MaskOptions, path: Path) -> dict[int, int]:
    """Return the first number of each packed color in a palette mask, at some of its pixels."""
    try:
        if not read_header(path, options.read).stored.palette:
            return {}
        numbers = read_image(path, options.read)[0].ravel()
        colors = widen_bits(read_image(path, _make_colour_options(options)))
    except DataError:  # named where all masks are read
        return {}
    if len(colors) != 3:
        return {}
    step = max(1, numbers.size // _SAMPLED_PIXELS)
    packed = pack_colours(colors.reshape(3, -1)[:, ::step])
    pairs = np.unique(np.stack([packed, numbers[::step]]), axis=1)
    number_of: dict[int, int] = {}
    for colour, number in pairs.T.tolist():
        number_of.setdefault(colour, number)
    return number_of


def _make_colour_options(options: MaskOptions) -> ReadOptions:
    return replace(options, classes=2, colors=((0, 0, 0), (255, 255, 255))).read


def _choose_channels(
    masks: Sequence[Path], options: MaskOptions, readable: list[Ints], classes: Sequence[str]
) -> tuple[MaskOptions, list[Ints]]:
    """Return options for masks of several channels, and the resulting count of each value by mask."""
    # An opaque mask among them would be all defect, and an explicit option for alpha prevails.
    if options.classes == 2 and options.alpha == "opaque" and not readable:
        alpha_only = replace(options, alpha="only")
        counts = _count_readable(masks, alpha_only)
        if len(counts) == len(masks):
            log.info("masks are transparent outside of the defect: data.mask_read.alpha=only")
            return alpha_only, counts
    pixel_counts, brightest_counts = _count_colours(masks, options)
    if 2 <= len(pixel_counts) <= _MOST_COLOURS and not _are_grey(pixel_counts):
        names = _read_label_map(masks[0].parent)
        return _name_colours(pixel_counts, names, options, classes), readable
    are_readable = options.classes == 2 and len(brightest_counts) == len(masks)
    if are_readable and has_grey_edges(sum(brightest_counts, np.zeros(256, np.int64))):
        log.info("masks are colors on black: data.mask_read.channels=brightest")
        return replace(options, channels="brightest"), brightest_counts
    return options, readable


def _count_colours(masks: Sequence[Path], options: MaskOptions) -> tuple[Counter[int], list[Ints]]:
    """Read masks as colors.

    Returns:
        Pixels of each packed color, up to one color more than the most classes; and for each
        readable mask the count of each of 256 values in its largest channel.
    """
    read = _make_colour_options(options)
    pixel_counts: Counter[int] = Counter()
    brightest_counts = []
    for path in masks:
        try:
            colors = widen_bits(read_image(path, read))
        except DataError:  # named where all masks are read
            continue
        if colors.dtype != np.uint8 or len(colors) != 3:
            continue
        if len(pixel_counts) <= _MOST_COLOURS:
            values, counts = np.unique(pack_colours(colors), return_counts=True)
            pixel_counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        brightest_counts.append(np.bincount(colors.max(axis=0).ravel(), minlength=256))
    return pixel_counts, brightest_counts


def _are_grey(packed_colours: Iterable[int]) -> bool:
    colors = unpack_colours(np.array(list(packed_colours)))
    return all(red == green == blue for red, green, blue in colors)


def _choose_threshold(counts: Ints, mask_count: int, options: MaskOptions) -> MaskOptions:
    values = np.flatnonzero(counts)
    if set(values.tolist()) <= {0, 1} or set(values.tolist()) <= {0, 255}:
        return options
    if has_grey_edges(counts):
        between = counts[_END : 256 - _END].sum() / counts.sum()
        reason = f"masks have gray edges ({between:.2%} of the pixels of {counted(mask_count, 'mask')}): values from"
        return _set_threshold(options, _THRESHOLD, reason)
    if values[0] == 0 and (len(values) == 2 or values[-1] < _MOST_CLASSES):
        return _set_threshold(options, 1, f"masks hold {_join(values)}: values from")
    return options


def _name_colours(
    pixel_counts: Counter[int],
    names: dict[int, str],
    options: MaskOptions,
    classes: Sequence[str],
) -> MaskOptions:
    """Return options with the background first, then the named colors of masks, then the others.

    The background is black, or else the most frequent color.

    Args:
        pixel_counts: Pixels of each packed color.
        names: Names of packed colors.
        options: Options to complete.
        classes: Names of the classes, whose order is that of their colors if all have a name.

    Raises:
        DataError: The options have another number of classes.
    """
    background = 0 if 0 in pixel_counts else pixel_counts.most_common(1)[0][0]
    named = [colour for colour in names if colour != background]
    unnamed = sorted(pixel_counts.keys() - {background} - names.keys(), key=_rank_colour)
    marks = named + unnamed
    colour_of = dict(zip(map(names.get, marks), marks, strict=True))
    if colour_of.keys() == set(classes):
        marks = list(map(colour_of.__getitem__, classes))
    colors = unpack_colours(np.array([background, *marks]))
    typed = str(colors).replace(" ", "")
    if options.classes not in (2, len(colors)):
        raise DataError(
            f"masks hold {len(colors)} colors, including the background, and data.classes names "
            f"{options.classes - 1}: name one for each other color of {typed}"
        )
    hint = ""
    if options.classes == 2 and len(marks) > 1:
        number_names = [names.get(colour, f"name{n}") for n, colour in enumerate(marks, 1)]
        hint = f"; data.classes=[{','.join(number_names)}] tells them apart"
    elif len(classes) > 1:
        listed = ", ".join(map("{} {}".format, classes, colors[1:]))
        hint = f"; classes are {listed}: if not, type the colors in the order of the classes"
    log.info(
        "masks hold %d colors, the background first: data.mask_read.colors=%s%s",
        len(colors),
        typed,
        hint,
    )
    return replace(options, colors=colors)


def _rank_colour(packed: int) -> int:
    """Return the number of a color in the order of VOC, which LabelMe and others use."""
    rank = 0
    for bit in range(8):
        for channel, shift in enumerate((16, 8, 0)):
            rank |= (packed >> (shift + 7 - bit) & 1) << (3 * bit + channel)
    return rank


def _read_label_map(folder: Path) -> dict[int, str]:
    """Read the names of colors from CVAT's ``labelmap.txt``.

    The file is beside the masks or up to two folders above.
    """
    for label_folder in (folder, *folder.parents[:2]):
        path = label_folder / "labelmap.txt"
        if is_there(path):
            with open_source(path) as stream:
                lines = stream.read(_MOST_LABEL_BYTES).decode(errors="replace").splitlines()
            return dict(filter(None, map(_read_label, lines)))
    return {}


def _read_label(line: str) -> tuple[int, str] | None:
    """Read a line such as ``name:128,0,0::``."""
    name, _, rest = line.partition(":")
    parts = rest.partition(":")[0].split(",")
    if (
        name.startswith("#")
        or len(parts) != 3
        or not all(re.fullmatch("[0-9]{1,3}", part) for part in parts)
    ):
        return None
    return int(pack_colours(np.array(parts, np.int64))), name


def may_be_mask(path: Path) -> bool:
    """Return True if an image has few values or colors, or is black and white except for gray edges."""
    try:
        pixels = read_image(path, ReadOptions(alpha="drop"))
    except DataError:
        return False
    flat = pixels.reshape(len(pixels), -1)
    some = flat[:, :: max(1, flat.shape[1] // _SAMPLED_PIXELS)]
    if np.unique(some, axis=1).shape[1] <= _MOST_COLOURS:
        return True
    return some.dtype == np.uint8 and has_grey_edges(np.bincount(some[0], minlength=256))


def has_grey_edges(counts: Ints) -> bool:
    """Return True if masks are black and white except for their edges.

    Args:
        counts: [256] number of pixels of each value.
    """
    between = counts[_END : 256 - _END]
    nearly_white = counts[_NEARLY_WHITE]
    spreads = np.count_nonzero(between) >= _END // 4 or np.count_nonzero(nearly_white) > 1
    return bool(counts[-_END:].any() and spreads and between.sum() <= _MOST_BETWEEN * counts.sum())


def count_values(path: Path, options: MaskOptions) -> Ints | None:
    """Count the pixels of each of 256 values in a mask; return None if it has other values.

    Raises:
        DataError: The file cannot be read as a mask.
    """
    mask = to_whole_numbers(read_image(path, options.read))
    if mask.dtype.kind == "f" or mask.min() < 0 or mask.max() > 255:
        return None
    return np.bincount(mask.ravel(), minlength=256)


def _count_readable(masks: Iterable[Path], options: MaskOptions) -> list[Ints]:
    def count(path: Path) -> Ints | None:
        try:
            return count_values(path, options)
        except DataError:  # named where all masks are read
            return None

    counts = ordered_map(count, masks, count_threads())
    return [values for values in counts if values is not None]


def _join(values: Array) -> str:
    return " and ".join(map(str, values)) if len(values) == 2 else show_values(values)


def _set_threshold(options: MaskOptions, threshold: int, reason: str) -> MaskOptions:
    log.info("%s %d on are the defect (data.mask_read.threshold=%d)", reason, threshold, threshold)
    return replace(options, threshold=threshold)
