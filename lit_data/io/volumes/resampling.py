"""Volumes brought to another size or voxel spacing while they are read, slab by slab."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.io.volumes.volume import Spacing, Triple, Volume
from lit_data.types import Array


@dataclass(frozen=True, slots=True)
class Resolution:
    """The size or voxel spacing that volumes are brought to; as they are if nothing is given.

    Args:
        shape: (z, y, x) voxels, or one number for all three.
        spacing_mm: (z, y, x), or one number for all three.
        fit: ``resample`` stretches to ``shape``; ``pad_crop`` adds air around the volume or cuts
            it, about its middle. With ``pad_crop``, ``spacing_mm`` comes first.

    Raises:
        ConfigError: a number that is not above 0, or options that contradict each other.
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

    def apply(self, volume: Volume, *, fill: float, nearest: bool = False) -> Volume:
        """The volume at this resolution; closing it closes the volume.

        Args:
            volume: What to read from.
            fill: Value of added voxels.
            nearest: Take the nearest voxel (labels) instead of interpolating linearly between voxel
                centres.
        """
        shape, spacing_mm = _as_triple(self.shape), _as_triple(self.spacing_mm)
        if spacing_mm is not None and not np.allclose(spacing_mm, volume.spacing_mm, rtol=1e-6):
            steps = [new / old for new, old in zip(spacing_mm, volume.spacing_mm, strict=True)]
            lengths = [
                max(1, round(length / step))
                for length, step in zip(volume.shape, steps, strict=True)
            ]
            volume = _ResampledVolume(volume, _triple(lengths), steps, nearest=nearest)
        if shape is None or shape == volume.shape:
            return volume
        if self.fit == "pad_crop":
            return _PaddedVolume(volume, shape, fill)
        steps = [old / new for old, new in zip(volume.shape, shape, strict=True)]
        return _ResampledVolume(volume, shape, steps, nearest=nearest)


class _ResampledAxis(NamedTuple):
    """For each new voxel along an axis, the two old ones around its centre and the weight of the second."""

    lower: NDArray[np.int64]
    upper: NDArray[np.int64]
    weight: NDArray[np.float32]

    def mix(self, block: Array, axis: int) -> Array:
        """Interpolate along an axis: float32."""
        weight = self.weight.reshape([-1 if number == axis else 1 for number in range(3)])
        mixed = block.take(self.upper, axis).astype(np.float32)
        lower = block.take(self.lower, axis).astype(np.float32, copy=False)
        mixed -= lower
        mixed *= weight
        mixed += lower
        return mixed


class _ResampledVolume(Volume):
    """Another grid over the same body; both begin at the outer edge of the first voxel."""

    def __init__(
        self, source: Volume, shape: Triple, steps: Sequence[float], *, nearest: bool
    ) -> None:
        z, y, x = (mm * step for mm, step in zip(source.spacing_mm, steps, strict=True))
        affine = _move(source.affine, steps, [0.5 * step - 0.5 for step in steps])
        super().__init__(
            source.name, shape=shape, dtype=source.dtype, spacing_mm=(z, y, x), affine=affine
        )
        self._source, self._steps, self._nearest = source, steps, nearest
        self._axes = [
            _plan(new, old, step) for new, old, step in zip(shape, source.shape, steps, strict=True)
        ]
        self._kept: tuple[int, Array] | None = None

    @property
    def work_bytes(self) -> int:
        plane = self._source.shape[1] * self._source.shape[2]
        old_bytes = math.ceil(max(1.0, self._steps[0])) * self._source.work_bytes
        return old_bytes + plane * (self.dtype.itemsize if self._nearest else 12)

    def read(self, begin: int, end: int) -> Array:
        lower, upper, weight = self._axes[0]
        first, last = int(lower[begin]), int(upper[end - 1])
        block = self._read_source(first, last + 1)
        axis = _ResampledAxis(lower[begin:end] - first, upper[begin:end] - first, weight[begin:end])
        if self._nearest:
            rows = [
                np.where(part.weight >= 0.5, part.upper, part.lower)
                for part in (axis, *self._axes[1:])
            ]
            return block[rows[0]][:, rows[1]][:, :, rows[2]]
        for number, part in enumerate((axis, *self._axes[1:])):
            block = part.mix(block, number)
        return _round(block, self.dtype)

    def close(self) -> None:
        self._kept = None
        self._source.close()

    def _read_source(self, begin: int, end: int) -> Array:
        """Old slices; those that the slab before needed too are not read again, since packed files run forward."""
        start, kept = self._kept or (0, None)
        if kept is None or not start <= begin <= start + len(kept):
            block = self._source.read(begin, end)
        elif end <= start + len(kept):
            block = kept[begin - start : end - start]
        else:
            block = np.concatenate(
                [kept[begin - start :], self._source.read(start + len(kept), end)]
            )
        self._kept = begin, block
        return block


