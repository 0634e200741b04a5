"""TIFF: what one page holds, without decoding, by the rules tifffile reads it with."""

import json
import math
import re
from typing import Any, BinaryIO

import numpy as np

from lit_data.errors import DataError
from lit_data.io.images.stored import StoredImage
from lit_data.io.images.tiff_segments import check_segments, read_grid
from lit_data.io.images.tiff_tags import Directory, find_pages, read_layout

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _PALETTE, _CMYK = 0, 1, 3, 5
_ALPHA = (1, 2)  # kinds of extra samples: associated and unassociated alpha
_PLANAR = 2
_UNSIGNED = {1: "?", **dict.fromkeys(range(2, 9), "u1"), **dict.fromkeys(range(9, 17), "u2")}
_UNSIGNED |= {**dict.fromkeys(range(17, 33), "u4"), 64: "u8"}
_SIGNED = {8: "i1", 16: "i2", 32: "i4", 64: "i8"}
_FLOAT = {16: "f2", 24: "f4", 32: "f4", 64: "f8"}
_FAX = (2, 3, 4)  # compressions whose pages are white where nothing is said
_CMYK_NOTE = "CMYK TIFF; its ink channels are kept as stored"


def read_tiff_header(stream: BinaryIO, size_bytes: int, page: int | None) -> StoredImage:
    """Read the directories up to the page and that page's tags.

    Args:
        stream: The file, anywhere.
        size_bytes: Its size.
        page: From 0; None refuses files of several pages.

    Returns:
        The image; samples marked as alpha are its alpha channels.

    Raises:
        DataError: damaged, cut, of several pages, or of a kind that is not read.
    """
    layout = read_layout(stream)
    places = find_pages(stream, size_bytes, layout)
    number = page or 0
    if number >= len(places):
        raise DataError(f"page={number} is not there; the file has the pages 0 to {len(places) - 1}")
    tags = Directory(stream, size_bytes, layout, places[0])  # tifffile parses the first one whatever the page
    if number:
        tags = Directory(stream, size_bytes, layout, places[number])
    _check_page_count(tags, len(places), page)
    samples = tags.number(277, 1)
    planes = samples if tags.number(284, 1) == _PLANAR else 1
    grid = read_grid(tags, planes)
    bits, dtype = _find_dtype(tags, samples)
    notes = check_segments(stream, size_bytes, tags, grid, bits * samples // planes)
    extra = tags.numbers(338)[:samples].tolist()
    alpha = tuple(samples - len(extra) + place for place, kind in enumerate(extra) if kind in _ALPHA)
    if tags.number(32997, 1) != 1 or len(alpha) >= samples:
        raise DataError(f"TIFF with {samples} samples and depth {tags.number(32997, 1)} is not a flat image")
    photometric = tags.number(262, _WHITE_IS_ZERO if tags.number(259, 1) in _FAX else _BLACK_IS_ZERO)
    return StoredImage(
        kind="tiff",
        height_px=grid.height_px,
        width_px=grid.width_px,
        colors=samples - len(alpha),
        dtype=dtype,
        bits_per_pixel=bits * samples,
        depth_bits=bits,
        white_is_zero=photometric == _WHITE_IS_ZERO,
        alpha=alpha,
        palette=photometric == _PALETTE and samples == 1,
        pages=len(places),
        page=number,
        orientation=tags.number(274, 1) if tags.number(274, 1) in range(1, 9) else 1,
        padded_pixels=grid.padded_height_px * grid.padded_width_px if grid.tiled else 0,
        notes=(_CMYK_NOTE, *notes) if photometric == _CMYK else notes,
    )


def _find_dtype(tags: Directory, samples: int) -> tuple[int, "np.dtype[Any]"]:
    depths, kinds = tags.numbers(258)[:samples], tags.numbers(339)[:samples]
    bits, kind = tags.number(258, 1), tags.number(339, 1)
    name = None
    if (depths == bits).all() and (kinds == kind).all():
        name = {1: _UNSIGNED, 2: _SIGNED, 3: _FLOAT, 4: _UNSIGNED}.get(kind, {}).get(bits)
    if name is None:
        raise DataError(
            f"TIFF with bits {depths.tolist()} in sample formats {kinds.tolist()} is not read; save it with 8 or 16 "
            "bits or as float32"
        )
    return bits, np.dtype(name)


def _check_page_count(tags: Directory, pages: int, page: int | None) -> None:
    if page is None and pages > 1:
        raise DataError(f"{pages} pages; choose one with page=0 to page={pages - 1}")
    hidden = _count_hidden_images(tags)
    if pages == 1 and hidden > 1:
        raise DataError(f"{hidden} images behind one page; save each as a page or a file of its own")


def _count_hidden_images(tags: Directory) -> int:
    """Images that follow the first one without a directory, as ImageJ, tifffile and MetaMorph write large stacks."""
    text = tags.read(270)
    if text.startswith(b"ImageJ=") and (match := re.search(rb"^images=(\d{1,18})\s*$", text, re.MULTILINE)):
        return int(match[1])
    if text.startswith(b'{"shape": ['):
        return _count_shaped(text, tags)
    return tags.count(33629)


def _count_shaped(text: bytes, tags: Directory) -> int:
    try:
        shape = json.loads(text.rstrip(b"\0"))["shape"]
        total = math.prod(int(length) for length in shape)
    except (ValueError, TypeError, KeyError, RecursionError):
        return 1  # somebody's own text
    return total // max(1, tags.number(256, 1) * tags.number(257, 1) * tags.number(277, 1))
