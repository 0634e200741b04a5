"""Stains: smooth clouds that brighten or darken."""

from dataclasses import dataclass
from typing import ClassVar

from lit_data.synthesis.families.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Stain(Region):
    """A region with a soft edge that is brighter or darker than its surroundings; see `Region` for the arguments."""

    name: ClassVar[str] = "stain"
    parameters: ClassVar[tuple[str, ...]] = Region.outline
    turns_inwards: ClassVar[bool] = True
    soft: ClassVar[float] = 0.8
