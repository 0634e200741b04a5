"""What every augmentation keeps to."""

import random
from collections.abc import Callable

import kornia.augmentation as kornia_augmentation
import numpy as np
import pytest
import torch

from lit_data.augment import (
    Augmentation,
    ColourJitter,
    ExternalTransform,
    Geometry,
    Layers,
    Photometry,
    StripeAugment,
    detection_augment,
    segmentation_augment,
    stripe_augment,
)

Make = Callable[[], Augmentation]


def _kornia() -> ExternalTransform:
    steps = [
        kornia_augmentation.RandomAffine(20.0, p=0.8),
        kornia_augmentation.RandomBrightness((0.8, 1.2), p=0.7),
    ]
    return ExternalTransform(steps, seed_per="sample")


ANY_CHANNELS = [
    lambda: Geometry(flip_left_right=True, turn=True, shift_px=2, padding="zeros"),
    lambda: Geometry(
        turn=True, rotate_deg=30, scale=(0.8, 1.3), shear_deg=5, perspective=0.1, crop_px=7
    ),
    lambda: Photometry(gain=0.2, offset=0.1, contrast=0.3, gamma=0.4, blur_px=1.1, noise=0.1),
    StripeAugment,
    stripe_augment,
    segmentation_augment,
]
RGB = [ColourJitter, detection_augment, _kornia]


def make_layers(batch: int, channels: int, height: int, width: int) -> Layers:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, channels, height, width, generator=generator)
    masks = torch.randint(0, 8, (batch, 2, height, width), generator=generator)
    size = 0.2 + 0.3 * torch.rand(2 * batch, 2, generator=generator)
    centre = 0.3 + 0.4 * torch.rand(2 * batch, 2, generator=generator)
    rows = torch.arange(batch).repeat_interleave(2)[:, None]
    return Layers(images, masks, torch.cat((rows, rows % 5, centre, size), dim=1))


def select(layers: Layers, chosen: list[int]) -> Layers:
    assert layers.masks is not None
    assert layers.boxes is not None
    rows = torch.cat([torch.nonzero(layers.boxes[:, 0] == row)[:, 0] for row in chosen])
    boxes = layers.boxes[rows].clone()
    for place, row in enumerate(chosen):
        boxes[layers.boxes[rows][:, 0] == row, 0] = place
    return Layers(layers.images[chosen], layers.masks[chosen], boxes)


def assert_equal(found: Layers, expected: Layers) -> None:
    for name in ("images", "masks", "boxes"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
@pytest.mark.parametrize(("height", "width"), [(9, 9), (14, 9), (9, 15)])
def test_a_sample_does_not_depend_on_its_batch(make: Make, height: int, width: int) -> None:
    augment = make()
    layers = make_layers(7, 3, height, width)
    together = augment(layers, augment.draw(5, 3, np.arange(7) + 100, 3))
    for chosen in ([3], [6, 0], [2, 5, 1, 4], [6, 5, 4, 3, 2, 1, 0]):
        found = augment(select(layers, chosen), augment.draw(5, 3, np.array(chosen) + 100, 3))
        assert_equal(found, select(together, chosen))


@pytest.mark.parametrize("make", ANY_CHANNELS)
@pytest.mark.parametrize(("batch", "channels"), [(1, 1), (2, 3), (7, 5), (384, 1)])
def test_any_batch_and_channels(make: Make, batch: int, channels: int) -> None:
    augment = make()
    layers = make_layers(batch, channels, 12, 10)
    whole = augment(layers, augment.draw(1, 0, np.arange(batch), channels))
    assert whole.images.dtype == torch.float32
    assert whole.images.shape[:2] == (batch, channels)
    assert 0 <= whole.images.min() <= whole.images.max() <= 1
    assert whole.masks is not None
    assert whole.masks.dtype == torch.int64
    assert set(whole.masks.unique().tolist()) <= set(range(8))
    last = augment(select(layers, [batch - 1]), augment.draw(1, 0, [batch - 1], channels))
    assert torch.equal(last.images[0], whole.images[-1])


@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_nothing_but_the_layers_returned_changes(make: Make) -> None:
    augment = make()
    layers, untouched = make_layers(4, 3, 12, 12), make_layers(4, 3, 12, 12)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    layers.images.requires_grad_()
    result = augment(layers, augment.draw(0, 0, np.arange(4), 3))
    assert not result.images.requires_grad
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]
    assert_equal(layers, untouched)


