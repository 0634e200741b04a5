"""Joining of overlapping windows to the labels of a volume."""

from collections.abc import Sequence

import numpy as np

from lit_data.core.types import Array, Bytes
from lit_inspect.tiles import weigh_tile

_LEAST_WEIGHT = 1e-3  # of the corners of a window: some voxels are in no other window


class WindowBlend:
    """Labels of a volume from the probabilities of overlapping windows.

    Probabilities are added up, weighted by a Gaussian in the center of each window whose standard
    deviation is an eighth of the side, as in nnU-Net and MONAI. Windows must come in ascending
    order of z, so that only the slices of one window need probabilities; those before are labels
    already.

    Args:
        shape: (z, y, x) of the volume.
        sides: (z, y, x) of a window, which may reach past the volume.
        count: Number of classes, including the background.
    """

    def __init__(self, shape: Sequence[int], sides: Sequence[int], count: int) -> None:
        self.labels: Bytes = np.zeros(tuple(shape), np.uint8)
        self._sides = tuple(sides)
        self._first = 0  # slice of the volume that is the first of the sums
        self._sums = np.zeros((count, sides[0], *shape[1:]), np.float32)
        z, y, x = (np.maximum(weigh_tile(side, "gaussian"), _LEAST_WEIGHT) for side in sides)
        weights = z[:, None, None] * y[:, None] * x
        self._weights = np.maximum(weights, _LEAST_WEIGHT).astype(np.float32)

    def add(self, probability: Array, start: Sequence[int]) -> None:
        """Add a window.

        Args:
            probability: [K, D, H, W] float32.
            start: (z, y, x) of the window's first voxel.
        """
        self._finish_slices(start[0])
        _, height, width = self.labels.shape
        _, y, x = start
        rows, columns = slice(y, y + self._sides[1]), slice(x, x + self._sides[2])
        weighted = probability * self._weights
        inside = weighted[:, :, : height - y, : width - x]
        self._sums[:, :, rows, columns] += inside

    def finish(self) -> Bytes:
        """Return the labels [Z, Y, X] after all windows have been added."""
        self._finish_slices(self._first + self._sides[0])
        return self.labels

    def _finish_slices(self, end: int) -> None:
        """Convert the sums of the slices before `end` to labels, and move the others up."""
        count = end - self._first
        if count == 0:
            return
        # Skipped windows leave slices without sums behind.
        labels = self.labels[self._first : end][: self._sides[0]]
        # One slice at a time: argmax of all sums at once would copy them.
        for number, plane in enumerate(labels):
            plane[:] = self._sums[:, number].argmax(0)
        # Class by class, because an overlapping move needs a copy of what it moves.
        for sums in self._sums:
            sums[:-count] = sums[count:].copy()
            sums[-count:] = 0
        self._first = end
