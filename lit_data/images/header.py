"""Headers of image files: shape and dtype from the first bytes, checked before anything is decoded."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_data.core.errors import DataError, Problems, show_path
from lit_data.core.opening import open_source
from lit_data.core.types import PathText, Size
from lit_data.images.header_raster import (
    SIGNATURE,
    read_bmp_header,
    read_jpeg_header,
    read_png_header,
)
from lit_data.images.header_tiff import read_tiff_header
from lit_data.images.npy import read_npy_header
from lit_data.images.read_options import (
    DEFAULT_READ,
    Kind,
    ReadOptions,
    StoredImage,
    note_inversion,
)
from lit_inspect.counts import counted
from lit_inspect.npy import MAGIC

EXTENSIONS: dict[str, Kind] = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".bmp": "bmp",
    ".tif": "tiff",
    ".tiff": "tiff",
    ".npy": "npy",
}
"""Extensions of image files; the content of a file decides its format."""

MAX_RATIO = 10_000
"""Most unpacked bytes per byte of a file; more is a bomb (AcademySoftwareFoundation/OpenImageIO#5319)."""

_TURN_BOTH = "set data.read.exif=apply and data.mask_read.exif=apply, or rotate one of them"

_MAGICS: tuple[tuple[bytes, Kind], ...] = (
    (SIGNATURE, "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"BM", "bmp"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
    (MAGIC, "npy"),
)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Array that reading returns under the same options, and notes about the file.

    Attributes:
        kind: Format, by content.
        height_px: Number of rows.
        width_px: Number of columns.
        channels: Number of channels.
        dtype: Dtype, in native byte order.
        pages: Number of images in the file.
        notes: Facts about the file that a user should know.
        stored: The image as the file describes it.
        narrow_bits: Number of bits that values use, if a store scales them to the full range of the
            dtype; else None.
    """

    kind: Kind
    height_px: int
    width_px: int
    channels: int
    dtype: "np.dtype[Any]"
    pages: int
    notes: tuple[str, ...]
    stored: StoredImage
    narrow_bits: int | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns."""
        return self.channels, self.height_px, self.width_px


def read_header(path: PathText, options: ReadOptions = DEFAULT_READ) -> ImageHeader:
    """Read shape and dtype of an image without decoding it.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file; the content decides which, never the name.
        options: Rules for reading it.

    Raises:
        DataError: The file is not a regular file, not an image, damaged, larger than the options
            allow, or refused by them.
    """
    path = Path(path)
    with open_source(path) as stream:
        return parse_header(stream, path.suffix, options)


def parse_header(stream: BinaryIO, extension: str, options: ReadOptions) -> ImageHeader:
    """Read the header of an open file, as ``read_header`` does.

    Args:
        stream: The whole file; its position afterwards is undefined.
        extension: End of its name, with the dot.
        options: Rules for reading it.

    Raises:
        DataError: As ``read_header``, without the name of the file.
    """
    size_bytes = stream.seek(0, os.SEEK_END)
    # The claims of the file are checked before memory is allocated.
    stored = _read_stored(stream, size_bytes, options)
    _check_limits(stored, size_bytes, options)
    channels = _count_channels(stored, options)
    dtype = _find_dtype(stored, options)
    height_px = stored.height_px
    width_px = stored.width_px
    if options.exif == "apply" and stored.orientation >= 5:  # a quarter turn
        height_px, width_px = width_px, height_px
    nbytes = channels * height_px * width_px * dtype.itemsize
    if nbytes > options.max_image_bytes:  # a cast or a palette may take more bytes than were stored
        raise DataError(_too_large(nbytes, options))
    notes = (
        *stored.notes,
        *_note_extension(stored.kind, extension, options),
        *_note_changes(stored, dtype, options),
    )
    return ImageHeader(
        kind=stored.kind,
        height_px=height_px,
        width_px=width_px,
        channels=channels,
        dtype=dtype,
        pages=stored.pages,
        notes=notes,
        stored=stored,
        narrow_bits=_find_narrow_bits(stored, dtype, options),
    )


def _read_stored(stream: BinaryIO, size_bytes: int, options: ReadOptions) -> StoredImage:
    stream.seek(0)
    start = stream.read(16)
    kind = next((kind for magic, kind in _MAGICS if start.startswith(magic)), None)
    # Page 0 is there in any file.
    if options.page and kind != "tiff":
        raise DataError(
            f"{options.key}.page={options.page} does not exist; only TIFF files have several pages"
        )
    match kind:
        case "png":
            return read_png_header(stream, size_bytes)
        case "jpeg":
            return read_jpeg_header(stream)
        case "bmp":
            return read_bmp_header(stream, size_bytes)
        case "tiff":
            return read_tiff_header(stream, size_bytes, options.page, options.key)
        case "npy":
            return read_npy_header(stream, size_bytes)
    raise DataError(f"not a PNG, JPEG, BMP, TIFF or .npy image, starts with {start!r}")


def _check_limits(stored: StoredImage, size_bytes: int, options: ReadOptions) -> None:
    pixels = stored.height_px * stored.width_px
    if pixels < 1:
        raise DataError(f"no pixels: {stored.height_px} x {stored.width_px}")
    if max(pixels, stored.padded_pixels) > options.max_pixels:
        raise DataError(
            f"{stored.height_px} x {stored.width_px} is {max(pixels, stored.padded_pixels)} "
            f"pixels, more than {options.key}.max_pixels={options.max_pixels}; raise that if the "
            "image is meant to be so large"
        )
    samples = stored.colors + len(stored.alpha)
    # Tiles at the edges are decoded whole.
    decoded_bytes = max(pixels, stored.padded_pixels) * samples * stored.dtype.itemsize
    if decoded_bytes > options.max_image_bytes:
        raise DataError(_too_large(decoded_bytes, options))
    ratio = pixels * stored.bits_per_pixel // 8 / size_bytes
    if ratio > MAX_RATIO:
        raise DataError(
            f"{size_bytes} bytes that unpack to {ratio:.0f} times as many; a factor above "
            f"{MAX_RATIO} is treated as an attack"
        )


def _too_large(nbytes: int, options: ReadOptions) -> str:
    return (
        f"{nbytes} bytes decoded, more than {options.key}.max_image_bytes="
        f"{options.max_image_bytes}; raise that if the image is meant to be so large"
    )


def _count_channels(stored: StoredImage, options: ReadOptions) -> int:
    """Count the channels of the result.

    Raises:
        DataError: A palette or an alpha channel is refused.
    """
    channels = stored.colors
    if options.alpha == "only":
        if not stored.alpha:
            raise DataError(f"no alpha channel, and {options.key}.alpha=only reads nothing else")
        return 3 if options.gray_to_rgb else 1
    if stored.palette and options.palette == "error":
        raise DataError(
            f"a palette image; set {options.key}.palette=expand for its colors or =index for its "
            "numbers"
        )
    expands = stored.palette and options.palette == "expand"
    # A palette with a transparent colour is never opaque, but its numbers alone do not show that.
    refuses = options.alpha == "error" or (options.alpha == "opaque" and stored.palette)
    if stored.alpha and refuses and (expands or not stored.palette):
        raise DataError(f"{counted(channels, 'channel')} and alpha; {options.alpha_cure}")
    if expands:
        channels = 3
    if options.equal_channels != "keep":
        return 1
    return 3 if channels == 1 and options.gray_to_rgb else channels


def _find_dtype(stored: StoredImage, options: ReadOptions) -> "np.dtype[Any]":
    """Return the dtype of the result."""
    if options.as_float or stored.dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(np.uint8) if stored.palette and options.palette == "expand" else stored.dtype


def _find_narrow_bits(
    stored: StoredImage, dtype: "np.dtype[Any]", options: ReadOptions
) -> int | None:
    """Return the bits of values that do not use all of their dtype and will be scaled to it, or None."""
    bits = stored.depth_bits
    # The numbers of a palette are not a brightness; True is scaled as any other white.
    if bits is None or stored.palette or dtype.kind != "u" or options.depth == "keep":
        return None
    return bits if bits < 8 * dtype.itemsize else None


def _note_extension(kind: Kind, extension: str, options: ReadOptions) -> tuple[str, ...]:
    if EXTENSIONS.get(extension.lower()) == kind:
        return ()
    text = f"the content is {kind}, the name ends in {extension!r}"
    if options.strict_extension:
        raise DataError(f"{text}; rename the file, or set {options.key}.strict_extension=false")
    return (text,)


def _note_changes(
    stored: StoredImage, dtype: "np.dtype[Any]", options: ReadOptions
) -> tuple[str, ...]:
    notes = [*note_inversion(stored, options)]
    if stored.orientation != 1:
        done = "applied"
        if options.exif != "apply":
            done = f"not applied; {options.key}.exif=apply turns images as viewers show them"
        notes.append(f"orientation {stored.orientation} {done}")
    if dtype != stored.dtype and not stored.palette:
        notes.append(f"{stored.dtype} cast to {dtype}")
    return tuple(notes)


def describe_size_mismatch(
    names: tuple[PathText, PathText],
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> str:
    """Describe how two images differ in size.

    Args:
        names: Paths of the images.
        sizes: (height, width) px of each image.

    Returns:
        One sentence with both paths and sizes, which mentions if one is the other rotated.
    """
    (first, other), (one, two) = map(show_path, names), sizes
    text = f"{first} is {one[0]} x {one[1]} pixels, {other} is {two[0]} x {two[1]}"
    if one == two[::-1]:
        return f"{text}: one of them is rotated, perhaps by an EXIF orientation; {_TURN_BOTH}"
    return f"{text}; they must have the same size"


def refuse_mask_sizes(masks: Iterable[tuple[str, Size, str, Size]]) -> None:
    """Refuse masks of other sizes than their images.

    Args:
        masks: Path and (height, width) px of each mask, and those of its image.

    Raises:
        DataError: There are such masks; all of them are listed.
    """
    problems = Problems()
    cure = ""
    for mask, mask_px, image, image_px in masks:
        if mask_px == image_px:
            continue
        turned = ""
        # Editors rotate photographs by their EXIF tag, and masks have no such tag.
        if mask_px == image_px[::-1]:
            turned = " (turned by 90 degrees?)"
            cure = f"if EXIF tags turn the images, {_TURN_BOTH}"
        described = f"{show_path(image)}: {image_px[0]} x {image_px[1]}{turned}"
        problems.add(mask, f"{mask_px[0]} x {mask_px[1]}, {described}")
    problems.raise_if_any(
        counted(len(problems), "mask differs", "masks differ")
        + " in size from the image (height x width px)",
        cure,
    )
