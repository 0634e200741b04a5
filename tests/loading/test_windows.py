"""Orders that are random among a few runs of samples at a time."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lit_data.core.errors import ConfigError
from lit_data.core.types import SampleRuns
from lit_data.datamodules import InspectionDataModule
from lit_data.datasets.balanced_patches import SamplingOptions
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.order import EpochOrder, Windows

COUNTS = np.array([5, 1, 40, 7, 7, 12, 3, 30, 9, 11])
RUNS = SampleRuns(np.cumsum(COUNTS), COUNTS * 10)
TOTAL = int(COUNTS.sum())


def _order(window_bytes: int = 200, **options: Any) -> EpochOrder:
    return EpochOrder(TOTAL, True, 3, windows=Windows(RUNS, window_bytes), **options)


def _run_of(samples: np.ndarray) -> np.ndarray:
    return np.searchsorted(RUNS.ends, samples, side="right")


@pytest.mark.parametrize("window_bytes", [1, 200, 400, 10**9])
def test_each_sample_comes_once(window_bytes: int) -> None:
    for epoch in range(3):
        found = _order(window_bytes).indices(0, TOTAL, epoch)
        assert sorted(found.tolist()) == list(range(TOTAL))


def test_samples_of_a_run_stay_within_a_window() -> None:
    for epoch in range(5):
        run = _run_of(_order(200).indices(0, TOTAL, epoch))
        for number in range(len(COUNTS)):
            (places,) = np.nonzero(run == number)
            # a window holds what begins below 20 samples, so at most those and one run more
            assert places[-1] - places[0] < 20 + COUNTS.max()
    mixed = _run_of(_order(400).indices(0, TOTAL, 0))
    assert (np.diff(mixed) != 0).sum() > 2 * len(COUNTS)  # not run after run


def test_ranks_and_positions_share_one_order() -> None:
    whole = _order().indices(0, TOTAL, 1)
    assert np.array_equal(_order().indices(31, 40, 1), whole[31:71])
    shares = [_order(rank=rank, world_size=3).indices(0, TOTAL, 1) for rank in range(3)]
    assert all(np.array_equal(share, whole[rank::3]) for rank, share in enumerate(shares))


class Numbers(Dataset[torch.Tensor]):
    runs = RUNS

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def _loader(dataset: Any = None, **options: Any) -> MicroBatchLoader:
    windows = {"locality": "image", "window_bytes": 200}
    given = {"batch_size": 8, "num_workers": 0, "seed": 3} | windows | options
    return MicroBatchLoader(dataset or Numbers(), LoaderOptions(**given), shuffle=True)


def test_a_loader_goes_on_exactly_within_a_window() -> None:
    loader = _loader()
    batches = iter(loader)
    first = [next(batches) for _ in range(5)]
    state = loader.state_dict()
    rest = list(batches)
    assert torch.equal(torch.cat([*first, *rest]), torch.from_numpy(_order().indices(0, TOTAL, 0)))
    resumed = _loader(batch_size=16)
    resumed.load_state_dict(state)
    assert torch.equal(torch.cat(list(resumed)), torch.cat(rest))


def test_another_order_is_refused_inside_an_epoch() -> None:
    loader = _loader()
    next(iter(loader))
    state = loader.state_dict()
    for options in ({"locality": "none"}, {"window_bytes": 300}):
        other = _loader(**options)
        with pytest.raises(ConfigError, match="window_bytes=200, but it is"):
            other.load_state_dict(state)


def test_a_dataset_that_says_nothing_is_refused() -> None:
    text = "TensorDataset does not state which of its samples are stored together"
    with pytest.raises(ConfigError, match=text):
        _loader(torch.utils.data.TensorDataset(torch.arange(9)))


def test_patches_of_an_image_come_close_to_each_other(tmp_path: Path) -> None:
    close = LoaderOptions(locality="image", window_bytes=2 * 3 * 192 * 256)

    def run(loader: LoaderOptions = close, **options: Any) -> list[int]:
        places = {"cache_dir": str(tmp_path), "samples": {"count": 24}, "patch_px": 64}
        loader = replace(loader, batch_size=8, num_workers=0)
        sampling = SamplingOptions(**options)
        data = InspectionDataModule(**places, loader=loader, sampling=sampling)
        data.prepare_data()
        data.setup("fit")
        return torch.cat([batch["image_index"] for batch in data.train_dataloader()]).tolist()

    def find_spans(images: list[int]) -> list[int]:
        places = [[n for n, i in enumerate(images) if i == k] for k in set(images)]
        return [max(place) - min(place) for place in places]

    images = run()
    assert len(images) == 12 * len(find_spans(images))
    assert max(find_spans(images)) < 3 * 12 + 12
    mixed, chosen = run(LoaderOptions(locality="none"), positives=0.5), run(positives=0.5)
    assert sorted(chosen) == sorted(mixed)  # the same samples in another order
    most = max(Counter(chosen).values())
    assert max(find_spans(chosen)) < 4 * most < max(find_spans(mixed))
    with pytest.raises(
        ConfigError, match=r"or uses parts of other samples \(mosaics, pasted defects\)"
    ):
        run(paste=0.5)


def test_windows_that_grow_begin_with_one_run() -> None:
    nbytes = np.full(40, 10)
    windows = Windows(SampleRuns(np.arange(1, 41) * 3, nbytes, most_bytes=85), 1000)
    assert windows.window_bytes == 85
    run = windows.at(np.arange(120), 5, 1) // 3
    assert sorted(run.tolist()) == sorted([*range(40)] * 3)
    edges = [0, 1, 3, 7, 16, 24]  # of runs of 10 bytes: 10, 20, 40, and then windows of 85 bytes
    for begin, end in pairwise(edges):
        assert len(set(run[3 * begin : 3 * end].tolist())) == end - begin


def test_runs_may_change_with_the_epoch() -> None:
    def find_runs(epoch: int) -> SampleRuns:
        samples = np.random.default_rng(epoch).permutation(60)
        return SampleRuns(np.array([20, 40, 60]), np.full(3, 10), samples)

    windows = Windows(find_runs, 10)
    for epoch in (0, 1, 0):
        found = windows.at(np.arange(60), 5, epoch)
        assert sorted(found.tolist()) == list(range(60))
        wanted = [set(part.tolist()) for part in np.split(find_runs(epoch).samples, 3)]
        assert all(set(part.tolist()) in wanted for part in np.split(found, 3))
