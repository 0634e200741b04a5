"""Distribution of synthetic defects, and the plan drawn from it, which has no pixels."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike

from lit_data.core.checks import check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Bools, Doubles, Floats, Ints, Size
from lit_data.synthesis.families import build_families
from lit_data.synthesis.families.base import DRAWS, Family, Range, check_range
from lit_data.synthesis.families.spot import SUBPIXELS, Spot

if TYPE_CHECKING:
    import torch


SAMPLE_DRAWS = 3
DEFECT_DRAWS = 6

_SIDE_BITS = 20


class Synthesis:
    """Base of distributions of what is drawn into clean images."""


@dataclass(frozen=True, kw_only=True)
class DefectSpec(Synthesis):
    """Distribution of synthetic defects over samples.

    A sample has defects with `probability`. It then has `count` of them, of which `true_count` are
    *true*: only in the target, and in the mask. The rest are *distractors*: in the target and at
    least one reference, or only in a reference, and never in the mask, so a model has to compare.
    A sample of one channel has no references and therefore no distractors.

    Args:
        probability: Chance that a sample has defects, 0 to 1.
        count: Smallest and largest number of defects in such a sample.
        true_count: Smallest and largest number of true defects among them.
        families: Kinds of defects: for each name in `lit_data.synthesis.FAMILIES` the options of
            its class, including its weight.
        amplitude: Smallest and largest strength, in units of the 0..1 value range, of families
            without their own.
        contrast: Smallest and largest strength in standard deviations of the noise around each
            defect; replaces `amplitude`.
        bright_fraction: Fraction of defects that are brighter than their surroundings; the others
            are darker.
        subpixel: Place centers between pixels (on a grid of 1/8 px) instead of on pixel centers.
        least_change: Smallest change by a true defect, in units of the 0..1 value range, for a
            pixel to be in the mask; spots mark their whole window. If pixels are replaced by others
            (cut_paste, shift, blur, texture, nick, stripe_break), the root mean square change of a
            pixel and its neighbors must also exceed three standard deviations of the noise.

    Raises:
        ConfigError: A range is empty, a fraction is outside 0..1, or a family is unknown.
    """

    probability: float = 0.5
    count: tuple[int, int] = (3, 8)
    true_count: tuple[int, int] = (0, 2)
    families: Mapping[str, Any] | tuple[Family, ...] = field(default_factory=lambda: {"spot": {}})
    amplitude: Range = (0.08, 0.4)
    contrast: Range | None = None
    bright_fraction: float = 0.5
    subpixel: bool = True
    least_change: float = 0.02

    def __post_init__(self) -> None:
        """Accept lists and mappings, as a configuration file gives them, and check every range."""
        object.__setattr__(self, "families", build_families(self.families))
        for name in ("probability", "bright_fraction", "least_change"):
            check_fraction(name, getattr(self, name))
        for name in ("count", "true_count", "amplitude", "contrast"):
            bounds = getattr(self, name)
            if bounds is not None:
                object.__setattr__(self, name, check_range(name, bounds))
        if self.count[1] < 1:
            raise ConfigError(
                f"count={list(self.count)} allows no defect: remove synthesis, or set probability=0"
            )

    @property
    def members(self) -> tuple[Family, ...]:
        """The families, in the order in which a plan numbers them."""
        return cast(tuple[Family, ...], self.families)

    @property
    def draws(self) -> int:
        """Number of random numbers that a sample draws from its stream."""
        return SAMPLE_DRAWS + DEFECT_DRAWS * self.count[1]

    @cached_property
    def has_plain_spots_only(self) -> bool:
        """Return True if defects are Gaussian spots whose strength is the same on any image."""
        if len(self.members) != 1 or not isinstance(self.members[0], Spot):
            return False
        return not self.relative.any()

    @cached_property
    def kinds(self) -> tuple[Floats, Ints, Ints]:
        """All variants of all families, and their frequencies.

        The arrays are the upper ends of the intervals in 0..1 of all kinds but the last, [K - 1],
        the family of each kind, [K], and the number of the family's variant, [K].
        """
        weights: list[Doubles] = []
        families: list[int] = []
        variants: list[int] = []
        for number, member in enumerate(self.members):
            weights.append(np.array(member.variants) * self._weigh(member))
            families += [number] * len(member.variants)
            variants += range(len(member.variants))
        # Upper ends of intervals of [0, 1), whose lengths are the weights.
        ends = np.cumsum(np.concatenate(weights))
        upper = (ends / np.concatenate(weights).sum())[:-1].astype(np.float32)
        return upper, np.array(families), np.array(variants)

    def _weigh(self, member: Family) -> float:
        # Divided once at the end, as with one family, because a weight that is rounded twice may
        # choose another variant.
        return 1.0 if len(self.members) == 1 else member.weight / sum(member.variants)

    @cached_property
    def strengths(self) -> tuple[Floats, Floats]:
        """Smallest strength of each family, and the width of its range."""
        bounds = []
        for member in self.members:
            # The family's own range first, and contrast before amplitude.
            own_bounds = member.contrast or member.amplitude
            bounds.append(own_bounds or self.contrast or self.amplitude)
        low, high = np.array(bounds, np.float64).T
        return low.astype(np.float32), (high - low).astype(np.float32)

    @cached_property
    def relative(self) -> Bools:
        """True for each family whose strength is in standard deviations of the noise around it."""
        is_relative = []
        for member in self.members:
            takes_contrast = member.amplitude is None and self.contrast is not None
            is_relative.append(member.contrast is not None or takes_contrast)
        return np.array(is_relative)

    @cached_property
    def shape_draws(self) -> int:
        """Number of random numbers for the shape of a defect."""
        return max(member.draws for member in self.members)


class Group(NamedTuple):
    """Defects ``start:stop`` of a plan, which are drawn together in windows of one size."""

    family: int
    height_px: int
    width_px: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DefectPlan:
    """N defects of a batch, in NumPy arrays or in tensors on the device that will draw them.

    Args:
        row: [N] int64, the sample in the batch.
        y: [N] float32, center in px from the top.
        x: [N] float32, center in px from the left.
        family: [N] int64, number of the family in the specification.
        amplitude: [N] float32, signed strength, in the family's unit of the specification.
        channels: [N, C] bool, the channels that show the defect.
        is_true: [N] bool, True if the defect belongs to the mask.
        values: [N, DRAWS] float32, the family's parameters in their order.
        groups: Groups that are drawn together; defects are sorted by group, then by sample.
        spec: Specification that the defects were drawn from.
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
        """Return the arrays by name."""
        names = [field.name for field in fields(self) if field.name not in ("groups", "spec")]
        return {name: getattr(self, name) for name in names}

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "DefectPlan":
        """Return the plan with tensors on a device, using a single copy.

        Args:
            device: Target device.
            non_blocking: Do not wait for the copy.
        """
        import torch

        tensors: dict[str, Any] = {
            name: torch.as_tensor(array) for name, array in self.arrays().items()
        }
        if tensors["row"].device != torch.device(device):
            tensors = copy_packed(tensors, torch.device(device), non_blocking)
        return replace(self, **tensors)

    def select(self, chosen: Any) -> "DefectPlan":  # noqa: ANN401 - an array or tensor on the host
        """Return the plan of some of the defects.

        Args:
            chosen: [N] bool on the host, True for the defects to keep.
        """
        groups = []
        start = 0
        for group in self.groups:
            stop = start + int(chosen[group.start : group.stop].sum())
            if stop > start:
                groups.append(group._replace(start=start, stop=stop))
            start = stop
        arrays = {name: array[chosen] for name, array in self.arrays().items()}
        return replace(self, groups=tuple(groups), **arrays)

    def slice_samples(self, start: int, stop: int) -> "DefectPlan":
        """Return the plan of the samples ``start:stop`` alone, renumbered from 0."""
        row = self.row if isinstance(self.row, np.ndarray) else self.row.cpu().numpy()
        some = self.select((row >= start) & (row < stop))
        return replace(some, row=some.row - start)


