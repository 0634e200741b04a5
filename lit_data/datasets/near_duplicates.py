"""Near-duplicates: images that show the same, saved anew, scaled or brighter.

Images are compared by small pictures of 4 KB, which lie in a temporary file: in memory are 200 bytes of
each image, and some thousands of pictures at a time. Of these a random projection says which pairs
may be alike, and only their pictures are read and compared.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import StoreError, show_path
from lit_data.core.progress import track
from lit_data.core.types import Array, Bools, Floats, Ints
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import keep_found

SIMILAR = 0.9
"""Correlation of small pictures without their slow changes, from which on images count as near-duplicates."""
_LIKELY = 0.6
"""Correlation of sketches from which on pictures are compared: 6 standard deviations below `SIMILAR`."""
_SAME = 0.97
"""Correlation from which on images of a crowd are frames of one part, if noise alone is between them."""
_NOISE = 1.5
"""Root mean square of the difference of small pictures, in gray levels of 255, that noise of a camera explains."""
_OWN = 0.6
"""Correlation of what images of a crowd do not have in common, from which on they show the same."""
_CROWD = 8
"""Images alike, from which on they may be different places of one texture."""
_SIDE_PX = 32
_PIXELS = _SIDE_PX**2
BUCKET = 2048  # images that are compared with each other, about
_LARGEST_BUCKET = 8  # times `BUCKET`
_ANCHORS = 256  # images of a bucket beyond that, with which all others are compared
_MOST_PAIRS = 2**20  # that are compared at once
_BANDS = 8
_SKETCH = 64  # numbers of the projection of a picture
_BUFFER_BYTES = 2**20
_LEAST = 1e-3
"""Standard deviation of a small picture, in gray levels of 255, below which it is flat."""


class _Pictures(Protocol):
    """Small pictures [n, 1024] of which some can be taken."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: Ints, /) -> Floats: ...


def group_similar(bank: ImageBank, folder: Path | None) -> Ints:
    """[n] number of the group of near-duplicates: saved anew, scaled, brighter, but not moved.

    Images are compared by 32 x 32 means of their pixels, without slow changes and without what all
    have in common, so that lighting and fixtures count for nothing. Where many are alike, what
    these have in common, such as the bands of a fabric, counts for nothing either.

    Args:
        bank: The images; each is read once.
        folder: Where the groups are kept for the next run; None keeps nothing.

    Raises:
        StoreError: There is no room for the small pictures, 4 KB an image.
    """
    of_shards = getattr(bank, "similar", None)
    if of_shards is not None:  # found out when the shards were made
        return np.asarray(of_shards, np.int64)

    def find() -> dict[str, Ints]:
        with _PictureFile.open(folder) as pictures:
            for picture in _shrink(bank):
                pictures.append(picture)
            return {"group": _group(pictures)}

    return keep_found(folder, bank, (), "similar", find, version=2)["group"]


def find_details(bank: ImageBank) -> Array:
    """Return small pictures of the images, without their slow changes: [n * 32 * 32] float32, 0..255."""
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
    for number in track(range(len(bank)), "comparing images", len(bank)):
        pixels = bank[number]
        # One plane is scaled, not one for each channel, which takes most of the time.
        plane = np.add.reduce(pixels, axis=0, dtype=np.float32)
        grey = cv2.resize(plane, side, interpolation=cv2.INTER_AREA) / len(pixels)
        picture: Floats = scale * (grey - cv2.blur(grey, (5, 5)))
        yield picture.reshape(-1)


