import functools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.core.errors import ConfigError, DataError
from lit_data.predict import TiledPredictor
from lit_inspect.tiles import Blend
from tests.predict.nets import (
    REACH_PX,
    Counting,
    HalvingNet,
    assert_same,
    make_images,
    make_net,
    predict,
    predict_all_whole,
    predict_whole,
)

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

FIELD_PX = 2 * REACH_PX + 1
SIZES = [(70, 50), (24, 90), (24, 24), (33, 31), (1, 7), (97, 25)]


@pytest.mark.parametrize(
    ("blend", "overlap", "margin", "batch_size"),
    [
        ("constant", FIELD_PX, None, 1),
        ("gaussian", FIELD_PX, None, 5),
        ("gaussian", 2 * FIELD_PX, REACH_PX, 5),
    ],
)
def test_a_net_whose_field_the_overlap_holds_gives_what_it_gives_for_the_whole_image(
    blend: Blend, overlap: int, margin: int | None, batch_size: int
) -> None:
    net, images = make_net(), make_images(*SIZES)
    tiles = {"tile_px": (32, 28), "overlap_px": overlap, "margin_px": margin}
    found = predict(net, images, blend=blend, round_px=1, batch_size=batch_size, **tiles)
    assert_same(found, predict_all_whole(net, images), 1e-5)


@pytest.mark.parametrize(
    ("blend", "overlap", "margin"),
    [("constant", 8, None), ("gaussian", 8, None), ("gaussian", 8, 4)],
)
def test_a_smaller_overlap_does_not(blend: Blend, overlap: int, margin: int | None) -> None:
    net, images = make_net(), make_images((104, 104))  # 3 * 24 + 32
    tiles = {"tile_px": 32, "overlap_px": overlap, "margin_px": margin}
    ((_, values),) = predict(net, images, blend=blend, **tiles)
    assert float((values - predict_whole(net, images[0])).abs().max()) > 1e-4


@pytest.mark.parametrize(("blend", "multiple"), [("constant", 1), ("constant", 2), ("gaussian", 2)])
def test_a_net_with_a_stride_needs_tiles_at_its_multiples(blend: Blend, multiple: int) -> None:
    net, images = HalvingNet(), make_images((58, 94))
    tiles = {"tile_px": 24, "overlap_px": 8, "margin_px": 4, "multiple_px": multiple}
    ((_, values),) = predict(net, images, blend=blend, **tiles)
    same = torch.allclose(values, predict_whole(net, images[0]), rtol=0, atol=1e-5)
    assert same == (multiple == 2)


def test_sides_that_are_no_multiple_are_filled_and_cut_back() -> None:
    net, images = HalvingNet(), make_images((51, 19))
    ((_, values),) = predict(net, images, tile_px=64, multiple_px=2)
    # To 56 and 24, multiples of 64 / 8.
    padded = np.pad(images[0], ((0, 0), (0, 5), (0, 5)), mode="edge")
    assert_close(values, predict_whole(net, padded)[:, :51, :19], rtol=0, atol=1e-6)


@pytest.mark.parametrize("blend", ["constant", "gaussian"])
def test_images_of_mixed_sizes_share_batches_and_come_back_in_order(blend: Blend) -> None:
    net, images = Counting(), make_images((40, 16), (16, 16), (15, 16), (16, 64), (10, 16))
    tiles = {"tile_px": 16, "overlap_px": 4, "margin_px": 1, "batch_size": 4}
    found = predict(net, images, blend=blend, **tiles)
    # 3 + 1 + 1 + 5 tiles, and one of 10 rows
    assert net.shapes == [(4, 1, 16, 16)] * 2 + [(2, 1, 16, 16), (1, 1, 10, 16)]
    for (_, values), image in zip(found, images, strict=True):
        np.testing.assert_allclose(values.numpy(), image, rtol=0, atol=1e-6)


def test_an_image_does_not_wait_for_ever_for_others_of_its_size() -> None:
    predictor = TiledPredictor(Counting(), tile_px=16, overlap_px=0, batch_size=4)
    read = []

    def load(number: int) -> np.ndarray:
        read.append(number)
        return make_images((2, 2) if number == 0 else (16, 16))[0]

    first, _ = next(predictor.predict(functools.partial(load, number) for number in range(1000)))
    assert first == 0
    assert max(read) < 20


