"""Distribution of synthetic defects over samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from lit_data.errors import ConfigError
from lit_data.synthesis.families import build_families
from lit_data.synthesis.families.base import Family, Range, check_range
from lit_data.synthesis.families.spot import Spot

SAMPLE_DRAWS: Final = 3
DEFECT_DRAWS: Final = 6


@dataclass(frozen=True, kw_only=True)
class DefectSpec:
    """Distribution of synthetic defects over samples.

    A sample has defects with `probability`; then `count` of them, of which `true_count` are *true*:
    in the target alone, and in the mask. The rest are *distractors*: in the target and at least one
    reference, or in a reference alone, and never in the mask, so that a model has to compare. A
    sample of one channel has no references, hence no distractors.

    Args:
        probability: Chance that a sample has defects, 0 to 1.
        count: Fewest and most defects of such a sample.
        true_count: Fewest and most true ones among them.
        families: Looks of the defects: for each name in `lit_data.synthesis.FAMILIES` the options
            of its class, among them its weight.
        amplitude: Smallest and largest strength, in units of the 0..1 value range, of families that
            say no other.
        contrast: The same in standard deviations of the noise around each defect; takes the place
            of `amplitude`.
        bright_fraction: Fraction of defects that brighten; the others darken.
        subpixel: Centres between pixels (on a grid of 1/8 px); if not, on pixel centres.
        least_change: A pixel is in the mask if a true defect changes it by this much at least, in
            units of the 0..1 value range; spots mark their whole window. Where pixels are replaced
            by others (cut_paste, shift, blur, texture, nick, stripe_break) the change of a pixel
            and its neighbours, root mean square, must stand out from noise as well, by three of its
            standard deviations.

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
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must lie between 0 and 1")
        for name in ("count", "true_count", "amplitude", "contrast"):
            bounds = getattr(self, name)
            if bounds is not None:
                object.__setattr__(self, name, check_range(name, bounds))
        if self.count[1] < 1:
            raise ConfigError(
                f"count={list(self.count)} allows no defect: leave synthesis out, or set "
                "probability=0"
            )

    @property
    def members(self) -> tuple[Family, ...]:
        """The families, in the order in which a plan counts them."""
        return cast(tuple[Family, ...], self.families)

    @property
    def draws(self) -> int:
        """Random numbers of one sample from its stream."""
        return SAMPLE_DRAWS + DEFECT_DRAWS * self.count[1]

    @cached_property
    def has_plain_spots_only(self) -> bool:
        """Return True if defects are Gaussian spots whose strength is the same on any image."""
        if len(self.members) != 1 or not isinstance(self.members[0], Spot):
            return False
        return not self.relative.any()

    @cached_property
    def kinds(self) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Every form of every family, and its frequency.

        Upper ends of the intervals in 0..1 of all kinds but the last [K - 1], family of each kind
        [K], and number of the family's variant [K].
        """
        weights: list[NDArray[np.float64]] = []
        families: list[int] = []
        variants: list[int] = []
        for number, member in enumerate(self.members):
            weights.append(np.array(member.variants) * self._weigh(member))
            families += [number] * len(member.variants)
            variants += range(len(member.variants))
        ends = np.cumsum(np.concatenate(weights))
        upper = (ends / np.concatenate(weights).sum())[:-1].astype(np.float32)
        return upper, np.array(families), np.array(variants)

    def _weigh(self, member: Family) -> float:
        # Divided once at the end, as with one family: a weight that is rounded twice may choose
        # another form.
        return 1.0 if len(self.members) == 1 else member.weight / sum(member.variants)

    @cached_property
    def strengths(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Smallest strength of each family, and the width of its range."""
        bounds = []
        for member in self.members:
            # The family's own range first, and contrast before amplitude.
            own_bounds = member.contrast or member.amplitude
            bounds.append(own_bounds or self.contrast or self.amplitude)
        low, high = np.array(bounds, np.float64).T
        return low.astype(np.float32), (high - low).astype(np.float32)

    @cached_property
    def relative(self) -> NDArray[np.bool_]:
        """True for each family whose strength is in standard deviations of the noise around it."""
        is_relative = []
        for member in self.members:
            takes_contrast = member.amplitude is None and self.contrast is not None
            is_relative.append(member.contrast is not None or takes_contrast)
        return np.array(is_relative)

    @cached_property
    def shape_draws(self) -> int:
        """Random numbers for the shape of a defect."""
        return max(member.draws for member in self.members)