class _PaddedVolume(Volume):
    """The middle of a volume, or a volume in the middle of a larger one."""

    def __init__(self, source: Volume, shape: Triple, fill: float) -> None:
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
        slab = np.full((end - begin, *self.shape[1:]), self._fill, self.dtype)
        first = max(begin + self._starts[0], 0)
        last = min(end + self._starts[0], self._source.shape[0])
        if first < last:
            block = self._source.read(first, last)
            target, rows = (
                [slice(first - begin - self._starts[0], last - begin - self._starts[0])],
                [slice(None)],
            )
            for start, new, old in zip(
                self._starts[1:], self.shape[1:], self._source.shape[1:], strict=True
            ):
                target.append(slice(max(0, -start), min(new, old - start)))
                rows.append(slice(max(0, start), min(old, new + start)))
            slab[tuple(target)] = block[tuple(rows)]
        return slab

    def close(self) -> None:
        self._source.close()


def _plan(new: int, old: int, step: float) -> _ResampledAxis:
    centres = np.clip((np.arange(new) + 0.5) * step - 0.5, 0, old - 1)
    lower = np.floor(centres).astype(np.int64)
    return _ResampledAxis(
        lower, np.minimum(lower + 1, old - 1), (centres - lower).astype(np.float32)
    )


def _move(affine: Array | None, steps: Sequence[float], starts: Sequence[float]) -> Array | None:
    """The affine of a grid whose voxels lie at ``start + step * number`` of the old one; both are (z, y, x)."""
    if affine is None:
        return None
    change = np.diag([*reversed(steps), 1.0])
    change[:3, 3] = list(reversed(starts))
    moved: Array = affine @ change
    return moved


def _round(block: Array, dtype: "np.dtype[Any]") -> Array:
    if dtype.kind == "f":
        return block
    return block >= 0.5 if dtype == np.bool_ else np.rint(block).astype(dtype)


def _limits(dtype: "np.dtype[Any]") -> "np.iinfo[Any] | np.finfo[Any]":
    return np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)


def _read_triple(name: str, value: object, number: Callable[[Any], Any]) -> object:
    if value is None:
        return None
    try:
        parts = list(value)  # type: ignore[call-overload]
    except TypeError:
        parts = [value] * 3
    is_right = len(parts) == 3 and all(
        isinstance(part, int | float) and math.isfinite(part) for part in parts
    )
    if not is_right or any(part <= 0 or number(part) != part for part in parts):
        kind = "whole numbers" if number is int else "numbers"
        raise ConfigError(
            f"{name}={value!r} is not allowed; give one or three {kind} above 0, in the order z, y, x"
        )
    return tuple(number(part) for part in parts)


def _as_triple(value: Any) -> Any:  # noqa: ANN401 - __post_init__ made a triple of it
    return value


def _triple(lengths: Sequence[int]) -> Triple:
    z, y, x = lengths
    return z, y, x
