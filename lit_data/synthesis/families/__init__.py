"""The families of defects, by name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from lit_data.checks import call_checked
from lit_data.errors import ConfigError
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.families.line import Line, Scratch
from lit_data.synthesis.families.nick import Nick, Relief
from lit_data.synthesis.families.region import Blur, CutPaste, Shift, Stain
from lit_data.synthesis.families.spot import Spot
from lit_data.synthesis.families.stripe_break import ExtraStripe, StripeBreak
from lit_data.synthesis.families.texture import Texture

FAMILIES: Final[Mapping[str, type[Family]]] = {
    family.name: family
    for family in (
        Spot, Scratch, StripeBreak, ExtraStripe, Stain, Relief, Line, CutPaste, Texture, Nick, Shift, Blur,
    )
}  # fmt: skip
"""A family keeps its name for ever: it is its class in exported annotations."""


def build_families(given: Mapping[str, Any] | tuple[Family, ...]) -> tuple[Family, ...]:
    """Families from their names.

    Args:
        given: For each name the options of its class, a family, or none to leave it out; or
            families.

    Raises:
        ConfigError: A name or an option is unknown, or nothing is left.
    """
    named = (
        given.items() if isinstance(given, Mapping) else ((family.name, family) for family in given)
    )
    families = tuple(_build(str(name), value) for name, value in named if value is not None)
    if not families:
        raise ConfigError(
            f"families is empty: give at least one of {', '.join(FAMILIES)}, or leave synthesis out"
        )
    return families


def _build(name: str, given: Any) -> Family:  # noqa: ANN401 - options or a family
    if isinstance(given, Family):
        return given
    if name not in FAMILIES:
        raise ConfigError(f"families.{name} is unknown: choose from {', '.join(FAMILIES)}")
    known = [field.name for field in fields(FAMILIES[name])]
    if not isinstance(given, Mapping) or not given.keys() <= set(known):
        raise ConfigError(f"families.{name}={given!r}: its options are {', '.join(known)}")
    return call_checked(FAMILIES[name], (), given, f"families.{name}")
