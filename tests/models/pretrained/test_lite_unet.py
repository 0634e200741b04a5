"""`LiteUNet`: sizes, channels, what it starts from, and how fast its parts learn."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import instantiate
from lit_data.core.errors import ConfigError
from lit_data.models import EfficientNetLite, LiteUNet, SegmentationModule
from lit_data.models.schedule import make_optimizer
from tests.models.runs import load_batches, make_trainer


def _small(**options: Any) -> LiteUNet:
    return LiteUNet(**{"strides_px": [2, 4, 8], "width": 4, **options})


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (7, 5), (1, 9)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_any_size_and_channels_go_through(size: tuple[int, int], channels: int) -> None:
    net = _small(channels=channels, classes=["pit", "crack"]).eval()
    assert net(torch.rand(2, channels, *size)).shape == (2, 3, *size)


def test_the_untrained_net_expects_few_defects() -> None:
    torch.manual_seed(0)
    assert LiteUNet(prior=0.02)(torch.rand(2, 3, 64, 64)).sigmoid().mean() < 0.1


def test_the_encoder_begins_with_what_imagenet_taught() -> None:
    taught = EfficientNetLite(strides_px=[2, 4, 8]).state_dict()
    assert all(map(torch.equal, taught.values(), _small().encoder.state_dict().values()))
    random = _small(weights=None).encoder.state_dict()
    assert not torch.equal(taught["conv_stem.weight"], random["conv_stem.weight"])


def test_it_learns_to_mark_what_is_bright() -> None:
    torch.manual_seed(0)
    net, images = LiteUNet(strides_px=[2, 4], width=8), torch.rand(4, 3, 32, 32)
    masks = torch.nn.functional.interpolate((torch.rand(4, 1, 4, 4) > 0.5).float(), scale_factor=8)
    images = images * 0.2 + masks * 0.5
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(30):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all((weight.grad is not None) == weight.requires_grad for weight in net.parameters())
    assert ((net(images) > 0) == (masks > 0)).float().mean() > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels=0 is not usable"),
        ({"classes": 0}, "classes=0 is not usable"),
        ({"width": 0}, "width=0 is not usable"),
        ({"prior": 1.0}, "need 0 < prior < 1"),
        ({"size": "lite9"}, "size='lite9' is unknown"),
        ({"strides_px": [2, 8]}, r"strides_px=\[2, 8\]: list all of them"),
        ({"weights": "imagnet"}, "weights='imagnet' is unknown: choose imagenet, null"),
        ({"encoder_rate": 2}, "encoder_rate=2 must be between 0 and 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _small(**options)


def test_parts_learn_at_their_own_rates() -> None:
    net = _small(encoder_rate=0.25, weights=None)
    factory = partial(torch.optim.AdamW, lr=0.4)
    others, encoder = make_optimizer(factory, SegmentationModule(net)).param_groups
    assert (others["lr"], encoder["lr"]) == pytest.approx((0.4, 0.1))
    assert set(encoder["params"]) == set(net.encoder.parameters())
    assert len(others["params"]) + len(encoder["params"]) == len(list(net.parameters()))


def test_a_trainer_leaves_the_statistics_that_light_fine_tuning_keeps(tmp_path: Path) -> None:
    module = SegmentationModule(_small(fine_tuning="light"))
    buffers = dict(module.net.encoder.named_buffers())
    before = {name: value.clone() for name, value in buffers.items()}
    batch = {"image": torch.rand(2, 3, 32, 32), "mask": torch.zeros(2, 1, 32, 32)}
    trainer = make_trainer(tmp_path)
    trainer.fit(module, load_batches(batch), load_batches(batch))
    assert trainer.global_step == 1
    assert all(torch.equal(value, before[name]) for name, value in buffers.items())


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"foreach": False}, None), ({"fused": False}, False)],
    ids=["free", "foreach", "told"],
)
def test_on_a_cpu_optimizers_step_all_weights_at_once_unless_told_how(
    options: dict[str, bool], fused: bool | None
) -> None:
    factory = partial(torch.optim.AdamW, lr=0.4, **options)
    groups = make_optimizer(factory, SegmentationModule(_small(weights=None))).param_groups
    assert {group["fused"] for group in groups} == {fused}


def test_optimizers_of_one_kind_of_step_stay_as_they_are() -> None:
    module = SegmentationModule(_small(weights=None))
    groups = make_optimizer(partial(torch.optim.Rprop, lr=0.4), module).param_groups
    assert all("fused" not in group for group in groups)


def test_the_group_builds_it_with_classes_of_the_data() -> None:
    words = ["+experiment=segmentation", "model=unet_lite0", "data.classes=[pit]", "paths.run=run"]
    module = instantiate(compose("fit", words).model)
    assert isinstance(module.net, LiteUNet)
    assert module(torch.rand(1, 3, 32, 32)).shape == (1, 2, 32, 32)
