"""Dense windows of sparse volumes: their positions, and the voxels in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.core.checks import check_choice, check_count, check_fraction, is_count
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words
from lit_data.core.types import Ints, Triple
from lit_data.wings.volumes.files.sparse import LabelIndex, SparseVolume

WindowMode = Literal["sliding", "random"]

_WORDS = 5  # labeled or not, which labeled voxel, z, y, x
_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Size and places of the windows that are samples of a volume.

    Args:
        size: (z, y, x) voxels of a window, or one number for all three.
        stride: Distance between two sliding windows, like `size`; their size by default.
        mode: Windows for training: `sliding` takes a grid that covers every volume, `random` takes
            windows at places that are drawn again in each epoch. The other stages use the grid.
        per_volume: Random windows of a volume in an epoch.
        label_bias: Fraction of random windows centered on a labeled voxel; a window that would
            reach past an edge of the volume is moved inside. Volumes without labels have none of
            these.
        balanced: True centers these windows on each class of a volume equally often, however few
            voxels the class has; otherwise each labeled voxel is equally likely.
        min_points: Sliding windows with fewer occupied voxels are skipped.

    Raises:
        ConfigError: A value is out of its range.
    """

    size: int | Sequence[int] = 64
    stride: int | Sequence[int] | None = None
    mode: WindowMode = "random"
    per_volume: int = 8
    label_bias: float = 0.0
    balanced: bool = False
    min_points: int = 0

    def __post_init__(self) -> None:
        """Check every range, and expand sizes to three numbers."""
        stride = self.size if self.stride is None else self.stride
        object.__setattr__(self, "size", _three("size", self.size))
        object.__setattr__(self, "stride", _three("stride", stride))
        check_choice("windows.mode", self.mode, get_args(WindowMode))
        check_fraction("windows.label_bias", self.label_bias)
        check_count("windows.per_volume", self.per_volume, 1)
        check_count("windows.min_points", self.min_points, 0)

    @property
    def sides(self) -> Triple:
        """(z, y, x) voxels of a window."""
        return _three("size", self.size)

    @property
    def steps(self) -> Triple:
        """(z, y, x) voxels between two sliding windows."""
        return _three("stride", self.size if self.stride is None else self.stride)


def draw_words(seed: int, numbers: Ints, epoch: int) -> list[list[int]]:
    """Draw the random words of some windows from their streams `Stream.POINTS`.

    Args:
        seed: 0 <= seed < 2**64.
        numbers: [M] numbers of the samples.
        epoch: 0 <= epoch < 2**32.

    Returns:
        For each sample the words of `draw_start`, followed by the one of `choose_labelled`.
    """
    words: list[list[int]] = random_words(seed, Stream.POINTS, numbers, epoch, _WORDS + 1).tolist()
    return words


def choose_labelled(
    index: LabelIndex, spec: WindowSpec, words: Sequence[int]
) -> NDArray[np.signedinteger]:
    """Choose the labeled voxels that a random window may be centered on.

    Args:
        index: Labeled voxels of the volume.
        spec: Options; with `balanced`, all voxels of one class, each class equally likely;
            otherwise all voxels.
        words: See `draw_words`.

    Returns:
        [L] flat positions.
    """
    if not spec.balanced or not len(index.classes):
        return index.positions
    row = words[_WORDS] * len(index.classes) >> _WORD_BITS
    return index.of(int(index.classes[row]))


