"""Suite ``loaders``: the ways in which people load samples, beside those of the command."""

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.seed_ways import make_plain_mosaics, make_plain_windows
from benchmarks.stripe_ways import make_stripe_ways
from benchmarks.suite import Suite
from lit_data.app.benchmarks.compare import run_loaders
from lit_data.app.benchmarks.measure import Candidate
from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.benchmarks.table import Row
from lit_data.app.configuration.targets import read_options
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.datamodules import BaseDataModule, StripeDataModule
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.volumes import CTDataModule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadersSuite(Suite):
    """Mode `loaders` of the command, with its options below ``benchmark`` and further rows.

    ``original`` of stripes decodes whole files and draws on whole images, ``improved`` crops first
    and keeps decoded images in memory, ``textbook`` joins micro-batches in the main process.
    ``original`` of images with boxes makes mosaics of images in memory, that of volumes looks for
    the foreground of a whole volume for each window.
    """

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        options = read_options(BenchmarkOptions, cfg.benchmark, "benchmark")
        return run_loaders(cfg, options, find_others)


def find_others(
    datamodule: BaseDataModule, on_host: Candidate, is_finished: bool
) -> dict[str, Candidate]:
    """Find the ways of others to load training samples.

    Args:
        datamodule: An opened set.
        on_host: Its decoded samples.
        is_finished: Draw defects and cast; otherwise patches stay as they are stored.

    Raises:
        ConfigError: There are no such ways for this kind of data.
    """
    if isinstance(datamodule, DetectionDataModule):
        return {"original": Candidate(dataset=make_plain_mosaics(datamodule))}
    if isinstance(datamodule, CTDataModule):
        return {"original": Candidate(dataset=make_plain_windows(datamodule))}
    if not isinstance(datamodule, StripeDataModule):
        raise ConfigError(
            "suite=loaders needs stripes, boxes or volumes: +experiment=stripe, detection or ct"
        )
    original, improved = make_stripe_ways(datamodule, "train", finished=is_finished)
    improved.warm_up()
    return {
        "original": Candidate(dataset=original),
        "improved": Candidate(dataset=improved, make_loader=make_forking_loader),
        "textbook": replace(on_host, make_loader=make_textbook_loader, has_micro_batches=True),
    }


def make_forking_loader(row: Row, candidate: Candidate, seed: int) -> Iterable[Batch]:
    """Make a torch DataLoader whose workers inherit what the dataset has in memory."""
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    return DataLoader(
        candidate.dataset,
        row.batch_size,
        shuffle=True,
        num_workers=row.num_workers,
        persistent_workers=row.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork" if has_fork and row.num_workers else None,
        generator=torch.Generator().manual_seed(seed % 2**63),
    )


def make_textbook_loader(row: Row, candidate: Candidate, seed: int) -> Iterable[Batch]:
    """Make a torch DataLoader of micro-batches, which the main process joins with `torch.cat`."""
    micro_batches = -(-row.batch_size // row.micro_batch_size)
    loader = DataLoader(
        candidate.dataset,
        row.micro_batch_size,
        shuffle=True,
        num_workers=row.num_workers,
        persistent_workers=row.num_workers > 0,
        prefetch_factor=2 * micro_batches if row.num_workers else None,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
    return JoinedBatches(loader, micro_batches)


class JoinedBatches:
    """Batches of several micro-batches each.

    Args:
        loader: Gives micro-batches.
        parts: Micro-batches of a batch.
    """

    def __init__(self, loader: Iterable[Batch], parts: int) -> None:
        self.loader = loader
        self.parts = parts

    def __iter__(self) -> Iterator[Batch]:
        micro_batches = iter(self.loader)
        while parts := list(islice(micro_batches, self.parts)):
            yield {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