def sample_plan(
    spec: DefectSpec, seed: int, epoch: int, index: ArrayLike, shape: tuple[int, int, int]
) -> DefectPlan:
    """Draw the defects of a batch; each sample's are a pure function of (seed, epoch, its index).

    Args:
        spec: Distribution of the defects.
        seed: Seed, 0 <= seed < 2**64.
        epoch: Number of the epoch; 0 for stages that must not change.
        index: [B] sample indices.
        shape: (C, H, W) of a sample; channel 0 is the target, the others are references.
    """
    channels, height_px, width_px = shape
    draws = uniform(seed, Stream.DEFECTS, index, epoch, spec.draws)
    present, is_true = _draw_counts(spec, draws[:, :SAMPLE_DRAWS], has_references=channels > 1)
    # Every sample draws for the largest number of defects, so none depends on their number.
    defect_draws = _of_each(draws[:, SAMPLE_DRAWS:], present, DEFECT_DRAWS)
    down, across, kind_level, strength_level, sign, carrier = defect_draws.T
    shape_draws = defect_draws
    if spec.shape_draws:
        count = spec.shape_draws * spec.count[1]
        all_draws = uniform(seed, Stream.SHAPES, index, epoch, count)
        shape_draws = _of_each(all_draws, present, spec.shape_draws)
    # A kind is one variant of one family; its weight is an interval of [0, 1).
    upper, families, variants = spec.kinds
    kind = np.searchsorted(upper, kind_level, side="right")
    family = families[kind]
    y = _place(down, height_px, spec.subpixel)
    x = _place(across, width_px, spec.subpixel)
    shapes = _draw_shapes(spec, family, variants[kind], shape_draws, y, x, shape[1:])
    order, groups = _group(family, shapes.windows_px)
    plan = DefectPlan(
        row=np.nonzero(present)[0],
        y=shapes.y,
        x=shapes.x,
        family=family,
        amplitude=_draw_strength(spec, family, strength_level, sign),
        channels=_choose_channels(is_true[present], carrier, channels),
        is_true=is_true[present],
        values=shapes.values,
        groups=groups,
        spec=spec,
    )
    if order is None:
        return plan
    return replace(plan, **{name: array[order] for name, array in plan.arrays().items()})


