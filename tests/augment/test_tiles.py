import numpy as np
import pytest
import torch

from lit_data.augment import draw_tiles, pack_tiles
from lit_data.augment import mixing as module
from lit_data.core.mosaic import FILL, MosaicPlan, MosaicSpec, sample_mosaics
from lit_data.core.types import Array
from lit_data.wings.detection.dataset import draw_tiles as draw_by_worker

SPECS = [
    MosaicSpec(),
    MosaicSpec(tiles=9),
    MosaicSpec(probability=0.5, scale=(0.4, 3.0), translate=0.6),
    MosaicSpec(tiles=9, probability=0.5, scale=(1.0, 1.0), translate=0.0),
]
OUTPUTS = [(48, 48), (33, 70), (60, 9), (1, 1), (2, 40)]
SHAPES = [(1, 1), (1, 3), (40, 1), (1, 40), (9, 10), (25, 2)]
"""Height to width; square, wide, tall, and so thin that a side is a pixel or two."""


def _make(output_px: tuple[int, int], slope: float | None = None) -> tuple[list[Array], Array]:
    """Images that fill an output in one direction, and the same alone in it; noise, or ramps of some slope."""
    rng, images = np.random.default_rng(0), []
    for number in range(14):
        fit = min(
            size / part for size, part in zip(output_px, SHAPES[number % len(SHAPES)], strict=True)
        )
        high, wide = (
            min(s, max(1, round(fit * p)))
            for s, p in zip(output_px, SHAPES[number % 6], strict=True)
        )
        noise = rng.integers(0, 256, (3, high, wide), dtype=np.uint8)
        ramp = (
            FILL + 4 + 2 * number + slope * (np.arange(high)[:, None] + np.arange(wide))
            if slope
            else 0
        )
        images.append((noise * 0 + ramp).astype(np.uint8) if slope else noise)
    rows = np.zeros((len(images), 3, *output_px), np.uint8)
    draw_by_worker(rows, _plan(None, images, output_px), images)  # type: ignore[arg-type]  # a list is bank enough
    return images, rows


def _plan(spec: MosaicSpec | None, images: list[Array], output_px: tuple[int, int]) -> MosaicPlan:
    sizes, all_of_them = np.array([image.shape[1:] for image in images]), np.arange(len(images))
    return sample_mosaics(
        spec,
        3,
        1,
        all_of_them,
        images=all_of_them,
        sizes_px=sizes,
        output_px=output_px,
        choices=all_of_them,
    )


def _pack(spec: MosaicSpec, images: list[Array], output_px: tuple[int, int]) -> torch.Tensor:
    return pack_tiles(
        _plan(spec, images, output_px), _plan(None, images, output_px).window, spec.tiles
    )


def _draw_slowly(plan: MosaicPlan, images: list[Array], shape: tuple[int, ...]) -> Array:
    drawn = np.full(shape, float(FILL))
    for row, image, scale, origin, (top, left, bottom, right) in zip(
        plan.row, plan.image, plan.scale, plan.origin, plan.window.tolist(), strict=True
    ):
        values = images[image].astype(np.float64)
        for axis, low, high in ((0, top, bottom), (1, left, right)):
            place = (np.arange(low, high) + 0.5) / scale - origin[axis] - 0.5
            place = place.clip(0, values.shape[1 + axis] - 1)
            first = np.floor(place).astype(int)
            second = np.minimum(first + 1, values.shape[1 + axis] - 1)
            share = (place - first).reshape((-1, 1) if axis == 0 else (1, -1))
            values = (
                values.take(first, 1 + axis) * (1 - share) + values.take(second, 1 + axis) * share
            )
        drawn[row, :, top:bottom, left:right] = values
    return drawn


@pytest.mark.parametrize("output_px", OUTPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_pixels_follow_a_slow_definition(spec: MosaicSpec, output_px: tuple[int, int]) -> None:
    images, rows = _make(output_px)
    drawn = draw_tiles(torch.from_numpy(rows), _pack(spec, images, output_px))
    expected = _draw_slowly(_plan(spec, images, output_px), images, rows.shape)
    assert drawn.dtype == torch.float32
    assert drawn.is_contiguous()
    np.testing.assert_allclose(255 * drawn.numpy(), expected, atol=0.02)


@pytest.mark.parametrize("output_px", OUTPUTS[:3])
@pytest.mark.parametrize("spec", SPECS[:2])
def test_pixels_are_those_of_the_workers(spec: MosaicSpec, output_px: tuple[int, int]) -> None:
    images, rows = _make(output_px, slope=1.0)
    drawn = 255 * draw_tiles(torch.from_numpy(rows), _pack(spec, images, output_px)).numpy()
    expected = np.empty_like(rows)
    draw_by_worker(expected, _plan(spec, images, output_px), images)  # type: ignore[arg-type]
    difference = np.abs(drawn - expected)
    assert (
        difference.max() < 3
    )  # workers move tiles by up to half a pixel of the output, which has two slopes of 1
    assert difference.mean() < 0.6
    np.testing.assert_array_equal(np.abs(drawn - FILL) < 1e-4, expected == FILL)


def test_samples_do_not_depend_on_those_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    images, rows = _make((48, 48))
    packed = _pack(SPECS[1], images, (48, 48))
    whole = draw_tiles(torch.from_numpy(rows), packed)
    monkeypatch.setattr(module, "PASS_PX", (3 * 48 * 48, 0))
    assert torch.equal(draw_tiles(torch.from_numpy(rows), packed), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("output_px", OUTPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_cpu_and_device_agree(spec: MosaicSpec, output_px: tuple[int, int]) -> None:
    images, rows = _make(output_px)
    packed = _pack(spec, images, output_px)
    host = draw_tiles(torch.from_numpy(rows), packed)
    device = draw_tiles(torch.from_numpy(rows).cuda(), packed.cuda())
    assert (device.cpu() - host).abs().max() <= 1 / 255
