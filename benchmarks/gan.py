"""Mode ``gan``: time and memory of a step of a GAN as it is often written, and as `GANModule` makes it."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final

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
        """Mean seconds of a step, after one for warming up, which has no part in it."""
        self._run(way, batch, steps + 1, around=self._time)
        return sum(self._seconds[1:]) / steps

    def measure_peak(self, way: GANVariant, batch: Batch) -> int:
        """Most bytes of tensors in a step with a penalty: weights, optimizers, batch, and what the step makes."""
        self._run(way, batch, 2, around=self._measure, r1_every=1)
        return self._peaks[-1]

    def find_gradients(self, way: GANVariant, batch: Batch) -> Tensor:
        """Gradients [N] of both nets, each before its step of plain descent; with a penalty."""
        keep = _KeepGradients()
        self._run(way, batch, 1, callback=keep, r1_every=1, descent=True)
        return torch.cat(keep.gradients).cpu().double()

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
        if (
            descent
        ):  # Adam's first step is as large for gradients that are rounding errors as for any other
            module.make_generator_optimizer = partial(torch.optim.SGD, lr=1e-3)
            module.make_discriminator_optimizer = partial(torch.optim.SGD, lr=1e-3)
        if way.step is not None:
            replaced = way.step
            wrap(module, "training_step", lambda _, some, batch_idx: replaced(module, some))
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


class _KeepGradients(L.Callback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self.gradients += [
            weight.grad.flatten().clone() for weight in weights if weight.grad is not None
        ]


def _count_held_bytes(module: GANModule, batch: Batch) -> int:
    """Bytes of weights, buffers, gradients, optimizers' states and batch before a step."""
    weights = list(module.parameters())
    held = [*weights, *module.buffers(), *batch.values(), *(weight.grad for weight in weights)]
    for optimizer in module.trainer.optimizers:
        held += chain.from_iterable(state.values() for state in optimizer.state.values())
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))


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
        model, size, folder = build_model(cfg), self.batch_size, Path(cfg.paths.run)
        if not isinstance(model, GANModule):
            raise ConfigError(
                f"suite=gan measures a GANModule, not a {type(model).__name__}: choose model=gan"
            )
        whole = _read_samples(build_datamodule(cfg), _MOST * size, device)
        measured = _measure(Bench(model, device), self, whole)
        lines = [make_line(name, found, measured["original"]) for name, found in measured.items()]
        title = f"{cfg.name}: steps of {size} images, {torch.get_num_threads()} threads, {device}"
        report_lines(lines, COLUMNS, folder, title, labels=NAMES)
        return collect(lines, COLUMNS) | {
            "benchmark/batch_size": size,
            "benchmark/part_size": self.part_size,
        }


def find_largest(fits: Callable[[int], bool], size: int, most: int) -> int:
    """The largest batch that fits, to an eighth of `size`.

    Args:
        fits: Whether a batch of so many samples does; larger ones than one that does not, do not
            either.
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


def _measure(bench: Bench, options: GANSuite, whole: Batch) -> dict[str, Measured]:
    size, ways = options.batch_size, list_ways(options.part_size)
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
            difference=float(
                (bench.find_gradients(way, batch) - gradients).norm() / gradients.norm()
            ),
        )
    return measured


def _fits(bench: Bench, way: GANVariant, whole: Batch, limit_bytes: int, count: int) -> bool:
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
