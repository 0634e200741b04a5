import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.plan import DefectPlan
from lit_data.synthesis.renderer import find_touches, merge_windows, split_windows
from tests.synthesis.placing import GREY, NAMES, drawn, many, move, only, plan_of, regroup, scene

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "spot"])
def test_windows_hold_all_of_a_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In larger windows nothing more is drawn."""
    monkeypatch.setattr("lit_data.synthesis.renderer.WORTH_PX", -1)
    shape = (1, 200, 200)
    # Sizes that just fit a power of two if some of the reach is forgotten.
    tight = {
        "relief": {"sigma_px": (3.8, 4.4)},
        "scratch": {"length_px": (22, 28), "bend_rad": (2, 3)},
    }
    spec = only(name, **tight.get(name, {}))
    plan, grey = plan_of(spec, 250, shape), scene(1, shape)
    plan = (
        replace(plan, row=np.zeros_like(plan.row)) if name == "line" else move(plan, 100.375, 99.5)
    )
    plan = replace(plan, row=np.zeros_like(plan.row))
    canvas = Canvas(torch.from_numpy(grey), GREY)
    steps = [find_touches(canvas, some.to("cpu")) for some in (plan, regroup(plan, 30))]
    sizes = [torch.bincount(touches.defect, minlength=len(plan)) for touches in steps]
    assert sizes[0].tolist() == sizes[1].tolist()


def test_square_windows_of_a_family_are_merged() -> None:
    plan = plan_of(many(), 100, (3, 64, 48))
    assert merge_windows(plan.groups, most_px=0) == list(plan.groups)
    merged = merge_windows(plan.groups, most_px=sys.maxsize)
    assert len(merged) < len(merge_windows(plan.groups, most_px=2**15)) <= len(plan.groups)
    assert [group.start for group in merged] == [0, *(group.stop for group in merged)][:-1]
    for group in merged:
        inside = [g for g in plan.groups if group.start <= g.start < group.stop]
        assert {g.family for g in inside} == {group.family}
        assert max(g.height_px for g in inside) == group.height_px
        assert max(g.width_px for g in inside) == group.width_px
    grey = scene(100, (3, 64, 48))
    for one, other in zip(
        drawn(grey, plan), drawn(grey, replace(plan, groups=tuple(merged))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("most_px", [1, 5000, 10**9])
def test_many_pixels_are_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch, most_px: int) -> None:
    plan, grey = plan_of(many(), 20, (3, 64, 48)), scene(20, (3, 64, 48))
    expected = drawn(grey, plan)
    monkeypatch.setattr("lit_data.synthesis.renderer.CACHED_PX", most_px)
    parts = list(split_windows(plan.groups))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][:-1]
    assert all(
        (p.stop - p.start) * p.height_px * p.width_px <= most_px
        for p in parts
        if p.stop - p.start > 1
    )
    for one, other in zip(drawn(grey, plan), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def _peaks(plan: DefectPlan, sigma: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, sigma, (len(plan), 1, 64, 64))
    changes, _ = drawn(np.clip(np.rint(110 + noise), 0, 255).astype(np.uint8), plan)
    return np.asarray(np.abs(changes).max((1, 2, 3)))


@pytest.mark.parametrize("name", ["spot", "scratch", "stain", "extra_stripe", "relief"])
def test_contrast_is_counted_in_standard_deviations_of_the_noise(name: str) -> None:
    spec = replace(only(name), contrast=(5.0, 5.0), subpixel=False)
    plan = plan_of(spec, 60, (1, 64, 64))
    plan = move(plan, 32, 32)
    for sigma in (2.0, 6.0, 12.0):
        assert 0.8 < np.median(_peaks(plan, sigma)) / (5 * sigma) < 1.15
    assert np.median(_peaks(plan, 0)) in (2, 3)  # 2.55: 5 times the least noise