def copy_packed(
    tensors: "Mapping[str, torch.Tensor]", device: "torch.device", non_blocking: bool
) -> "dict[str, torch.Tensor]":
    """Return the same tensors on a device, using a single copy.

    Every number in a plan is exact in float32.
    """
    import torch

    # Columns of one matrix of float32: one copy instead of eight small ones.
    widths = []
    columns = []
    for tensor in tensors.values():
        width = tensor[:1].numel() or 1
        widths.append(width)
        columns.append(tensor.reshape(len(tensor), width).to(torch.float32))
    packed = torch.cat(columns, dim=1).to(device, non_blocking=non_blocking)
    copies = {}
    parts = torch.split(packed, widths, dim=1)
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        copies[name] = part.to(tensor.dtype).reshape(tensor.shape)
    return copies


@lru_cache
def distractor_patterns(channels: int) -> Bools:
    """Return every possible set of channels of a distractor: target and references, or one reference.

    Args:
        channels: Number of channels, the first of which is the target.

    Returns:
        [P, C] bool; P is 0 for a single channel.
    """
    # A single reference, or the target with references: the cases that a comparison distinguishes.
    patterns = []
    for pattern in itertools.product((False, True), repeat=channels):
        in_target, *in_references = pattern
        if any(in_references) and (in_target or sum(in_references) == 1):
            patterns.append(pattern)
    return np.array(patterns, dtype=bool).reshape(-1, channels)


def _draw_counts(spec: DefectSpec, draws: Floats, *, has_references: bool) -> tuple[Bools, Bools]:
    """Return masks [B, most] of the defects that each sample has, and of the true ones."""
    slot = np.arange(spec.count[1])
    is_true = slot < _integer(draws[:, 2:3], spec.true_count)
    # The first slots are true defects, those that follow distractors.
    present = (draws[:, :1] < spec.probability) & (slot < _integer(draws[:, 1:2], spec.count))
    if not has_references:
        present = present & is_true
    return present, is_true


