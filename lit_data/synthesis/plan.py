"""Where, how strong and in which images defects appear: all the randomness of synthesis, and no pixels."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.rng import Stream, uniform
from lit_data.synthesis.families.base import DRAWS, Family, Floats
from lit_data.synthesis.kernels import SUBPIXELS
from lit_data.synthesis.spec import DEFECT_DRAWS, SAMPLE_DRAWS, DefectSpec

if TYPE_CHECKING:
    import torch

_SIDE_BITS: Final = 20


class Group(NamedTuple):
    """Defects of a plan that are drawn together: those from `start` to `stop`, in windows of one size."""

    family: int
    height_px: int
    width_px: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DefectPlan:
    """N defects of a batch; the arrays are NumPy arrays, or tensors on the device where they will
    be drawn.

    Args:
        row: [N] int64, the sample in the batch.
        y: [N] float32, centre in px from the top.
        x: [N] float32, centre in px from the left.
        family: [N] int64, which of the specification's families.
        amplitude: [N] float32, signed strength, in the unit that the specification says for the
            family.
        channels: [N, C] bool, the channels that carry the defect.
        is_true: [N] bool, whether it belongs to the mask.
        values: [N, DRAWS] float32, the family's parameters in their order.
        groups: What is drawn together; the defects lie in the order of the groups, and in each by
            sample.
        spec: The specification that the defects were drawn from.
    """

    row: Any
    y: Any
    x: Any
    family: Any
    amplitude: Any
    channels: Any
    is_true: Any
    values: Any
    groups: tuple[Group, ...]
    spec: DefectSpec

    def __len__(self) -> int:
        return len(self.row)

    def arrays(self) -> dict[str, Any]:
        """The arrays by name."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("groups", "spec")
        }

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "DefectPlan":
        """The plan with tensors on a device, which takes one copy.

        Args:
            device: Where to.
            non_blocking: Do not wait for the copy.
        """
        import torch

        tensors = {name: torch.as_tensor(array) for name, array in self.arrays().items()}
        if tensors["row"].device != torch.device(device):
            tensors = copy_packed(tensors, torch.device(device), non_blocking)
        return self._with_arrays(tensors)

    def select(self, chosen: Any) -> "DefectPlan":  # noqa: ANN401 - an array or tensor on the host
        """Some of the defects.

        Args:
            chosen: [N] bool, on the host.
        """
        counts = [int(chosen[group.start : group.stop].sum()) for group in self.groups]
        stops = np.cumsum([0, *counts]).tolist()
        groups = tuple(
            group._replace(start=start, stop=stop)
            for group, start, stop in zip(self.groups, stops, stops[1:], strict=False)
            if stop > start
        )
        some = self._with_arrays({name: array[chosen] for name, array in self.arrays().items()})
        return replace(some, groups=groups)

    def slice_samples(self, start: int, stop: int) -> "DefectPlan":
        """The plan of the samples from `start` to `stop` alone, which are counted from 0 then."""
        row = self.row if isinstance(self.row, np.ndarray) else self.row.cpu().numpy()
        some = self.select((row >= start) & (row < stop))
        return replace(some, row=some.row - start)

    def _with_arrays(self, arrays: Mapping[str, Any]) -> "DefectPlan":
        return replace(self, **arrays)


def sample_plan(
    spec: DefectSpec, seed: int, epoch: int, index: ArrayLike, shape: tuple[int, int, int]
) -> DefectPlan:
    """Draw the defects of a batch; each sample's are a pure function of (seed, epoch, its index).

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        epoch: The epoch, 0 for stages that must not change.
        index: [B] sample indices.
        shape: (C, H, W) of a sample; channel 0 is the target, the others are references.

    Returns:
        The plan.
    """
    channels, height_px, width_px = shape
    draws = uniform(seed, Stream.DEFECTS, index, epoch, spec.draws)
    present, is_true = _draw_counts(spec, draws[:, :SAMPLE_DRAWS], has_references=channels > 1)
    row, slot = np.nonzero(present)
    each = draws[:, SAMPLE_DRAWS:].reshape(len(draws), spec.count[1], DEFECT_DRAWS)[row, slot].T
    true = is_true[row, slot]
    upper, families, variants = spec.kinds
    kind = np.searchsorted(upper, each[2], side="right")
    shapes = (
        uniform(seed, Stream.SHAPES, index, epoch, spec.shape_draws * spec.count[1])
        if spec.shape_draws
        else draws
    )
    shapes = (
        shapes.reshape(len(draws), spec.count[1], -1)[row, slot] if spec.shape_draws else each.T
    )
    family = families[kind]
    y, x = _place(each[0], height_px, spec.subpixel), _place(each[1], width_px, spec.subpixel)
    values = np.zeros((len(row), DRAWS), np.float32)
    windows_px = _shape(spec, family, variants[kind], shapes, (y, x, values), (height_px, width_px))
    strength = _draw_strength(spec, family, each[3], each[4])
    carriers = _choose_channels(true, each[5], channels)
    order, groups = _group(family, windows_px)
    plan = DefectPlan(row, y, x, family, strength, carriers, true, values, groups, spec)
    return (
        plan
        if order is None
        else replace(plan, **{name: array[order] for name, array in plan.arrays().items()})
    )


