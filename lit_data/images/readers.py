"""One reader for every image file: channels and pixels as stored, and errors that name the file."""

import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.files import find_crc32
from lit_data.core.opening import open_source, read_whole
from lit_data.core.types import Array, Bytes, PathText
from lit_data.images.header import ImageHeader, parse_header
from lit_data.images.header_raster import (
    check_png,
    open_bmp,
    read_bmp_palette,
    read_packed_bmp,
    refusing,
)
from lit_data.images.header_tiff import open_tiff
from lit_data.images.npy import find_channel_axis
from lit_data.images.read_options import DEFAULT_READ, ReadOptions, StoredImage, invert, must_invert
from lit_inspect.counts import counted
from lit_inspect.npy import NPY_LOCK

_HARMLESS = re.compile(
    "extraneous bytes before marker|Invalid SOS parameters|Adobe color transform|JFIF revision|"
    "bad ICC marker|determine subsampling level"
)
"""Warnings of libjpeg and TurboJPEG about common files that decode to the whole image."""
_OPENCV_PACKINGS = (
    "BGR",
    "BGRX",
    "BGRA",
)  # Pillow's names of the packings that OpenCV assumes in a BMP

_TURNS = {
    2: (0, True),
    3: (2, False),
    4: (2, True),
    5: (3, True),
    6: (3, False),
    7: (1, True),
    8: (1, False),
}
"""Counterclockwise quarter turns for each orientation, then True to mirror left and right. EXIF 2.3, 4.6.4 A."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Image, notes about it, and a fingerprint of its file.

    Attributes:
        array: [C, H, W], contiguous, in native byte order.
        notes: Notes for the user, in texts that many files share, so that they can be counted.
        source_crc32: CRC-32 of the whole file.
        narrow_bits: As in `ImageHeader`.
    """

    array: Array
    notes: tuple[str, ...]
    source_crc32: int
    narrow_bits: int | None


def decode_strict(path: PathText, options: ReadOptions = DEFAULT_READ) -> Decoded:
    """Read a file into memory once and check everything that can be checked.

    One kind of damage cannot be seen: a flipped bit in the pixels of a JPEG. A later check can find
    it by ``source_crc32``.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file.
        options: Rules for reading it.

    Raises:
        DataError: As ``read_header``; also if the file is truncated, a checksum is wrong, or pixels
            are NaN or infinite without ``nan_fill``.
    """
    path = Path(path)
    with open_source(path) as stream:
        header = parse_header(stream, path.suffix, options)
        data = read_whole(stream)
        array = decode(BytesIO(data), header, options)
        notes = (*header.notes, *_check_values(array))
    return Decoded(array, notes, find_crc32(data), header.narrow_bits)


def _check_values(array: Array) -> tuple[str, ...]:
    if array.dtype.kind != "f":
        return ()
    finite = np.isfinite(array)
    if not finite.all():
        channel, row, column = np.unravel_index(int(finite.argmin()), array.shape)
        raise DataError(
            f"{array.size - int(finite.sum())} NaN or infinite pixels, the first in channel "
            f"{channel} at row {row}, column {column}; data.read.nan_fill=0 replaces them"
        )
    if array.min() >= 0 and 1 < array.max() <= 255:
        return (
            "float pixels between 0 and 255 instead of 0 and 1; set data.read.value_range=[0,255]",
        )
    return ()


def read_image(
    path: PathText, options: ReadOptions = DEFAULT_READ, *, strict: bool = False
) -> Array:
    """Read an image.

    PNG and BMP are decoded by OpenCV (palettes are read as stored and expanded here), JPEG by
    libjpeg-turbo, TIFF by tifffile, ``.npy`` by NumPy. Floats of 16 and 64 bits become float32.

    Args:
        path: A PNG, JPEG, BMP, TIFF or ``.npy`` file; the content decides which, never the name. A
            ``.npy`` array is [H, W], or 3-D with the channels on the shorter one of the first and
            the last axis (at most 16).
        options: Rules for reading it.
        strict: Check everything that can be checked, as ``decode_strict`` does; otherwise only
            read and decode.

    Returns:
        [C, H, W], contiguous, in native byte order; channel 0 is the first stored channel (R of an
        RGB PNG).

    Raises:
        DataError: The file is not a regular file, not an image, damaged, larger than the options
            allow, or refused by them.
    """
    if strict:
        return decode_strict(path, options).array
    path = Path(path)
    with open_source(path) as stream:
        header = parse_header(stream, path.suffix, options)
        return decode(stream, header, options)


