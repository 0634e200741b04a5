"""Which voxels of a volume are a sample's points, and where they lie."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.io.volumes.hounsfield import Window
from lit_data.rng import Stream, random_words
from lit_data.types import Array

_WORD_BITS: Final = np.uint64(32)
_CHUNK: Final = 2**15  # voxels at once, which stay in the cache of a core


def choose_points(count: int, most: int, *, seed: int, epoch: int, index: int) -> NDArray[np.int64] | None:
    """Some of `count` voxels, each of them equally likely, no voxel twice, in ascending order.

    The voxels lie on a ring that is turned by a random number of places and cut into `most` arcs of equal length; each
    arc gives one voxel. The turn makes every voxel equally likely; the arcs spread the subset over the whole volume,
    which a plain draw does not. Random numbers are those of the sample's stream `Stream.POINTS` in its epoch.

    Args:
        count: Voxels there are.
        most: Voxels to choose.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**32.
        index: Number of the sample.

    Returns:
        [most] numbers of voxels; none where there are not more than that, so that all are taken.
    """
    if count <= most:
        return None
    words = random_words(seed, Stream.POINTS, index, epoch, most + 2)[0].astype(np.uint64)
    turn = int(words[0] << _WORD_BITS | words[1]) % count
    edges = np.arange(most + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(most)
    places = edges[:-1] + (words[2:] * np.diff(edges) >> _WORD_BITS)
    places = places.astype(np.int64)
    first = int(np.searchsorted(places, count - turn))  # from here on the turn leads past the end
    return np.concatenate((places[first:] + (turn - count), places[:first] + turn))


def write_coordinates(positions: NDArray[np.signedinteger], shape: tuple[int, int, int], out: Array) -> None:
    """Turn flat positions into coordinates, straight into the rows of a batch.

    Args:
        positions: [N] int32 or int64, in C order.
        shape: (Z, Y, X) of the volume.
        out: [N, 3] int32, written: (z, y, x).
    """
    _, height, width = shape
    buffers = np.empty((2, min(_CHUNK, len(positions))), positions.dtype)
    for begin in range(0, len(positions), _CHUNK):
        flat, target = positions[begin : begin + _CHUNK], out[begin : begin + _CHUNK]
        lines, rest = buffers[:, : len(flat)]
        np.floor_divide(flat, width, out=lines)
        np.multiply(lines, width, out=rest)
        target[:, 2] = np.subtract(flat, rest, out=rest)
        np.floor_divide(lines, height, out=rest)
        target[:, 0] = rest
        rest *= height
        target[:, 1] = np.subtract(lines, rest, out=rest)


def write_values(values: Array, window: Window, out: Array) -> None:
    """Scale values to 0..1, straight into the rows of a batch.

    Args:
        values: [N] Hounsfield units.
        window: What 0 and 1 are.
        out: [N] float32, written.
    """
    for begin in range(0, len(values), _CHUNK):
        out[begin : begin + _CHUNK] = window.scale(values[begin : begin + _CHUNK])
