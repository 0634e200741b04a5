"""Several batches at one time: the same values in the same order, within memory, and nothing left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.predict import TiledPredictor
from lit_data.predict.forward import InferenceThreads, choose_threads
from lit_data.predict.memory_limit import count_weight_bytes
from tests.helpers.limited_memory import out_of_memory
from tests.predict.nets import Found, assert_same, make_images, make_net, predict

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.usefixtures("_leave_no_thread"),
]

SIZES = [(40, 30), (16, 16), (9, 16), (33, 48), (16, 17), (16, 16), (5, 40), (70, 16)]
MANY = [(16, 16)] * 12
WAIT_S = 20


@pytest.fixture
def _leave_no_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("lit_data_inference")]


class Watched(nn.Module):
    """Counts who is inside; lets the first two calls meet, and calls fail; `fits` is asked with tiles and callers."""

    def __init__(
        self, fits: Callable[[int, int], bool] = lambda *_: True, *, meet: bool = False
    ) -> None:
        super().__init__()
        self.net, self.fits = make_net(), fits
        self.lock, self.meeting = threading.Lock(), threading.Barrier(2)
        self.meet = 2 * meet
        self.inside = self.most = self.failed = 0
        self.tiles = []
        self.trained = []

    def forward(self, images: Tensor) -> Tensor:
        with self.lock:
            self.inside, self.meet = self.inside + 1, self.meet - 1
            self.most = max(self.most, self.inside)
            self.tiles.append(len(images))
            meets = self.meet >= 0
        if meets:
            self.meeting.wait(WAIT_S)
        with self.lock:
            self.trained.append(self.training)
            fits = self.fits(len(images), self.inside)
            self.failed += not fits
        try:
            if not fits:
                raise out_of_memory()
            return self.net(images)
        finally:
            with self.lock:
                self.inside -= 1


def _predict(net: nn.Module, sizes: list[tuple[int, int]] = SIZES, **options: Any) -> Found:
    defaults = {"tile_px": 16, "overlap_px": 4, "batch_size": 3, "threads": 2}
    return predict(net, make_images(*sizes), **(defaults | options))


def _assert_same(found: Found, sizes: list[tuple[int, int]] = SIZES, **options: Any) -> None:
    assert_same(found, _predict(make_net(), sizes, threads=1, **options))


@pytest.mark.parametrize(
    ("threads", "blend", "sizes", "batch_size"),
    [(2, "constant", 3 * SIZES, 1), (3, "gaussian", 3 * SIZES, 1), (3, "constant", MANY, 3)],
)
def test_the_same_batches_give_the_same_bits_in_the_same_order(
    threads: int, blend: Any, sizes: list[tuple[int, int]], batch_size: int
) -> None:
    one, many = (
        _predict(make_net(), sizes, threads=count, batch_size=batch_size, blend=blend)
        for count in (1, threads)
    )
    assert_same(many, one, atol=0)
    # In which company a tile is sent depends on how many images wait for each other.
    _assert_same(_predict(make_net(), sizes, threads=threads), sizes)


def test_nor_do_they_in_a_file(tmp_path: Path) -> None:
    image = make_images((50, 70))[0]
    tiles = {"tile_px": 16, "overlap_px": 4, "batch_size": 2}
    one, many = (
        TiledPredictor(make_net(), threads=threads, **tiles).predict_to_file(
            image, tmp_path / f"{threads}.npy"
        )
        for threads in (1, 2)
    )
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize(
    "sizes", [MANY, [(16, 16 + 2 * n) for n in range(12)], [(8 + n, 16) for n in range(8)]]
)
def test_batches_are_computed_side_by_side_even_where_none_fills(
    sizes: list[tuple[int, int]],
) -> None:
    net = Watched(meet=True)  # one thread would wait in vain for the other
    _assert_same(_predict(net, sizes, round_px=1), sizes, round_px=1)
    assert net.most == 2


def test_cores_are_shared_among_the_threads_and_kept_elsewhere() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        threads = InferenceThreads(2)
        meeting = threading.Barrier(2)

        def ask() -> int:
            meeting.wait(WAIT_S)
            return torch.get_num_threads()

        assert [call.result() for call in [threads.submit(ask), threads.submit(ask)]] == [2, 2]
        assert torch.get_num_threads() == 4
        other = []
        thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert other == [4]
        assert (choose_threads(torch.device("cpu")), choose_threads(torch.device("cuda"))) == (4, 1)
        threads.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fitting", [1, 2])
def test_running_out_of_memory_changes_nothing_and_is_remembered(fitting: int) -> None:
    net = Watched(lambda tiles, _: tiles <= fitting)
    predictor = TiledPredictor(net, tile_px=16, overlap_px=4, batch_size=3, threads=2)
    _assert_same(list(predictor.predict(make_images(*SIZES))))
    failed = net.failed
    _assert_same(list(predictor.predict(make_images(*SIZES))))
    assert net.failed == failed > 0


def test_batches_that_fit_only_alone_go_alone() -> None:
    net = Watched(lambda _, callers: callers == 1, meet=True)
    sizes = 4 * MANY
    _assert_same(_predict(net, sizes, batch_size=1), sizes)
    assert 1 <= net.failed <= 4, "those under way when the first one failed"


def test_a_tile_that_never_fits_ends_the_prediction() -> None:
    net = Watched(lambda *_: False).train()
    with pytest.raises(BatchMemoryError, match="1 tile of 1x16x16 float32 does not fit into mem"):
        _predict(net)
    assert net.training


@pytest.mark.parametrize(("tiles", "most", "batch"), [(4, 2, 2), (3, 2, 1), (1.5, 1, 1)])
def test_a_memory_limit_holds_for_all_threads_together(tiles: float, most: int, batch: int) -> None:
    net = Watched(meet=False)
    tile_bytes, values_bytes = 16 * 16 * 4 * 9, 16 * 16 * 4 * 2
    limit = count_weight_bytes(net) + round(tiles * (tile_bytes + values_bytes))
    _assert_same(_predict(net, MANY, memory_limit_bytes=limit), MANY)
    assert max(net.tiles) == batch
    assert net.most <= most


def test_another_error_comes_through_and_the_net_is_as_before() -> None:
    class Failing(Watched):
        def forward(self, images: Tensor) -> Tensor:
            super().forward(images)
            raise ZeroDivisionError("of its own")

    net = Failing().train()
    with pytest.raises(ZeroDivisionError, match="of its own"):
        _predict(net)
    assert all(part.training for part in net.modules())
    assert net.trained
    assert not any(net.trained)


def test_a_prediction_that_is_left_early_ends_its_threads() -> None:
    net = Watched().train()
    predictor = TiledPredictor(net, tile_px=16, overlap_px=4, batch_size=1, threads=2)
    found = predictor.predict(make_images(*MANY))
    assert next(found)[0] == 0
    found.close()  # type: ignore[attr-defined]
    assert all(part.training for part in net.modules())
    assert not any(net.trained)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"threads": 2, "compile": True}, "threads=2 has no effect on what is compiled"),
        ({"threads": 2, "device": "meta"}, "threads=2 has no effect on meta"),
    ],
)
def test_threads_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TiledPredictor(make_net(), tile_px=16, overlap_px=4, **given)