def decode(stream: BinaryIO, header: ImageHeader, options: ReadOptions) -> Array:
    """Decode the image that a header describes.

    Args:
        stream: The file; its position afterwards is undefined.
        header: Header that ``parse_header`` returned for this file and these options.
        options: Rules for reading it.

    Returns:
        [C, H, W], contiguous, in native byte order, with the shape and dtype of the header.

    Raises:
        DataError: The file is damaged, or does not match the header.
    """
    planes, palette = _load(stream, header.stored, options)
    if palette is not None and options.palette == "expand":
        planes = _expand(planes[0], palette)
    if must_invert(header.stored, options):
        planes = invert(planes, None if palette is not None else header.stored.depth_bits)
    if options.exif == "apply":
        planes = _turn(planes, header.stored.orientation)
    planes = _arrange_channels(planes, header, options)
    # Float64 beyond float32 becomes infinite, which strict reading reports.
    with np.errstate(over="ignore"):
        image = np.ascontiguousarray(planes, dtype=header.dtype)
    if options.nan_fill is not None and image.dtype.kind == "f":
        image[~np.isfinite(image)] = options.nan_fill
    if image.shape != header.shape:
        raise DataError(_differs(image.dtype, image.shape, header.dtype, header.shape))
    return image


def _load(
    stream: BinaryIO, stored: StoredImage, options: ReadOptions
) -> tuple[Array, Bytes | None]:
    """Load pixels as stored without alpha, or only the alpha channel, [C, H, W].

    Returns:
        The pixels; for a palette image, its indices [1, H, W] and its colors [n, 3].
    """
    stream.seek(0)
    if stored.kind == "tiff":
        return _load_tiff(stream, stored, options)
    if stored.kind == "npy":
        return _load_npy(stream), None
    if stored.palette and options.alpha != "only":
        is_png = stored.kind == "png"
        indices, palette = _load_png_indices(stream) if is_png else _load_bmp_indices(stream)
        return indices[None], palette
    if stored.kind == "bmp":
        pixels = _decode_bmp(stream, stored)
    elif stored.kind == "jpeg":
        pixels = _decode_jpeg(read_whole(stream), stored)
    else:
        data = read_whole(stream)
        check_png(data)  # OpenCV allocates as many bytes as a chunk claims to have
        pixels = _decode_with_opencv(data, stored)
    return _to_planes(pixels, stored, options), None


def _decode_jpeg(data: bytes, stored: StoredImage) -> Bytes:
    """Decode to gray [H, W], or to [H, W, 3] B, G, R.

    Raises:
        DataError: The stream ends early, or does not fit its header; libjpeg and OpenCV would make
            up the missing rows.
    """
    import simplejpeg

    is_cmyk = stored.bits_per_pixel == 32
    space = "CMYK" if is_cmyk else "GRAY" if stored.colors == 1 else "BGR"
    try:
        pixels: Bytes = simplejpeg.decode_jpeg(data, space)
    except ValueError as error:
        if not _HARMLESS.search(str(error)):
            raise DataError(f"truncated or damaged JPEG: {error}") from error
        pixels = _decode_lenient(data)
    if is_cmyk:  # inks are stored inverted: 255 is no ink
        inks = pixels[..., 2::-1].astype(np.uint16)
        black = pixels[..., 3:].astype(np.uint16)
        pixels = (black - ((255 - inks) * black >> 8)).astype(np.uint8)
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def _decode_lenient(data: bytes) -> Bytes:
    """Decode to [H, W, 1, 3 or 4] gray, B, G, R or inks as stored; only a truncated stream is an error."""
    from PIL.JpegImagePlugin import JpegImageFile

    with refusing("JPEG"), JpegImageFile(BytesIO(data)) as image:
        pixels = np.atleast_3d(np.asarray(image))
        return 255 - pixels if image.mode == "CMYK" else pixels[..., ::-1]


