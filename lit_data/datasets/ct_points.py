"""Which voxels of a volume are a sample's points, and where they lie."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.io.volumes.hounsfield import Window
from lit_data.rng import Stream, random_words
from lit_data.types import Array

_WORD_BITS: Final = np.uint64(32)
_CHUNK: Final = 2**16  # voxels at once, which stay in the cache of a core


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
        out: [N, 4] int32, contiguous, written: (0, z, y, x).
    """
    import cv2

    _, height, width = shape
    planes = np.zeros((5, min(_CHUNK, len(positions))), positions.dtype)
    for begin in range(0, len(positions), _CHUNK):
        flat, target = positions[begin : begin + _CHUNK], out[begin : begin + _CHUNK]
        _, z, y, x, rest = planes[:, : len(flat)]
        np.floor_divide(flat, width, out=y)
        np.subtract(flat, np.multiply(y, width, out=rest), out=x)
        np.floor_divide(y, height, out=z)
        np.subtract(y, np.multiply(z, height, out=rest), out=y)
        # Three writes with gaps between them would take twice as long.
        parts = planes[:4, : len(flat)].astype(np.int32, copy=False)
        cv2.merge([part[None] for part in parts], dst=target[None])


def write_values(values: Array, window: Window, out: Array) -> None:
    """Scale values to 0..1 as `Window.scale` does, straight into the rows of a batch.

    Args:
        values: [N] Hounsfield units.
        window: What 0 and 1 are.
        out: [N] float32, written.
    """
    low_hu, width_hu = np.float32(window.low_hu), np.float32(window.width_hu)
    for begin in range(0, len(values), _CHUNK):
        target = out[begin : begin + _CHUNK]
        np.subtract(values[begin : begin + _CHUNK], low_hu, out=target, dtype=np.float32, casting="same_kind")
        target /= width_hu
        np.minimum(np.maximum(target, 0, out=target), 1, out=target)
