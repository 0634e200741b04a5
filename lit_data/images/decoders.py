"""Decoders of a store, which turn the files of one image or mask into pixels."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lit_data.core.errors import ConfigError, DataError, show_path
from lit_data.core.opening import naming
from lit_data.core.types import Array
from lit_data.images.header import ImageHeader, describe_size_mismatch, read_header
from lit_data.images.masks import DEFAULT_MASK, MaskOptions, number_classes
from lit_data.images.read_options import DEFAULT_READ, ReadOptions
from lit_data.images.readers import Decoded, decode_strict
from lit_inspect.counts import counted

_MASK_FOLDER = re.compile("mask|label|annot|ground.?truth|_gt$|^gt$", re.IGNORECASE)
_FORMAT = 1  # increases when the same files and options give other pixels

STORE_DTYPES = {name: name for name in ("uint8", "uint16", "int16", "float32")} | {
    "bool": "uint8",
    "int8": "int16",
}
"""Dtype in a store for each dtype of pixels; other dtypes need an explicit cast."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Files of one image, in the order in which they are stacked along the channels."""

    paths: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.paths or isinstance(self.paths, str):
            raise ConfigError(f"paths={self.paths!r} must be a tuple of at least one path")


class SourceHeader(NamedTuple):
    """Shape and dtype of the array that a decoder returns for a source."""

    channels: int
    height_px: int
    width_px: int
    dtype: "np.dtype[Any]"


@dataclass(frozen=True, slots=True)
class DecodedSource:
    """Pixels [C, H, W] of a source, notes about its files, and the CRC-32 of each file."""

    array: Array
    notes: tuple[str, ...]
    source_crc32: tuple[int, ...]


