import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.augment import Layers, SingleTexture, StripeAugment
from lit_data.core.errors import ConfigError


def _batch(batch: int, channels: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, channels, height, width, generator=generator)
    return images, (torch.rand(batch, 1, height, width, generator=generator) > 0.9).float()


def _run(
    augment: StripeAugment,
    images: Tensor,
    masks: Tensor | None = None,
    *,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    draws = augment.draw(9, 4, first + np.arange(len(images)), images.shape[1])
    layers = augment(Layers(images, masks), draws)
    return layers.images, layers.masks


def test_a_texture_does_not_depend_on_its_batch() -> None:
    images, _ = _batch(7, 3, 16, 16)
    texture = SingleTexture()
    state = torch.get_rng_state()
    exposed = texture(images, texture.draw(9, 4, np.arange(7), 3))
    for n in range(7):
        assert torch.equal(texture(images[n : n + 1], texture.draw(9, 4, [n], 3))[0], exposed[n])
    assert torch.equal(torch.get_rng_state(), state)
    assert not exposed.requires_grad


def test_samples_stay_what_they_are_from_release_to_release() -> None:
    images, masks = _batch(6, 3, 16, 16)
    moved, moved_masks = _run(StripeAugment(shift_px=2), images, masks)
    assert moved_masks is not None
    digest = hashlib.sha256(
        (moved * 2**14).round().to(torch.int32).numpy().tobytes() + moved_masks.numpy().tobytes()
    )
    assert digest.hexdigest()[:16] == "e25ef2edfc31b957"


@pytest.mark.parametrize(
    ("name", "value"), [("shift_px", -1), ("noise", -0.1), ("gain", 1.0), ("gain", -0.1)]
)
@pytest.mark.parametrize("module", [StripeAugment, SingleTexture])
def test_bad_options(module: type, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value}.*need"):
        module(**{name: value})
