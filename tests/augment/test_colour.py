import colorsys
import math

import numpy as np
import pytest
import torch

from lit_data.augment import ColourJitter, Layers
from lit_data.errors import ConfigError


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


def test_off_costs_nothing_and_greys_stay_grey() -> None:
    off, layers = ColourJitter(hue=0, saturation=0, value=0), Layers(torch.rand(2, 3, 4, 4))
    assert off.draw(0, 0, np.arange(2), 3) == {}
    assert off(layers, {}) is layers
    jitter, grey = ColourJitter(), torch.rand(2, 1, 4, 4).expand(2, 3, 4, 4)
    result = jitter(Layers(grey), jitter.draw(0, 0, np.arange(2), 3)).images
    torch.testing.assert_close(result[:, 0], result[:, 2])


def test_only_rgb_has_colours() -> None:
    jitter = ColourJitter()
    with pytest.raises(ConfigError, match="images have 1 channels: colours need the three of RGB"):
        jitter(Layers(torch.zeros(1, 1, 4, 4)), jitter.draw(0, 0, [0], 1))


@pytest.mark.parametrize(
    "options", [{"hue": 0.6}, {"hue": -0.1}, {"saturation": 1.1}, {"value": math.inf}]
)
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"need 0 <= hue <= 0\.5 and the others in 0\.\.1"):
        ColourJitter(**options)