@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_a_run_in_low_precision_changes_nothing(make: Make) -> None:
    augment = make()
    layers = make_layers(3, 3, 12, 12)
    draws = augment.draw(0, 0, np.arange(3), 3)
    expected = augment(layers, draws)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(augment(layers, draws), expected)


@pytest.fixture(params=["CPU", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with OpenCV, and once as on a device."""
    if request.param == "device":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("make", [*ANY_CHANNELS, ColourJitter, detection_augment])
def test_an_empty_batch_stays_empty(make: Make) -> None:
    augment = make()
    size_px = augment.crop_px or (12, 10)
    found = augment(make_layers(0, 3, 12, 10), augment.draw(0, 0, [], 3))
    assert found.images.shape == (0, 3, *size_px)
    assert found.masks is not None
    assert found.masks.shape == (0, 2, *size_px)
    assert found.boxes is not None
    assert found.boxes.shape == (0, 6)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_the_order_of_pixels_in_memory_changes_nothing(make: Make) -> None:
    augment, layers = make(), make_layers(4, 3, 16, 12)
    assert layers.masks is not None
    turned_over = Layers(
        layers.images.to(memory_format=torch.channels_last),
        layers.masks.mT.contiguous().mT,
        layers.boxes,
    )
    assert not turned_over.images.is_contiguous()
    draws = augment.draw(0, 0, np.arange(4), 3)
    assert_equal(augment(turned_over, draws), augment(layers, draws))


@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_draws_fit_into_a_batch_and_change_with_seed_and_epoch(make: Make) -> None:
    augment = make()
    draws = augment.draw(0, 0, np.arange(5), 3)
    assert draws.keys() <= set(augment.draw_keys)
    assert all(key.startswith("augment_") and len(value) == 5 for key, value in draws.items())
    for seed, epoch in ((1, 0), (0, 1)):
        other = augment.draw(seed, epoch, np.arange(5), 3)
        assert all(not torch.equal(draws[key], other[key]) for key in draws)


@pytest.mark.gpu
@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_cpu_and_device_agree(make: Make) -> None:
    augment = make()
    layers = make_layers(16, 3, 32, 32)
    # Between the random pixels of a neighbourhood a rounding error of the place would count most.
    layers = Layers(torch.nn.functional.avg_pool2d(layers.images, 3, 1, 1), layers.masks)
    draws = augment.draw(0, 0, np.arange(16), 3)
    host = augment(layers, draws)
    assert layers.masks is not None
    device = augment(
        Layers(layers.images.cuda(), layers.masks.cuda()), {k: v.cuda() for k, v in draws.items()}
    )
    assert host.masks is not None
    assert device.masks is not None
    assert (device.images.cpu() - host.images).abs().max() <= 1 / 255
    assert (device.masks.cpu() != host.masks).float().mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("make", ANY_CHANNELS + RGB)
def test_a_run_in_tf32_changes_nothing(make: Make) -> None:
    augment, layers = make(), make_layers(4, 3, 32, 32)
    assert layers.masks is not None
    there = Layers(layers.images.cuda(), layers.masks.cuda())
    draws = {key: value.cuda() for key, value in augment.draw(0, 0, np.arange(4), 3).items()}
    expected = augment(there, draws)
    torch.set_float32_matmul_precision("high")
    try:
        found = augment(there, draws)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.images, expected.images)
    assert found.masks is not None
    assert expected.masks is not None
    assert torch.equal(found.masks, expected.masks)