class WindowGrid:
    """Grid of sliding windows over volumes of any shapes: flat number -> (volume, z, y, x).

    Windows are numbered volume by volume, in C order. The last one of an axis is flush with the
    edge; a volume that is smaller than a window has one, which reaches past the edge.

    Args:
        shapes: [I, 3] voxels of each volume.
        sides: (z, y, x) voxels of a window.
        steps: (z, y, x) voxels between two windows.
    """

    def __init__(self, shapes: ArrayLike, sides: Triple, steps: Triple) -> None:
        self.shapes = np.asarray(shapes, np.int64).reshape(-1, 3)
        self.steps = np.array(steps, np.int64)
        self.slack = np.maximum(self.shapes - sides, 0)
        # Rounded up: the last window covers the rest.
        self.counts = -(-self.slack // self.steps) + 1
        # Number after the last window of each volume.
        self._ends = np.cumsum(self.counts.prod(1))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def windows_of(self, volume: int) -> range:
        """Return the numbers of the windows of one volume."""
        end = int(self._ends[volume])
        return range(end - int(self.counts[volume].prod()), end)

    def locate(self, numbers: ArrayLike) -> tuple[Ints, Ints]:
        """Return volume [N] and first voxel [N, 3] (z, y, x) of windows."""
        flat = np.asarray(numbers, np.int64)
        volume = np.searchsorted(self._ends, flat, side="right")
        counts = self.counts[volume]
        within_volume = flat - (self._ends[volume] - counts.prod(1))
        column = within_volume % counts[:, 2]
        line = within_volume // counts[:, 2]
        steps = np.stack((line // counts[:, 1], line % counts[:, 1], column), axis=1)
        # The last window of an axis is flush with the edge.
        return volume, np.minimum(steps * self.steps, self.slack[volume])


def draw_start(
    shape: Triple,
    spec: WindowSpec,
    labelled: NDArray[np.signedinteger] | None,
    words: Sequence[int],
) -> list[int]:
    """Return the first voxel of a random window, (z, y, x).

    Args:
        shape: (Z, Y, X) of the volume.
        spec: Size of the window, and how often it is centered on a labeled voxel.
        labelled: [L] flat positions of the labeled voxels, if there are any.
        words: See `draw_words`.
    """
    # Python integers: arrays of three take longer to make than all of this.
    slack = [max(0, length - side) for length, side in zip(shape, spec.sides, strict=True)]
    is_biased = words[0] * 2.0**-32 < spec.label_bias
    if not is_biased or labelled is None or not len(labelled):
        # word * n >> 32 is a whole number below n, each equally likely.
        return [
            word * (most + 1) >> _WORD_BITS for word, most in zip(words[2:5], slack, strict=True)
        ]
    line, x = divmod(int(labelled[words[1] * len(labelled) >> _WORD_BITS]), shape[2])
    middle = (*divmod(line, shape[1]), x)
    start = []
    for position, side, most in zip(middle, spec.sides, slack, strict=True):
        start.append(min(max(position - side // 2, 0), most))
    return start


def count_inside(volume: SparseVolume, starts: Ints, sides: Sequence[int]) -> Ints:
    """Count the occupied voxels of many windows, in one pass over those of the volume.

    The edges of all windows cut the volume into cells, whose voxels are in the same windows. The
    cells' counts are summed up along each axis, so that the count of a window is a sum of eight
    corners.

    Args:
        volume: The volume.
        starts: [W, 3] (z, y, x) first voxels of the windows.
        sides: (z, y, x) voxels of each window.

    Returns:
        [W] int64.
    """
    stops = np.minimum(starts + sides, volume.shape)
    coords = volume.coords()
    cell = np.zeros(len(volume), np.int64)
    sizes, firsts, lasts = [], [], []
    for axis, length in enumerate(volume.shape):
        cuts = np.unique((starts[:, axis], stops[:, axis]))
        cell_of_line = np.searchsorted(cuts, np.arange(length), side="right")
        # Number of the cell in C order, axis by axis.
        cell = cell * (len(cuts) + 1) + cell_of_line[coords[:, axis]]
        sizes.append(len(cuts) + 1)
        firsts.append(np.searchsorted(cuts, starts[:, axis]))
        lasts.append(np.searchsorted(cuts, stops[:, axis]))
    counts = np.bincount(cell, minlength=int(np.prod(sizes))).reshape(sizes)
    # sums[z, y, x] counts the voxels of all cells up to and including that one.
    sums = counts.cumsum(0).cumsum(1).cumsum(2)
    (z0, y0, x0), (z1, y1, x1) = firsts, lasts
    below_z1 = sums[z1, y1, x1] - sums[z1, y0, x1] - sums[z1, y1, x0] + sums[z1, y0, x0]
    below_z0 = sums[z0, y1, x1] - sums[z0, y0, x1] - sums[z0, y1, x0] + sums[z0, y0, x0]
    return np.asarray(below_z1 - below_z0)


def _three(name: str, value: int | Sequence[int]) -> Triple:
    sides = (value, value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 3 or not all(is_count(side, 1) for side in sides):
        raise ConfigError(
            f"windows.{name}={value!r} is not allowed: give one positive number of voxels or [z, "
            "y, x]"
        )
    return sides[0], sides[1], sides[2]
