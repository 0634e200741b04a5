"""Volumes resampled to another size or voxel spacing while they are read, slab by slab."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, Floats, Ints, Spacing, Triple
from lit_data.wings.volumes.files.volume import Volume


@dataclass(frozen=True, slots=True)
class Resolution:
    """Size or voxel spacing that volumes are resampled to; without either they stay as they are.

    Args:
        shape: (z, y, x) voxels, or one number for all three.
        spacing_mm: (z, y, x), or one number for all three.
        fit: ``resample`` stretches to ``shape``; ``pad_crop`` adds air around the volume or crops
            it, about its center. With ``pad_crop``, ``spacing_mm`` comes first.

    Raises:
        ConfigError: A number is not above 0, or options contradict each other.
    """

    shape: int | Triple | None = None
    spacing_mm: float | Spacing | None = None
    fit: Literal["resample", "pad_crop"] = "resample"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _read_triple("shape", self.shape, int))
        object.__setattr__(self, "spacing_mm", _read_triple("spacing_mm", self.spacing_mm, float))
        if self.fit not in ("resample", "pad_crop"):
            raise ConfigError(f"fit={self.fit!r} is not allowed; give 'resample' or 'pad_crop'")
        if self.fit == "pad_crop" and self.shape is None:
            raise ConfigError("fit='pad_crop' needs a shape= to pad or crop to")
        if self.fit == "resample" and self.shape is not None and self.spacing_mm is not None:
            raise ConfigError(
                "shape= and spacing_mm= contradict each other; give one, or fit='pad_crop' for both"
            )

    @property
    def is_original(self) -> bool:
        """True if volumes stay as they are."""
        return self.shape is None and self.spacing_mm is None

    def apply(self, volume: Volume, *, fill: float, nearest: bool = False) -> Volume:
        """Return the volume at this resolution; closing it closes the volume.

        Args:
            volume: Volume to read from.
            fill: Value of added voxels.
            nearest: Take the nearest voxel (labels) instead of interpolating linearly between voxel
                centers.
        """
        shape, spacing_mm = _as_triple(self.shape), _as_triple(self.spacing_mm)
        if spacing_mm is not None and not np.allclose(spacing_mm, volume.spacing_mm, rtol=1e-6):
            # Size of a new voxel in old ones.
            steps = np.divide(spacing_mm, volume.spacing_mm).tolist()
            z, y, x = np.divide(volume.shape, steps).tolist()
            resampled_shape = max(1, round(z)), max(1, round(y)), max(1, round(x))
            volume = _ResampledVolume(volume, resampled_shape, steps, nearest=nearest)
        if shape is None or shape == volume.shape:
            return volume
        if self.fit == "pad_crop":
            return _PaddedVolume(volume, shape, fill)
        steps = np.divide(volume.shape, shape).tolist()
        return _ResampledVolume(volume, shape, steps, nearest=nearest)


def resample_labels(labels: Array, like: Volume, spacing_mm: Spacing) -> Array:
    """Resample labels of a resampled volume to the grid of the original, each voxel from the nearest.

    Args:
        labels: [z, y, x].
        like: The volume as stored in its file.
        spacing_mm: (z, y, x) of the labels.

    Returns:
        [Z, Y, X], the shape of the volume.
    """
    if labels.shape == like.shape:
        return labels
    # Size of an old voxel in new ones: both grids begin at the edge of the first voxel.
    steps = np.divide(like.spacing_mm, spacing_mm).tolist()
    axes = [_plan(*axis) for axis in zip(like.shape, labels.shape, steps, strict=True)]
    return labels[np.ix_(*(axis.nearest for axis in axes))]


class _ResampledAxis(NamedTuple):
    """Old voxels of each new one along an axis.

    Attributes:
        lower: [n] the old voxel before the center of each new one.
        upper: [n] the old voxel after that center.
        weight: [n] weight of ``upper``, 0..1.
    """

    lower: Ints
    upper: Ints
    weight: Floats

    @property
    def nearest(self) -> Ints:
        """The old voxel nearest to the center of each new one: [n]."""
        return np.where(self.weight >= 0.5, self.upper, self.lower)

    def mix(self, block: Array, axis: int) -> Array:
        """Interpolate along an axis, in float32."""
        shape = [1, 1, 1]
        shape[axis] = -1
        weight = self.weight.reshape(shape)
        # In place, because blocks are large: lower + (upper - lower) * weight.
        mixed = block.take(self.upper, axis).astype(np.float32)
        lower = block.take(self.lower, axis).astype(np.float32, copy=False)
        mixed -= lower
        mixed *= weight
        mixed += lower
        return mixed


class _ResampledVolume(Volume):
    """Volume on another grid over the same body; both begin at the edge of the first voxel."""

    def __init__(
        self, source: Volume, shape: Triple, steps: Sequence[float], *, nearest: bool
    ) -> None:
        z_mm, y_mm, x_mm = np.multiply(source.spacing_mm, steps).tolist()
        # Half a voxel is longer or shorter, so the center of the first one moves.
        starts = [0.5 * step - 0.5 for step in steps]
        super().__init__(
            source.name,
            shape=shape,
            dtype=source.dtype,
            spacing_mm=(z_mm, y_mm, x_mm),
            affine=_move(source.affine, steps, starts),
        )
        self._source, self._steps, self._nearest = source, steps, nearest
        self._axes = [_plan(*axis) for axis in zip(shape, source.shape, steps, strict=True)]
        self._last_block: tuple[int, Array] | None = None

    @property
    def work_bytes(self) -> int:
        plane = self._source.shape[1] * self._source.shape[2]
        old_bytes = math.ceil(max(1.0, self._steps[0])) * self._source.work_bytes
        return old_bytes + plane * (self.dtype.itemsize if self._nearest else 12)

    def read(self, begin: int, end: int) -> Array:
        lower, upper, weight = self._axes[0]
        first, last = int(lower[begin]), int(upper[end - 1])
        block = self._read_source(first, last + 1)
        z = _ResampledAxis(lower[begin:end] - first, upper[begin:end] - first, weight[begin:end])
        _, y, x = self._axes
        if self._nearest:
            return block[z.nearest][:, y.nearest][:, :, x.nearest]
        for number, axis in enumerate((z, y, x)):
            block = axis.mix(block, number)
        return _round(block, self.dtype)

    def close(self) -> None:
        self._last_block = None
        self._source.close()

    def _read_source(self, begin: int, end: int) -> Array:
        """Read old slices, reusing those that the previous slab needed too."""
        # Packed files run forward only: reading a slice again means starting over.
        start, last_block = self._last_block or (0, None)
        if last_block is None or not start <= begin <= start + len(last_block):
            block = self._source.read(begin, end)
        elif end <= start + len(last_block):
            block = last_block[begin - start : end - start]
        else:
            new_slices = self._source.read(start + len(last_block), end)
            block = np.concatenate([last_block[begin - start :], new_slices])
        self._last_block = begin, block
        return block


class _PaddedVolume(Volume):
    """The center of a volume, or a volume in the center of a larger one."""

    def __init__(self, source: Volume, shape: Triple, fill: float) -> None:
        # First voxel of the new grid in the old one; below 0 if voxels are added.
        self._starts = [(old - new) // 2 for old, new in zip(source.shape, shape, strict=True)]
        affine = _move(source.affine, (1, 1, 1), self._starts)
        super().__init__(
            source.name,
            shape=shape,
            dtype=source.dtype,
            spacing_mm=source.spacing_mm,
            affine=affine,
        )
        self._source = source
        least = 0 if source.dtype == np.bool_ else float(_limits(source.dtype).min)
        self._fill = max(fill, least)

    @property
    def work_bytes(self) -> int:
        return self._source.work_bytes + self.slice_bytes

    def read(self, begin: int, end: int) -> Array:
        # Voxels that nothing is copied to have been added.
        slab = np.full((end - begin, *self.shape[1:]), self._fill, self.dtype)
        shift = begin + self._starts[0]
        first, last = max(shift, 0), min(end + self._starts[0], self._source.shape[0])
        if first >= last:
            return slab
        block = self._source.read(first, last)
        inside = [slice(first - shift, last - shift)]  # of the slab
        cut = [slice(None)]  # of the block
        for axis in (1, 2):
            start, new, old = self._starts[axis], self.shape[axis], self._source.shape[axis]
            inside.append(slice(max(0, -start), min(new, old - start)))
            cut.append(slice(max(0, start), min(old, new + start)))
        slab[tuple(inside)] = block[tuple(cut)]
        return slab

    def close(self) -> None:
        self._source.close()


def _plan(new: int, old: int, step: float) -> _ResampledAxis:
    """Map an axis of ``new`` voxels, ``step`` old voxels apart, to one of ``old`` voxels."""
    # Beyond the outer centers the value is that of the last voxel.
    centres = np.clip((np.arange(new) + 0.5) * step - 0.5, 0, old - 1)
    lower = np.floor(centres).astype(np.int64)
    upper = np.minimum(lower + 1, old - 1)
    return _ResampledAxis(lower, upper, (centres - lower).astype(np.float32))


def _move(affine: Array | None, steps: Sequence[float], starts: Sequence[float]) -> Array | None:
    """Return the affine of a grid whose voxels are at ``start + step * number`` of the old one.

    Args:
        affine: Affine of the old grid, see ``Volume``.
        steps: (z, y, x) old voxels between new ones.
        starts: (z, y, x) of the first new voxel in the old grid.
    """
    if affine is None:
        return None
    change = np.diag([*reversed(steps), 1.0])  # affines are of (x, y, z)
    change[:3, 3] = list(reversed(starts))
    moved: Array = affine @ change
    return moved


def _round(block: Array, dtype: "np.dtype[Any]") -> Array:
    if dtype.kind == "f":
        return block
    if dtype == np.bool_:
        return block >= 0.5
    return np.rint(block).astype(dtype)


def _limits(dtype: "np.dtype[Any]") -> "np.iinfo[Any] | np.finfo[Any]":
    return np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)


def _read_triple(name: str, value: object, number: Callable[[Any], Any]) -> object:
    if value is None:
        return None
    try:
        parts = list(value)  # type: ignore[call-overload]
    except TypeError:
        parts = [value] * 3
    if len(parts) != 3 or not all(_is_length(part, number) for part in parts):
        kind = "whole numbers" if number is int else "numbers"
        raise ConfigError(
            f"{name}={value!r} is not allowed; give one or three {kind} above 0, "
            "in the order z, y, x"
        )
    return tuple(number(part) for part in parts)


def _is_length(part: Any, number: Callable[[Any], Any]) -> bool:  # noqa: ANN401 - of a configuration
    """Return True for a finite number above 0, and for a whole one if `number` is int."""
    if not isinstance(part, int | float) or not math.isfinite(part):
        return False
    return part > 0 and bool(number(part) == part)


def _as_triple(value: Any) -> Any:  # noqa: ANN401 - __post_init__ made a triple of it
    return value
