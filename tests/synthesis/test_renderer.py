from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_data.synthesis import DefectPlan, DefectSpec, SpotShape, render, sample_plan

SPOTS = (
    SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
    SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    SpotShape(height_px=4, width_px=2, sigma_y_px=2.0, sigma_x_px=0.7),
)


def _one(y: float, x: float, spot: int = 0, channels: tuple[bool, ...] = (True, False, False)) -> DefectPlan:
    return DefectPlan(
        row=np.array([0]),
        y=np.array([y], np.float32),
        x=np.array([x], np.float32),
        spot=np.array([spot]),
        amplitude=np.array([0.25], np.float32),
        channels=np.array([channels]),
        is_true=np.array([channels == (True, False, False)]),
        spots=SPOTS,
    )


def _draw_slowly(images: torch.Tensor, plan: DefectPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one pixel at a time."""
    batch, channels, height, width = images.shape
    clean = images.clone()
    images, masks = images.clone().double(), torch.zeros(batch, 1, height, width)
    for n in range(len(plan)):
        spot, cy, cx = plan.spots[plan.spot[n]], float(plan.y[n]), float(plan.x[n])
        centre = min(int(np.floor(cy + 0.5)), height - 1), min(int(np.floor(cx + 0.5)), width - 1)
        amplitude = float(plan.amplitude[n])
        if not 0 <= clean[plan.row[n], 0, centre[0], centre[1]] + np.float32(amplitude) <= 1:
            amplitude = -amplitude
        top = int(np.floor(cy + 0.5)) - (spot.height_px - 1) // 2
        left = int(np.floor(cx + 0.5)) - (spot.width_px - 1) // 2
        for y in range(max(top, 0), min(top + spot.height_px, height)):
            for x in range(max(left, 0), min(left + spot.width_px, width)):
                exponent = ((y - cy) / spot.sigma_y_px) ** 2 / 2 + ((x - cx) / spot.sigma_x_px) ** 2 / 2
                for c in range(channels):
                    if plan.channels[n, c]:
                        images[plan.row[n], c, y, x] += amplitude * np.exp(-exponent)
                if plan.is_true[n]:
                    masks[plan.row[n], 0, y, x] = 1
    return images.clamp(0, 1).float(), masks


@pytest.mark.parametrize("spot", [0, 1, 2])
@pytest.mark.parametrize(("y", "x"), [(5.0, 6.0), (5.375, 6.5), (4.5, 5.875)])
def test_a_spot_is_its_formula(spot: int, y: float, x: float) -> None:
    plan = _one(y, x, spot)
    images = torch.full((1, 3, 12, 14), 0.5)
    expected_image, expected_mask = _draw_slowly(images, plan)
    drawn, mask = render(images, plan)
    torch.testing.assert_close(drawn, expected_image, rtol=0, atol=1e-6)
    torch.testing.assert_close(mask, expected_mask, rtol=0, atol=0)


@pytest.mark.parametrize(("y", "x", "pixels"), [(0, 0, 4), (0, 11, 4), (9, 0, 4), (9, 11, 4), (0, 5, 6), (9, 5, 6)])
def test_spots_are_cut_at_the_edges_and_never_wrap(y: int, x: int, pixels: int) -> None:
    image, mask = render(torch.zeros(1, 3, 10, 12), _one(y, x))
    assert int(mask.sum()) == pixels
    assert int((image[0, 0] > 0).sum()) == pixels
    torch.testing.assert_close(image, _draw_slowly(torch.zeros(1, 3, 10, 12), _one(y, x))[0], rtol=0, atol=1e-6)


def test_distractors_are_drawn_and_not_marked() -> None:
    image, mask = render(torch.zeros(1, 3, 10, 10), _one(5, 5, channels=(True, False, True)))
    assert image[0, 0].any()
    assert not image[0, 1].any()
    assert image[0, 2].any()
    assert not mask.any()


@pytest.mark.parametrize("batch", [1, 2, 7, 40])
@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 40, 8), (1, 8, 40), (5, 12, 12)])
def test_batches_agree_with_the_definition(batch: int, shape: tuple[int, int, int]) -> None:
    spec = DefectSpec(probability=1.0, spots=SPOTS, amplitude=(0.1, 0.6))
    plan = sample_plan(spec, 3, 1, np.arange(batch), shape)
    images = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0))
    expected = _draw_slowly(images, plan)
    drawn, masks = render(images.clone(), plan)
    torch.testing.assert_close(drawn, expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(masks, expected[1], rtol=0, atol=0)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    spec, shape = DefectSpec(probability=1.0), (3, 32, 32)
    images = torch.rand(9, *shape, generator=torch.Generator().manual_seed(0))
    together = render(images.clone(), sample_plan(spec, 3, 1, np.arange(9), shape))
    for n in range(9):
        alone = render(images[n : n + 1].clone(), sample_plan(spec, 3, 1, [n], shape))
        assert torch.equal(alone[0][0], together[0][n])
        assert torch.equal(alone[1][0], together[1][n])


@pytest.mark.parametrize(("level", "amplitude"), [(0.0, -0.25), (1.0, 0.25), (0.1, -0.25), (0.5, -0.25)])
def test_a_defect_can_be_seen_on_black_and_on_white(level: float, amplitude: float) -> None:
    plan = replace(_one(5, 5), amplitude=np.array([amplitude], np.float32))
    image, mask = render(torch.full((1, 3, 10, 10), level), plan)
    assert abs(float(image[0, 0, 5, 5]) - level) == pytest.approx(0.25)
    assert ((image[:, :1] != level) == mask.bool()).all()


def test_an_empty_plan_changes_nothing() -> None:
    images = torch.rand(2, 3, 8, 8)
    drawn, masks = render(images.clone(), sample_plan(DefectSpec(probability=0.0), 0, 0, [0, 1], (3, 8, 8)))
    assert torch.equal(drawn, images)
    assert not masks.any()


def test_nothing_random_happens() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - the global state is what is tested
    render(torch.rand(1, 3, 8, 8, generator=torch.Generator()), _one(4, 4))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@pytest.mark.gpu
def test_the_device_draws_what_the_cpu_draws() -> None:
    shape = (3, 64, 64)
    plan = sample_plan(DefectSpec(probability=1.0), 3, 1, np.arange(32), shape)
    images = torch.rand(32, *shape, generator=torch.Generator().manual_seed(0))
    expected = render(images.clone(), plan)
    drawn = render(images.cuda(), plan)
    torch.testing.assert_close(drawn[0].cpu(), expected[0], rtol=0, atol=1 / 255)
    torch.testing.assert_close(drawn[1].cpu(), expected[1], rtol=0, atol=0)
