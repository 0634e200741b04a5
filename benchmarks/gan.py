"""Suite ``gan``: time and memory of a GAN's step, as it is often written and by `GANModule`."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.gan_variants import NAMES, GANVariant, list_ways
from lit_data.batch_form import count_samples
from lit_data.callbacks.wrapping import wrap
from lit_data.commands.benchmarks.options import Suite, choose_device
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.commands.build import build_datamodule, build_model
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.inference.batch_size_table import measure_peak_bytes
from lit_data.inference.export.onnx_file import without_noise
from lit_data.io.progress import track
from lit_data.loading.device_timer import read_clock
from lit_data.modules import GANModule
from lit_data.types import Batch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Bench:
    """Runs steps of a module, in which nothing but the way to make them differs.

    Attributes:
        module: Left as it is; each run has a copy.
        device: Where to train.
    """

    module: GANModule
    device: torch.device
    _seconds: list[float] = field(default_factory=list)
    _peaks: list[int] = field(default_factory=list)

    def time_step(self, way: GANVariant, batch: Batch, steps: int) -> float:
        """Measure the mean seconds of a step, after one for warming up, which does not count."""
        self._run(way, batch, steps + 1, around=self._time)
        return sum(self._seconds[1:]) / steps

    def measure_peak(self, way: GANVariant, batch: Batch) -> int:
        """Measure the most bytes of tensors in a step with a penalty.

        Weights, optimizers and batch are among them.
        """
        self._run(way, batch, 2, around=self._measure, r1_every=1)
        return self._peaks[-1]

    def find_gradients(self, way: GANVariant, batch: Batch) -> Tensor:
        """Find the gradients [N] of both nets before their steps of descent, with a penalty."""
        collector = _GradientCollector()
        self._run(way, batch, 1, callback=collector, r1_every=1, descent=True)
        return torch.cat(collector.gradients).cpu().double()

    def _run(
        self,
        way: GANVariant,
        batch: Batch,
        steps: int,
        *,
        around: Callable[..., Any] | None = None,
        callback: L.Callback | None = None,
        r1_every: int | None = None,
        descent: bool = False,
    ) -> None:
        module = copy.deepcopy(self.module)
        module.micro_batch_size = module.r1_micro_batch_size = way.part
        module.r1_every = r1_every or module.r1_every
        if descent:
            # Adam's first step is as large for gradients that are rounding errors as for others.
            module.make_generator_optimizer = partial(torch.optim.SGD, lr=1e-3)
            module.make_discriminator_optimizer = partial(torch.optim.SGD, lr=1e-3)
        if way.step is not None:
            step = way.step
            wrap(module, "training_step", lambda _, each, batch_idx: step(module, each))
        self._seconds.clear()
        self._peaks.clear()
        if around is not None:
            wrap(module, "training_step", partial(around, module))
        callbacks = [*way.make_callbacks(module), *([callback] if callback else [])]
        loader: Any = DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]
        with without_noise():
            self._make_trainer(callbacks).fit(module, loader)

    def _make_trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        return L.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )

    def _time(
        self, module: GANModule, call: Callable[..., Any], batch: Batch, batch_idx: int
    ) -> None:
        began_s = read_clock(self.device)
        call(batch, batch_idx)
        self._seconds.append(read_clock(self.device) - began_s)

    def _measure(
        self, module: GANModule, call: Callable[..., Any], batch: Batch, batch_idx: int
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            call(batch, batch_idx)
            self._peaks.append(torch.cuda.max_memory_allocated(self.device))
            return
        held_bytes = _count_held_bytes(module, batch)
        self._peaks.append(held_bytes + measure_peak_bytes(lambda: call(batch, batch_idx)))


class _GradientCollector(L.Callback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.gradients.append(weight.grad.flatten().clone())


def _count_held_bytes(module: GANModule, batch: Batch) -> int:
    """Count the bytes of weights, buffers, gradients, optimizers' states and batch."""
    values: list[Any] = [*module.buffers(), *batch.values()]
    for weight in module.parameters():
        values += [weight, weight.grad]
    for optimizer in module.trainer.optimizers:
        for state in optimizer.state.values():
            values += state.values()
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


