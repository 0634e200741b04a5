"""`DataWaitMonitor`: the parts of each training step, and what limits the run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.amp import AMP
from lit_data.callbacks.device_memory import MemoryGauge, open_gauge
from lit_data.callbacks.events import Event, choose_folder, is_logging_step, log_metrics
from lit_data.callbacks.loader_facts import count_batch
from lit_data.callbacks.timeline import draw_throughput, write_picture
from lit_data.callbacks.timing.step_clock import CudaStepClock, Part, StepClock, attach
from lit_data.callbacks.timing.totals import EndedBatch, Hardware, StepTotals, Tally, Throughput
from lit_data.callbacks.wrapping import CopiedCallback
from lit_data.core.devices import has_fast_bf16
from lit_data.core.machine import count_disk_bytes
from lit_data.core.types import PathText
from lit_data.loading import MicroBatchLoader

_MEASURED_STEPS = 16
"""Steps between two logging steps in which CUDA's clock is read; each costs about 50 us."""

_MOST_ENDED = 64
"""Number of steps that are summed at once, which is cheaper than summing after each."""


class DataWaitMonitor(CopiedCallback):
    """Measures how long training waits for data, transfer, augmentation and the model.

    Steps before the start of an epoch or a validation, or before a checkpoint, are not measured. On
    a CUDA device, the device's own clock times some of the steps; on other devices, the host's
    clock times all of them. Nothing waits for the device. All times are those of this rank.

    Logged with the Trainer's ``log_every_n_steps``, over the steps since the last time:

    - ``data/wait_fraction``: fraction of the time spent waiting for a batch (``wait`` and
      ``assemble``), 0 to 1
    - ``data/samples_per_s``: samples trained per second; missing if they cannot be counted
    - ``data/success_rate``: fraction of batches that went through without running out of memory, 0
      to 1
    - ``time/wait_s``: mean seconds of a step, waiting for the loader
    - ``time/assemble_s``: the loader's own work (`lit_data.core.types.CountsAssembly`) and
      ``on_before_batch_transfer``
    - ``time/transfer_s``: ``transfer_batch_to_device``
    - ``time/augment_s``: ``on_after_batch_transfer``
    - ``time/forward_s``: ``training_step``, without what follows
    - ``time/backward_s``: backward
    - ``time/optimizer_s``: from ``on_before_optimizer_step`` to the end of the optimizer's step,
      clipping included
    - ``time/other_s``: the rest: zeroing gradients, schedulers, other callbacks, loggers, the
      Trainer

    At the end of training, even if it failed, one sentence states what limits the run, the
    precision of the model if it was not float32, and whether the device has bf16 that was not used
    (unless AMP was given a precision); and ``throughput.png`` shows samples per second, batch size
    and the fractions of the parts.

    Args:
        path: Folder for the plot; by default that of the Trainer's logger, never the working folder.
        plot: Draw the plot; a ``fast_dev_run`` never does.
    """

    of_run = MappingProxyType({"_clock": StepClock, "_detach": type(None)})

    def __init__(self, *, path: PathText | None = None, plot: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.plot = plot
        self._total = StepTotals()
        self._since_logged = Tally()
        self._history = Throughput()
        self._ended: list[EndedBatch] = []
        self._batches = 0
        self._size: int | None = None  # samples at once, once another callback announced it
        self._failed = False
        self._before_backward: Part = "other"
        self._hardware = Hardware()
        self._folder: Path | None = None
        self._disk_bytes_before = 0  # read before the training
        self._samples_before = 0
        self._clock = StepClock()
        self._gauge: MemoryGauge  # set at the start of a training
        self._detach: Callable[[], None] | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = pl_module.device
        self._gauge = open_gauge(device)
        self._clock = _make_clock(trainer, device)
        folder = choose_folder(trainer, self.path)
        draws = self.plot and trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = folder if draws else None
        self._disk_bytes_before = count_disk_bytes()
        self._samples_before = self._total.tally.samples

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Read here: AMP may have fallen back, and if a run fails, it may have given the plugin back
        # before the last sentence.
        device_type = pl_module.device.type
        self._hardware = Hardware(
            on_cpu=device_type == "cpu",
            precision=str(trainer.precision),
            has_bf16=has_fast_bf16(device_type),
            is_chosen=any(_chooses_precision(callback) for callback in trainer.callbacks),  # type: ignore[attr-defined]
        )
        self._clock.drop()
        self._detach_clock()
        # repeated in each epoch, which may have its own loaders
        self._detach = attach(self._clock, trainer, pl_module)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # forward, or whatever part a step of manual optimization was in
        self._before_backward = self._clock.enter("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.enter(self._before_backward)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._clock.enter("optimizer")

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seconds_s = self._clock.lap(self._batches)
        samples = count_batch(trainer, batch)
        size = min(self._size or samples, samples)
        is_rest = trainer.is_last_batch
        self._ended.append(
            EndedBatch(self._batches, samples, seconds_s, size, self._failed, is_rest)
        )
        self._batches += 1
        self._failed = False
        if is_logging_step(trainer, batch_idx):
            self._clock.read()  # device times of steps that are over
            self._total.add_memory(self._gauge.read())
            self._log(trainer)
        elif len(self._ended) >= _MOST_ENDED:
            self._count()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.drop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total.add_memory(self._gauge.read())
        self._clock.read(wait=True)
        self._finish(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._detach is not None:  # the training failed
            self._finish(trainer)

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        """Note batches that ran out of memory, and new sizes, of `AdaptiveBatchSize`."""
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
        """Return the values of the whole training so far; empty before its second step.

        - ``data_wait_fraction``, ``samples_per_s``: as logged
        - ``train/mean_step_s``, and ``train/mean_wait_s`` and so on for each part
        - ``train/best_batch_size``: the number of samples at once that trained the most samples
          per second, among those seen; missing if samples cannot be counted
        - ``train/batch_success_rate``: as logged
        - ``train/memory_mean_bytes``, ``train/memory_max_bytes``: allocated on the device at the
          logging steps, and its peak; on the CPU the resident set of this process
        - ``train/disk_read_bytes``: read from disks by this process and its workers
        - ``train/limited_by``: one sentence
        """
        self._count()
        return self._total.summarise(self._hardware)

    def _count(self) -> None:
        """Sum the batches that ended and the parts that are known."""
        ended, self._ended = self._ended, []
        known, self._clock.known = self._clock.known, []
        parts = [seconds for _, seconds in known]
        self._since_logged.add(ended, parts)
        self._total.add(ended, parts)
        self._history.add(ended, known)

    def _log(self, trainer: Trainer) -> None:
        self._count()
        tally = self._since_logged
        self._since_logged = Tally()
        if not trainer.loggers or not tally.measured or not tally.steps:
            return
        values = {f"data/{name}": value for name, value in tally.rate().items()}
        for part, seconds_s in tally.mean_parts().items():
            values[f"time/{part}_s"] = seconds_s
        log_metrics(trainer, values)

    def _finish(self, trainer: Trainer) -> None:
        self._detach_clock()
        self._count()
        if not self._total.tally.measured or not len(self._history.speed):
            return  # the fit was already over
        self._count_reads(trainer)
        sentence = self._total.describe(self._hardware)
        rank_zero_info(f"DataWaitMonitor: {sentence}")
        if self._folder is not None:
            draw = partial(
                draw_throughput, self._history.speed, self._history.parts, title=sentence
            )
            write_picture(self._folder / "throughput.png", draw)

    def _count_reads(self, trainer: Trainer) -> None:
        """Compare bytes of disks and samples, only once for a training as it takes milliseconds."""
        loader = trainer.train_dataloader
        samples = self._total.tally.samples - self._samples_before
        sample_bytes = loader.sample_bytes if isinstance(loader, MicroBatchLoader) else 0
        disk_bytes = max(0, count_disk_bytes() - self._disk_bytes_before)
        self._total.disk_bytes += disk_bytes
        self._total.sample_bytes += samples * sample_bytes

    def _detach_clock(self) -> None:
        if self._detach is not None:
            self._detach()
        self._detach = None


def _chooses_precision(callback: Callback) -> bool:
    return isinstance(callback, AMP) and (callback.precision != "auto" or callback.has_fallen_back)


def _make_clock(trainer: Trainer, device: torch.device) -> StepClock:
    if device.type != "cuda":
        return StepClock()
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
    # a Trainer that never logs gives 0
    return CudaStepClock(min(1.0, _MEASURED_STEPS / (every_n_steps or _MEASURED_STEPS * 10)))