def copy_packed(
    tensors: "Mapping[str, torch.Tensor]", device: "torch.device", non_blocking: bool
) -> "dict[str, torch.Tensor]":
    """The same tensors on a device by a single copy; every number in a plan is exact in float32."""
    import torch

    widths = [tensor[:1].numel() or 1 for tensor in tensors.values()]
    flat = [
        t.reshape(len(t), width).to(torch.float32)
        for t, width in zip(tensors.values(), widths, strict=True)
    ]
    packed = torch.cat(flat, dim=1).to(device, non_blocking=non_blocking)
    parts = zip(tensors.items(), torch.split(packed, widths, dim=1), strict=True)
    return {name: part.to(tensor.dtype).reshape(tensor.shape) for (name, tensor), part in parts}


@lru_cache
def distractor_patterns(channels: int) -> NDArray[np.bool_]:
    """Every set of channels that a distractor may occupy: target with references, or one reference
    alone.

    Args:
        channels: Number of channels, the first of which is the target.

    Returns:
        [P, C] bool; P is 0 for a single channel.
    """
    patterns = [
        p
        for p in itertools.product((False, True), repeat=channels)
        if any(p[1:]) and (p[0] or sum(p) == 1)
    ]
    return np.array(patterns, dtype=bool).reshape(-1, channels)


def _draw_counts(
    spec: DefectSpec, draws: Floats, *, has_references: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    slot = np.arange(spec.count[1])
    true = slot < _integer(draws[:, 2:3], spec.true_count)
    present = (draws[:, :1] < spec.probability) & (slot < _integer(draws[:, 1:2], spec.count))
    return (present if has_references else present & true), true


def _integer(draws: Floats, bounds: tuple[int, int]) -> NDArray[np.int64]:
    low, high = bounds
    return low + (draws * np.float32(high - low + 1)).astype(np.int64)


def _place(draws: Floats, length_px: int, subpixel: bool) -> Floats:
    steps = SUBPIXELS if subpixel else 1
    placed: Floats = np.floor(draws * np.float32(length_px * steps)) / np.float32(steps)
    return placed


def _draw_strength(
    spec: DefectSpec, family: NDArray[np.int64], draws: Floats, signs: Floats
) -> Floats:
    """[N] signed strengths."""
    low, span = spec.strengths
    sign = np.where(signs < spec.bright_fraction, np.float32(1), np.float32(-1))
    strength: Floats = sign * (low[family] + draws * span[family])
    return strength


def _shape(
    spec: DefectSpec,
    family: NDArray[np.int64],
    variant: NDArray[np.int64],
    draws: Floats,
    filled: tuple[Floats, Floats, Floats],
    shape_px: tuple[int, int],
) -> NDArray[np.int64]:
    """Fill in parameters [N, DRAWS] and move centres y, x [N] where their family wants it; windows [N, 2] or [2]."""
    if len(spec.members) == 1:
        return _shape_some(spec.members[0], slice(None), variant, draws, filled, shape_px)
    windows = np.empty((len(family), 2), np.int64)
    for number, member in enumerate(spec.members):
        chosen = np.flatnonzero(family == number)
        windows[chosen] = _shape_some(
            member, chosen, variant[chosen], draws[chosen], filled, shape_px
        )
    return windows


def _shape_some(
    member: Family,
    chosen: NDArray[np.int64] | slice,
    variant: NDArray[np.int64],
    draws: Floats,
    filled: tuple[Floats, Floats, Floats],
    shape_px: tuple[int, int],
) -> NDArray[np.int64]:
    y, x, values = filled
    parameters = member.sample(draws, variant)
    for column, name in enumerate(member.parameters):
        values[chosen, column] = parameters[name]
    y[chosen], x[chosen] = member.place(y[chosen], x[chosen], parameters, shape_px)
    return member.window_px(parameters, shape_px)


def _group(
    family: NDArray[np.int64], windows_px: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | None, tuple[Group, ...]]:
    """The order in which defects of one family and window lie together, none if they do already, and the groups."""
    if not len(family):
        return None, ()
    if windows_px.ndim == 1:
        height, width = windows_px.tolist()
        return None, (Group(0, height, width, 0, len(family)),)
    key = (family << 2 * _SIDE_BITS) | (windows_px[:, 0] << _SIDE_BITS) | windows_px[:, 1]
    order = np.argsort(key, kind="stable")
    stops = [*(np.flatnonzero(np.diff(key[order])) + 1).tolist(), len(family)]
    starts = [0, *stops[:-1]]
    first = order[starts]
    columns = (family[first].tolist(), *windows_px[first].T.tolist(), starts, stops)
    return order, tuple(itertools.starmap(Group, zip(*columns, strict=True)))


def _choose_channels(is_true: NDArray[np.bool_], draws: Floats, channels: int) -> NDArray[np.bool_]:
    target_alone = np.arange(channels) == 0
    patterns = distractor_patterns(channels)
    if not len(patterns):
        return np.broadcast_to(target_alone, (len(draws), channels)).copy()
    chosen = patterns[(draws * np.float32(len(patterns))).astype(np.int64)]
    return np.where(is_true[:, None], target_alone, chosen)
