"""How the net is called: precision, memory format, compilation, several sides of a tile."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.predict import TiledPredictor
from lit_data.predict.forward import TURNS, Augment, turn, turn_back
from tests.predict.nets import REACH_PX, make_images, make_net, predict_whole

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

IMAGES = make_images((20, 33), (16, 12))


def _predict(net: nn.Module, **options: object) -> list[Tensor]:
    predictor = TiledPredictor(net, **({"tile_px": 16, "overlap_px": 11, "round_px": 1} | options))  # type: ignore[arg-type]
    return [values for _, values in predictor.predict(IMAGES)]


class Watching(nn.Module):
    """Notes what its inner convolution sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(1, 4, 3, padding=1)
        self.seen = []

    def forward(self, images: Tensor) -> Tensor:
        values = self.net(images)
        last = images.is_contiguous(memory_format=torch.channels_last)
        self.seen.append((values.dtype, last))
        return values


@pytest.mark.parametrize(
    ("precision", "dtype", "atol"),
    [("fp32", torch.float32, 1e-6), ("bf16", torch.bfloat16, 2e-2), ("fp16", torch.float16, 2e-3)],
)
def test_half_precision_computes_in_half_and_answers_in_float32(
    precision: str, dtype: torch.dtype, atol: float
) -> None:
    net = Watching()
    found = _predict(net, precision=precision)
    assert {seen for seen, _ in net.seen} == {dtype}
    assert net.net.weight.dtype == torch.float32
    for values, image in zip(found, IMAGES, strict=True):
        assert values.dtype == torch.float32
        assert_close(values, predict_whole(net.net, image), rtol=0, atol=atol)


def test_channels_last_lays_out_weights_and_tiles() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), watching := Watching())
    watching.net = nn.Conv2d(3, 4, 3, padding=1)
    expected = _predict(net)
    assert {last for _, last in watching.seen} == {False}
    watching.seen.clear()
    for values, wanted in zip(_predict(net, channels_last=True), expected, strict=True):
        assert_close(values, wanted, rtol=0, atol=1e-5)
    assert {last for _, last in watching.seen} == {True}
    assert watching.net.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_activations(activation: str) -> None:
    net = make_net()
    for values, image in zip(_predict(net, activation=activation), IMAGES, strict=True):
        whole = predict_whole(net, image)
        wanted = whole.sigmoid() if activation == "sigmoid" else whole.softmax(0)
        assert_close(values, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("augment", ["flips", "d4"])
def test_turns_are_different_and_can_be_undone(augment: Augment) -> None:
    tiles = torch.arange(24).reshape(1, 2, 3, 4)
    turned = [turn(tiles, how) for how in TURNS[augment]]
    different = {str(one.tolist()) for one in turned}
    assert len(different) == len(turned) == {"flips": 4, "d4": 8}[augment]
    for one, how in zip(turned, TURNS[augment], strict=True):
        assert torch.equal(turn_back(one, how), tiles)


@pytest.mark.parametrize("augment", ["flips", "d4"])
def test_augmentation_averages_over_the_turns_of_the_whole_image(augment: Augment) -> None:
    net = make_net()
    found = _predict(net, augment=augment, activation="sigmoid")
    for values, image in zip(found, IMAGES, strict=True):
        sides = []
        for how in TURNS[augment]:
            turned = turn(torch.from_numpy(image)[None], how)[0].numpy()
            sides.append(turn_back(predict_whole(net, turned)[None].sigmoid(), how)[0])
        assert_close(values, torch.stack(sides).mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("augment", [None, "d4"])
def test_a_net_that_works_in_place_spoils_nothing(augment: Augment | None) -> None:
    class InPlace(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mul_(2).sub_(1)

    images = [image.copy() for image in IMAGES]
    found = _predict(InPlace(), augment=augment, overlap_px=0)
    for values, image in zip(found, images, strict=True):
        np.testing.assert_allclose(values.numpy(), image * 2 - 1, rtol=0, atol=1e-6)
    assert all(np.array_equal(image, before) for image, before in zip(IMAGES, images, strict=True))


def test_compiled_tiles_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def compile_net(net: nn.Module, *, dynamic: bool) -> object:
        def call(images: Tensor) -> Tensor:
            shapes.append(tuple(images.shape))
            return net(images)

        return call

    monkeypatch.setattr(torch, "compile", compile_net)
    net = make_net()
    found = _predict(net, compile=True, round_px=None, batch_size=3)
    assert set(shapes) == {(3, 1, 16, 16)}
    assert_close(found[0], predict_whole(net, IMAGES[0]), rtol=0, atol=1e-5)
    padded = np.pad(IMAGES[1], ((0, 0), (0, 0), (0, 4)), mode="edge")
    assert_close(found[1], predict_whole(net, padded)[..., :12], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about torch
def test_compiled_by_the_real_compiler() -> None:
    net = make_net()
    for values, wanted in zip(_predict(net, compile=True), _predict(net), strict=True):
        # Compiled tiles have their full size: farther right the second image's repeated edge shows.
        left = (..., slice(0, 12 - REACH_PX))
        assert_close(values[left], wanted[left], rtol=0, atol=1e-5)


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and none of g\+\+, clang"):
        _predict(make_net(), compile=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="none of no-such-compiler is installed"):
        _predict(make_net(), compile=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "precision='int8' is unknown: choose one of fp32, bf16, fp16"),
        ({"augment": "all"}, "augment='all' is unknown: choose one of null, flips, d4"),
        ({"activation": "tanh"}, "activation='tanh' is unknown"),
        ({"value_range": (1.0, 1.0)}, r"value_range=\[1.0, 1.0\] must be"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _predict(make_net(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu(precision: str) -> None:
    net = make_net()
    expected = _predict(net)
    found = _predict(net, precision=precision, device="cuda", channels_last=True)
    atol = 1e-3 if precision == "fp32" else 2e-2
    for values, wanted in zip(found, expected, strict=True):
        assert_close(values, wanted, rtol=0, atol=atol)
