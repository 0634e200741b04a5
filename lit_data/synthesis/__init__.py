"""Synthetic defects on clean images.

A plan holds all randomness and no pixels; a renderer draws it on any device.
"""

from typing import TYPE_CHECKING

from lit_data.synthesis.families import FAMILIES
from lit_data.synthesis.families.spot import SpotShape
from lit_data.synthesis.plan import DefectPlan, DefectSpec, Synthesis, sample_plan

if TYPE_CHECKING:
    from lit_data.synthesis.renderer import render

__all__ = [
    "FAMILIES",
    "DefectPlan",
    "DefectSpec",
    "SpotShape",
    "Synthesis",
    "render",
    "sample_plan",
]


def __getattr__(name: str) -> object:
    """Import the renderer, and with it torch, only on first access."""
    if name == "render":
        from lit_data.synthesis.renderer import render

        return render
    raise AttributeError(name)
