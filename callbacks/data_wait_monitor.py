"""`DataWaitMonitor`: where the time of each training step goes, and what limits the run."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.device_memory import MemoryGauge, open_gauge
from lit_data.callbacks.events import Event, has_own_folder, is_logging_step, log_metrics
from lit_data.callbacks.loader_facts import count_batch
from lit_data.callbacks.timing.plot import Throughput, draw_throughput
from lit_data.callbacks.timing.step_clock import CudaStepClock, Part, StepClock, attach
from lit_data.callbacks.timing.totals import Ended, StepTotals, Tally
from lit_data.devices import has_fast_bf16
from lit_data.loading import MicroBatchLoader
from lit_data.loading.machine import count_disk_bytes

log = logging.getLogger(__name__)


_MEASURED_STEPS: Final = 16
"""On CUDA, steps between two logging steps in which the device's clock is read; each costs about 50 us."""

_MOST_ENDED: Final = 64
"""Steps that are added up at once."""


class DataWaitMonitor(L.Callback):
    """Measures where the time of training steps goes, each from the end of the one before it to its
    own end.

    Left out are the steps after which an epoch or a validation began or a checkpoint was taken. On
    a CUDA device the parts are the device's time in some of the steps, else the host's time in all
    of them; the device is never waited for. Every part is of this rank.

    Logged with the Trainer's ``log_every_n_steps``, over the steps since the last time:

    - ``data/wait_fraction``: share of the time spent waiting for a batch (``wait`` and
      ``assemble``), 0 to 1
    - ``data/samples_per_s``: samples trained per second
    - ``data/success_rate``: share of batches that went through without running out of memory, 0 to
      1
    - ``time/wait_s``: mean seconds of a step, waiting for the loader
    - ``time/assemble_s``: own work of the loader (`lit_data.types.CountsAssembly`) and
      ``on_before_batch_transfer``
    - ``time/transfer_s``: ``transfer_batch_to_device``
    - ``time/augment_s``: ``on_after_batch_transfer``
    - ``time/forward_s``: ``training_step``, without what follows
    - ``time/backward_s``: backward
    - ``time/optimizer_s``: from ``on_before_optimizer_step`` to the end of the optimizer's step,
      clipping included
    - ``time/other_s``: the rest: zeroing gradients, schedulers, other callbacks, loggers, the
      Trainer

    At the end of training, also of one that fails, one sentence says what limits the run, in which
    precision the model ran if not in float32, and whether the device has bf16 that was not used;
    and ``throughput.png`` shows samples per second, batch size and the shares of the parts.

    Args:
        path: Folder of the plot; by default that of the Trainer's logger, never the working folder.
        plot: Whether to draw it; never in a ``fast_dev_run``.
    """

    def __init__(self, *, path: str | os.PathLike[str] | None = None, plot: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.plot = plot
        self._total, self._recent = StepTotals(), Tally()
        self._history = Throughput()
        self._ended: list[Ended] = []
        self._batches = 0
        self._size: int | None = None
        self._failed = False
        self._before_backward: Part = "other"
        self._on_cpu = True
        self._precision, self._has_bf16 = "", False
        self._folder: Path | None = None
        self._began = 0, 0  # bytes read from disks, samples trained
        self._clock = StepClock()
        self._gauge: MemoryGauge = open_gauge(torch.device("cpu"))
        self._detach: Callable[[], None] | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = pl_module.device
        self._on_cpu, self._gauge = device.type == "cpu", open_gauge(device)
        # Read here: where a run fails, AMP may have given the plugin back before the last sentence.
        self._precision, self._has_bf16 = str(trainer.precision), has_fast_bf16(device.type)
        every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
        share = min(1.0, _MEASURED_STEPS / (every_n_steps or _MEASURED_STEPS * 10))
        self._clock = CudaStepClock(share) if device.type == "cuda" else StepClock()
        folder = self.path or Path(
            trainer.log_dir or trainer.default_root_dir
        )  # all ranks: `log_dir` is a broadcast
        draws = self.plot and trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = folder if draws and has_own_folder(trainer, self.path) else None
        self._began = count_disk_bytes(), self._total.tally.samples

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.drop()
        self._let_go()
        self._detach = attach(
            self._clock, trainer, pl_module
        )  # each epoch may have loaders of its own

    @override
    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        self._before_backward = self._clock.enter("backward")

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.enter(self._before_backward)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._clock.enter("optimizer")

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seconds_s = self._clock.lap(self._batches)
        samples = count_batch(trainer, batch)
        size = min(self._size or samples, samples)
        self._ended.append(
            Ended(self._batches, samples, seconds_s, size, self._failed, trainer.is_last_batch)
        )
        self._batches, self._failed = self._batches + 1, False
        if is_logging_step(trainer, batch_idx):
            self._clock.read()
            self._total.add_memory(self._gauge.read())
            self._log(trainer)
        elif len(self._ended) >= _MOST_ENDED:
            self._count()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.drop()

    @override
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._clock.drop()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._total.add_memory(self._gauge.read())
        self._clock.read(wait=True)
        self._finish(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._detach is not None:
            self._finish(trainer)

    def on_event(self, trainer: L.Trainer, event: Event, error: BaseException | None) -> None:
        """Take note of what `AdaptiveBatchSize` tells: batches that ran out of memory, and new sizes."""
        if event.name == "oom":
            self._failed = True
            self._history.mark_oom(self._batches)
        elif event.name == "batch_size":
            self._size = int(event.values["size"])

    @override
    def state_dict(self) -> dict[str, Any]:
        self._count()
        return self._total.to_plain()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total = StepTotals.from_plain(state_dict)
        self._batches = self._total.tally.batches

    def summary(self) -> dict[str, float | int | str]:
        """The whole training so far; empty before its second step.

        - ``data_wait_fraction``, ``samples_per_s``: as logged
        - ``train/mean_step_s``, and ``train/mean_wait_s`` and so on for each part
        - ``train/best_batch_size``: of the sizes seen, that which trained the most samples per
          second; samples that go through the model at once
        - ``train/batch_success_rate``: as logged
        - ``train/memory_mean_bytes``, ``train/memory_max_bytes``: allocated on the device at the
          logging steps, and its peak; on the CPU the resident set of this process
        - ``train/disk_read_bytes``: read from disks by this process and its workers
        - ``train/limited_by``: one sentence
        """
        self._count()
        return self._total.summarise(
            on_cpu=self._on_cpu, precision=self._precision, has_bf16=self._has_bf16
        )

    def _count(self) -> None:
        """Add up what the steps left, many at once: cheaper than after each."""
        ended, self._ended = self._ended, []
        parts, self._clock.known = self._clock.known, []
        self._recent.add(ended, [seconds for _, seconds in parts])
        self._total.add(ended, [seconds for _, seconds in parts])
        self._history.add(ended, parts)

    def _log(self, trainer: L.Trainer) -> None:
        self._count()
        recent, self._recent = self._recent, Tally()
        if trainer.loggers and recent.measured and recent.steps:
            rates = {f"data/{name}": value for name, value in recent.rate().items()}
            parts = {f"time/{part}_s": seconds_s for part, seconds_s in recent.mean_parts().items()}
            log_metrics(trainer, rates | parts)

    def _finish(self, trainer: L.Trainer) -> None:
        self._let_go()
        self._count()
        if not self._total.tally.measured or not len(
            self._history.speed.read()[0]
        ):  # a fit that was over already
            return
        self._count_reads(trainer)
        sentence = self._total.describe(
            on_cpu=self._on_cpu, precision=self._precision, has_bf16=self._has_bf16
        )
        rank_zero_info(f"DataWaitMonitor: {sentence}")
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draw_throughput(self._history, self._folder / "throughput.png", sentence)
        except OSError as error:
            log.warning("%s/throughput.png cannot be written: %s", self._folder, error)

    def _count_reads(self, trainer: L.Trainer) -> None:
        """Disks against samples, once for a training: to ask for what all workers read takes milliseconds."""
        samples, loader = self._total.tally.samples - self._began[1], trainer.train_dataloader
        sample_bytes = loader.sample_bytes if isinstance(loader, MicroBatchLoader) else 0
        self._total.add_reads(max(0, count_disk_bytes() - self._began[0]), samples * sample_bytes)

    def _let_go(self) -> None:
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()
