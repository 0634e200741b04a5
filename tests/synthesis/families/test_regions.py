"""Families that fill a region with something else: another place, another texture, blur, what lies beside an edge."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.synthesis.placing import drawn, move, only, plan_of, scene, with_values

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")
SHAPE = (3, 96, 96)
MIDDLE = (slice(None), slice(None), slice(44, 53), slice(44, 53))


@pytest.mark.parametrize(
    ("name", "way"), [("cut_paste", (-20, 13)), ("shift", (2, -3)), ("shift", (0, 1))]
)
def test_another_place_is_seen(name: str, way: tuple[int, int]) -> None:
    grey = scene(1, SHAPE)
    plan = move(plan_of(only(name), shape=SHAPE), 48, 48)
    plan = with_values(plan, half_px=14, half_across_px=14, shift_y=way[0], shift_x=way[1])
    changes, mask = drawn(grey, plan)
    other = np.roll(grey, (-way[0], -way[1]), (2, 3)).astype(np.float32)
    assert_array_equal((grey + changes)[:, :1][MIDDLE], other[:, :1][MIDDLE])
    assert mask[0].sum() > 60
    assert not changes[:, 1:].any()


@pytest.mark.parametrize("name", ["cut_paste", "shift"])
def test_distances_lie_in_their_range(name: str) -> None:
    plan = plan_of(only(name, distance_px=(5, 9)), 500, SHAPE)
    parameters = plan.spec.members[0].parameters
    distance = np.hypot(
        *(plan.values[:, parameters.index(name)] for name in ("shift_y", "shift_x"))
    )
    assert 4.2 < distance.min() < 5.5
    assert 8.5 < distance.max() < 9.8


def test_blur_lowers_the_variance_and_keeps_the_mean() -> None:
    grey = np.random.default_rng(0).normal(120, 25, (20, *SHAPE)).clip(0, 255).astype(np.uint8)
    plan = with_values(
        move(plan_of(only("blur"), 20, SHAPE), 48, 48), half_px=14, half_across_px=14, sigma_px=1.5
    )
    changes, _ = drawn(grey, plan)
    after = (grey + changes)[:, :1][MIDDLE]
    assert after.std() < 0.3 * grey[:, :1][MIDDLE].std()
    assert after.mean() == pytest.approx(grey[:, :1][MIDDLE].mean(), abs=1)
    kernel = cv2.getGaussianKernel(5, 1.5)
    expected = cv2.sepFilter2D(grey[0, 0].astype(np.float32), -1, kernel, kernel)
    assert np.abs(after[0, 0] - expected[44:53, 44:53]).max() <= 1


def test_a_texture_keeps_the_mean_brightness_and_has_its_strength() -> None:
    grey = np.random.default_rng(0).normal(120, 3, (300, *SHAPE)).clip(0, 255).astype(np.uint8)
    grey[:, 1:] = 40
    plan = move(
        plan_of(only("texture", amplitude=(0.1, 0.1), size_px=(24, 28)), 300, SHAPE), 48, 48
    )
    plan.channels[:] = True
    changes, mask = drawn(grey, plan)
    full = mask[:, None] & np.array([True, False, False])[:, None, None]
    after = grey + changes
    assert after[full].mean() == pytest.approx(120, abs=3)
    assert 15 < after[full].std() < 32
    assert np.abs(after[:, 1:].mean() - 40) < 3
    # Islands of noise: holes inside the outline.
    kernel = np.ones((3, 3))
    filled = [cv2.dilate(cv2.erode(np.uint8(m), kernel), kernel).sum() for m in mask]
    assert 0.2 < np.mean(filled) / (np.pi * 12 * 8) < 1.1


def test_textures_from_a_folder(tmp_path: Path) -> None:
    stripes = np.tile(np.where(np.arange(256) % 8 < 4, 0, 255).astype(np.uint8), (256, 1))
    cv2.imwrite(str(tmp_path / "stripes.png"), stripes)
    plan = move(
        plan_of(only("texture", textures_from=str(tmp_path), size_px=(28, 28)), 50, SHAPE), 48, 48
    )
    changes, _ = drawn(np.full((50, *SHAPE), 120, np.uint8), plan)
    found = changes[:, 0][changes[:, 0] != 0]
    # Two levels, one standard deviation of the texture to either side; less on the edge.
    assert np.mean(np.abs(np.abs(found) - 51) <= 1) > 0.6
    assert np.abs(found).max() <= 52


def _outlines(plan_size_px: float, folder: str) -> np.ndarray:
    """Masks of regions with outlines from a folder, upright: [100, 96, 96]."""
    plan = move(
        plan_of(
            only("stain", shapes_from=folder, size_px=(plan_size_px, plan_size_px)), 100, SHAPE
        ),
        47.5,
        47.5,
    )
    return drawn(np.full((100, *SHAPE), 100, np.uint8), with_values(plan, angle=0))[1]


def test_outlines_are_those_of_the_masks(tmp_path: Path) -> None:
    cross = np.zeros((30, 30), np.uint8)
    cross[10:20], cross[:, 10:20] = 255, 255
    bar = np.zeros((40, 20), np.uint8)
    bar[10:34, 5:11] = 255
    cv2.imwrite(str(tmp_path / "bar.png"), bar)
    cv2.imwrite(str(tmp_path / "cross.png"), cross)
    expected = {
        name: cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST) > 0
        for name, mask, height, width in (
            ("bar", bar[10:34, 5:11], 36, 9),
            ("cross", cross, 36, 36),
        )
    }
    seen = set()
    for mask in _outlines(36, str(tmp_path)):
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        name = "bar" if len(columns) < 20 else "cross"
        seen.add(name)
        height, width = expected[name].shape
        assert abs(len(rows) - height) <= 2
        assert abs(len(columns) - width) <= 2
        place = np.zeros((96, 96), bool)
        place[48 - height // 2 :, 48 - width // 2 :][:height, :width] = expected[name]
        assert (place & mask).sum() / (place | mask).sum() > 0.85
    assert seen == {"bar", "cross"}


@pytest.mark.parametrize("bright", [False, True])
@pytest.mark.parametrize("down", [False, True])
def test_a_nick_sits_on_the_edge(down: bool, bright: bool) -> None:
    grey = np.full((40, 1, 96, 96), 60, np.uint8)
    grey[..., 50:] = 180
    grey = grey if down else grey.swapaxes(2, 3).copy()
    plan = plan_of(only("nick", opacity=(1, 1)), 40, (1, 96, 96))
    place = np.random.default_rng(0).uniform(45, 54, (2, 40)).astype(np.float32)
    plan.y[:], plan.x[:] = place
    plan.amplitude[:] = 0.2 if bright else -0.2
    changes, mask = drawn(grey, plan)
    changes = changes[:, 0] if down else changes[:, 0].swapaxes(1, 2)
    # It fills one side alone, beginning at the edge.
    assert (np.sign(changes[changes != 0]) == (1 if bright else -1)).all()
    assert changes[:, :, 49 if bright else 50].any(1).all()
    assert not changes[:, :, 50:].any() if bright else not changes[:, :, :50].any()
    radius = plan.values[np.argsort(plan.row), 0]
    reach = mask.sum((1, 2))
    assert (reach > 0.3 * np.pi * radius**2).all()
    assert (reach < 0.9 * np.pi * (radius + 1) ** 2).all()
