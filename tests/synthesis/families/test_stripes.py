"""Families that belong to stripes: breaks, extra stripes, and the lines of a camera."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.synthesis.placing import drawn, move, only, plan_of, with_values

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")
SHAPE = (1, 64, 64)
DOWN = np.broadcast_to(60 + 120 * (np.arange(64) % 12 < 5), SHAPE[1:]).astype(np.uint8)
"""Bright stripes of 5 px that run down, the first at columns 0 to 4."""


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("bright", "column", "kind"), [(False, 26, 180), (True, 32, 60)])
def test_a_break_removes_part_of_a_stripe(
    across: bool, bright: bool, column: int, kind: int
) -> None:
    grey = DOWN.T if across else DOWN
    plan = move(
        plan_of(only("stripe_break"), shape=SHAPE), *((column, 30) if across else (30, column))
    )
    plan = with_values(plan, length_px=9, width_px=8 if bright else 6, opacity=1)
    plan.amplitude[:] = 0.2 if bright else -0.2
    assert (DOWN[30, column - 2 : column + 2] == kind).all()
    changes, mask = drawn(grey[None, None].copy(), plan)
    after = (grey + changes[0, 0]).T if across else grey + changes[0, 0]
    gone = slice(24, 29) if not bright else slice(29, 36)
    assert (after[26:35, gone] == 240 - kind).all()
    assert (after[:25, gone] == kind).all()
    assert (after[36:, gone] == kind).all()
    assert mask.sum() == 9 * (gone.stop - gone.start)


def test_opacity_leaves_a_share_of_the_stripe() -> None:
    plan = with_values(
        move(plan_of(only("stripe_break"), shape=SHAPE), 30, 26),
        length_px=3,
        width_px=3,
        opacity=0.5,
    )
    plan.amplitude[:] = -0.2
    changes, _ = drawn(DOWN[None, None].copy(), plan)
    assert set(changes[changes != 0].tolist()) == {-60}


@pytest.mark.parametrize("across", [False, True])
def test_an_extra_stripe_lies_along_the_stripes(across: bool) -> None:
    grey = DOWN.T if across else DOWN
    plan = with_values(
        move(plan_of(only("extra_stripe"), shape=SHAPE), 30, 30), length_px=21, width_px=3
    )
    changes, mask = drawn(grey[None, None].copy(), plan)
    changed = mask[0].T if across else mask[0]
    expected = np.zeros((64, 64), bool)
    expected[20:41, 29:32] = True
    assert_array_equal(changed, expected)
    assert set(changes[0, 0][mask[0]].tolist()) == {51}


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(("along", "bright"), [("rows", True), ("columns", False)])
def test_a_line_is_whole_rows_or_columns(along: str, bright: bool, width: int) -> None:
    shape = (1, 41, 64)
    grey = np.random.default_rng(0).integers(60, 190, (30, *shape)).astype(np.uint8)
    plan = plan_of(only("line", along=along, width_px=(width, width), opacity=(1, 1)), 30, shape)
    plan.amplitude[:] = 0.2 if bright else -0.2
    changes, mask = drawn(grey, plan)
    after = grey + changes
    lines = mask.all(2 if along == "rows" else 1)
    assert_array_equal(mask.any(2 if along == "rows" else 1), lines)
    assert set(lines.sum(1).tolist()) <= {width, max(width - 1, 1)}  # one may be cut by the edge
    assert (after[:, 0][mask] == 255 * bright).all()
    assert not changes[:, 0][~mask].any()