def _of_each(draws: Floats, present: Bools, count: int) -> Floats:
    """Return the numbers of each present defect, [N, count], from [B, most * count]."""
    drawn: Floats = draws.reshape(*present.shape, count)[present]
    return drawn


def _integer(draws: Floats, bounds: tuple[int, int]) -> Ints:
    low, high = bounds
    return low + (draws * np.float32(high - low + 1)).astype(np.int64)


def _place(draws: Floats, length_px: int, subpixel: bool) -> Floats:
    # Centers are on a grid, so that the kernels of spots can be computed once.
    steps = SUBPIXELS if subpixel else 1
    placed: Floats = np.floor(draws * np.float32(length_px * steps)) / np.float32(steps)
    return placed


def _draw_strength(spec: DefectSpec, family: Ints, draws: Floats, signs: Floats) -> Floats:
    """Return the signed strengths, [N]."""
    low, span = spec.strengths
    sign = np.where(signs < spec.bright_fraction, np.float32(1), np.float32(-1))
    strength: Floats = sign * (low[family] + draws * span[family])
    return strength


class _Shapes(NamedTuple):
    """Shapes of N defects: centers y and x [N], parameters [N, DRAWS], and windows [N, 2]."""

    y: Floats
    x: Floats
    values: Floats
    windows_px: Ints


def _draw_shapes(
    spec: DefectSpec,
    family: Ints,
    variant: Ints,
    draws: Floats,
    y: Floats,
    x: Floats,
    shape_px: Size,
) -> _Shapes:
    """Return the shape of each defect, which its family draws around the center."""
    count = len(family)
    values, windows = np.zeros((count, DRAWS), np.float32), np.empty((count, 2), np.int64)
    shapes = _Shapes(y.copy(), x.copy(), values, windows)
    for number, member in enumerate(spec.members):
        # A slice copies nothing: most specifications have one family.
        chosen = slice(None) if len(spec.members) == 1 else np.flatnonzero(family == number)
        parameters = member.sample(draws[chosen], variant[chosen])
        centers = member.place(y[chosen], x[chosen], parameters, shape_px)
        shapes.y[chosen], shapes.x[chosen] = centers
        for column, name in enumerate(member.parameters):
            values[chosen, column] = parameters[name]
        windows[chosen] = member.window_px(parameters, shape_px)
    return shapes


def _group(family: Ints, windows_px: Ints) -> tuple[Ints | None, tuple[Group, ...]]:
    """Return the groups, and the order that sorts defects by group; None if they are sorted."""
    if not len(family):
        return None, ()
    # One whole number for family and window, so that one sort is enough.
    key = (family << 2 * _SIDE_BITS) | (windows_px[:, 0] << _SIDE_BITS) | windows_px[:, 1]
    if (key == key[0]).all():  # as with spots alone
        height, width = windows_px[0].tolist()
        return None, (Group(int(family[0]), height, width, 0, len(family)),)
    order = np.argsort(key, kind="stable")
    stops = [*(np.flatnonzero(np.diff(key[order])) + 1).tolist(), len(family)]
    starts = [0, *stops[:-1]]
    groups = []
    for start, stop in zip(starts, stops, strict=True):
        first = order[start]
        height, width = windows_px[first].tolist()
        groups.append(Group(int(family[first]), height, width, start, stop))
    return order, tuple(groups)


def _choose_channels(is_true: Bools, draws: Floats, channels: int) -> Bools:
    target_alone = np.arange(channels) == 0
    patterns = distractor_patterns(channels)
    if not len(patterns):
        return np.broadcast_to(target_alone, (len(draws), channels)).copy()
    chosen = patterns[(draws * np.float32(len(patterns))).astype(np.int64)]
    return np.where(is_true[:, None], target_alone, chosen)
