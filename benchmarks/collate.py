"""Suite ``collate``: ways to make large batches of samples that are in memory already."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from benchmarks.loaders import make_textbook_loader
from benchmarks.suite import Suite
from lit_data.app.benchmarks.compare import measure_lines
from lit_data.app.benchmarks.measure import Candidate
from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.benchmarks.table import COLUMNS, HEADINGS, collect_metrics, report_lines
from lit_data.app.configuration.targets import read_options
from lit_data.core.types import Batch


class SamplesInMemory(Dataset[Batch]):
    """Map-style as a user writes it: a sample is a view of a ready array.

    Args:
        count: Number of samples.
        shape: Shape of a sample, uint8.
    """

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images: Tensor = torch.randint(
            0, 256, (count, *shape), dtype=torch.uint8, generator=generator
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.images[index]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateSuite(Suite):
    """Batches of samples in memory, with the options of the command below ``benchmark``.

    Rows are those of mode `loaders`, and ``textbook``, which joins micro-batches in the main
    process.

    Args:
        sample_shape: Shape of a uint8 sample.
        samples_in_memory: Size of the dataset.
    """

    sample_shape: Sequence[int] = (3, 320, 320)
    samples_in_memory: int = 768

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        options = read_options(BenchmarkOptions, cfg.benchmark, "benchmark")
        candidate = Candidate(dataset=SamplesInMemory(self.samples_in_memory, self.sample_shape))
        candidates: dict[str, Candidate | str] = dict.fromkeys(options.methods, candidate)
        candidates["textbook"] = replace(
            candidate, make_loader=make_textbook_loader, has_micro_batches=True
        )
        lines = measure_lines(cfg, options, candidates, "device")
        shape = "x".join(map(str, self.sample_shape))
        title = f"batches of {shape} uint8 samples in memory"
        report_lines(lines, COLUMNS, Path(cfg.paths.run), title, headings=HEADINGS)
        return collect_metrics(lines, options.batch_sizes[0])
