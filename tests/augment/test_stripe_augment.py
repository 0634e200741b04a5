import hashlib

import numpy as np
import pytest
import torch

from lit_data.augment import Layers, SingleTexture, StripeAugment
from lit_data.augment.photometry import noise_field
from lit_data.errors import ConfigError


def _batch(batch: int, channels: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, channels, height, width, generator=generator)
    return images, (torch.rand(batch, 1, height, width, generator=generator) > 0.9).float()


def _run(
    augment: StripeAugment,
    images: torch.Tensor,
    masks: torch.Tensor | None = None,
    *,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    draws = augment.draw(9, 4, first + np.arange(len(images)), images.shape[1])
    layers: Layers = augment(Layers(images, masks), draws)
    return layers.images, layers.masks


def _turns_and_mirrors(image: torch.Tensor) -> list[torch.Tensor]:
    turned = [torch.rot90(image, quarter, (1, 2)) for quarter in range(4)]
    return [*turned, *(image.flip(2) for image in turned)]


def test_flips_and_turns_move_image_and_mask_alike() -> None:
    augment = StripeAugment(shift_px=0, gain=0, noise=0)
    images, masks = _batch(64, 3, 9, 9)
    moved, moved_masks = _run(augment, images, masks)
    assert moved_masks is not None
    chosen = set()
    for sample in range(64):
        layers = torch.cat((images[sample], masks[sample]))
        result = torch.cat((moved[sample], moved_masks[sample]))
        matches = [
            n for n, other in enumerate(_turns_and_mirrors(layers)) if torch.equal(other, result)
        ]
        assert len(matches) == 1
        chosen.add(matches[0])
    assert chosen == set(range(8))


@pytest.mark.parametrize(("height", "width"), [(8, 12), (12, 8)])
def test_patches_that_are_not_square_keep_their_shape(height: int, width: int) -> None:
    augment = StripeAugment(shift_px=0, gain=0, noise=0)
    images, masks = _batch(32, 3, height, width)
    moved, _ = _run(augment, images, masks)
    for sample in range(32):
        same_shape = [
            image
            for image in _turns_and_mirrors(images[sample])
            if image.shape == images[sample].shape
        ]
        assert any(torch.equal(image, moved[sample]) for image in same_shape)


def test_shifts_are_whole_pixels_and_mirror_the_edge() -> None:
    augment = StripeAugment(flip=False, turn=False, shift_px=2, gain=0, noise=0)
    images, _ = _batch(40, 2, 16, 16)
    moved, masks = _run(augment, images)
    assert masks is None
    shifts = set()
    for sample in range(40):
        for dy in range(-2, 3):
            for dx in range(-2, 3):
                if torch.equal(
                    moved[sample, :, 2:14, 2:14],
                    images[sample, :, 2 - dy : 14 - dy, 2 - dx : 14 - dx],
                ):
                    shifts.add((dy, dx))
    assert len(shifts) > 10
    assert set(moved.unique().tolist()) <= set(images.unique().tolist())


def test_masks_stay_binary_and_images_in_range() -> None:
    augment = StripeAugment(gain=0.5, noise=0.3)
    images, masks = _batch(16, 3, 32, 32)
    moved, moved_masks = _run(augment, images, masks)
    assert moved_masks is not None
    assert set(moved_masks.unique().tolist()) == {0.0, 1.0}
    assert moved.min() >= 0
    assert moved.max() <= 1


def test_gain_and_noise_are_drawn_for_each_image() -> None:
    augment = StripeAugment(flip=False, turn=False, shift_px=0, gain=0.2, noise=0)
    images = torch.full((8, 3, 4, 4), 0.5)
    gains = _run(augment, images)[0][:, :, 0, 0] / 0.5
    assert gains.unique().numel() == 24
    assert gains.min() >= 0.8
    assert gains.max() <= 1.2
    augment = StripeAugment(flip=False, turn=False, shift_px=0, gain=0, noise=0.02)
    noise = _run(augment, torch.full((8, 3, 64, 64), 0.5))[0] - 0.5
    assert noise.std(dim=(2, 3)).max() < 0.0215
    assert noise.flatten(2).unique(dim=1).shape[1] == 3


def test_a_sample_does_not_depend_on_its_batch() -> None:
    images, masks = _batch(7, 3, 16, 16)
    together, moved_masks = _run(StripeAugment(), images, masks)
    texture = SingleTexture()
    exposed = texture(images, texture.draw(9, 4, np.arange(7), 3))
    assert moved_masks is not None
    for n in range(7):
        alone, mask = _run(StripeAugment(), images[n : n + 1], masks[n : n + 1], first=n)
        assert mask is not None
        assert torch.equal(alone[0], together[n])
        assert torch.equal(mask[0], moved_masks[n])
        assert torch.equal(texture(images[n : n + 1], texture.draw(9, 4, [n], 3))[0], exposed[n])


def test_samples_stay_what_they_are_from_release_to_release() -> None:
    images, masks = _batch(6, 3, 16, 16)
    moved, moved_masks = _run(StripeAugment(shift_px=2), images, masks)
    assert moved_masks is not None
    digest = hashlib.sha256(
        (moved * 2**14).round().to(torch.int32).numpy().tobytes() + moved_masks.numpy().tobytes()
    )
    assert digest.hexdigest()[:16] == "e25ef2edfc31b957"


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    images, masks = _batch(4, 3, 16, 16)
    texture = SingleTexture()
    assert not texture(images, texture.draw(0, 0, np.arange(4), 3)).requires_grad
    assert not _run(StripeAugment(), images, masks)[0].requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_single_texture_makes_three_different_exposures() -> None:
    texture = SingleTexture(shift_px=1.0, gain=0.05, noise=0.01)
    image = _batch(1, 1, 32, 32)[0].expand(2, 3, 32, 32)
    exposures = texture(image, texture.draw(0, 0, np.arange(2), 3))
    assert exposures.shape == (2, 3, 32, 32)
    assert exposures.flatten(2).unique(dim=1).shape[1] == 3
    nothing = SingleTexture(shift_px=0, gain=0, noise=0)
    torch.testing.assert_close(
        nothing(image, nothing.draw(0, 0, np.arange(2), 3)), image, rtol=0, atol=1e-5
    )


def test_the_noise_field_is_normal() -> None:
    field = noise_field(torch.device("cpu"))
    assert abs(float(field.mean())) < 0.005
    assert abs(float(field.std()) - 1) < 0.005
    assert abs(float((field.abs() < 1).float().mean()) - 0.6827) < 0.003


@pytest.mark.parametrize(
    "options", [{"shift_px": -1}, {"noise": -0.1}, {"gain": 1.0}, {"gain": -0.1}]
)
@pytest.mark.parametrize("module", [StripeAugment, SingleTexture])
def test_bad_options(module: type, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"need (shift_px|noise)|gain=.*need|0 <= gain < 1"):
        module(**options)
