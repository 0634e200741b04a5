from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image import fid

from lit_data.callbacks.image_features import Distances, SmallFeatures, extract, open_extractor
from lit_data.core.errors import ConfigError


def _draw(count: int, seed: int, *, noise: float = 0.0, tint: float = 0.0) -> Tensor:
    """Bright discs on dark ground, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(count, 2, 1, 1, generator=generator)
    axis = torch.linspace(0, 1, 24)
    away = (axis[None, :, None] - places[:, 0]) ** 2 + (axis[None, None, :] - places[:, 1]) ** 2
    discs = (away < 0.05).float()[:, None] * torch.tensor([0.9, 0.6, 0.2]).view(3, 1, 1)
    return (discs + tint + noise * torch.randn(discs.shape, generator=generator)).clamp(0, 1)


def _measure(real: Tensor, fake: Tensor) -> dict[str, float]:
    net, _ = open_extractor("small", None)
    distances = Distances(len(real))
    distances.add(extract(net, real, batch_size=64))
    return distances.measure(extract(net, fake, batch_size=64))


def test_the_small_net_is_the_same_for_ever() -> None:
    net = SmallFeatures()
    weights = net.weight_0.flatten()[:3].tolist()
    assert weights == pytest.approx([0.1926268, -0.2005143, -0.0162639], abs=1e-6)
    assert torch.equal(net.weight_3, SmallFeatures().weight_3)
    assert not list(net.parameters())  # buffers: nothing that an optimizer could change
    assert net(torch.rand(2, 3, 7, 5)).shape == (2, SmallFeatures.num_features)


@pytest.mark.parametrize("change", ["noise", "tint"])
def test_distances_grow_with_what_is_wrong(change: str) -> None:
    real = _draw(200, 0)
    found = [_measure(real, _draw(200, 1, **{change: value})) for value in (0.0, 0.1, 0.3)]
    for name in ("fid", "kid"):
        same, little, much = (row[name] for row in found)
        assert same < little < much
        assert same < 0.2 * little
    assert abs(found[0]["kid"]) < 2e-4  # no bias: other images of the same kind


def test_a_model_that_always_paints_the_same_is_found_out() -> None:
    real = _draw(200, 0)
    assert _measure(real, _draw(1, 1).expand(200, -1, -1, -1))["kid"] > 0.01


def test_distances_are_those_of_torchmetrics_and_leave_random_numbers_alone() -> None:
    features = torch.randn(3, 1200, 8, generator=torch.Generator().manual_seed(0))
    distances = Distances(1200)
    distances.add(features[0])
    state = torch.get_rng_state()
    first = distances.measure(features[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert distances.measure(features[2] + 1)["kid"] > 10 * abs(first["kid"])
    # Generated ones are forgotten, subsets drawn alike.
    assert distances.measure(features[1]) == first
    as_they_are = nn.Flatten()
    as_they_are.num_features = 8
    alone = fid.FrechetInceptionDistance(as_they_are)
    alone.update(features[0], real=True)
    alone.update(features[1], real=False)
    assert first["fid"] == pytest.approx(float(alone.compute()), rel=1e-5)


def test_grey_images_are_compared_and_others_refused() -> None:
    net = SmallFeatures()
    grey = torch.rand(3, 1, 8, 8)
    colour = extract(net, grey.repeat(1, 3, 1, 1), batch_size=2)
    assert torch.equal(extract(net, grey, batch_size=2), colour)
    text = "images of 4 channels cannot be compared: features need one or three"
    with pytest.raises(ConfigError, match=text):
        extract(net, torch.rand(3, 4, 8, 8), batch_size=2)


def test_any_net_may_give_the_features() -> None:
    own = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 5))
    net, suffix = open_extractor(own, None)
    assert suffix == "_sequential"
    assert not net.training
    assert not any(weight.requires_grad for weight in net.parameters())
    assert extract(net, torch.rand(3, 3, 8, 8), batch_size=2).shape == (3, 5)
    with pytest.raises(ConfigError, match=r"extractor Identity must return features \[B, D\]"):
        extract(nn.Identity(), torch.rand(3, 3, 8, 8), batch_size=2)


@pytest.mark.parametrize(
    ("extractor", "weights", "message"),
    [
        ("large", None, "extractor='large' is unknown: choose one of small, inception"),
        ("inception", None, "weights=None is not a file: extractor='inception' needs pt_inception"),
        ("small", "w.pth", "weights='w.pth' are only for extractor='inception'"),
    ],
)
def test_wrong_extractors_are_refused(extractor: Any, weights: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_extractor(extractor, weights)


def test_a_pickle_that_may_run_code_is_refused(tmp_path: Any) -> None:
    weights = tmp_path / "inception.pth"
    torch.save({"run": print}, weights)
    with pytest.raises(
        ConfigError, match="is not a file that holds only weights: Weights only load"
    ):
        open_extractor("inception", str(weights))
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a file that holds only weights"):
        open_extractor("inception", str(weights))


def test_inception_needs_its_package(tmp_path: Any) -> None:
    weights = tmp_path / "inception.pth"
    torch.save({}, weights)
    if fid._TORCH_FIDELITY_AVAILABLE:
        pytest.skip("torch-fidelity is installed")
    text = "extractor='inception' needs torch-fidelity: pip install torch-fidelity"
    with pytest.raises(ConfigError, match=text):
        open_extractor("inception", str(weights))


def test_inception_gets_whole_numbers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(
            self, name: str, features_list: list[str], feature_extractor_weights_path: str
        ) -> None:
            super().__init__()
            assert (name, features_list) == ("inception-v3-compat", ["2048"])
            assert feature_extractor_weights_path.endswith("inception.pth")

        def forward(self, images: Tensor) -> Tensor:
            assert images.dtype == torch.uint8
            return images.flatten(1).float()

    monkeypatch.setattr(fid, "NoTrainInceptionV3", Net)
    weights = tmp_path / "inception.pth"
    torch.save({}, weights)
    net, suffix = open_extractor("inception", str(weights))
    assert suffix == ""
    found = extract(net, torch.tensor([0.0, 0.5, 1.0, 2.0]).view(1, 1, 2, 2), batch_size=1)
    assert found[0, :4].tolist() == [0, 128, 255, 255]
