"""On a CPU the same draws give the same pixels as the device path, in less time."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lit_data.augment import Augmentation, Compiled, Geometry, Pipeline, StripeAugment, warping
from lit_data.augment.augmentation import Layers
from lit_data.augment.pipeline import detection_augment, segmentation_augment, stripe_augment
from lit_data.augment.warping import Padding
from lit_data.core.devices import change_each
from lit_data.core.types import Array

GREY_LEVEL = 1 / 255


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _images(count: int, side: int = 40) -> torch.Tensor:
    images = torch.rand(count, 3, side, side, generator=_generator())
    images[0], images[1, :, :9], images[2, :, :9] = images[0, :1], 0, 1  # grey, black, white
    return images


@pytest.mark.parametrize(
    "augmentation",
    [
        StripeAugment(shift_px=5),
        stripe_augment(),
        stripe_augment(
            rotate_deg=0, scale=(1, 1), shift_px=3, crop_px=31, padding="border", blur_px=3
        ),
        detection_augment(),
        detection_augment(shift_px=9, scale=(1, 1), hue=0.5, saturation=1, value=1),
        segmentation_augment(),
    ],
    ids=str,
)
def test_pixels_equal_the_device_path(
    augmentation: Augmentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(_images(24), (_images(24)[:, :1] > 0.5).to(torch.uint8))
    draws = augmentation.draw(0, 0, range(24), 3)
    found = augmentation(layers, draws)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    wanted = augmentation(layers, draws)
    assert (found.images - wanted.images).abs().max() < GREY_LEVEL / 10
    assert found.masks is not None
    assert wanted.masks is not None
    assert torch.equal(found.masks, wanted.masks)


@pytest.mark.parametrize(
    "augmentation",
    [
        detection_augment(shift_px=9, scale=(1, 1), flip_top_bottom=True),
        detection_augment(),
        detection_augment(scale=(1, 1), mixup=0.5),
        detection_augment(scale=(1, 1), hue=0, saturation=0, value=0),
        segmentation_augment(),
        pytest.param(
            Compiled(detection_augment(scale=(1, 1)), backend="eager"), marks=pytest.mark.slow
        ),
        Pipeline([Geometry(flip_left_right=True), nn.Identity()]),
    ],
    ids=str,
)
def test_images_may_come_as_bytes(augmentation: Augmentation) -> None:
    images, draws = (255 * _images(24)).to(torch.uint8), augmentation.draw(0, 0, range(24), 3)
    found, wanted = augmentation(Layers(images), draws), augmentation(Layers(images / 255), draws)
    assert torch.equal(found.images, wanted.images)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("padding", ["reflect", "zeros", "border"])
@pytest.mark.parametrize("crop_px", [None, 31])
def test_warps_are_those_of_the_device_path(
    is_exact: bool, padding: Padding, crop_px: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warping, "opencv_is_exact", lambda: is_exact)
    geometry = Geometry(
        rotate_deg=180, scale=(0.3, 2), shear_deg=9, shift_px=40, padding=padding, crop_px=crop_px
    )
    layers = Layers(
        _images(64, 37),
        torch.randint(0, 200, (64, 1, 37, 37), generator=_generator(), dtype=torch.uint8),
    )
    draws = geometry.draw(0, 0, range(64), 3)
    found = geometry(layers, draws)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    wanted = geometry(layers, draws)
    assert (found.images - wanted.images).abs().max() < GREY_LEVEL / 10
    assert found.masks is not None
    assert wanted.masks is not None
    assert (found.masks == wanted.masks).float().mean() > 0.9995  # places midway between two pixels


def test_this_opencv_is_exact_and_others_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warping.opencv_is_exact.__wrapped__()  # else warps take three times as long
    warp = warping.warp_plane

    def round_to_steps(plane: Array, matrix: Array, *args: Any, **kwargs: Any) -> None:
        warp(plane, np.round(matrix * 32) / 32, *args, **kwargs)

    monkeypatch.setattr(warping, "warp_plane", round_to_steps)
    assert not warping.opencv_is_exact.__wrapped__()


@pytest.mark.parametrize("values", [1, 2**18])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_sample_is_changed_once(threads: int, values: int) -> None:
    before, done, used = torch.get_num_threads(), [], set()

    def change(number: int) -> None:
        done.append(number)
        used.add(threading.get_ident())
        if values > 1:
            time.sleep(1e-3)

    torch.set_num_threads(threads)
    try:
        change_each(change, torch.empty(50, values))
        change_each(change, torch.empty(0, values))
        with pytest.raises(ZeroDivisionError):
            change_each(lambda number: 1 // (number - 7), torch.empty(50, values))
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == [*range(50)]
    assert len(used) == (threads if values > 1 else 1)
