"""Nets of fewer bits, and how far they are from float32."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_data.errors import ConfigError
from lit_data.inference import TiledPredictor, quantise
from lit_data.inference.export.quantise import compare_values, measure_agreement
from lit_data.modules import UNet

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

QUANTISE = "lit_data.inference.export.quantise"
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: pip install -e '.[quantise]'"
)


class Mixer(nn.Module):
    """A linear layer over the channels of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(32, 32)
        self.lift, self.lower = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.lower(self.mix(self.lift(images).movedim(1, 3)).movedim(3, 1)).sigmoid()


class Marks(nn.Module):
    """A UNet that answers with a probability; training it changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = UNet(width=4, depth=1, prior=0.5)

    def forward(self, images: Tensor) -> Tensor:
        return (10 * self.net(images)).float().sigmoid()


class Counting(nn.Conv2d):
    """Asks for the length of its batch as a plain number."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) / len(images)


def make_tiles(count: int, size: tuple[int, int] = (32, 48)) -> Tensor:
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(count))


def test_bfloat16_gives_float32_that_is_close() -> None:
    net = Marks().eval()
    quantised, tiles = quantise(net, mode="bf16"), make_tiles(2)
    with torch.inference_mode():
        found, wanted = quantised(tiles), net(tiles)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().max() < 0.03
    assert {weight.dtype for weight in net.parameters()} == {torch.float32}


@needs_torchao
def test_linear_layers_become_int8_and_the_net_stays() -> None:
    net, tiles = Mixer(), make_tiles(2)
    with torch.inference_mode():
        wanted = net(tiles)
        quantised = quantise(net, mode="dynamic")
        assert 0 < (quantised(tiles) - wanted).abs().max() < 0.02
        assert torch.equal(net(tiles), wanted)
    assert type(net.mix.weight) is nn.Parameter
    assert quantised.get_submodule("mix").weight.qdata.dtype == torch.int8


def check_static(net: nn.Module, size: tuple[int, int]) -> None:
    """Any number of tiles, of any size up to that of the calibration, and those with a NaN."""
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    quantised = quantise(net, mode="static", calibration=[make_tiles(1, size), make_tiles(2, size)])
    assert all(part.training for part in net.modules())
    net.eval()
    images = [make_tiles(1, (side, side))[0] for side in (size[0], 17, size[0], 30, size[0])]
    options: dict[str, Any] = {"tile_px": size, "overlap_px": 0, "round_px": max(size)}
    predictor = TiledPredictor(quantised, batch_size=3, **options)
    with torch.inference_mode():
        for image, (_, values) in zip(images, predictor.predict(images), strict=True):
            inside = (slice(None), slice(0, image.shape[1] - 4), slice(0, image.shape[2] - 4))
            # At the lower and right edge of a filled tile the net sees its filling.
            difference = (values - net(image[None])[0])[inside].abs()
            assert 0 < difference.max() < 0.1
            assert difference.mean() < 0.01
        tiles = make_tiles(1, size)
        tiles[0, 0, 5, 5] = math.nan
        assert torch.equal(quantised(tiles).isnan(), net(tiles).isnan())
    with pytest.raises(ConfigError, match=r"^tiles of 64 x 48 px are larger .*, 32 x 48 px"):
        quantised(make_tiles(1, (64, 48)))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all that int8 needs."""
    monkeypatch.setattr(f"{QUANTISE}.find_spec", lambda name: True)
    monkeypatch.setattr(f"{QUANTISE}.check_compiler", lambda device: None)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@needs_torchao
@pytest.mark.usefixtures("able")
def test_convolutions_become_int8_also_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda net: net)  # the same arithmetic, slowly
    check_static(Marks(), (32, 48))
    net, tiles = Marks().eval(), make_tiles(4)
    quantised = quantise(net, mode="static", calibration=[tiles])
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert (quantised(tiles) - net(tiles)).abs().max() < 0.1


@needs_torchao
@pytest.mark.slow  # compiling takes half a minute
def test_convolutions_become_int8_and_are_compiled() -> None:
    try:
        quantise(Marks(), mode="static", calibration=[make_tiles(1)])
    except ConfigError as error:
        pytest.skip(str(error))
    check_static(Marks(), (32, 48))
    torch._dynamo.reset()


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("net", "given", "match"),
    [
        (Mixer(), {"mode": "int4"}, "'int4' is unknown: choose one of dynamic, static, bf16$"),
        (Marks(), {"mode": "dynamic"}, "linear layers, and Marks has none: use quantise=static"),
        (Marks(), {"mode": "static"}, r"^quantise=static needs calibration images"),
        (Marks().to("meta"), {"mode": "bf16"}, "is for the CPU: on a GPU use precision=bf16"),
        (
            Marks(),
            {"mode": "static", "calibration": [make_tiles(1), make_tiles(1, (16, 16))]},
            r"needs calibration tiles of one size: these are \[\(3, 16, 16\), \(3, 32, 48\)\]$",
        ),
        (
            Counting(3, 1, 3, padding=1),
            {"mode": "static", "calibration": [make_tiles(2)]},
            r"^quantise=static traces a net by torch\.export, which Counting does not allow",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    net: nn.Module, given: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        quantise(net, **given)


@pytest.mark.parametrize(
    ("name", "answer", "match"),
    [
        (f"{QUANTISE}.find_spec", None, r"^quantise=static needs torchao: pip install"),
        ("platform.machine", "arm64", r"needs an x86 processor with VNNI.*use quantise=bf16$"),
        ("torch.cpu._is_vnni_supported", False, r"needs an x86 processor with VNNI"),
        ("shutil.which", None, r"compiles the net, and there is no C\+\+ compiler"),
    ],
)
def test_machines_that_lack_something_are_told_what(
    name: str, answer: object, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{QUANTISE}.find_spec", lambda name: True)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(name, lambda *_: answer)
    with pytest.raises(ConfigError, match=match):
        quantise(Marks(), mode="static", calibration=[make_tiles(1)])


@pytest.mark.parametrize(
    ("one", "other", "dice", "marked"),
    [
        ([0.9, 0.9, 0.1, 0.1], [0.8, 0.2, 0.6, 0.1], 2 * 1 / (2 + 2), 0.5),
        ([0.9, 0.5, 0.1, 0.1], [0.9, 0.5, 0.1, 0.1], 1.0, 0.5),
        ([0.1, 0.1, 0.1, 0.1], [0.1, 0.4, 0.1, 0.1], math.nan, 0.0),
        ([0.1, 0.1, 0.1, 0.1], [0.1, 0.5, 0.1, 0.1], 0.0, 0.0),
    ],
)
def test_agreement(
    one: Sequence[float], other: Sequence[float], dice: float, marked: float
) -> None:
    pairs = [(torch.tensor([a]), torch.tensor([b])) for a, b in zip(one, other, strict=True)]
    found = compare_values(pairs, threshold=0.5)
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert found.mean_difference == pytest.approx(sum(differences) / 4)
    assert found.max_difference == pytest.approx(max(differences))
    assert found.dice == pytest.approx(dice, nan_ok=True)
    assert found.marked_share == marked
    nets = (lambda _: torch.tensor([one])), (lambda _: torch.tensor([other]))
    by_nets = measure_agreement(*nets, [torch.zeros(1)], threshold=0.5)
    assert by_nets.mean_difference == pytest.approx(found.mean_difference)