COLUMNS = (
    "way", "peak_mib", "peak_to_original", "largest_batch", "largest_to_original", "step_ms",
    "time_to_original", "gradient_difference",
)  # fmt: skip
_MOST = 8
"""Batches larger than so many times the original one are not tried."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Time and memory of one way.

    Attributes:
        step_s: Of a step.
        peak_bytes: Of a step with a penalty.
        largest: Samples of the largest batch within the original way's peak.
        difference: Norm of the difference of its gradients to those of the original way, by the
            norm of those.
    """

    step_s: float
    peak_bytes: int
    largest: int
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GANSuite(Suite):
    """Time and memory of a step of a GAN as it is often written, and as `GANModule` makes it.

    A row for each way: ``original`` with fakes made twice, their graph kept, all losses in one
    backward; ``careful`` with fakes without a graph; ``whole`` as `GANModule` makes it,
    ``checkpointed`` with activations of blocks computed twice, ``parts`` in parts. All steps have
    the same draws. Columns: ``peak_mib``, most memory of tensors in a step with a penalty, weights,
    optimizers and batch among them: of tensors that operations return on a CPU,
    ``max_memory_allocated`` on a GPU; ``largest_batch`` whose peak is not above that of
    ``original`` at its batch, 8 times that at most; ``step_ms``, mean over `steps` with the
    penalties among them, median of `repeats`; ``gradient_difference``, norm of the difference of
    both nets' gradients to those of ``original``, by their norm; ``peak_to_original``,
    ``largest_to_original``, ``time_to_original``.

    Args:
        batch_size: Samples of a step.
        part_size: Samples of a part.
        steps: Steps that are timed.
    """

    batch_size: int = 32
    part_size: int = 4
    steps: int = 16

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        model = build_model(cfg)
        if not isinstance(model, GANModule):
            raise ConfigError(
                f"suite=gan measures a GANModule, not a {type(model).__name__}: choose model=gan"
            )
        samples = _read_samples(build_datamodule(cfg), _MOST * self.batch_size, device)
        measured = _measure(Bench(model, device), self, samples)
        original = measured["original"]
        lines = [make_line(name, way, original) for name, way in measured.items()]
        threads = torch.get_num_threads()
        title = f"{cfg.name}: steps of {self.batch_size} images, {threads} threads, {device}"
        report_lines(lines, COLUMNS, Path(cfg.paths.run), title, labels=NAMES)
        return collect(lines, COLUMNS) | {
            "benchmark/batch_size": self.batch_size,
            "benchmark/part_size": self.part_size,
        }


def find_largest(fits: Callable[[int], bool], size: int, most: int) -> int:
    """Find the largest batch that fits, to an eighth of `size`.

    Args:
        fits: Returns True if a batch of so many samples fits; none fits that is larger than one
            that does not.
        size: Where to begin; doubled as long as it fits.
        most: Batches of more than this many times `size` are not tried.

    Returns:
        Its samples; 0 if no batch fits that is a multiple of the eighth.
    """
    step = max(1, size // 8)
    low, high = 0, size  # low fits; high is tried next, then does not fit
    while high <= most * size and fits(high):
        low, high = high, 2 * high
    high = min(high, most * size + step)
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def make_line(name: str, measured: Measured, original: Measured) -> dict[str, Any]:
    """Make a line of `COLUMNS`."""
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


def _measure(bench: Bench, options: GANSuite, samples: Batch) -> dict[str, Measured]:
    size, ways = options.batch_size, list_ways(options.part_size)
    batch = _take(samples, size)
    steps_s: dict[str, list[float]] = {way.name: [] for way in ways}
    rounds = ways * options.repeats
    for way in track(rounds, "measuring time", len(rounds)):
        steps_s[way.name].append(bench.time_step(way, batch, options.steps))
    original = ways[0]
    limit_bytes = bench.measure_peak(original, batch)
    gradients = bench.find_gradients(original, batch)
    measured = {}
    for way in track(ways, "measuring memory", len(ways)):
        difference = (bench.find_gradients(way, batch) - gradients).norm() / gradients.norm()
        measured[way.name] = Measured(
            step_s=median(steps_s[way.name]),
            peak_bytes=bench.measure_peak(way, batch),
            largest=find_largest(partial(_fits, bench, way, samples, limit_bytes), size, _MOST),
            difference=float(difference),
        )
    return measured


def _fits(bench: Bench, way: GANVariant, samples: Batch, limit_bytes: int, count: int) -> bool:
    return bench.measure_peak(way, _take(samples, count)) <= limit_bytes


def _read_samples(datamodule: BaseDataModule, count: int, device: torch.device) -> Batch:
    """Read samples as they come to the training step, more than once where there are fewer."""
    datamodule.setup("fit")
    batches: list[Batch] = []
    samples = 0
    while samples < count:
        samples_before = samples
        for batch in datamodule.train_dataloader():
            batches.append(datamodule.transform(batch, "train"))
            samples += count_samples(batches[-1])
            if samples >= count:
                break
        if samples == samples_before:
            raise ConfigError("the training split is empty: it needs one batch at least")
    joined = {}
    for key in batches[0]:
        joined[key] = torch.cat([batch[key] for batch in batches])[:count].to(device)
    return joined


def _take(samples: Batch, count: int) -> Batch:
    # copies, so that the memory of the rest is not theirs
    return {key: value[:count].clone() for key, value in samples.items()}
