"""How defects are distributed over samples."""

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
    """How defects are distributed over samples.

    A sample has defects with `probability`; then `count` of them, of which `true_count` are *true*:
    in the target alone, and in the mask. The rest are *distractors*: in the target and at least one
    reference, or in a reference alone, and never in the mask, so that a model has to compare. A
    sample of one channel has no references, hence no distractors.

    Args:
        probability: Chance that a sample has defects, 0 to 1.
        count: Fewest and most defects of such a sample.
        true_count: Fewest and most true ones among them.
        families: What defects look like: for each name in `lit_data.synthesis.FAMILIES` the options
            of its class, among them its weight.
        amplitude: Smallest and largest strength, in units of the 0..1 value range, of families that
            say no other.
        contrast: The same in standard deviations of the noise around each defect; takes the place
            of `amplitude`.
        bright_fraction: Share of defects that brighten; the others darken.
        subpixel: Centres between pixels (on a grid of 1/8 px); if not, on pixel centres.
        least_change: A pixel is in the mask if a true defect changes it by this much at least, in
            units of the 0..1 value range; spots mark their whole window. Where other pixels take
            the place of those that were there (cut_paste, shift, blur, texture, nick, stripe_break)
            the change of a pixel and its neighbours, root mean square, must stand out from noise as
            well, by three of its standard deviations.

    Raises:
        ConfigError: A range is empty, a share is outside 0..1, or a family is unknown.
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
        """Accept plain lists and mappings, as a configuration file gives them, and check every range."""
        object.__setattr__(self, "families", build_families(self.families))
        for name in ("probability", "bright_fraction", "least_change"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")
        for name in ("count", "true_count", "amplitude", "contrast"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_range(name, getattr(self, name)))
        if self.count[1] < 1:
            raise ConfigError(
                f"count={list(self.count)} allows no defect: leave synthesis out, or set probability=0"
            )

    @property
    def members(self) -> tuple[Family, ...]:
        """The families, in the order in which a plan counts them."""
        return cast(tuple[Family, ...], self.families)

    @property
    def draws(self) -> int:
        """Random numbers that one sample takes from its stream."""
        return SAMPLE_DRAWS + DEFECT_DRAWS * self.count[1]

    @cached_property
    def has_plain_spots_only(self) -> bool:
        """Whether defects are Gaussian spots whose strength does not depend on the image."""
        return (
            len(self.members) == 1 and isinstance(self.members[0], Spot) and not self.relative.any()
        )

    @cached_property
    def kinds(self) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Every form of every family, and how often it is chosen.

        Upper ends of the shares of all kinds but the last [K - 1], family of each kind [K], and
        which of the family's variants it is [K].
        """
        shares = [np.array(member.variants) * self._weigh(member) for member in self.members]
        weights, counts = np.concatenate(shares), [len(share) for share in shares]
        upper: NDArray[np.float32] = (np.cumsum(weights) / weights.sum())[:-1].astype(np.float32)
        return (
            upper,
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(n) for n in counts]),
        )

    def _weigh(self, member: Family) -> float:
        # Divided once at the end, as with one family: a share that is rounded twice may choose
        # another form.
        return 1.0 if len(self.members) == 1 else member.weight / sum(member.variants)

    @cached_property
    def strengths(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Smallest strength of each family, and the width of its range."""
        bounds = [
            member.contrast or member.amplitude or self.contrast or self.amplitude
            for member in self.members
        ]
        low, high = np.array(bounds, np.float64).T
        return low.astype(np.float32), (high - low).astype(np.float32)

    @cached_property
    def relative(self) -> NDArray[np.bool_]:
        """For each family whether its strength is in standard deviations of the noise around the defect."""
        return np.array(
            [
                m.contrast is not None or (m.amplitude is None and self.contrast is not None)
                for m in self.members
            ]
        )

    @cached_property
    def shape_draws(self) -> int:
        """Random numbers that a defect takes for its shape."""
        return max(member.draws for member in self.members)
