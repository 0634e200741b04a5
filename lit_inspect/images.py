"""Image files as `predict` reads them: channels as stored, damaged files refused by name."""

import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import ImageError
from lit_inspect.rows import ArrayRows, FileRows
from lit_inspect.tiles import Rows

Pixels = NDArray[Any]

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".npy")
_PNG = b"\x89PNG\r\n\x1a\n"
_NPY = b"\x93NUMPY"
_MOST_CHANNELS = 16
_LARGE_BYTES = 2**26  # of files that OpenCV reads itself, so that no copy is held
_DTYPES = {
    **{name: name for name in ("uint8", "uint16", "int16", "float32")},
    **{"bool": "uint8", "int8": "int16", "float16": "float32", "float64": "float32"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Those of ``data.read`` that the runtime knows; files of others are not exported."""

    alpha: str = "opaque"
    cv2_order: bool = False
    gray_to_rgb: bool = False
    equal_channels: str = "keep"
    nan_fill: float | None = None
    as_float: bool = False
    max_pixels: int = 178_956_970

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ReadOptions":
        """Return the options of a manifest."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors of reading into one that names the file.

    Raises:
        ImageError: There was one.
    """
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from error
    except (ValueError, struct.error, cv2.error, SyntaxError, EOFError) as error:
        raise ImageError(f"{path}: cannot be read ({str(error)[:200]})") from error


def open_image(path: Path, options: ReadOptions) -> Rows:
    """Open an image, whose rows are read when they are asked for where its file allows it.

    Raises:
        ImageError: The file is none, damaged, or of a kind that only `predict` reads.
    """
    with naming(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImageError("not a regular file")
        with path.open("rb") as stream:
            start = stream.read(8)
            if start.startswith(_NPY):
                return _open_array(path, stream, options)
            pixels = _decode(path, stream, start, options)
        return ArrayRows(finish(pixels, options))


def finish(planes: Pixels, options: ReadOptions) -> Pixels:
    """Return [C, H, W] with the channels that the options ask for, in a dtype of a store."""
    if options.equal_channels == "collapse":
        if any((plane != planes[0]).any() for plane in planes[1:]):
            raise ImageError(f"{len(planes)} channels that differ, and one is expected")
        planes = planes[:1]
    elif options.equal_channels == "brightest":
        planes = planes.max(axis=0, keepdims=True)
    elif options.gray_to_rgb and len(planes) == 1:
        planes = np.repeat(planes, 3, axis=0)
    if planes.dtype == np.bool_ and not options.as_float:
        planes = planes.view(np.uint8) * np.uint8(255)  # True is white
    name = "float32" if options.as_float else _DTYPES.get(planes.dtype.name)
    if name is None:
        raise ImageError(f"{planes.dtype} pixels, of which no net is trained")
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
    stream.seek(0)
    major, _ = np.lib.format.read_magic(stream)
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, is_fortran, dtype = read(stream)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or len(shape) not in (2, 3):
        raise ImageError(f"an array {list(shape)} of {dtype}, not one of pixels")
    shape = shape if len(shape) == 3 else (1, *shape)
    is_last = shape[0] > shape[2]
    channels, height, width = (shape[2], *shape[:2]) if is_last else shape
    offset = stream.tell()
    _check_size(height, width, options)
    if min(shape) < 1 or channels > _MOST_CHANNELS:
        raise ImageError(f"an array {list(shape)}, not one of pixels")
    if os.fstat(stream.fileno()).st_size < offset + int(np.prod(shape)) * dtype.itemsize:
        raise ImageError("truncated array")
    if is_fortran:
        stream.seek(0)
        pixels: Pixels = np.load(stream, allow_pickle=False).reshape(shape)
        return ArrayRows(finish(np.moveaxis(pixels, -1, 0) if is_last else pixels, options))
    return FileRows(path, offset, (channels, height, width), dtype, is_last, options, finish)


def _check_size(height: int, width: int, options: ReadOptions) -> None:
    if height * width > options.max_pixels:
        raise ImageError(
            f"{height} x {width} px, more than max_pixels={options.max_pixels}: export with "
            f"data.read.max_pixels={height * width}"
        )


def _decode(path: Path, stream: BinaryIO, start: bytes, options: ReadOptions) -> Pixels:
    """Decode a PNG, JPEG, BMP or TIFF to [C, H, W], R, G, B."""
    is_tiff = start[:4] in (b"II*\x00", b"MM\x00*")
    if start == _PNG:
        _check_png(stream, options)
    elif start[:3] == b"\xff\xd8\xff":
        _check_jpeg(stream)
    elif is_tiff:
        _check_tiff(stream, "<" if start[:2] == b"II" else ">", options)
    elif start[:2] != b"BM":
        raise ImageError(f"not a PNG, JPEG, BMP, TIFF or .npy image, starts with {start!r}")
    size_bytes = stream.seek(0, os.SEEK_END)
    if size_bytes > _LARGE_BYTES:
        pixels = cv2.imread(os.fspath(path), cv2.IMREAD_UNCHANGED)
    else:
        stream.seek(0)
        pixels = cv2.imdecode(np.frombuffer(stream.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ImageError("damaged: OpenCV cannot decode it")
    _check_size(pixels.shape[0], pixels.shape[1], options)
    if pixels.ndim == 2:
        gray: Pixels = pixels[None]
        return gray
    if pixels.shape[2] == 4:
        largest = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
        if options.alpha == "opaque" and pixels[..., 3].min() < largest:
            raise ImageError("an alpha channel that is not opaque everywhere")
    order = (0, 1, 2) if options.cv2_order else (2, 1, 0)
    return np.stack([pixels[..., channel] for channel in order])


def _check_png(stream: BinaryIO, options: ReadOptions) -> None:
    """Walk all chunks: each whole, each checksum right, the last one ``IEND``."""
    stream.seek(len(_PNG))
    while len(start := stream.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        body = stream.read(length + 4)
        if len(body) < length + 4 or zlib.crc32(name + body[:-4]) != int.from_bytes(body[-4:]):
            raise ImageError(f"truncated or damaged PNG: chunk {name!r}")
        if name == b"IHDR":
            width, height = struct.unpack_from(">II", body)
            _check_size(height, width, options)
        if name == b"IEND":
            return
    raise ImageError("truncated PNG: no end chunk")


def _check_jpeg(stream: BinaryIO) -> None:
    stream.seek(0)
    if b"\xff\xd9" not in stream.read()[-4096:]:  # behind it some programs add a few bytes
        raise ImageError("truncated JPEG: no end marker")


def _check_tiff(stream: BinaryIO, order: str, options: ReadOptions) -> None:
    """Refuse TIFF files that OpenCV reads in another way than `predict`."""
    tags: dict[int, int] = {}
    stream.seek(4)
    stream.seek(struct.unpack(f"{order}I", stream.read(4))[0])
    for _ in range(struct.unpack(f"{order}H", stream.read(2))[0]):
        tag, kind, _, value = struct.unpack(f"{order}HHI4s", stream.read(12))
        form = f"{order}H" if kind == 3 else f"{order}I"
        tags[tag] = struct.unpack_from(form, value)[0]
    if struct.unpack(f"{order}I", stream.read(4))[0]:
        raise ImageError("a TIFF of several pages, which lit_inspect does not read")
    # 259: none, LZW, deflate or PackBits. 262: black is 0, or R, G, B. 266: bits in their order.
    has_bits = tags.get(277, 1) > 1 or tags.get(258, 1) in (8, 16, 32)
    is_known = tags.get(262) in (1, 2) and tags.get(259, 1) in (1, 5, 8, 32773, 32946)
    if not (has_bits and is_known) or tags.get(277, 1) not in (1, 3) or tags.get(266, 1) != 1:
        raise ImageError("a TIFF of a rare kind, which lit_inspect does not read")
    _check_size(tags[257], tags[256], options)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Size that images are brought to, see `lit_data.io.images.scaling`.

    Attributes:
        size_px: (height, width) that images are scaled to fit, and reflect-padded to.
        factor: Multiplies height and width in its place.
    """

    size_px: tuple[int, int] | None
    factor: float | None

    def scaled_px(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Return the size of an image after scaling, without padding."""
        if self.size_px is None:
            assert self.factor is not None
            return max(1, round(height_px * self.factor)), max(1, round(width_px * self.factor))
        factor = min(self.size_px[0] / height_px, self.size_px[1] / width_px)
        height = min(self.size_px[0], max(1, round(height_px * factor)))
        return height, min(self.size_px[1], max(1, round(width_px * factor)))

    def scale(self, image: Pixels) -> Pixels:
        """Scale an image: [C, H, W] to [C, h, w]."""
        resized = self.resize(image)
        return _place(resized, self.size_px or resized.shape[1:])

    def resize(self, image: Pixels) -> Pixels:
        """Scale an image without padding: [C, H, W] to [C, h, w]."""
        return _resize(image, self.scaled_px(*image.shape[1:]))

    def restore(self, values: Pixels, size_px: tuple[int, int]) -> Pixels:
        """Bring values of a scaled image back to the size of its file."""
        restored = _resize(_place(values, self.scaled_px(*size_px)), size_px)
        return np.clip(restored, values.min(), values.max())


def _resize(image: Pixels, size_px: tuple[int, int]) -> Pixels:
    if image.shape[1:] == size_px:
        return image
    is_smaller = size_px[0] * size_px[1] < image.shape[1] * image.shape[2]
    method = cv2.INTER_AREA if is_smaller else cv2.INTER_LINEAR
    return np.stack([cv2.resize(plane, size_px[::-1], interpolation=method) for plane in image])


def _place(image: Pixels, size_px: tuple[int, ...]) -> Pixels:
    """Crop or reflect-pad an image around its centre; an odd pixel goes to bottom and right."""
    widths = [(0, 0)]
    for axis, length in enumerate(size_px, 1):
        spare_px = image.shape[axis] - length
        if spare_px > 0:
            image = np.take(image, range(spare_px // 2, spare_px // 2 + length), axis)
        before_px = max(0, -spare_px) // 2
        widths.append((before_px, max(0, -spare_px) - before_px))
    return image if widths == [(0, 0)] * 3 else np.pad(image, widths, mode="reflect")


def list_images(folder: Path) -> list[str]:
    """Return the paths of the images below a folder, with forward slashes, in order; none hidden."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in files:
            if not _is_hidden(name) and Path(name).suffix.lower() in EXTENSIONS:
                names.append(Path(parent, name).relative_to(folder).as_posix())
    return sorted(names)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
