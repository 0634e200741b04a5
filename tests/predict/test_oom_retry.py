"""Batches that do not fit: injected errors, limits, and the sizes that follow."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.predict import TiledPredictor
from lit_data.predict.memory_limit import count_weight_bytes, measure_peak_bytes
from lit_data.predict.runner import GROW_AFTER, BatchSize
from tests.helpers.limited_memory import out_of_memory
from tests.predict.nets import Found, assert_same, make_images, make_net, predict

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

SIZES = [(40, 30), (16, 16), (9, 16), (33, 48), (16, 17)]


class Limited(nn.Module):
    """Lets calls fail; `fits` is asked with the number of the call and its tiles."""

    def __init__(self, fits: Callable[[int, int], bool], error: Exception | None = None) -> None:
        super().__init__()
        self.net, self.fits, self.error = make_net(), fits, error or out_of_memory()
        self.calls = []

    def forward(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        values = self.net(images)
        if not self.fits(len(self.calls) - 1, len(images)):
            raise self.error
        return values


def _predict(net: nn.Module, batch_size: int = 6, **sizes: int | None) -> Found:
    images = make_images(*SIZES)
    return predict(net, images, tile_px=16, overlap_px=4, batch_size=batch_size, **sizes)


def _assert_same(found: Found) -> None:
    assert_same(found, _predict(make_net()))


@pytest.mark.parametrize("call", [0, 1, 4])
def test_running_out_of_memory_once_changes_nothing(call: int) -> None:
    net = Limited(lambda number, tiles: number != call)
    _assert_same(_predict(net))
    assert len(net.calls) > call


@pytest.mark.parametrize("fitting", [1, 2, 3, 5])
def test_the_size_that_works_is_kept(fitting: int) -> None:
    net = Limited(lambda number, tiles: tiles <= fitting)
    predictor = TiledPredictor(net, tile_px=16, overlap_px=4, batch_size=6)
    for _ in range(2):
        _assert_same(list(predictor.predict(make_images(*SIZES))))
    failed = [tiles for tiles in net.calls if tiles > fitting]
    assert failed == {1: [6, 3, 2], 2: [6, 3], 3: [6, 4], 5: [6]}[fitting]


def test_other_words_for_it_are_known_and_other_errors_come_through() -> None:
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
    for error in (RuntimeError(text), MemoryError()):
        _assert_same(_predict(Limited(lambda number, tiles: tiles < 2, error)))
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _predict(Limited(lambda *_: False, broken))


@pytest.mark.parametrize(
    ("smallest", "calls"), [(1, [6, 3, 2, 1, 1]), (2, [6, 3, 2, 2]), (6, [6, 6])]
)
def test_the_smallest_batch_that_does_not_fit_ends_the_prediction(
    smallest: int, calls: list[int]
) -> None:
    net = Limited(lambda *_: False)
    refused = rf"a batch of {calls[-1]} tiles? of 1x16x16 float32 does not fit .*CUDA"
    with pytest.raises(BatchMemoryError, match=refused):
        _predict(net, min_batch_size=smallest)
    assert net.calls == calls


def test_no_tensor_of_a_failed_batch_lives_on() -> None:
    import gc
    import weakref

    outputs = []

    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            assert not any(output() is not None for output in outputs)
            values = images + 1
            if len(images) > 1:
                outputs.append(weakref.ref(values))
                raise out_of_memory()
            return values

    gc.disable()
    try:
        assert len(_predict(Failing())) == len(SIZES)
    finally:
        gc.enable()
    assert outputs


def test_a_size_grows_while_batches_go_well_and_never_reaches_what_failed() -> None:
    size = BatchSize(2, 1, 64)
    tried = []
    for _ in range(200):
        tried.append(size.size)
        if size.size >= 13:
            assert size.shrink(size.size)
        else:
            size.count_batch(size.size)
    sizes = list(dict.fromkeys(tried))
    assert sizes == [2, 4, 8, 16, 12, 14, 13]
    assert tried.count(16) == 1
    assert tried[-1] == 12
    assert tried[:GROW_AFTER] == [2] * GROW_AFTER
    short = BatchSize(4, 1, 8)
    for _ in range(5 * GROW_AFTER):
        short.count_batch(3)
    assert short.size == 4  # short batches do not count as full ones


def test_what_fitted_before_may_fail_later() -> None:
    size = BatchSize(8, max_size=8)
    size.count_batch(8)
    assert size.shrink(8)
    assert size.size == 4
    assert size.shrink(3)
    assert size.size == 2
    assert not size.shrink(1)
    assert size.fails == 3  # so a single tile that failed once does not hold back what follows


@pytest.mark.parametrize(
    ("start", "smallest", "largest"), [(0, 1, None), (2, 3, None), (4, 1, 3), (1, 0, None)]
)
def test_sizes_out_of_order_are_refused(start: int, smallest: int, largest: int | None) -> None:
    refused = f"min_batch_size={smallest}, batch_size={start}, max_batch_size={largest}"
    with pytest.raises(ConfigError, match=refused):
        _predict(make_net(), start, min_batch_size=smallest, max_batch_size=largest)


def test_the_peak_of_a_call_is_what_lives_at_one_time() -> None:
    image = torch.zeros(1, 1, 16, 16)
    plane_bytes = 16 * 16 * 4
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    with torch.inference_mode():
        # Of 10 made, and not the image itself.
        assert measure_peak_bytes(lambda: net(image)) == 8 * plane_bytes
        assert measure_peak_bytes(lambda: image[:, :, 1:]) == 0  # a view
    assert count_weight_bytes(net) == 4 * (4 * 9 + 4 + 4 * 9 + 1)


@pytest.mark.parametrize("tiles", [1, 3, 100])
def test_a_memory_limit_bounds_the_batch(tiles: int) -> None:
    net = Limited(lambda *_: True)
    tile_bytes = 16 * 16 * 4 * 9  # the tile and the net's peak
    limit = count_weight_bytes(net) + tiles * tile_bytes
    _assert_same(_predict(net, memory_limit_bytes=limit))
    assert max(net.calls) == min(6, tiles)


def test_a_limit_that_holds_no_tile_is_refused() -> None:
    message = r"memory_limit_bytes=100 .100 bytes. is too small for 1 tile of 1x16x16 float32"
    with pytest.raises(BatchMemoryError, match=message):
        _predict(make_net(), memory_limit_bytes=100)
    with pytest.raises(BatchMemoryError, match="a single tile of 1x16x16 float32 does not fit"):
        _predict(Limited(lambda *_: False), memory_limit_bytes=10**9)


@pytest.mark.parametrize("call", [0, 1, 6])
def test_nor_do_the_margins_change(call: int) -> None:
    """The first call measures how far the net sees."""
    images = make_images((40, 30), (16, 33))
    tiles = {"tile_px": 16, "overlap_px": 11, "blend": "gaussian"}
    net = Limited(lambda number, tiles: number != call)
    assert_same(predict(net, images, **tiles), predict(make_net(), images, **tiles))
    with pytest.raises(BatchMemoryError, match="a single tile of 1x16x16 does not fit into memory"):
        predict(Limited(lambda *_: False), images, **tiles)


def test_memory_runs_out_in_a_large_image_too(tmp_path: Path) -> None:
    image = make_images((50, 70))[0]
    net = Limited(lambda number, tiles: tiles <= 2 and number != 4)
    predictor = TiledPredictor(net, tile_px=16, overlap_px=4, batch_size=5)
    found = predictor.predict_to_file(image, tmp_path / "a.npy")
    expected = next(TiledPredictor(make_net(), tile_px=16, overlap_px=4).predict([image]))[1]
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)
