import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from kornia.filters import gaussian_blur2d
from torch import Tensor
from torch.testing import assert_close

from lit_data.augment import ColourJitter, Layers, Photometry
from lit_data.core.errors import ConfigError


def _expose(images: Tensor, **options: Any) -> Tensor:
    photometry = Photometry(**options)
    draws = photometry.draw(0, 0, np.arange(len(images)), images.shape[1])
    result = photometry(Layers(images), draws)
    return result.images


def _images(batch: int = 8, channels: int = 3, size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, channels, size, size, generator=generator) * 0.6 + 0.2


def _numbers(**options: Any) -> Tensor:
    """From -1 to 1, [8, 3, 9]."""
    return 2 * Photometry(**options).draw(0, 0, np.arange(8), 3)["augment_photometry"] - 1


def test_each_formula() -> None:
    images, options = _images(), {"gain": 0.2, "offset": 0.1, "contrast": 0.3, "gamma": 0.4}
    gain, _, _, _, _, offset, contrast, gamma, _ = _numbers(**options)[..., None, None].unbind(
        dim=2
    )
    mean = images.mean(dim=(2, 3), keepdim=True)
    close = {"atol": 5e-5, "rtol": 0}
    assert_close(_expose(images, gain=0.2), (images * (1 + 0.2 * gain)).clamp(0, 1), **close)
    assert_close(_expose(images, offset=0.1), images + 0.1 * offset, **close)
    expected = mean + (images - mean) * (1 + 0.3 * contrast)
    assert_close(_expose(images, contrast=0.3), expected.clamp(0, 1), **close)
    assert_close(_expose(images, gamma=0.4), images ** (1 + 0.4 * gamma), **close)
    whole = (expected * (1 + 0.2 * gain) + 0.1 * offset).clamp(0, 1) ** (1 + 0.4 * gamma)
    assert_close(_expose(images, **options), whole, atol=2e-4, rtol=0)


def test_blur_is_that_of_kornia() -> None:
    images, drawn = _images(size=24), (_numbers(blur_px=1.5)[..., 8] + 1) / 2
    sigma = (1.5 * drawn).reshape(-1, 1).expand(-1, 2).clamp(min=1e-3)
    expected = gaussian_blur2d(
        images.reshape(24, 1, 24, 24), (11, 11), sigma, border_type="replicate"
    )
    assert_close(_expose(images, blur_px=1.5), expected.view_as(images), atol=1e-5, rtol=0)


def test_noise_has_the_strength_that_was_drawn() -> None:
    images = torch.full((8, 3, 128, 128), 0.5)
    found = (_expose(images, noise=0.05) - 0.5).std(dim=(2, 3))
    assert_close(found, 0.05 * (_numbers(noise=0.05)[..., 1] + 1) / 2, atol=1e-3, rtol=0.02)


def test_channels_differ_unless_they_are_registered() -> None:
    image = _images(8, 1).expand(8, 3, 16, 16)
    options = {"gain": 0.2, "offset": 0.1, "contrast": 0.3, "gamma": 0.4, "blur_px": 1.0}
    for name, size in options.items():
        own = _expose(image, **{name: size})
        shared = _expose(image, **{name: size}, registered=True)
        assert not torch.equal(own[:, 0], own[:, 1])
        assert torch.equal(own[:, 0], shared[:, 0])
        assert torch.equal(shared[:, 0], shared[:, 1])
    noisy = _expose(torch.full((8, 3, 64, 64), 0.5), noise=0.05, registered=True)
    assert torch.allclose(noisy[:, 0].std(dim=(1, 2)), noisy[:, 2].std(dim=(1, 2)), rtol=0.05)
    assert not torch.equal(noisy[:, 0], noisy[:, 2])


@pytest.mark.parametrize(
    ("options", "match"),
    [({name: value}, rf"{name}={value}: need 0 <= {name} < 1") for name in ("gain", "contrast", "gamma")
     for value in (1.0, -0.1)]
    + [({name: -1}, f"{name}=-1: need {name} >= 0") for name in ("offset", "blur_px", "noise")],
)  # fmt: skip
def test_bad_options(options: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Photometry(**options)


@pytest.mark.parametrize(
    "options", [{}, {"hue": 0.5, "saturation": 0, "value": 0}, {"hue": 0, "saturation": 1}]
)
def test_colours_are_those_of_the_standard_library(options: dict[str, float]) -> None:
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    jitter = ColourJitter(**options)
    draws = jitter.draw(0, 0, np.arange(6), 3)
    found = jitter(Layers(images), draws).images
    sizes = np.array([jitter.hue, jitter.saturation, jitter.value])
    for image, result, numbers in zip(
        images, found, draws["augment_colour"].double().numpy(), strict=True
    ):
        turn, saturate, brighten = sizes * (2 * numbers - 1)
        for y, x in np.ndindex(4, 4):
            h, s, v = colorsys.rgb_to_hsv(*image[:, y, x].tolist())
            s, v = min(s * (1 + saturate), 1), min(v * (1 + brighten), 1)
            assert result[:, y, x].tolist() == pytest.approx(
                colorsys.hsv_to_rgb((h + turn) % 1, s, v), abs=1e-4
            )


def test_only_rgb_has_colours() -> None:
    jitter = ColourJitter()
    with pytest.raises(ConfigError, match="images have 1 channel: color changes need RGB"):
        jitter(Layers(torch.zeros(1, 1, 4, 4)), jitter.draw(0, 0, [0], 1))


@pytest.mark.parametrize(
    "options", [{"hue": 0.6}, {"hue": -0.1}, {"saturation": 1.1}, {"value": math.inf}]
)
def test_bad_options_of_jitter(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"need 0 <= hue <= 0\.5 and the others in 0\.\.1"):
        ColourJitter(**options)