def _decode_bmp(stream: BinaryIO, stored: StoredImage) -> Bytes:
    image = open_bmp(stream)
    packed = read_packed_bmp(stream, image)
    if packed is not None:
        return packed
    if stored.colors == 1 or image.tile[0].args[0] in _OPENCV_PACKINGS:
        return _decode_with_opencv(read_whole(stream), stored)
    return np.asarray(image)[..., [2, 1, 0, 3][: len(image.mode)]]


def _decode_with_opencv(data: bytes, stored: StoredImage) -> Array:
    """Decode to gray [H, W], or to [H, W, C] B, G, R and alpha."""
    import cv2

    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise DataError(f"OpenCV refuses it ({error.err})") from error
    if pixels is None:
        raise DataError(f"damaged {stored.kind}: OpenCV cannot decode it")
    return np.asarray(pixels)


def _to_planes(pixels: Array, stored: StoredImage, options: ReadOptions) -> Array:
    import cv2

    expected = (stored.height_px, stored.width_px, 3)
    has_size = pixels.shape[:2] == expected[:2]
    if not has_size or pixels.dtype != stored.dtype or pixels.ndim < stored.colors:
        raise DataError(_differs(pixels.dtype, pixels.shape, stored.dtype, expected))
    has_alpha = pixels.ndim == 3 and pixels.shape[2] == 4
    alpha: Array | None = pixels[..., -1] if has_alpha else None
    if options.alpha == "only":
        if alpha is None:  # for example a transparent colour of a grey image
            raise DataError("its transparency cannot be read; save it with an alpha channel")
        return alpha[None]
    if stored.alpha and options.alpha == "opaque":
        _check_opaque(alpha, stored, options)
    if stored.colors == 1:
        gray: Array = pixels if pixels.ndim == 2 else pixels[..., 0]
        return gray[None]
    planes: Array = np.empty((3, stored.height_px, stored.width_px), stored.dtype)
    cv2.mixChannels([pixels], list(planes), [2, 0, 1, 1, 0, 2])  # B, G, R pixels to R, G, B planes
    return planes


def _load_bmp_indices(stream: BinaryIO) -> tuple[Bytes, Bytes]:
    """Return the indices [H, W] and the palette [n, 3] R, G, B."""
    image = open_bmp(stream)
    palette = read_bmp_palette(image)  # loading the image changes it
    return np.array(image), palette


def _load_png_indices(stream: BinaryIO) -> tuple[Bytes, Bytes]:
    """Return the indices [H, W] and the palette [n, 3] R, G, B."""
    # OpenCV returns only colours. `Image.open` would try other formats than PNG.
    from PIL.PngImagePlugin import PngImageFile

    data = read_whole(stream)
    check_png(data)  # Pillow checks the checksums of the pixels only on request
    with PngImageFile(BytesIO(data)) as image:
        if image.mode != "P":
            raise DataError(f"Pillow gives mode {image.mode} for a palette PNG")
        return np.array(image), np.asarray(image.getpalette("RGB"), np.uint8).reshape(-1, 3)


def _check_opaque(alpha: Array | None, stored: StoredImage, options: ReadOptions) -> None:
    """Refuse an alpha channel that is not opaque, or that the decoder does not return."""
    if alpha is None or alpha.dtype.kind != "u" or alpha.min() < np.iinfo(alpha.dtype).max:
        raise DataError(
            f"{counted(stored.colors, 'channel')} and alpha, not opaque everywhere; {options.alpha_cure}"
        )


