"""Near-duplicates: images of the same content that were saved again, scaled or brightened.

Images are compared by small pictures of 4 KB, which are kept in a temporary file. Memory holds 200
bytes of each image, and some thousands of pictures at a time. A random projection of the pictures
selects pairs that may be alike, and only their pictures are read and compared.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import StoreError, show_path
from lit_data.core.progress import count_threads, ordered_map, track
from lit_data.core.types import Array, Bools, Floats, Ints
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import keep_found

SIMILAR = 0.9
"""Least correlation of small pictures, without slow changes, of near-duplicates."""
_LIKELY = 0.6
"""Least correlation of sketches of pictures to compare: 6 standard deviations below `SIMILAR`."""
_SAME = 0.97
"""Least correlation of images of a crowd that are frames of one part, if they differ only by noise."""
_NOISE = 1.5
"""Largest root mean square difference of small pictures that camera noise explains, in gray levels of 255."""
_OWN = 0.6
"""Least correlation of images with the same content, without what their crowd has in common."""
_CROWD = 8
"""Least number of similar images that may be different places of one texture."""
_SIDE_PX = 32
_PIXELS = _SIDE_PX**2
_PART = 32  # images that a thread shrinks at once
BUCKET = 2048  # approximate number of images that are compared with each other
_LARGEST_BUCKET = 8  # multiple of `BUCKET`
_ANCHORS = 256  # images of a bucket beyond that, with which all others are compared
_MOST_PAIRS = 2**20  # pairs that are compared at once
_BANDS = 8
_SKETCH = 64  # numbers of the projection of a picture
_BUFFER_BYTES = 2**20
_LEAST = 1e-3
"""Standard deviation of a small picture, in gray levels of 255, below which it is flat."""


class _Pictures(Protocol):
    """Small pictures [n, 1024], from which some can be selected."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: Ints, /) -> Floats: ...


def group_similar(bank: ImageBank, folder: Path | None) -> Ints:
    """Return [n] group numbers of near-duplicates: saved again, scaled or brighter, but not moved.

    Images are compared by 32 x 32 means of their pixels, without slow changes and without what all
    images have in common, so that lighting and fixtures do not count. If many images are alike,
    what these have in common, such as the bands of a fabric, does not count either.

    Args:
        bank: The images; each is read once.
        folder: Folder that keeps the groups for the next run; None keeps nothing.

    Raises:
        StoreError: The disk has not enough space for the small pictures, 4 KB per image.
    """
    of_shards = getattr(bank, "similar", None)
    if of_shards is not None:  # computed when the shards were made
        return np.asarray(of_shards, np.int64)

    def find() -> dict[str, Ints]:
        with _PictureFile.open(folder) as pictures:
            for picture in _shrink(bank):
                pictures.append(picture)
            return {"group": _group(pictures)}

    return keep_found(folder, bank, (), "similar", find, version=2)["group"]


def find_details(bank: ImageBank) -> Array:
    """Return small pictures of the images without slow changes: [n * 32 * 32] float32, 0..255."""
    pictures = np.empty((len(bank), _PIXELS), np.float32)
    for row, picture in zip(pictures, _shrink(bank), strict=True):
        row[:] = picture
    return pictures.reshape(-1)


def group_details(small: Array) -> Ints:
    """Group images as `group_similar`, by the details of `find_details`."""
    return _group(small.reshape(-1, _PIXELS))


def _shrink(bank: ImageBank) -> Iterator[Floats]:
    """Yield the small picture of each image: [32 * 32], 0..255, without slow changes."""
    import cv2

    scale = 255.0 / np.iinfo(bank.dtype.name).max if bank.dtype.kind == "u" else 1.0
    side = (_SIDE_PX, _SIDE_PX)

    def shrink(numbers: range) -> list[Floats]:
        return [shrink_one(bank[number]) for number in numbers]

    def shrink_one(pixels: Array) -> Floats:
        # One plane is scaled instead of one for each channel, since this takes most of the time.
        plane = np.zeros(pixels.shape[1:], np.float32)
        for channel in pixels if pixels.dtype != np.int16 else pixels.astype(np.float32):
            cv2.accumulate(channel, plane)
        grey = cv2.resize(plane, side, interpolation=cv2.INTER_AREA) / len(pixels)
        picture: Floats = scale * (grey - cv2.blur(grey, (5, 5)))
        return picture.reshape(-1)

    numbers = range(len(bank))
    parts = [numbers[first : first + _PART] for first in range(0, len(bank), _PART)]
    most_bytes = int(bank.count_bytes(np.arange(len(bank))).max(initial=0))
    pictures = chain.from_iterable(ordered_map(shrink, parts, count_threads(most_bytes)))
    yield from track(pictures, "comparing images", len(bank))


