"""`PlaceGaussians`: distances by place, what is usual, other images, checkpoints, what does not fit."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.models import MemoryBank, PlaceGaussians
from lit_data.models.anomaly.normality import Normality


def _draw(count: int, seed: int = 0) -> list[Tensor]:
    """Maps of 8 x 8 and 4 x 4 places, whose features differ by place and go together."""
    generator = torch.Generator().manual_seed(seed)
    maps = []
    for channels, size in ((6, 8), (10, 4)):
        mixing = torch.randn(channels, channels, generator=torch.Generator().manual_seed(channels))
        noise = torch.randn(count, channels, size, size, generator=generator)
        place = torch.arange(size * size).view(size, size).sin()
        maps.append(3 * place + torch.einsum("cd,bdhw->bchw", mixing, noise))
    return maps


def _fit(maps: Sequence[Tensor], normality: PlaceGaussians | None = None) -> PlaceGaussians:
    normality = normality or PlaceGaussians()
    normality.add(maps)
    normality.fit()
    return normality


def test_a_place_is_far_where_it_looks_as_another_place_does() -> None:
    normality = _fit(_draw(200))
    maps = _draw(2, seed=1)
    usual = normality(maps)
    assert usual.shape == (2, 1, 8, 8)
    assert usual.mean() < 1
    maps[0][1, :, 2, 3] = 3 * torch.tensor(50.0).sin()
    places = normality(maps)[1, 0]
    assert divmod(int(places.argmax()), 8) == (2, 3)
    assert places[2, 3] > 1.2 * usual[1, 0, 2, 3]


def test_95_percent_of_good_images_are_no_farther_than_usual_at_each_scale() -> None:
    normality = _fit(_draw(400))
    new = _draw(400, seed=2)
    for scale, features in zip(normality.scales, normality.describe(new), strict=True):
        highest = scale(features).flatten(1).amax(1)
        assert 0.85 < (highest <= 1).float().mean() < 0.99


def test_training_images_count_as_if_the_others_alone_were_fitted() -> None:
    maps = _draw(12)
    normality = PlaceGaussians()
    normality.add(maps)
    scale = normality.scales[1]
    features = normality.describe(maps)[1]
    left_out = scale.fit(features) * scale.usual
    others = torch.arange(12) != 5
    scale.fit(features[others])
    expected = (scale(features[5:6]) * scale.usual)[0]
    # Deviations of channels and the shrinkage are those of all twelve.
    assert_close(left_out[5], expected, rtol=0.25, atol=0)
    assert_close(left_out[5].mean(), expected.mean(), rtol=0.05, atol=0)


def test_a_checkpoint_holds_projections_of_wide_maps_alone() -> None:
    maps = _draw(20)
    normality = _fit(maps, PlaceGaussians(width=8))  # maps have 6 and 10 channels
    states = normality.state_dict()
    assert [name for name in states if "projection" in name] == ["scales.1.projection"]
    loaded = PlaceGaussians(width=8)
    loaded.load_state_dict(states)
    assert torch.equal(loaded(maps), normality(maps))
    with pytest.raises(ConfigError, match="gives 7 features, and 6 were fitted"):
        loaded([torch.zeros(1, 7, 8, 8), maps[1]])
    with pytest.raises(ConfigError, match="gives 7 features, and 10 were fitted"):
        loaded([maps[0], torch.zeros(20, 7, 4, 4)])


@pytest.mark.parametrize("parts", [1, 7])
def test_the_sample_is_that_of_one_batch(parts: int) -> None:
    maps = _draw(60)
    normality = PlaceGaussians(images=20, seed=4)
    for part in zip(*(one.split(60 // parts) for one in maps), strict=True):
        normality.add(part)
    assert len(normality.candidates) == 20
    normality.fit()
    expected = PlaceGaussians(images=20, seed=4)
    assert_close(normality(maps), _fit(maps, expected)(maps), rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="images"):
        PlaceGaussians(images=0)
    with pytest.raises(
        ConfigError, match="only 1 good training image, and a Gaussian needs at least 2"
    ):
        _fit(_draw(1))
    normality = _fit(_draw(5))
    maps = _draw(1)
    with pytest.raises(ConfigError, match="images of 8 x 6 places, and others were of 8 x 8"):
        normality([maps[0][..., :6], maps[1]])
    with pytest.raises(ConfigError, match="gives 5 features, and 6 were fitted"):
        normality([maps[0][:, :5], maps[1]])
    with pytest.raises(ConfigError, match="gives 1 maps, and 2 were fitted"):
        normality(maps[:1])
    assert isinstance(MemoryBank(), Normality)