class Decoder(Protocol):
    """Picklable object that turns sources into arrays; equal fingerprints give equal arrays."""

    @property
    def fingerprint(self) -> str:
        """Everything besides the files that determines the pixels."""

    def header(self, source: ImageSource) -> SourceHeader:
        """Return the shape and dtype that decoding will give, without decoding."""

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly."""


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decoder of images to the dtypes of a store: bool becomes uint8 0 and 255, int8 becomes int16.

    Pixels with fewer bits than their dtype are scaled to its full range, so that white is white at
    every bit depth; see `ReadOptions.depth`.

    Attributes:
        read: Rules for each file.
        channels: Which of the stacked channels to keep, and in which order; None keeps all.
    """

    read: ReadOptions = DEFAULT_READ
    channels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.channels is not None and (not self.channels or min(self.channels) < 0):
            raise ConfigError(
                f"channels={self.channels!r} must be numbers of channels from 0, or None for all"
            )

    @property
    def fingerprint(self) -> str:
        """JSON of the options and of this decoder's format."""
        return _print_options(
            "image", {"read": json.loads(self.read.fingerprint()), "channels": self.channels}
        )

    def header(self, source: ImageSource) -> SourceHeader:
        """Return shape and dtype without decoding.

        Raises:
            DataError: A file is bad, the files do not fit together, or a channel is missing.
        """
        return self._fit(source, [read_header(path, self.read) for path in source.paths])

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly.

        Raises:
            DataError: As ``header``, or a file is damaged.
        """
        files = [decode_strict(path, self.read) for path in source.paths]
        dtype = self._fit(source, [file.array for file in files]).dtype
        array = _concatenate([_cast(file, dtype) for file in files])
        if self.channels is not None:
            array = array[list(self.channels)]
        stored_dtype = files[0].array.dtype
        notes = [] if stored_dtype == dtype else [f"{stored_dtype} cast to {dtype}"]
        notes += [_note_scaling(file.narrow_bits, dtype) for file in files if file.narrow_bits]
        return _collect(array, files, notes)

    def _fit(self, source: ImageSource, images: Sequence[ImageHeader | Array]) -> SourceHeader:
        stacked = _stack(source, images)
        stacked = stacked._replace(dtype=_find_store_dtype(source, stacked.dtype))
        if self.channels is None:
            return stacked
        needed = max(self.channels) + 1
        if needed > stacked.channels:
            hint = hint_masks(source)
            if not hint and stacked.channels == 1:
                hint = "; set data.read.gray_to_rgb=true to copy it into three"
            raise DataError(
                f"{_show(source)}: channels={self.channels} needs {counted(needed, 'channel')}, found "
                f"{stacked.channels}{hint}"
            )
        return stacked._replace(channels=len(self.channels))


@dataclass(frozen=True, slots=True)
class MaskDecoder:
    """Decoder of masks to class numbers, one uint8 channel for each file.

    Attributes:
        options: Rules for each file.
    """

    options: MaskOptions = DEFAULT_MASK

    @property
    def fingerprint(self) -> str:
        """JSON of the options and of this decoder's format."""
        return _print_options("mask", asdict(self.options))

    def header(self, source: ImageSource) -> SourceHeader:
        """Return shape and dtype without decoding.

        Raises:
            DataError: A file is bad, or the files do not fit together.
        """
        headers = [read_header(path, self.options.read) for path in source.paths]
        stacked = _stack(source, headers)._replace(dtype=np.dtype(np.uint8))
        if self.options.colors is None:
            return stacked
        return stacked._replace(
            channels=len(headers)
        )  # three channels of colors are one of numbers

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly.

        Raises:
            DataError: As ``header``, or a file is damaged, or a value is not a class number.
        """
        files = [decode_strict(path, self.options.read) for path in source.paths]
        _stack(source, [file.array for file in files])
        masks = []
        for path, file in zip(source.paths, files, strict=True):
            with naming(path):
                masks.append(number_classes(file.array, self.options))
        return _collect(_concatenate(masks), files, ())


def _stack(source: ImageSource, images: Sequence[ImageHeader | Array]) -> SourceHeader:
    """Return the header of images stacked along the channels.

    Raises:
        DataError: The images differ in size or dtype.
    """
    channels, height_px, width_px = images[0].shape
    for path, image in zip(source.paths[1:], images[1:], strict=True):
        channels += image.shape[0]
        if image.shape[1:] != (height_px, width_px):
            sizes = (height_px, width_px), (image.shape[1], image.shape[2])
            raise DataError(describe_size_mismatch((source.paths[0], path), sizes))
        if image.dtype != images[0].dtype:
            raise DataError(
                f"{show_path(source.paths[0])} is {images[0].dtype}, {show_path(path)} is "
                f"{image.dtype}; the files of one image must have the same depth"
            )
    return SourceHeader(channels, height_px, width_px, images[0].dtype)


def hint_masks(source: ImageSource) -> str:
    """Return a hint about masks if the folder of an image is named like one of masks, or else ""."""
    folder = Path(source.paths[0]).parent.name
    if not _MASK_FOLDER.search(folder):
        return ""
    return f"; its folder is named {folder!r}: if these are masks, set data.masks={folder}"


def _find_store_dtype(source: ImageSource, dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    name = STORE_DTYPES.get(dtype.name)
    if name is None:
        raise DataError(
            f"{_show(source)}: a store cannot hold {dtype}; set data.read.as_float=true to cast "
            "it to float32"
        )
    return np.dtype(name)


def _cast(file: Decoded, dtype: "np.dtype[Any]") -> Array:
    if file.array.dtype == np.bool_:  # True is white
        return file.array.view(np.uint8) * np.uint8(255)
    if file.narrow_bits is not None:
        return scale_depth(file.array, file.narrow_bits)
    return file.array.astype(dtype, copy=False)


def scale_depth(pixels: Array, bits: int) -> Array:
    """Scale integers of a number of bits to the full range of their unsigned dtype, rounded."""
    white = np.iinfo(pixels.dtype).max
    table = np.rint(np.arange(2**bits) * (white / (2**bits - 1))).astype(pixels.dtype)
    return np.take(table, pixels)


def _note_scaling(bits: int, dtype: "np.dtype[Any]") -> str:
    white = np.iinfo(dtype).max
    return (
        f"{bits} bits per sample, scaled so that {2**bits - 1} is {white}; data.read.depth=keep "
        "keeps the numbers"
    )


def _concatenate(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _collect(array: Array, files: Sequence[Decoded], notes: Sequence[str]) -> DecodedSource:
    file_notes = itertools.chain.from_iterable(file.notes for file in files)
    every_note = dict.fromkeys((*file_notes, *notes))  # once each, in order
    return DecodedSource(array, tuple(every_note), tuple(file.source_crc32 for file in files))


def _print_options(decoder: str, options: dict[str, Any]) -> str:
    return json.dumps({"decoder": decoder, "format": _FORMAT, **options}, sort_keys=True)


def _show(source: ImageSource) -> str:
    return ", ".join(show_path(path) for path in source.paths)