class _PictureFile:
    """Small pictures in an unnamed temporary file, which is deleted with the process.

    Args:
        file: An empty file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._count = 0

    @classmethod
    @contextmanager
    def open(cls, folder: Path | None) -> Iterator[Self]:
        """Open an empty file of pictures.

        Args:
            folder: Folder of the file; None for the folder of temporary files.

        Raises:
            StoreError: The disk has not enough space.
        """
        if folder is None or not folder.is_dir():
            folder = Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=_BUFFER_BYTES) as file:
                yield cls(file)
        except OSError as error:
            raise StoreError(
                f"{show_path(folder)}: cannot store 4 KB per image, which the search for "
                f"near-duplicates needs ({error.strerror}): free some space, or set "
                "data.near_duplicates=apart"
            ) from error

    def append(self, picture: Floats) -> None:
        """Add the picture of the next image."""
        self._file.write(picture.data)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, numbers: Ints) -> Floats:
        self._file.flush()
        pictures = np.empty((len(numbers), _PIXELS), np.float32)
        for picture, number in zip(pictures, numbers.tolist(), strict=True):
            os.preadv(self._file.fileno(), [picture.data], number * picture.nbytes)
        return pictures


class _Details:
    """Small pictures without what all of them have in common.

    Args:
        pictures: Small pictures of all images.

    Attributes:
        norms: [n] norm of each remaining picture.
    """

    def __init__(self, pictures: _Pictures) -> None:
        count = len(pictures)
        self._pictures = pictures
        # Lighting and fixture, which all images have in common.
        self._common = np.zeros(_PIXELS, np.float32)
        for part in _cut(np.arange(count)):
            self._common += pictures[part].sum(0)
        self._common /= count
        self.norms = np.zeros(count, np.float32)
        for part in _cut(np.arange(count)):
            self.norms[part] = np.linalg.norm(pictures[part] - self._common, axis=1)

    def take(self, numbers: Ints) -> Floats:
        """Return the details of the given images, each with norm 1: [m, 1024]."""
        details: Floats = (self._pictures[numbers] - self._common) / self.norms[numbers, None]
        return details


def _cut(numbers: Ints) -> list[Ints]:
    """Split numbers of images into parts that fit into memory."""
    return np.array_split(numbers, max(1, -(-len(numbers) // BUCKET)))


def _group(pictures: _Pictures) -> Ints:
    """Return [n] group numbers of the images; a group has the lowest number of its images."""
    details = _Details(pictures)
    with_details = np.flatnonzero(details.norms > _LEAST * _SIDE_PX)
    keys, sketches = _sketch(details, with_details)
    pairs = [np.zeros((0, 2), np.int64)]
    for bucket in _sort_into_buckets(keys):
        pairs.append(_compare(details, with_details[bucket], sketches[bucket]))
    groups = _connect(len(pictures), np.concatenate(pairs))
    return _part_crowds(groups, details)


def _sketch(details: _Details, numbers: Ints) -> tuple[Ints, NDArray[np.float16]]:
    """Return the bucket keys [m, bands] of images, and their sketches [m, 64].

    A key has the signs along a few random directions, which differ by band. Sketches are random
    projections, whose correlation approximates that of the pictures.
    """
    # The number of directions gives buckets of about BUCKET images.
    bits = max(0, int(np.ceil(np.log2(max(len(numbers), 1) / BUCKET))))
    # Several bands, since near-duplicates that one band separates meet in another one.
    bands = _BANDS if bits else 1
    rng = np.random.default_rng(0)
    directions = [rng.standard_normal((_PIXELS, bits), np.float32) for _ in range(bands)]
    directions.append(rng.standard_normal((_PIXELS, _SKETCH), np.float32))
    joined = np.concatenate(directions, axis=1)
    keys = np.zeros((len(numbers), bands), np.int64)
    sketches = np.zeros((len(numbers), _SKETCH), np.float16)
    for part in _cut(np.arange(len(numbers))):
        projected = details.take(numbers[part]) @ joined
        signs, sketch = np.split(projected, [bands * bits], axis=1)
        # The signs along the directions of a band as one integer.
        keys[part] = (signs > 0).reshape(len(part), bands, bits) @ (1 << np.arange(bits))
        sketches[part] = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    return keys, sketches


def _sort_into_buckets(keys: Ints) -> Iterator[Ints]:
    """Yield the rows of images that may be alike, at most some thousands at a time."""
    for band in keys.T:
        order = np.argsort(band, kind="stable")
        ends = np.flatnonzero(np.diff(band[order])) + 1
        for bucket in np.split(order, ends):
            yield from _limit(bucket)


def _limit(bucket: Ints) -> Iterator[Ints]:
    """Yield a bucket, or overlapping parts of it if it is too large."""
    most = _LARGEST_BUCKET * BUCKET
    if len(bucket) <= most:
        yield bucket
        return
    # Copies of an image are connected by an anchor that is similar to them.
    anchors = bucket[:: -(-len(bucket) // _ANCHORS)]
    for part in np.array_split(bucket, -(-len(bucket) // most)):
        yield np.union1d(anchors, part)


def _compare(details: _Details, numbers: Ints, sketches: NDArray[np.float16]) -> Ints:
    """Return pairs [M, 2] of numbers that connect the similar images of a bucket."""
    count = len(numbers)
    floats = sketches.astype(np.float32)
    labels = np.arange(count)
    step = max(1, _MOST_PAIRS // max(count, 1))
    for begin in range(0, count, step):
        likely = floats[begin : begin + step] @ floats[begin:].T > _LIKELY
        # This is ten times as fast as `argwhere`.
        rows, columns = np.divmod(np.flatnonzero(likely), likely.shape[1])
        pairs = np.stack([rows, columns], axis=1) + begin
        is_new = (pairs[:, 0] < pairs[:, 1]) & (labels[pairs[:, 0]] != labels[pairs[:, 1]])
        alike = _find_alike(details, numbers, pairs[is_new])
        if len(alike):
            labels = _connect(count, np.concatenate([_link(labels), alike]))
    return numbers[_link(labels)]


def _find_alike(details: _Details, numbers: Ints, pairs: Ints) -> Ints:
    """Return the pairs [M, 2] of positions in `numbers` whose pictures are similar."""
    firsts, first_rows = np.unique(pairs[:, 0], return_inverse=True)
    seconds, second_rows = np.unique(pairs[:, 1], return_inverse=True)
    correlation = details.take(numbers[firsts]) @ details.take(numbers[seconds]).T
    return pairs[correlation[first_rows, second_rows] > SIMILAR]


def _part_crowds(groups: Ints, details: _Details) -> Ints:
    """Divide large groups by their differences from what the whole group has in common.

    Args:
        groups: [n] number of the group of each image.
        details: Details of the images.
    """
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    pairs = []
    for group in np.split(order, ends):
        if len(group) < _CROWD:
            pairs.append(np.stack([group, groups[group]], axis=1))
            continue
        for part in _cut(group):
            alike = np.argwhere(np.triu(_compare_crowd(details, part), 1))
            pairs.append(part[_link(_connect(len(part), alike))])
    return _connect(len(groups), np.concatenate(pairs))


def _compare_crowd(details: _Details, crowd: Ints) -> Bools:
    """Return [m, m] True for pairs of images of a crowd that stay together."""
    unit = details.take(crowd)
    # What a crowd has in common, such as the bands of a fabric, does not count.
    peculiar = unit - unit.mean(0)
    peculiar /= np.maximum(np.linalg.norm(peculiar, axis=1, keepdims=True), _LEAST)
    correlation = unit @ unit.T
    scale = details.norms[crowd] / _SIDE_PX
    # Mean square difference of two images, from their norms and correlation.
    squares = scale**2 + scale[:, None] ** 2 - 2 * scale * scale[:, None] * correlation
    is_frame = (correlation > _SAME) & (squares < _NOISE**2)
    is_alike: Bools = is_frame | (peculiar @ peculiar.T > _OWN)
    return is_alike


def _link(labels: Ints) -> Ints:
    """Return the pairs [M, 2] of a number and its label, if these differ."""
    numbers = np.flatnonzero(labels != np.arange(len(labels)))
    return np.stack([numbers, labels[numbers]], axis=1)


def _connect(count: int, pairs: Ints) -> Ints:
    """Return [count] the lowest number that each number is connected with by pairs [M, 2]."""
    labels, before = np.arange(count), np.arange(0)
    # Labels sink to the lowest of their neighbours until none changes.
    while not np.array_equal(before, labels):
        before = labels.copy()
        np.minimum.at(labels, pairs, labels[pairs].min(1, initial=count, keepdims=True))
        labels = labels[labels]
    return labels