def _load_tiff(
    stream: BinaryIO, stored: StoredImage, options: ReadOptions
) -> tuple[Array, Bytes | None]:
    with open_tiff(stream) as tiff:
        page = tiff.pages[stored.page]
        shape = (stored.colors + len(stored.alpha), stored.height_px, stored.width_px)
        # Sorted, since the samples come first or last. It is checked before memory is allocated.
        has_shape = sorted(page.shape) in (sorted(shape), sorted(shape[1:]))
        if page.dtype != stored.dtype or not has_shape:
            raise DataError(_differs(page.dtype, page.shape, stored.dtype, shape))
        pixels = page.asarray(maxworkers=1)  # images are read in parallel, so one thread each
        palette = _read_palette(page) if stored.palette else None
    planes = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, page.axes.index("S"), 0)
    if planes.shape != shape:
        raise DataError(_differs(pixels.dtype, pixels.shape, stored.dtype, shape))
    if options.alpha == "only":
        return planes[list(stored.alpha[:1])], None
    if stored.alpha and options.alpha == "opaque":
        _check_opaque(planes[list(stored.alpha)], stored, options)
    return np.delete(planes, stored.alpha, axis=0) if stored.alpha else planes, palette


def _read_palette(page: Any) -> Bytes:  # noqa: ANN401 - tifffile ships no types here
    colors = page.colormap
    if colors is None:
        raise DataError("damaged TIFF: a palette image without a palette")
    shift = 8 if colors.max() > 255 else 0  # the standard says 16 bits, but old writers used 8
    palette: Bytes = (colors >> shift).astype(np.uint8).T
    return palette


def _load_npy(stream: BinaryIO) -> Array:
    with NPY_LOCK:
        pixels: Array = np.load(stream, allow_pickle=False)
    if pixels.ndim == 2:
        return pixels[None]
    return np.moveaxis(pixels, find_channel_axis(pixels.shape), 0)


def _expand(indices: Array, palette: Bytes) -> Bytes:
    """Return the colors of a palette image: [3, H, W]."""
    largest = int(indices.max())
    if largest >= len(palette):
        raise DataError(
            f"damaged palette image: index {largest} in a palette of {len(palette)} colors"
        )
    return np.stack([np.take(palette[:, channel], indices) for channel in range(3)])


def _turn(planes: Array, orientation: int) -> Array:
    # Unknown orientations count as upright.
    quarter_turns, mirrored = _TURNS.get(orientation, (0, False))
    turned = np.rot90(planes, quarter_turns, axes=(1, 2))
    return turned[..., ::-1] if mirrored else turned


def _arrange_channels(planes: Array, header: ImageHeader, options: ReadOptions) -> Array:
    if options.equal_channels == "collapse":
        return _collapse(planes, options)
    if options.equal_channels == "brightest":
        brightest: Array = planes.max(axis=0, keepdims=True)
        return brightest
    if options.gray_to_rgb and len(planes) == 1:
        return np.repeat(planes, 3, axis=0)
    if options.cv2_order and header.kind != "npy" and len(planes) in (3, 4):
        return planes[[2, 1, 0, 3][: len(planes)]]  # B, G, R; alpha stays in place
    return planes


def _collapse(planes: Array, options: ReadOptions) -> Array:
    for channel in range(1, len(planes)):
        if not np.array_equal(planes[0], planes[channel], equal_nan=planes.dtype.kind == "f"):
            row, column = np.argwhere(planes[0] != planes[channel])[0]
            values = ", ".join(str(value) for value in planes[:, row, column])
            raise DataError(
                f"{len(planes)} channels that differ, first at row {row}, column {column} "
                f"({values}); {options.colour_cure}"
            )
    return planes[:1]


def _differs(
    dtype: object, shape: tuple[int, ...], said_dtype: object, said_shape: tuple[int, ...]
) -> str:
    return (
        f"the decoder gives {dtype} {tuple(shape)} but the header states {said_dtype} {said_shape}"
    )
