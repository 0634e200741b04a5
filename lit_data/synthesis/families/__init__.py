"""The families of defects, by name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lit_data.core.checks import call_checked
from lit_data.core.errors import ConfigError
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.families.line import ExtraStripe, Line, Scratch, StripeBreak
from lit_data.synthesis.families.region import Blur, CutPaste, Shift, Stain, Texture
from lit_data.synthesis.families.spot import Nick, Relief, Spot

_CLASSES: tuple[type[Family], ...] = (
    Spot,
    Scratch,
    StripeBreak,
    ExtraStripe,
    Stain,
    Relief,
    Line,
    CutPaste,
    Texture,
    Nick,
    Shift,
    Blur,
)
FAMILIES: Mapping[str, type[Family]] = {family.name: family for family in _CLASSES}
"""Families by name. A name never changes, because it is the class in exported annotations."""


def build_families(specs: Mapping[str, Any] | tuple[Family, ...]) -> tuple[Family, ...]:
    """Build families from their names.

    Args:
        specs: For each name the options of its class, a family, or None to leave it out; or a tuple
            of families.

    Raises:
        ConfigError: A name or an option is unknown, or nothing is left.
    """
    if not isinstance(specs, Mapping):
        specs = {family.name: family for family in specs}
    families = [_build(str(name), spec) for name, spec in specs.items() if spec is not None]
    if not families:
        raise ConfigError(
            f"families is empty: give at least one of {', '.join(FAMILIES)}, or remove synthesis"
        )
    return tuple(families)


def _build(name: str, spec: Any) -> Family:  # noqa: ANN401 - options or a family
    if isinstance(spec, Family):
        return spec
    if name not in FAMILIES:
        raise ConfigError(f"families.{name} is unknown: choose from {', '.join(FAMILIES)}")
    # Names first: the message of a wrong kind would not list them.
    options = [field.name for field in fields(FAMILIES[name])]
    if not isinstance(spec, Mapping) or not spec.keys() <= set(options):
        raise ConfigError(f"families.{name}={spec!r}: its options are {', '.join(options)}")
    return call_checked(FAMILIES[name], (), spec, f"families.{name}")
