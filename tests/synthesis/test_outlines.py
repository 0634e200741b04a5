import math

import pytest
import torch

from lit_data.synthesis.canvas import Canvas, ValueRange
from lit_data.synthesis.families.region import WOBBLE, blob
from lit_data.synthesis.windows import Surroundings, Windows


def _blob(half_px: float, half_across_px: float, angle: float, soft: float) -> torch.Tensor:
    """One blob for each of 64 places of the field: [64, 64, 64]."""
    canvas = Canvas(torch.zeros(64, 1, 64, 64), ValueRange())
    centre = torch.full((64,), 31.0)
    surroundings = Surroundings(canvas, torch.arange(64), centre, centre)
    windows = Windows(surroundings, torch.ones(64), slice(0, 64), (64, 64))
    numbers = {"half_px": half_px, "half_across_px": half_across_px, "angle": angle}
    p = {name: torch.full((64, 1, 1), value) for name, value in numbers.items()}
    seeds = torch.rand(2, 64, 1, 1, generator=torch.Generator().manual_seed(0))
    return blob(windows, p | {"seed_y": seeds[0], "seed_x": seeds[1]}, soft)


@pytest.mark.parametrize("soft", [0.0, 0.8])
@pytest.mark.parametrize("angle", [0.0, 0.6, math.pi / 2])
def test_a_blob_is_a_wavy_ellipse(angle: float, soft: float) -> None:
    cover = _blob(14.0, 7.0, angle, soft)
    assert cover.min() == 0
    assert cover.max() == 1
    assert float(cover.sum((1, 2)).mean()) == pytest.approx(math.pi * 14 * 7, rel=0.1)
    away = torch.arange(64.0) - 31
    along = away * math.cos(angle) + away[:, None] * math.sin(angle)
    across = away[:, None] * math.cos(angle) - away * math.sin(angle)
    radius = ((along / 14).square() + (across / 7).square()).sqrt()
    edge = max(1 / 7, soft) / 2
    assert not cover[:, radius > 1 + 2 * WOBBLE + edge].any()
    assert (cover[:, radius < 1 - 2 * WOBBLE - edge] == 1).all()
    # No two alike.
    assert len(torch.unique(cover.sum((1, 2)))) > 60
