"""Suite ``first``: the first batches of a dataset that makes its samples, from a cold start."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.core.progress import track
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.options import WorkerKind

COLUMNS = ("way", "samples_per_s", "ratio", "first_ms", "first_ratio")
_IMAGES = 256  # in memory

Feed = Callable[[], Iterable[Tensor]]


class FreshSamples(Dataset[Tensor]):
    """Samples that are new tensors, as those of most people are: copies of images in memory.

    Args:
        samples: Length.
        shape: Of a sample, uint8.
    """

    def __init__(self, samples: int, shape: Sequence[int]) -> None:
        self._samples = samples
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(
            0, 256, (_IMAGES, *shape), dtype=torch.uint8, generator=generator
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return self._images[index % _IMAGES].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSuite(Suite):
    """The first batches of a dataset that makes its samples, the start of the loader included.

    A row for torch's DataLoader and for each kind of worker of `MicroBatchLoader`, for each number
    of batches: ``samples_per_s`` with the start of the workers and the first touch of all memory,
    ``ratio`` to the DataLoader, ``first_ms`` to the first batch, ``first_ratio``.

    Args:
        batches: Numbers of batches to take, in turn.
        batch_size: Samples of each.
        shape: Of a sample, uint8.
        workers: Of each loader.
    """

    batches: Sequence[int] = (8, 40)
    batch_size: int = 384
    shape: Sequence[int] = (3, 320, 320)
    workers: int = 2

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        dataset = FreshSamples(self.batch_size * (max(self.batches) + 1), self.shape)
        feeds: dict[str, Feed] = {"dataloader": partial(self._open_torch, dataset)}
        for kind in ("process", "thread", "inline"):
            feeds[kind] = partial(self._open_ours, dataset, kind)
        lines = []
        for count in self.batches:
            laps: dict[str, list[tuple[float, float]]] = {way: [] for way in feeds}
            for _ in track(range(self.repeats), f"{count} batches", self.repeats):
                for way, feed in feeds.items():
                    laps[way].append(_take(feed, count))
            lines += [self._make_line(way, count, laps) for way in feeds]
        title = f"batches of {self.batch_size} x {list(self.shape)} uint8, made for each sample"
        report_lines(lines, COLUMNS, Path(cfg.paths.run), title)
        return collect(lines, COLUMNS)

    def _open_torch(self, dataset: FreshSamples) -> Iterable[Tensor]:
        return DataLoader(dataset, self.batch_size, shuffle=True, num_workers=self.workers)

    def _open_ours(self, dataset: FreshSamples, kind: WorkerKind) -> Iterable[Tensor]:
        workers = 0 if kind == "inline" else self.workers
        options = LoaderOptions(batch_size=self.batch_size, num_workers=workers, worker_kind=kind)
        with closing(MicroBatchLoader(dataset, options, shuffle=True)) as loader:
            yield from loader

    def _make_line(
        self, way: str, count: int, laps: dict[str, list[tuple[float, float]]]
    ) -> dict[str, Any]:
        last_s, first_s = _find_medians(laps[way])
        their_last_s, their_first_s = _find_medians(laps["dataloader"])
        return {
            "way": f"{way}_{count}",
            "samples_per_s": count * self.batch_size / last_s,
            "ratio": their_last_s / last_s,
            "first_ms": 1000 * first_s,
            "first_ratio": first_s / their_first_s,
        }


def _find_medians(laps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(last_s for last_s, _ in laps), median(first_s for _, first_s in laps)


def _take(feed: Feed, count: int) -> tuple[float, float]:
    """Measure the seconds to the last and to the first of some batches."""
    began_s = time.perf_counter()
    first_s = 0.0
    for number, _ in enumerate(islice(feed(), count)):
        if number == 0:
            first_s = time.perf_counter() - began_s
    return time.perf_counter() - began_s, first_s
