import hashlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.synthesis import DefectPlan, DefectSpec, SpotShape, sample_plan
from lit_data.synthesis.plan import copy_packed
from tests.synthesis.placing import BATCHES, NAMES, many

SHAPE = (3, 128, 128)
SPOTS = (
    SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
    SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    SpotShape(height_px=4, width_px=2, sigma_y_px=2.0, sigma_x_px=0.7),
)

# Drawn by the release that knew spots alone.
GOLDEN_PLAN = "c1c29e73ee3bad80f8b21101c1765a9fbb749c49c1f616e35aed18cabfce1b23"
CASES = [*((name, 2) for name in NAMES), *(("all", number) for number in range(len(BATCHES)))]


def _plan(
    spec: DefectSpec, samples: int = 4000, epoch: int = 0, shape: tuple[int, int, int] = SHAPE
) -> DefectPlan:
    return sample_plan(spec, seed=1, epoch=epoch, index=np.arange(samples), shape=shape)


def test_counts_follow_the_specification() -> None:
    plan = _plan(DefectSpec(probability=0.5, count=(3, 8), true_count=(0, 2)))
    counts = np.bincount(plan.row, minlength=4000)
    assert set(counts.tolist()) == {0, *range(3, 9)}
    assert 1900 < (counts == 0).sum() < 2100
    assert set(np.bincount(plan.row[plan.is_true], minlength=4000).tolist()) == {0, 1, 2}


def test_true_defects_lie_in_the_target_alone_and_distractors_never_do() -> None:
    plan = _plan(DefectSpec())
    assert (plan.channels[plan.is_true] == [True, False, False]).all()
    others = {tuple(row) for row in plan.channels[~plan.is_true].astype(int).tolist()}
    assert others == {(1, 1, 0), (1, 0, 1), (1, 1, 1), (0, 1, 0), (0, 0, 1)}


def test_ranges_of_amplitude_and_place() -> None:
    plan = _plan(DefectSpec(amplitude=(0.1, 0.3), bright_fraction=0.25), shape=(3, 64, 200))
    magnitude = np.abs(plan.amplitude)
    assert magnitude.min() >= np.float32(0.1)
    assert magnitude.max() <= np.float32(0.3)
    assert 0.2 < (plan.amplitude > 0).mean() < 0.3
    assert plan.y.min() >= 0
    assert 60 < plan.y.max() < 64
    assert 190 < plan.x.max() < 200
    assert set((plan.y % 1 * 8).tolist()) == set(range(8))


def test_whole_pixel_centres() -> None:
    plan = _plan(DefectSpec(subpixel=False), samples=200)
    assert (plan.y % 1 == 0).all()
    assert (plan.x % 1 == 0).all()


def test_weights_choose_the_family() -> None:
    plan = _plan(DefectSpec(families={"spot": {"weight": 3}, "line": None, "blur": {}}))
    assert [member.name for member in plan.spec.members] == ["spot", "blur"]
    assert 0.73 < (plan.family == 0).mean() < 0.77
    # A family's shapes share its weight.
    assert 0.45 < plan.values[plan.family == 0, 0].mean() < 0.55


def test_plans_of_spots_are_those_of_earlier_releases() -> None:
    spec = DefectSpec(probability=1.0, amplitude=(0.05, 0.9), families={"spot": {"shapes": SPOTS}})
    plan = sample_plan(spec, 7, 3, np.arange(64), (3, 40, 56))
    shape = plan.values[:, 0].astype(np.int64)
    arrays = (plan.row, plan.y, plan.x, shape, plan.amplitude, plan.channels, plan.is_true)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
    assert digest.hexdigest() == GOLDEN_PLAN


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_plan_depends_on_seed_epoch_and_index_only(name: str, number: int) -> None:
    batch, shape = BATCHES[number]
    spec = many(*(NAMES if name == "all" else (name,)))
    whole = sample_plan(spec, 5, 2, np.arange(batch), shape)
    for start in range(0, batch, 100):
        part = sample_plan(spec, 5, 2, np.arange(start, min(start + 100, batch)), shape)
        chosen = (whole.row >= start) & (whole.row < start + 100)
        for name, array in part.arrays().items():
            expected = whole.arrays()[name][chosen]
            assert_array_equal(array, expected - start * (name == "row"))
    for seed, epoch in ((5, 3), (6, 2), (2**64 - 1, 2)):
        other = sample_plan(spec, seed, epoch, np.arange(batch), shape)
        assert other.x.tolist() != whole.x.tolist()


def _assert_grouped(plan: DefectPlan) -> None:
    bounds = [0, *(group.stop for group in plan.groups)]
    assert [group.start for group in plan.groups] == bounds[:-1]
    assert bounds[-1] == len(plan)
    for group in plan.groups:
        assert group.stop > group.start
        assert (plan.family[group.start : group.stop] == group.family).all()
        assert (np.diff(plan.row[group.start : group.stop]) >= 0).all()


@pytest.mark.parametrize("spec", [DefectSpec(probability=0), many()])
def test_plans_travel(spec: DefectSpec) -> None:
    plan = sample_plan(spec, 1, 0, np.arange(7), SHAPE)
    tensors = plan.to("cpu")
    packed = copy_packed(tensors.arrays(), torch.device("cpu"), non_blocking=False)
    for copy in (tensors.arrays(), packed, pickle.loads(pickle.dumps(plan)).arrays()):
        for name, array in plan.arrays().items():
            assert_array_equal(copy[name], array)
            assert np.asarray(copy[name]).dtype == array.dtype
    assert tensors.groups == plan.groups
    assert tensors.to("cpu").spec is plan.spec


def test_some_defects_of_a_plan() -> None:
    plan = sample_plan(many(), 1, 0, np.arange(40), SHAPE)
    every = np.ones(len(plan), bool)
    for chosen in (plan.is_true, plan.family == 3, ~every, every):
        some = plan.select(chosen)
        _assert_grouped(some)
        for name, array in plan.arrays().items():
            assert_array_equal(some.arrays()[name], array[chosen])
        windows = {group[:3] for group in plan.groups if chosen[group.start : group.stop].any()}
        assert {group[:3] for group in some.groups} == windows
    on_device = plan.to("cpu").select(torch.from_numpy(plan.is_true))
    assert_array_equal(on_device.y, plan.y[plan.is_true])


@pytest.mark.parametrize(
    ("options", "family", "expected", "relative"),
    [
        ({"amplitude": (0.1, 0.2)}, {}, (0.1, 0.2), False),
        ({"amplitude": (0.1, 0.2)}, {"amplitude": (0.5, 0.6)}, (0.5, 0.6), False),
        ({"contrast": (3, 9)}, {}, (3, 9), True),
        ({"contrast": (3, 9)}, {"amplitude": (0.5, 0.6)}, (0.5, 0.6), False),
        ({"contrast": (3, 9)}, {"contrast": (10, 12)}, (10, 12), True),
        ({"amplitude": (0.1, 0.2)}, {"amplitude": (0.5, 1), "contrast": (3, 9)}, (3, 9), True),
    ],
)
def test_whose_strength_counts(
    options: dict[str, Any], family: dict[str, Any], expected: tuple[float, float], relative: bool
) -> None:
    spec = DefectSpec(families={"stain": family, "spot": {"amplitude": (0.01, 0.02)}}, **options)
    plan = _plan(spec, 400)
    strength = np.abs(plan.amplitude[plan.family == 0])
    assert expected[0] <= strength.min() < strength.max() <= expected[1]
    assert np.abs(plan.amplitude[plan.family == 1]).max() <= 0.02
    assert spec.relative.tolist() == [relative, False]
