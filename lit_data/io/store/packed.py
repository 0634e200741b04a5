"""Compressed images, in blocks that are read one by one, for sets that do not fit the disk.

A block is [C, h, w], 64 rows high and as wide as a band of its image, else as the image. `lz4`
sorts the bits of its values and looks for repeats alone: it is read nearly as fast as it lies
there, and saves a third at most of a photograph. `zstd` stores differences of neighbours, sorted by
bytes, by how often they occur: half of a photograph at a fifth of the speed. Both give back every
bit.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from typing_extensions import override

from lit_data.grid import Ints
from lit_data.io.store.files import Mapped, corrupt
from lit_data.io.store.slices import ImageSizes, SlicedFile, SlicedImage
from lit_data.types import Array

Compression = Literal["none", "lz4", "zstd"]
PACKINGS: Final = get_args(Compression)[1:]
ROWS_PX: Final = 64
MOST_SAVED: Final = 2**16
"""Bytes of pixels that a compressed byte can stand for at most; zstd stays below a half of it."""
_LEVELS: Final = {"lz4": 5, "zstd": 3}
_BITS: Final = 2
"""What Blosc calls the sorting of bits."""


def pack(block: Array, compression: str) -> bytes:
    """Compress a block [C, h, w], contiguous."""
    codecs = _load_codecs()
    level = _LEVELS[compression]
    if compression == "lz4":
        options = {"shuffle": _BITS, "typesize": block.itemsize, "numthreads": 1}
        return bytes(codecs.blosc_encode(block, level=level, compressor="lz4", **options))
    return bytes(codecs.zstd_encode(_difference(block), level=level))


def unpack(
    data: Array, shape: tuple[int, int, int], dtype: "np.dtype[Any]", compression: str
) -> Array:
    """The block that `pack` compressed.

    Args:
        data: [n] uint8.
        shape: Of the block.
        dtype: Of the block.
        compression: How it was compressed.

    Raises:
        ValueError: It is not one of this shape.
    """
    codecs = _load_codecs()
    out = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    decode = (
        partial(codecs.blosc_decode, numthreads=1) if compression == "lz4" else codecs.zstd_decode
    )
    try:
        found = decode(data, out=out)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if found.size != out.size:
        raise ValueError(f"expected {out.size} bytes, found {found.size}")
    block: Array = out.view(dtype).reshape(shape)
    return block if compression == "lz4" else _add_up(block)


def split_blocks(image: Array, width_px: int) -> Iterator[Array]:
    """The blocks of an image [C, H, W], column of blocks after column, each from top to bottom."""
    _, height, width = image.shape
    for left in range(0, width, width_px):
        for top in range(0, height, ROWS_PX):
            yield np.ascontiguousarray(image[:, top : top + ROWS_PX, left : left + width_px])


def count_blocks(heights_px: Ints, widths_px: Ints, block_px: Ints) -> Ints:
    """[n] blocks of images whose blocks are so wide."""
    counts: Ints = -(-heights_px // ROWS_PX) * -(-widths_px // block_px)
    return counts


class Packing(NamedTuple):
    """How the images of a file are compressed.

    Attributes:
        compression: Of their blocks.
        path: Of the file, for messages.
    """

    compression: str
    path: Path


class PackedImage(SlicedImage):
    """One compressed image.

    Args:
        data: [n] uint8, all of its blocks.
        ends: [blocks] where each ends.
        shape: (C, H, W).
        dtype: Of its values.
        width_px: Of a block.
        packing: How they are compressed.
    """

    def __init__(
        self,
        data: Array,
        ends: Ints,
        shape: tuple[int, int, int],
        dtype: "np.dtype[Any]",
        *,
        width_px: int,
        packing: Packing,
    ) -> None:
        super().__init__(shape, dtype)
        self._data, self._ends, self._width_px, self._packing = (
            data,
            [0, *ends.tolist()],
            width_px,
            packing,
        )
        self._rows = -(-shape[1] // ROWS_PX)

    @override
    def read(self, top_px: int, left_px: int, height_px: int, width_px: int) -> Array:
        found = np.empty((self.shape[0], height_px, width_px), self.dtype)
        bottom, right = top_px + height_px, left_px + width_px
        for number, top, left in self._find_blocks(top_px, left_px, bottom, right):
            y, x = max(top, top_px), max(left, left_px)
            part = self._unpack(number, top, left)[
                :, y - top : bottom - top, x - left : right - left
            ]
            found[
                :,
                y - top_px : y - top_px + part.shape[1],
                x - left_px : x - left_px + part.shape[2],
            ] = part
        return found

    @override
    def find_spans(
        self, top_px: int, left_px: int, size_px: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        bottom, right = top_px + size_px[0], left_px + size_px[1]
        for number, _, _ in self._find_blocks(max(top_px, 0), max(left_px, 0), bottom, right):
            yield self._ends[number], self._ends[number + 1] - self._ends[number]

    def _find_blocks(
        self, top_px: int, left_px: int, bottom_px: int, right_px: int
    ) -> Iterator[tuple[int, int, int]]:
        """Number, first row and first column of each block that a part touches."""
        width = self._width_px
        for column in range(left_px // width, -(-min(right_px, self.shape[2]) // width)):
            for row in range(top_px // ROWS_PX, -(-min(bottom_px, self.shape[1]) // ROWS_PX)):
                yield column * self._rows + row, row * ROWS_PX, column * width

    def _unpack(self, number: int, top_px: int, left_px: int) -> Array:
        channels, height, width = self.shape
        shape = (channels, min(ROWS_PX, height - top_px), min(self._width_px, width - left_px))
        data = self._data[self._ends[number] : self._ends[number + 1]]
        try:
            return unpack(data, shape, self.dtype, self._packing.compression)
        except ValueError as error:
            raise corrupt(
                self._packing.path, f"a block of it cannot be decompressed ({error})"
            ) from error


class PackedFile(SlicedFile):
    """The compressed images of a file.

    Args:
        mapped: As `SlicedFile` has it.
        values: [n] uint8, all blocks of all images.
        ends: [m] where each block ends.
        sizes: Of the images.
        blocks_px: [images] width of the blocks of each.
        packing: How they are compressed.
    """

    def __init__(
        self,
        mapped: Mapped,
        values: Array,
        ends: Array,
        sizes: ImageSizes,
        *,
        blocks_px: Ints,
        packing: Packing,
    ) -> None:
        super().__init__(mapped)
        self._values, self._ends, self._sizes = values, ends, sizes
        self._blocks_px, self._packing = blocks_px, packing
        self._past = np.cumsum(count_blocks(sizes.heights_px, sizes.widths_px, blocks_px))

    @override
    def make(self, number: int) -> tuple[int, SlicedImage]:
        first = self._past.item(number - 1) if number else 0
        begin = self._ends.item(first - 1) if first else 0
        ends = self._ends[first : self._past.item(number)].astype(np.int64) - begin
        image = PackedImage(
            self._values[begin : begin + ends.item(-1)],
            ends,
            self._sizes.shape(number),
            self._sizes.dtype,
            width_px=self._blocks_px.item(number),
            packing=self._packing,
        )
        return begin, image


def estimate_shares(blocks: Iterable[Array]) -> Mapping[str, float]:
    """The share of their bytes that some blocks keep under each compression."""
    sizes = [
        (block.nbytes, *(len(pack(block, compression)) for compression in PACKINGS))
        for block in blocks
    ]
    whole_bytes, *packed_bytes = np.sum(sizes, axis=0).tolist()
    return {name: nbytes / whole_bytes for name, nbytes in zip(PACKINGS, packed_bytes, strict=True)}


def _difference(block: Array) -> Array:
    codecs = _load_codecs()
    coded: Array = (
        codecs.delta_encode(block, axis=-1)
        if block.itemsize == 1
        else codecs.byteshuffle_encode(block, axis=-1, delta=True)
    )
    return coded


def _add_up(block: Array) -> Array:
    codecs = _load_codecs()
    values: Array = (
        codecs.delta_decode(block, axis=-1)
        if block.itemsize == 1
        else codecs.byteshuffle_decode(block, axis=-1, delta=True)
    )
    return values


def _load_codecs() -> Any:  # noqa: ANN401 - its types leave out arrays
    import imagecodecs

    return imagecodecs
