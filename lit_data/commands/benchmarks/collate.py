"""Mode ``collate``: what it costs to make large batches of samples that are in memory already."""

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset

from lit_data.commands.benchmarks.contest import compete
from lit_data.commands.benchmarks.feeds import Lane
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.types import Batch

_UNAVAILABLE = {
    "copy": "compared in mode loaders",
    "original": "samples are in memory already",
    "improved": "samples are in memory already",
    "device": "samples are in the host's memory",
}


class SamplesInMemory(Dataset[Batch]):
    """Map-style as a user writes it: a sample is a view of a ready array.

    Args:
        count: Number of samples.
        shape: Shape of a sample, uint8.
    """

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images: Tensor = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.images[index]}


def run_collate(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare ways to make batches; see `lit_data.commands.benchmark.run`."""
    device = options.choose_device()
    dataset = SamplesInMemory(options.samples_in_memory, options.sample_shape)
    lanes = {method: _UNAVAILABLE.get(method) or Lane(dataset=dataset) for method in options.methods}
    shape = "x".join(map(str, options.sample_shape))
    _, metrics = compete(cfg, options, device, lanes, f"batches of {shape} uint8 samples in memory")
    return metrics