class _PictureFile:
    """Small pictures in a temporary file without a name, which ends with the process.

    Args:
        file: It is empty.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._count = 0

    @classmethod
    @contextmanager
    def open(cls, folder: Path | None) -> Iterator[Self]:
        """Open an empty one.

        Args:
            folder: In which it takes room; None: that of temporary files.

        Raises:
            StoreError: There is no room.
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
        pictures: Of all images.

    Attributes:
        norms: [n] lengths of what is left of them.
    """

    def __init__(self, pictures: _Pictures) -> None:
        count = len(pictures)
        self._pictures = pictures
        # Lamp and fixture, which all images have in common.
        self._common = np.zeros(_PIXELS, np.float32)
        for part in _cut(np.arange(count)):
            self._common += pictures[part].sum(0)
        self._common /= count
        self.norms = np.zeros(count, np.float32)
        for part in _cut(np.arange(count)):
            self.norms[part] = np.linalg.norm(pictures[part] - self._common, axis=1)

    def take(self, numbers: Ints) -> Floats:
        """Return the details of some images, each of length 1: [m, 1024]."""
        details: Floats = (self._pictures[numbers] - self._common) / self.norms[numbers, None]
        return details


def _cut(numbers: Ints) -> list[Ints]:
    """Cut numbers of images into parts that fit into memory."""
    return np.array_split(numbers, max(1, -(-len(numbers) // BUCKET)))


def _group(pictures: _Pictures) -> Ints:
    """[n] number of the group of each image: the lowest of its images."""
    details = _Details(pictures)
    with_details = np.flatnonzero(details.norms > _LEAST * _SIDE_PX)
    keys, sketches = _sketch(details, with_details)
    pairs = [np.zeros((0, 2), np.int64)]
    for bucket in _sort_into_buckets(keys):
        pairs.append(_compare(details, with_details[bucket], sketches[bucket]))
    groups = _connect(len(pictures), np.concatenate(pairs))
    return _part_crowds(groups, details)


def _sketch(details: _Details, numbers: Ints) -> tuple[Ints, NDArray[np.float16]]:
    """Return by which images are sorted into buckets [m, bands], and short forms of them [m, 64].

    Keys hold the signs along a few random directions, in each band along other ones. Sketches are
    random projections, whose correlation is about that of the pictures.
    """
    # As many directions as make buckets of about BUCKET images.
    bits = max(0, int(np.ceil(np.log2(max(len(numbers), 1) / BUCKET))))
    # Several bands: near-duplicates that a direction parts meet in another one.
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
        # The signs along the directions of a band as one whole number.
        keys[part] = (signs > 0).reshape(len(part), bands, bits) @ (1 << np.arange(bits))
        sketches[part] = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    return keys, sketches


def _sort_into_buckets(keys: Ints) -> Iterator[Ints]:
    """Yield the rows of images that may be alike, at most some thousands together."""
    for band in keys.T:
        order = np.argsort(band, kind="stable")
        ends = np.flatnonzero(np.diff(band[order])) + 1
        for bucket in np.split(order, ends):
            yield from _limit(bucket)


def _limit(bucket: Ints) -> Iterator[Ints]:
    """Yield a bucket, or parts of one that is too large, which have some images in common."""
    most = _LARGEST_BUCKET * BUCKET
    if len(bucket) <= most:
        yield bucket
        return
    # Copies of an image meet in the one of these that is like them.
    anchors = bucket[:: -(-len(bucket) // _ANCHORS)]
    for part in np.array_split(bucket, -(-len(bucket) // most)):
        yield np.union1d(anchors, part)


def _compare(details: _Details, numbers: Ints, sketches: NDArray[np.float16]) -> Ints:
    """Return pairs that connect the images of a bucket which are alike: [M, 2] numbers."""
    count = len(numbers)
    floats = sketches.astype(np.float32)
    labels = np.arange(count)
    step = max(1, _MOST_PAIRS // max(count, 1))
    for begin in range(0, count, step):
        likely = floats[begin : begin + step] @ floats[begin:].T > _LIKELY
        # Ten times as fast as `argwhere`.
        rows, columns = np.divmod(np.flatnonzero(likely), likely.shape[1])
        pairs = np.stack([rows, columns], axis=1) + begin
        is_new = (pairs[:, 0] < pairs[:, 1]) & (labels[pairs[:, 0]] != labels[pairs[:, 1]])
        alike = _find_alike(details, numbers, pairs[is_new])
        if len(alike):
            labels = _connect(count, np.concatenate([_link(labels), alike]))
    return numbers[_link(labels)]


def _find_alike(details: _Details, numbers: Ints, pairs: Ints) -> Ints:
    """Return those of some pairs [M, 2] of places in `numbers` whose pictures are alike."""
    firsts, first_rows = np.unique(pairs[:, 0], return_inverse=True)
    seconds, second_rows = np.unique(pairs[:, 1], return_inverse=True)
    correlation = details.take(numbers[firsts]) @ details.take(numbers[seconds]).T
    return pairs[correlation[first_rows, second_rows] > SIMILAR]


def _part_crowds(groups: Ints, details: _Details) -> Ints:
    """Divide large groups: images stay together only by what not all of the group have in common.

    Args:
        groups: [n] number of the group of each image.
        details: Of the images.
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
    """Return which images of a crowd stay together: [m, m]."""
    unit = details.take(crowd)
    # What a crowd has in common, such as the bands of a fabric, says nothing.
    peculiar = unit - unit.mean(0)
    peculiar /= np.maximum(np.linalg.norm(peculiar, axis=1, keepdims=True), _LEAST)
    correlation = unit @ unit.T
    scale = details.norms[crowd] / _SIDE_PX
    # Mean square of the differences of two images, from their norms and correlation.
    squares = scale**2 + scale[:, None] ** 2 - 2 * scale * scale[:, None] * correlation
    is_frame = (correlation > _SAME) & (squares < _NOISE**2)
    is_alike: Bools = is_frame | (peculiar @ peculiar.T > _OWN)
    return is_alike


def _link(labels: Ints) -> Ints:
    """Return the pairs [M, 2] of a number and its label, where that is another one."""
    numbers = np.flatnonzero(labels != np.arange(len(labels)))
    return np.stack([numbers, labels[numbers]], axis=1)


def _connect(count: int, pairs: Ints) -> Ints:
    """[count] the lowest number that each is connected with by pairs [M, 2]."""
    labels, before = np.arange(count), np.arange(0)
    # Labels sink to the lowest of their neighbours until none changes.
    while not np.array_equal(before, labels):
        before = labels.copy()
        np.minimum.at(labels, pairs, labels[pairs].min(1, initial=count, keepdims=True))
        labels = labels[labels]
    return labels