def test_memory_does_not_grow_with_the_number_of_images() -> None:
    image = np.zeros((1, 64, 64), np.float32)  # 16 kB
    predictor = TiledPredictor(nn.Identity(), tile_px=64, overlap_px=0, batch_size=4)

    def peak(images: int) -> int:
        tracemalloc.start()
        for _ in predictor.predict(image.copy for _ in range(images)):
            pass
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak_bytes

    peak(8)
    assert peak(200) < peak(20) + 4 * image.nbytes


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (np.full((1, 4, 4), 51, np.uint8), 0.2),
        (np.full((1, 4, 4), 13107, np.uint16), 0.2),
        (np.full((1, 4, 4), 13107, ">u2"), 0.2),
        (np.full((1, 4, 4), True), 1.0),
        (np.full((1, 4, 4), 3.5, np.float64), 3.5),
        (np.full((1, 4, 4), 0.5, np.float16), 0.5),
        (torch.full((1, 4, 4), 51, dtype=torch.uint8), 0.2),
        (torch.full((1, 4, 4), 0.3, requires_grad=True), 0.3),
        (lambda: np.full((1, 4, 4), 51, np.uint8), 0.2),
        (lambda: torch.full((1, 4, 4), 51, dtype=torch.uint8), 0.2),
    ],
)
def test_kinds_of_images(image: object, value: float) -> None:
    ((_, values),) = predict(Counting(), [image])
    assert_close(values, torch.full((1, 4, 4), value), rtol=0, atol=1e-6)


def test_a_bank_of_several_kinds_of_images() -> None:
    class Bank:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> np.ndarray:
            pixels = np.full((1 + index // 2, 4, 5), 51, np.uint8)
            return pixels / np.float32(255) if index == 1 else pixels

    expected = [(number, torch.full((1 + number // 2, 4, 5), 0.2)) for number in range(3)]
    assert_same(predict(Counting(), Bank()), expected)
    with pytest.raises(ConfigError, match="readers=0 must be at least 1"):
        predict(Counting(), [], readers=0)


def test_a_range_of_values() -> None:
    image = np.array([[[-100, 0, 100, 300]]], np.int16)
    ((_, values),) = predict(Counting(), [image], value_range=(-100, 100))
    assert values.flatten().tolist() == [0, 0.5, 1, 1]
    with pytest.raises(ConfigError, match="int16 pixels have no natural range"):
        predict(Counting(), [image])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4), np.uint8), r"image 1 is ndarray of shape \[4, 4\]"),
        (np.zeros((1, 0, 4), np.uint8), r"shape \[1, 0, 4\]"),
        (np.zeros((1, 4, 4), np.int64), "image 1 is int64"),
        ("a.png", r"image 1 is str of shape \[\]"),
    ],
)
def test_bad_images_are_refused_or_left_out(image: object, message: str) -> None:
    good = np.zeros((1, 4, 4), np.uint8)
    images = [good, image, good]
    with pytest.raises(DataError, match=message):
        predict(Counting(), images)
    bad = []
    found = predict(Counting(), images, on_bad=lambda number, error: bad.append(number))
    assert [number for number, _ in found] == [0, 2]
    assert bad == [1]


def test_what_loading_raises_comes_through() -> None:
    def load() -> np.ndarray:
        raise DataError("a.png: cut short")

    bad = []
    assert predict(Counting(), [load], on_bad=lambda _, error: bad.append(str(error))) == []
    assert bad == ["a.png: cut short"]
    with pytest.raises(ZeroDivisionError):
        predict(Counting(), [lambda: 1 / 0], on_bad=lambda *_: None)


def test_the_model_is_as_before_between_the_images() -> None:
    net = nn.Sequential(Counting(), nn.Dropout(), nn.BatchNorm2d(1))
    net[2].eval()
    predictor = TiledPredictor(net, tile_px=8, overlap_px=0, batch_size=1)
    found = predictor.predict(make_images((4, 4), (4, 4)))
    next(found)
    assert [part.training for part in net.modules()] == [True, True, True, False]
    assert net[0].modes == [False]
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    _, values = next(found)
    assert not values.is_inference()


class Refusing(nn.Module):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: Tensor) -> object:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(1, 2), r"a tensor \[1, 2\] for images .*: it must give \[1, K, 8, 8\]"),
        (torch.zeros(1, 1, 4, 4), r"a tensor \[1, 1, 4, 4\]"),
        ({"logits": 1}, "Refusing gives a dict"),
    ],
)
def test_an_answer_that_is_no_map_is_refused(answer: object, message: str) -> None:
    net = Refusing(answer).train()
    with pytest.raises(ConfigError, match=message):
        predict(net, make_images((8, 8)))
    assert net.training


def test_tiles_are_counted_batch_by_batch() -> None:
    tiles = []
    predict(Counting(), make_images((8, 8), (16, 8), (8, 8)), on_tiles=tiles.append, batch_size=2)
    assert tiles == [2, 2]


def test_images_may_come_from_a_generator_that_is_left_early() -> None:
    closed = []

    def images() -> Iterator[np.ndarray]:
        try:
            while True:
                yield make_images((8, 8))[0]
        finally:
            closed.append(True)

    source = images()
    found = TiledPredictor(Counting(), tile_px=8, overlap_px=0).predict(source)
    next(found)
    found.close()  # type: ignore[attr-defined]
    source.close()
    assert closed == [True]
