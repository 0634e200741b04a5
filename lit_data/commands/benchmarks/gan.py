"""Mode ``gan``: time and memory of a step of a GAN as it is often written, and as `GANModule` makes it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from omegaconf import DictConfig
from rich.table import Table

from lit_data.batch_form import count_samples
from lit_data.commands.benchmarks.gan_meter import Bench
from lit_data.commands.benchmarks.gan_ways import NAMES, Way, list_ways
from lit_data.commands.benchmarks.lines import format_number, show_table, write_lines
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.session import build_datamodule, build_model
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.io.progress import track
from lit_data.modules import GANModule
from lit_data.types import Batch

log = logging.getLogger(__name__)

COLUMNS: Final = (
    "way", "peak_mib", "peak_to_original", "largest_batch", "largest_to_original", "step_ms", "time_to_original",
    "gradient_difference",
)  # fmt: skip
_MOST: Final = 8
"""Batches larger than so many times the original one are not tried."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way takes.

    Attributes:
        step_s: Of a step.
        peak_bytes: Of a step with a penalty.
        largest: Samples of the largest batch within the original way's peak.
        difference: Norm of the difference of its gradients to those of the original way, by the norm of those.
    """

    step_s: float
    peak_bytes: int
    largest: int
    difference: float


def run_gan(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare the ways; see `lit_data.commands.benchmark.run`."""
    device = options.choose_device()
    model, size, folder = build_model(cfg), options.batch_sizes[0], Path(cfg.paths.run)
    if not isinstance(model, GANModule):
        raise ConfigError(f"benchmark.mode=gan measures a GANModule, not a {type(model).__name__}: choose model=gan")
    whole = _read_samples(build_datamodule(cfg), _MOST * size, device)
    measured = _measure(Bench(model, device), options, whole)
    lines = [make_line(name, found, measured["original"]) for name, found in measured.items()]
    write_lines(lines, COLUMNS, folder / "benchmark.csv")
    _print_lines(lines, f"{cfg.name}: steps of {size} images, {torch.get_num_threads()} threads, {device}")
    log.info("table: %s", folder / "benchmark.csv")
    named = {f"benchmark/{line['way']}_{name}": line[name] for line in lines for name in COLUMNS[1:]}
    return named | {"benchmark/batch_size": size, "benchmark/part_size": options.micro_batch_sizes[0]}


def find_largest(fits: Callable[[int], bool], size: int, most: int) -> int:
    """The largest batch that fits, to an eighth of `size`.

    Args:
        fits: Whether a batch of so many samples does; larger ones than one that does not, do not either.
        size: Where to begin; doubled as long as it fits.
        most: Batches of more than this many times `size` are not tried.

    Returns:
        Its samples; 0 if no batch fits that is a multiple of the eighth.
    """
    step, low, high = max(1, size // 8), 0, size
    while high <= most * size and fits(high):
        low, high = high, 2 * high
    high = min(high, most * size + step)
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def make_line(name: str, measured: Measured, original: Measured) -> dict[str, Any]:
    """A line of `COLUMNS`."""
    return {
        "way": name,
        "peak_mib": measured.peak_bytes / 2**20,
        "peak_to_original": measured.peak_bytes / original.peak_bytes,
        "largest_batch": measured.largest,
        "largest_to_original": measured.largest / original.largest,
        "step_ms": 1e3 * measured.step_s,
        "time_to_original": measured.step_s / original.step_s,
        "gradient_difference": measured.difference,
    }


def _measure(bench: Bench, options: BenchmarkOptions, whole: Batch) -> dict[str, Measured]:
    size, ways = options.batch_sizes[0], list_ways(options.micro_batch_sizes[0])
    batch = _take(whole, size)
    steps_s: dict[str, list[float]] = {way.name: [] for way in ways}
    rounds = ways * options.repeats
    for way in track(rounds, "measuring time", len(rounds)):
        steps_s[way.name].append(bench.time_step(way, batch, options.steps))
    limit, gradients = bench.measure_peak(ways[0], batch), bench.find_gradients(ways[0], batch)
    measured = {}
    for way in track(ways, "measuring memory", len(ways)):
        measured[way.name] = Measured(
            step_s=median(steps_s[way.name]),
            peak_bytes=bench.measure_peak(way, batch),
            largest=find_largest(partial(_fits, bench, way, whole, limit), size, _MOST),
            difference=float((bench.find_gradients(way, batch) - gradients).norm() / gradients.norm()),
        )
    return measured


def _fits(bench: Bench, way: Way, whole: Batch, limit_bytes: int, count: int) -> bool:
    return bench.measure_peak(way, _take(whole, count)) <= limit_bytes


def _read_samples(datamodule: BaseDataModule, count: int, device: torch.device) -> Batch:
    """So many samples as they come to the training step, more than once where there are fewer."""
    datamodule.setup("fit")
    batches: list[Batch] = []
    while sum(map(count_samples, batches)) < count:
        before = len(batches)
        for batch in datamodule.train_dataloader():
            batches.append(datamodule.transform(batch, "train"))
            if sum(map(count_samples, batches)) >= count:
                break
        if len(batches) == before:
            raise ConfigError("the training split is empty: it needs one batch at least")
    joined = {key: torch.cat([batch[key] for batch in batches])[:count] for key in batches[0]}
    return {key: value.to(device) for key, value in joined.items()}


def _take(whole: Batch, count: int) -> Batch:
    # Copies, so that the memory of the rest is not theirs.
    return {key: value[:count].clone() for key, value in whole.items()}


def _print_lines(lines: Sequence[Mapping[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name == "way" else "right")
    for line in lines:
        table.add_row(NAMES[line["way"]], *(format_number(float(line[name])) for name in COLUMNS[1:]))
    show_table(table)
