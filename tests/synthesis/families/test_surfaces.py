"""Families that change the brightness of a surface: scratches, stains, pits and bumps."""

import numpy as np
import pytest

from tests.synthesis.placing import drawn, move, only, plan_of, with_values

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")
SHAPE = (1, 96, 96)


def _extent(mask: np.ndarray) -> tuple[float, float]:
    """Longest and shortest way through a mask, px."""
    points = np.argwhere(mask)
    ways = np.deg2rad(np.arange(0, 180, 3))
    along = points @ np.stack((np.sin(ways), np.cos(ways)))
    spans = np.ptp(along, axis=0) + 1
    return spans.max(), spans.min()


@pytest.mark.parametrize("angle", [0.0, 0.7, np.pi / 2])
def test_a_straight_scratch_has_its_length_and_width(angle: float) -> None:
    plan = move(plan_of(only("scratch"), shape=SHAPE), 48, 48)
    plan = with_values(
        plan, length_px=41, width_px=3, angle=angle, bend=0, swing=0, taper=0, beat_px=0
    )
    changes, mask = drawn(np.full((1, *SHAPE), 100, np.uint8), plan)
    longest, shortest = _extent(mask[0])
    assert 40 <= longest <= 44
    assert 3 <= shortest <= 5.5
    assert changes.sum() == pytest.approx(41 * 3 * 51, rel=0.03)
    along = np.argwhere(mask[0]) - 48
    # The angle counts from the x axis towards the y axis.
    assert np.abs(along @ (np.cos(angle), -np.sin(angle))).max() < 2.5


def test_a_scratch_tapers_bends_and_comes_and_goes() -> None:
    plan = move(plan_of(only("scratch"), shape=SHAPE), 48, 48)
    plain = {"length_px": 41, "width_px": 3, "angle": 0, "bend": 0}
    plain |= {"swing": 0, "taper": 0, "beat_px": 0}
    grey = np.full((1, *SHAPE), 100, np.uint8)

    def columns(**values: float) -> np.ndarray:
        return np.asarray(drawn(grey, with_values(plan, **(plain | values)))[0][0, 0].sum(0)) / 51

    assert columns()[29:68].tolist() == pytest.approx([3.0] * 39, abs=0.02)
    tapered = columns(taper=0.8)
    assert tapered[48] == pytest.approx(3, abs=0.05)
    assert tapered[30] < 1.3
    beaten = columns(beat_px=10)
    assert beaten[48] == pytest.approx(3, abs=0.05)
    assert beaten[[43, 53]].max() == 0
    bent = drawn(grey, with_values(plan, **(plain | {"bend": 1.0})))[0][0, 0]
    rows = (bent * np.arange(96)[:, None]).sum(0)[30:67] / bent.sum(0)[30:67]
    assert rows[0] == pytest.approx(rows[-1], abs=0.3)
    assert rows[0] - rows.min() == pytest.approx(18**2 / 41 / 2, abs=0.3)


@pytest.mark.parametrize(
    ("name", "option", "bounds"),
    [
        ("scratch", "length_px", (15, 30)),
        ("stain", "size_px", (12, 24)),
        ("relief", "sigma_px", (2, 3)),
    ],
)
def test_sizes_lie_in_their_ranges(name: str, option: str, bounds: tuple[float, float]) -> None:
    plan = plan_of(only(name, **{option: bounds}), 500, SHAPE)
    size = plan.values[:, 0] * (2 if name == "stain" else 1)
    assert bounds[0] <= size.min() < bounds[0] + 0.5
    assert bounds[1] - 0.5 < size.max() <= bounds[1]


def test_stains_have_soft_edges_and_their_size() -> None:
    plan = with_values(
        move(plan_of(only("stain"), 200, SHAPE), 48, 48), half_px=12, half_across_px=12
    )
    changes, _ = drawn(np.full((200, *SHAPE), 100, np.uint8), plan)
    sides = np.sqrt(changes.sum((1, 2, 3)) / 51 * 4 / np.pi)
    assert 22 < sides.mean() < 26
    assert changes.max() == 51
    partly = (changes > 2) & (changes < 49)
    assert partly.sum() > 0.4 * (changes > 0).sum()


@pytest.mark.parametrize("bright", [True, False])
@pytest.mark.parametrize("light", [0.0, 90.0, 225.0])
def test_relief_is_bright_towards_the_light(light: float, bright: bool) -> None:
    plan = move(plan_of(only("relief", light_deg=light, elongation=(1, 1)), 1, SHAPE), 48, 48)
    plan.amplitude[:] = 0.2 if bright else -0.2
    changes, mask = drawn(np.full((1, *SHAPE), 100, np.uint8), plan)
    rows, columns = np.mgrid[:96, :96] - 48
    towards = columns * np.cos(np.deg2rad(light)) + rows * np.sin(np.deg2rad(light))
    sign = 1 if bright else -1
    assert (sign * changes[0, 0][towards > 0.5] >= 0).all()
    assert (sign * changes[0, 0][towards < -0.5] <= 0).all()
    assert abs(changes.sum()) < 0.02 * np.abs(changes).sum()
    assert 47 <= np.abs(changes).max() <= 51
    sigma = float(plan.values[0, 0])
    assert abs(np.abs(towards[np.abs(changes[0, 0]) > 46]).mean() - sigma) < 1
    assert mask.any()
