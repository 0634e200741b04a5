"""Suite ``seeds``: the workloads that this project began with, by a plain way and by ours."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.gan_steps import step_originally
from benchmarks.learning import run_module
from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.app.benchmarks.training import train_steps
from lit_data.app.build import build_datamodule
from lit_data.callbacks.wrapping import wrap
from lit_data.core.types import Batch
from lit_data.predict.memory_limit import measure_peak_bytes

log = logging.getLogger(__name__)

COLUMNS = ("workload", "measure", "reported", "plain", "ours", "ratio")
_MIB = 2**20
_LOADED = (
    ("samples/s", "samples_per_s"),
    ("main process, ms of CPU for 1,000 samples", "process_cpu_ms_per_1000"),
    ("wait for a batch, ms", "load_ms_mean"),
)
_PREDICTED = (("images/s", "images_per_s"), ("memory of tensors, MiB", "peak_mib"))


class Seed(NamedTuple):
    """A workload that a suite measures.

    Attributes:
        name: Of its lines.
        reported: What was said of it when this project began.
        words: The suite and its options.
        ours: Of the suite's ways, beside ``original``.
        measures: Headings, and the columns of the suite.
    """

    name: str
    reported: str
    words: Sequence[str]
    ours: str
    measures: Sequence[tuple[str, str]] = _LOADED


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsSuite(Suite):
    """A line for each measure of a workload: ``plain``, ``ours`` and how many times ours is better.

    Each workload is measured by a suite in a process of its own, whose command is logged; the
    memory of a GAN's step, tensors beside the weights, in this one.

    Args:
        images: Training images of 976 x 176 px.
        batch_size: Of stripes and mosaics.
        volume_side: Voxels of the volume along each axis.
        window: Voxels of a window along each axis.
        pages: That are predicted.
        seconds: Of each measurement of loading.
        micro_batch_size: Samples of the GAN's batch that go through its nets at once.
    """

    images: int = 518
    batch_size: int = 384
    volume_side: int = 512
    window: int = 64
    pages: int = 60
    seconds: int = 4
    micro_batch_size: int = 4

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        folder = Path(cfg.paths.run)
        lines: list[dict[str, Any]] = []
        with TemporaryDirectory(dir=folder, prefix="volumes-") as volumes:
            self._write_volume(Path(volumes) / "0.npy")
            for seed in self._list_seeds(Path(volumes)):
                lines += self._measure(seed, folder / seed.name, cfg.paths.cache)
                # after each, so that a suite that is broken off leaves a table
                report_lines(lines, COLUMNS, folder, "Seeds")
        lines.append(self._measure_gan(cfg))
        report_lines(lines, COLUMNS, folder, "Seeds")
        named = [line | {"way": f"{line['workload']}_{line['measure']}"} for line in lines]
        return collect(named, ("way", "plain", "ours", "ratio"))

    def _list_seeds(self, volumes: Path) -> Iterator[Seed]:
        loaders = [
            "loaders",
            "trainer=cpu",
            "benchmark.finish=false",
            "benchmark.methods=[process]",
            f"benchmark.repeats={self.repeats}",
            f"benchmark.seconds_per_row={self.seconds}",
        ]
        batches = [f"benchmark.batch_sizes=[{self.batch_size}]"]
        stripes = [
            "+experiment=stripe",
            f"data.samples.count={round(self.images * 64 / 44)}",  # of which 44 in 64 train
            "data.edges=drop",
        ]
        yield Seed(
            "stripes", "GPU at 34 %; loader 4 to 6x", [*loaders, *batches, *stripes], "process"
        )
        mosaics = [
            "+experiment=detection",
            "data.mosaic.probability=1",
            "data.size_px=320",
            f"data.samples.count={round(2 * self.batch_size / 0.7)}",  # two batches
        ]
        yield Seed(
            "mosaics",
            "1.5 to 2x; main process at 5 to 10 %",
            [*loaders, *batches, *mosaics],
            "process",
        )
        windows = [
            "+experiment=ct",
            f"data.root={volumes}",
            "data.splits={train: 1.0}",
            "data.sample=windows",
            f"data.windows.size={self.window}",
            "data.windows.per_volume=64",
            "benchmark.batch_sizes=[4]",
        ]
        yield Seed("windows", "nonzero 3 to 5x; sparse 2 to 3x", [*loaders, *windows], "process")
        pages = ["predict", "trainer=cpu", f"suite.images={self.pages}", "suite.repeats=1"]
        yield Seed("pages", "40 to 60 % faster", [*pages, "suite.steps=10"], "ours", _PREDICTED)

    def _write_volume(self, path: Path) -> None:
        """Write noise in which one voxel of 200 is bone."""
        shape = (self.volume_side,) * 3
        volume = np.lib.format.open_memmap(path, "w+", np.int16, shape)
        rng = np.random.default_rng(0)
        for plane in volume:
            plane[:] = np.where(rng.random(plane.shape) < 1 / 200, 700, -1000)

    def _measure(self, seed: Seed, folder: Path, cache: str) -> Iterator[dict[str, Any]]:
        log.info("%s: python -m benchmarks %s", seed.name, " ".join(seed.words))
        places = [f"hydra.run.dir={folder}", f"paths.cache={cache}"]
        run_module(sys.executable, "benchmarks", *seed.words, *places)
        metrics = json.loads((folder / "summary.json").read_text())
        for measure, column in seed.measures:
            plain = metrics[f"benchmark/original_{column}"]
            ours = metrics[f"benchmark/{seed.ours}_{column}"]
            yield make_line(seed.name, measure, seed.reported, plain, ours)

    def _measure_gan(self, cfg: DictConfig) -> dict[str, Any]:
        plain = _PeakMemory(is_plain=True)
        train_steps(cfg, plain, steps=2, datamodule=build_datamodule(cfg))
        in_parts = cfg.copy()
        in_parts.model.micro_batch_size = self.micro_batch_size
        in_parts.model.r1_micro_batch_size = self.micro_batch_size
        ours = _PeakMemory()
        train_steps(in_parts, ours, steps=2, datamodule=build_datamodule(in_parts))
        reported = "60 to 90 % less memory"
        peaks = plain.peak_bytes / _MIB, ours.peak_bytes / _MIB
        return make_line("GAN", "memory of a step, MiB", reported, *peaks)


def make_line(
    workload: str, measure: str, reported: str, plain: float, ours: float
) -> dict[str, Any]:
    """Make a line of `COLUMNS`; of rates more is better, of times and memory less."""
    ratio = ours / plain if measure.endswith("/s") else plain / ours
    values = workload, measure, reported, plain, ours, ratio
    return dict(zip(COLUMNS, values, strict=True))


class _PeakMemory(L.Callback):
    """Counts the most bytes of tensors that a training step makes."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.peak_bytes = 0
        self._is_plain = is_plain

    @override
    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        def step(ours: Callable[..., Any], batch: Batch, batch_idx: int) -> None:
            call = partial(ours, batch, batch_idx)
            if self._is_plain:
                call = partial(step_originally, pl_module, batch)
            self.peak_bytes = max(self.peak_bytes, measure_peak_bytes(call))

        wrap(pl_module, "training_step", step)
