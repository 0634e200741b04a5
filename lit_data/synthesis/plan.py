"""Where, how strong and in which images defects appear: all the randomness of synthesis, and no pixels."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform

SUBPIXELS: Final = 8
"""Centres lie on a grid of 1/8 px, so that every kernel that can occur is computed once."""

_SAMPLE_DRAWS: Final = 3
_DEFECT_DRAWS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotShape:
    """A Gaussian spot cut to a window: the window is the extent that the mask marks.

    Args:
        height_px: Window height.
        width_px: Window width.
        sigma_y_px: Standard deviation along the rows' axis.
        sigma_x_px: Standard deviation along the columns' axis.
        weight: How often this shape is chosen, relative to the others.
    """

    height_px: int
    width_px: int
    sigma_y_px: float
    sigma_x_px: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes that draw nothing."""
        for name in ("height_px", "width_px", "sigma_y_px", "sigma_x_px", "weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} of a spot must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefectSpec:
    """How defects are distributed over samples.

    A sample has defects with `probability`; then `count` of them, of which `true_count` are *true*: in the target
    alone, and in the mask. The rest are *distractors*: in the target and at least one reference, or in a reference
    alone, and never in the mask, so that a model has to compare. A sample of one channel has no references, hence no
    distractors.

    Args:
        probability: Chance that a sample has defects, 0 to 1.
        count: Fewest and most defects of such a sample.
        true_count: Fewest and most true ones among them.
        spots: The shapes to choose from; mappings with the fields of `SpotShape` are accepted.
        amplitude: Smallest and largest height of a spot's peak, in units of the 0..1 value range.
        bright_fraction: Share of defects that brighten; the others darken.
        subpixel: Centres between pixels (on a grid of 1/8 px); if not, on pixel centres.

    Raises:
        ConfigError: A range is empty, or a share is outside 0..1.
    """

    probability: float = 0.5
    count: tuple[int, int] = (3, 8)
    true_count: tuple[int, int] = (0, 2)
    spots: tuple[SpotShape, ...] = (
        SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
        SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    )
    amplitude: tuple[float, float] = (0.08, 0.4)
    bright_fraction: float = 0.5
    subpixel: bool = True

    def __post_init__(self) -> None:
        """Accept plain lists and mappings, as a configuration file gives them, and check every range."""
        spots = tuple(SpotShape(**spot) if isinstance(spot, Mapping) else spot for spot in self.spots)
        object.__setattr__(self, "spots", spots)
        if not spots:
            raise ConfigError("spots is empty: give at least one shape, or leave synthesis out")
        for name in ("probability", "bright_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")
        for name in ("count", "true_count", "amplitude"):
            object.__setattr__(self, name, _check_range(name, getattr(self, name)))

    @property
    def draws(self) -> int:
        """Random numbers that one sample takes from its stream."""
        return _SAMPLE_DRAWS + _DEFECT_DRAWS * self.count[1]


@dataclass(frozen=True, slots=True)
class DefectPlan:
    """N defects of a batch; the arrays are NumPy arrays, or tensors on the device where they will be rendered.

    Args:
        row: [N] int64, the sample in the batch.
        y: [N] float32, centre in px from the top.
        x: [N] float32, centre in px from the left.
        spot: [N] int64, which of `spots`.
        amplitude: [N] float32, signed height of the peak in the 0..1 value range.
        channels: [N, C] bool, the channels that carry the defect.
        is_true: [N] bool, whether it belongs to the mask.
        spots: The shapes that `spot` counts.
    """

    row: Any
    y: Any
    x: Any
    spot: Any
    amplitude: Any
    channels: Any
    is_true: Any
    spots: tuple[SpotShape, ...]

    def __len__(self) -> int:
        return len(self.row)

    def arrays(self) -> dict[str, Any]:
        """The arrays by name, without the shapes: what travels to the device with a batch."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spots"}


def sample_plan(spec: DefectSpec, seed: int, epoch: int, index: ArrayLike, shape: tuple[int, int, int]) -> DefectPlan:
    """Draw the defects of a batch; each sample's are a pure function of (seed, epoch, its index).

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        epoch: The epoch, 0 for stages that must not change.
        index: [B] sample indices.
        shape: (C, H, W) of a sample; channel 0 is the target, the others are references.

    Returns:
        The plan, defects ordered by sample.
    """
    channels, height_px, width_px = shape
    draws = uniform(seed, Stream.DEFECTS, index, epoch, spec.draws)
    present, is_true = _draw_counts(spec, draws[:, :_SAMPLE_DRAWS], has_references=channels > 1)
    row, slot = np.nonzero(present)
    each = draws[:, _SAMPLE_DRAWS:].reshape(len(draws), spec.count[1], _DEFECT_DRAWS)[row, slot].T
    true = is_true[row, slot]
    low, high = spec.amplitude
    sign = np.where(each[4] < spec.bright_fraction, np.float32(1), np.float32(-1))
    return DefectPlan(
        row=row,
        y=_place(each[0], height_px, spec.subpixel),
        x=_place(each[1], width_px, spec.subpixel),
        spot=np.searchsorted(_shares(spec.spots), each[2], side="right"),
        amplitude=sign * (np.float32(low) + each[3] * np.float32(high - low)),
        channels=_choose_channels(true, each[5], channels),
        is_true=true,
        spots=spec.spots,
    )


def distractor_patterns(channels: int) -> NDArray[np.bool_]:
    """Every set of channels that a distractor may occupy: target with references, or one reference alone.

    Args:
        channels: Number of channels, the first of which is the target.

    Returns:
        [P, C] bool; P is 0 for a single channel.
    """
    patterns = [p for p in product((False, True), repeat=channels) if any(p[1:]) and (p[0] or sum(p) == 1)]
    return np.array(patterns, dtype=bool).reshape(-1, channels)


def _draw_counts(
    spec: DefectSpec, draws: NDArray[np.float32], *, has_references: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    slot = np.arange(spec.count[1])
    true = slot < _integer(draws[:, 2:3], spec.true_count)
    present = (draws[:, :1] < spec.probability) & (slot < _integer(draws[:, 1:2], spec.count))
    return (present if has_references else present & true), true


def _integer(draws: NDArray[np.float32], bounds: tuple[int, int]) -> NDArray[np.int64]:
    low, high = bounds
    return low + (draws * np.float32(high - low + 1)).astype(np.int64)


def _place(draws: NDArray[np.float32], length_px: int, subpixel: bool) -> NDArray[np.float32]:
    steps = SUBPIXELS if subpixel else 1
    placed: NDArray[np.float32] = np.floor(draws * np.float32(length_px * steps)) / np.float32(steps)
    return placed


@lru_cache
def _shares(spots: tuple[SpotShape, ...]) -> NDArray[np.float32]:
    weights = np.array([spot.weight for spot in spots])
    upper: NDArray[np.float32] = (np.cumsum(weights) / weights.sum())[:-1].astype(np.float32)
    return upper


def _choose_channels(is_true: NDArray[np.bool_], draws: NDArray[np.float32], channels: int) -> NDArray[np.bool_]:
    target_alone = np.arange(channels) == 0
    patterns = distractor_patterns(channels)
    if not len(patterns):
        return np.broadcast_to(target_alone, (len(draws), channels)).copy()
    chosen = patterns[(draws * np.float32(len(patterns))).astype(np.int64)]
    return np.where(is_true[:, None], target_alone, chosen)


def _check_range(name: str, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
    pair = tuple(bounds)
    if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
        raise ConfigError(f"{name}={list(pair)} is not a range: give [smallest, largest] with 0 <= smallest <= largest")
    return pair[0], pair[1]
