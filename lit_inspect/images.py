"""Image files, read as in `predict`: channels as stored, and errors that name damaged files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lit_inspect import npy
from lit_inspect.bounds import MOST_CHANNELS, Value
from lit_inspect.errors import ImageError, UsageError, describe_error
from lit_inspect.files import open_regular
from lit_inspect.headers import check_file, is_grey_png
from lit_inspect.rows import ArrayRows, FileRows
from lit_inspect.tiles import Rows

Pixels = NDArray[Any]

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".npy")
_LARGE_BYTES = 2**26  # OpenCV opens larger files itself, so that memory holds no copy
_DTYPES = {
    **{name: name for name in ("uint8", "uint16", "int16", "float32")},
    **{"bool": "uint8", "int8": "int16", "float16": "float32", "float64": "float32"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of ``data.read`` that the runtime supports; models with other options are not exported."""

    alpha: Literal["opaque", "drop"] = "opaque"
    cv2_order: bool = False
    gray_to_rgb: bool = False
    equal_channels: Literal["keep", "collapse", "brightest"] = "keep"
    nan_fill: Value | None = None
    as_float: bool = False
    max_pixels: Annotated[int, Field(ge=1, le=2**32)] = 178_956_970


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Replace any error while reading by one that names the file.

    Raises:
        ImageError: Reading failed.
    """
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from error
    except Exception as error:  # decoders raise any error for foreign files
        raise ImageError(f"{path}: cannot be read ({describe_error(error)})") from error


def open_image(path: Path, options: ReadOptions) -> Rows:
    """Open an image; if its file allows it, rows are read on demand.

    Raises:
        ImageError: The file is not an image, is damaged, or has a type that only `predict` reads.
    """
    with naming(path), open_regular(path) as stream:
        start = stream.read(8)
        if start.startswith(npy.MAGIC):
            return _open_array(path, stream, options)
        return ArrayRows(finish(_decode(path, stream, start, options), options))


def finish(planes: Pixels, options: ReadOptions) -> Pixels:
    """Return [C, H, W] with the channels that the options require, in a dtype of the store."""
    if options.equal_channels == "collapse":
        if any((plane != planes[0]).any() for plane in planes[1:]):
            raise ImageError(f"{len(planes)} channels that differ, but one is expected")
        planes = planes[:1]
    elif options.equal_channels == "brightest":
        planes = planes.max(axis=0, keepdims=True)
    elif options.gray_to_rgb and len(planes) == 1:
        planes = np.repeat(planes, 3, axis=0)
    if planes.dtype == np.bool_ and not options.as_float:
        planes = planes.view(np.uint8) * np.uint8(255)  # True becomes white
    name = "float32" if options.as_float else _DTYPES.get(planes.dtype.name)
    if name is None:
        raise ImageError(f"{planes.dtype} pixels, which no net is trained on")
    with np.errstate(over="ignore"):
        planes = planes.astype(name, copy=False)
    if planes.dtype.kind == "f":
        planes = _settle(planes, options)
    return np.ascontiguousarray(planes)


def _settle(planes: Pixels, options: ReadOptions) -> Pixels:
    is_finite = np.isfinite(planes)
    if is_finite.all():
        return planes
    if options.nan_fill is None:
        raise ImageError(f"{planes.size - int(is_finite.sum())} NaN or infinite pixels")
    return np.where(is_finite, planes, np.float32(options.nan_fill))


def _open_array(path: Path, stream: BinaryIO, options: ReadOptions) -> Rows:
    size_bytes = os.fstat(stream.fileno()).st_size
    stored, is_fortran, dtype, offset = npy.read_header(stream, size_bytes)
    if len(stored) not in (2, 3) or min(stored) < 1:
        raise ImageError(f"an array {list(stored)}, not one of pixels")
    shape = stored if len(stored) == 3 else (1, *stored)
    is_last = shape[0] > shape[2]
    channels, height, width = (shape[2], *shape[:2]) if is_last else shape
    check_size(height, width, options)
    if channels > MOST_CHANNELS:
        raise ImageError(f"an array {list(stored)}, not one of pixels")
    if is_fortran:
        pixels = npy.read_array(stream, size_bytes).reshape(shape)
        return ArrayRows(finish(np.moveaxis(pixels, -1, 0) if is_last else pixels, options))
    return FileRows(path, offset, (channels, height, width), dtype, is_last, options, finish)


def _decode(path: Path, stream: BinaryIO, start: bytes, options: ReadOptions) -> Pixels:
    """Decode a PNG, JPEG, BMP or TIFF to [C, H, W], in R, G, B."""
    import cv2

    size_bytes = os.fstat(stream.fileno()).st_size
    check_size(*check_file(stream, start, size_bytes), options)
    if size_bytes > _LARGE_BYTES:
        pixels = cv2.imread(os.fspath(path), cv2.IMREAD_UNCHANGED)
    else:
        stream.seek(0)
        pixels = cv2.imdecode(np.frombuffer(stream.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ImageError("damaged: OpenCV cannot decode it")
    check_size(pixels.shape[0], pixels.shape[1], options)
    if pixels.ndim == 2:
        gray: Pixels = pixels[None]
        return gray
    if pixels.shape[2] == 4:
        largest = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
        if options.alpha == "opaque" and pixels[..., 3].min() < largest:
            raise ImageError("an alpha channel that is not opaque everywhere")
        if is_grey_png(stream, start):  # OpenCV would return three channels
            levels: Pixels = pixels[None, ..., 0]
            return levels
    order = (0, 1, 2) if options.cv2_order else (2, 1, 0)
    return np.stack([pixels[..., channel] for channel in order])


def check_size(height: int, width: int, options: ReadOptions) -> None:
    """Refuse an image without pixels, or with more than the options allow.

    Raises:
        ImageError: The image is refused.
    """
    if min(height, width) < 1:
        raise ImageError(f"{height} x {width} px, but an image has at least one")
    if height * width > options.max_pixels:
        raise ImageError(
            f"{height} x {width} px, more than max_pixels={options.max_pixels}: export with "
            f"data.read.max_pixels={height * width}"
        )


def list_images(folder: Path) -> list[str]:
    """Return the sorted paths of the images below a folder, with forward slashes; hidden files are skipped.

    Raises:
        UsageError: A folder cannot be read.
    """
    names = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in files:
            if not _is_hidden(name) and Path(name).suffix.lower() in EXTENSIONS:
                names.append(Path(parent, name).relative_to(folder).as_posix())
    return sorted(names)


def _refuse(error: OSError) -> None:
    raise UsageError(f"{error.filename}: {error.strerror}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
