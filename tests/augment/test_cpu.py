"""On a CPU the same draws give the same pixels as the device path, in less time."""

import pytest
import torch
from kornia.color import hsv_to_rgb, rgb_to_hsv

from lit_data.augment import Augmentation, StripeAugment
from lit_data.augment.augmentation import Layers, in_pieces
from lit_data.augment.builders import detection_augment, segmentation_augment, stripe_augment
from lit_data.augment.colour import change_colours

GREY_LEVEL = 1 / 255


def _images(count: int, side: int = 40) -> torch.Tensor:
    images = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))
    images[0], images[1, :, :9], images[2, :, :9] = images[0, :1], 0, 1  # grey, black, white
    return images


@pytest.mark.parametrize(
    "augmentation",
    [
        StripeAugment(shift_px=5),
        stripe_augment(),
        stripe_augment(rotate_deg=0, scale=(1, 1), shift_px=3, crop_px=31, padding="border", blur_px=3),
        detection_augment(),
        detection_augment(shift_px=9, scale=(1, 1), hue=0.5, saturation=1, value=1),
        segmentation_augment(),
    ],
    ids=str,
)
def test_pixels_are_those_of_the_device_path(augmentation: Augmentation, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(_images(24), (_images(24)[:, :1] > 0.5).to(torch.uint8))
    draws = augmentation.draw(0, 0, range(24), 3)
    found = augmentation(layers, draws)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    wanted = augmentation(layers, draws)
    assert (found.images - wanted.images).abs().max() < GREY_LEVEL / 10
    assert found.masks is not None
    assert wanted.masks is not None
    assert torch.equal(found.masks, wanted.masks)


@pytest.mark.parametrize("turn", [-3.0, -0.09, 0.0, 0.7, 3.0])
@pytest.mark.parametrize(("saturation", "value"), [(1.0, 1.0), (0.0, 1.3), (1.7, 0.6), (2.0, 2.0)])
def test_colours_are_those_of_the_way_through_hsv(turn: float, saturation: float, value: float) -> None:
    images = _images(6)
    hues, saturations, values = rgb_to_hsv(images).unbind(dim=1)
    hues = (hues + turn * torch.pi / 3) % (2 * torch.pi)
    changed = (hues, (saturations * saturation).clamp(0, 1), (values * value).clamp(0, 1))
    wanted = hsv_to_rgb(torch.stack(changed, dim=1))
    numbers = [torch.full((6, 1, 1), number) for number in (turn, saturation, value)]
    torch.testing.assert_close(change_colours(images, *numbers), wanted, atol=1e-5, rtol=0)


def test_pieces_get_the_numbers_of_their_images() -> None:
    images, factors = torch.ones(50, 3, 200, 200), torch.arange(50.0)
    seen = []

    def change(part: torch.Tensor, factor: torch.Tensor, nothing: None) -> torch.Tensor:
        seen.append(len(part))
        return part * factor.view(-1, 1, 1, 1)

    changed = in_pieces(change, images, factors, None)
    assert torch.equal(changed[:, 0, 0, 0], factors)
    assert max(seen) == 1
    assert len(seen) == 50
