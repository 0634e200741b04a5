"""`MemoryMonitor`: the memory of a run, its growth, and what used it when it ran out."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_data.callbacks.events import Event, check_folder, choose_folder, log_metrics
from lit_data.callbacks.memory.post_mortem import (
    PostMortems,
    SeenBatch,
    advise,
    is_noted,
    note_error,
    see_batch,
)
from lit_data.callbacks.memory.record import MemoryRecord, Moment
from lit_data.callbacks.timeline import MARK_STYLES, write_picture
from lit_data.callbacks.wrapping import SAVE, UndoneCallback, run_after
from lit_data.core.checks import check_count, check_saved_counts
from lit_data.core.errors import ConfigError
from lit_data.core.out_of_memory import is_out_of_memory
from lit_data.core.types import PathText

log = logging.getLogger(__name__)

_BATCHES = 5
_RECORDED_ALLOCATIONS = 100_000
"""Number of allocations in a snapshot; each takes a few KB."""

_PEAKS = {
    "rss_bytes": "peak_rss_bytes",
    "pss_bytes": "peak_pss_bytes",
    "peak_bytes": "peak_allocated_bytes",
    "reserved_bytes": "peak_reserved_bytes",
}


class MemoryMonitor(UndoneCallback):
    """Measures memory, warns of growth, and reports what used it when it ran out.

    Logged every `every_n_steps` training batches, regardless of the Trainer's
    ``log_every_n_steps``, and at the start and the end of each validation, test and prediction:

    - ``memory/allocated_bytes``: in tensors on the device; on the CPU the resident memory of this
      process
    - ``memory/reserved_bytes``: held by the device's caching allocator; on the CPU the resident
      memory again
    - ``memory/peak_bytes``: most that was allocated since the last measurement of a training batch
    - ``memory/fragmentation``: fraction of the reserved memory that is in no tensor, 0 to 1
    - ``memory/free_bytes``: still available on the device, or on the CPU in the machine or
      container
    - ``memory/limit_bytes``: the sum of free and reserved memory
    - ``memory/rss_bytes``: resident memory of this process
    - ``memory/pss_bytes``: resident memory of this process and its children, shared pages counted
      once; less often if reading is slow (`memory.record.TreeReader`), never if the system does not
      provide it
    - ``memory/shared_bytes``: of that, shared memory (/dev/shm, memfd)
    - ``memory/pinned_bytes``: page-locked by torch's allocator, not by others; with CUDA only

    Logged at the end of each training epoch, starting with the fifth measured one
    (`lit_data.callbacks.memory.record.Growth`):

    - ``memory/growth_bytes_per_epoch``: growth of ``pss_bytes``, or of ``rss_bytes`` if the system
      does not provide it
    - ``memory/allocated_growth_bytes_per_epoch``: of ``allocated_bytes``

    Each rank logs its own values. The first rank includes the ranks that Lightning's launcher
    started, and writes into the folder `path`: ``memory.png``, all of this over time, at the end of
    ``fit`` and after an error; and after an out-of-memory error, also one that another callback
    recovers from, ``oom-<n>.txt`` with the largest tensors and their owners and, on CUDA, torch's
    summary of its allocator, at most 5 in a run. Peaks and counts continue after a resume.

    Args:
        every_n_steps: Training batches from one measurement to the next.
        path: Folder for the files; by default ``trainer.log_dir``, without loggers
            ``trainer.default_root_dir``, but never the working folder.
        leak_bytes_per_epoch: Growth above which a warning is logged, once for the host and once for
            the device.
        snapshot: Record each allocation on CUDA with its line of code, and write ``oom-<n>.pickle``
            too, torch's snapshot, for https://docs.pytorch.org/memory_viz. Costs a few microseconds
            per allocation.
        plot: Write ``memory.png``.

    Raises:
        ConfigError: An argument is not usable, or `path` is a file.
    """

    of_run = MappingProxyType({"_undo": ExitStack})

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        path: PathText | None = None,
        leak_bytes_per_epoch: float = 50 * 2**20,
        snapshot: bool = False,
        plot: bool = True,
    ) -> None:
        check_count("every_n_steps", every_n_steps, 1)
        if not isinstance(leak_bytes_per_epoch, int | float) or not leak_bytes_per_epoch > 0:
            raise ConfigError(
                f"leak_bytes_per_epoch={leak_bytes_per_epoch!r} is not usable: choose bytes above 0"
            )
        self.every_n_steps = every_n_steps
        self.leak_bytes_per_epoch = leak_bytes_per_epoch
        self.path = None if path is None else Path(path)
        self.snapshot = snapshot
        self.plot = plot
        self._folder: Path | None = None
        self._record: MemoryRecord | None = None
        self._post_mortems = PostMortems()
        self._seen: deque[SeenBatch] = deque(maxlen=_BATCHES)
        self._size: float | None = None  # samples at once, once another callback announced it
        self._evaluation_began_s = 0.0
        self._is_recording = False
        self._steps = 0
        self._ooms = 0
        self._peaks: dict[str, int] = {}
        self._undo = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo(trainer)
        self._folder = choose_folder(trainer, self.path)
        check_folder(self._folder, "memory.png")
        device = trainer.strategy.root_device
        if self._record is None or self._record.device != device:
            self._record = MemoryRecord(device)
        self._undo.callback(run_after(trainer, SAVE, partial(self._record.mark, "checkpoint")))
        if self.snapshot and device.type == "cuda" and trainer.is_global_zero:
            torch.cuda.memory._record_memory_history(max_entries=_RECORDED_ALLOCATIONS)
            self._is_recording = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sample()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._steps += 1
        if self._steps % self.every_n_steps == 0:
            _log(trainer, self._sample())
            self.measured.gauge.reset_peak()  # each logged peak is that since the last one

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self.measured
        record.end_epoch(trainer.current_epoch, self._sample("epoch"))
        _log(trainer, record.read_growth())
        if trainer.is_global_zero:
            for alarm in record.find_alarms(self.leak_bytes_per_epoch):
                log.warning("%s", alarm)

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_began_s = self.measured.now_s
        _log(trainer, self._sample())

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.validating:  # a test or a prediction is not within a training
            self.measured.mark("validation", self._evaluation_began_s)
        _log(trainer, self._sample())

    def _see_batch(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._seen.append(see_batch(trainer, batch, batch_idx, dataloader_idx))

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation
    on_validation_end = on_test_end = on_predict_end = _end_evaluation
    on_train_batch_start = on_validation_batch_start = _see_batch
    on_test_batch_start = on_predict_batch_start = _see_batch

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sample()
        self._draw(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._record is None:
            return
        try:
            # an error that another callback announced already has its report
            if is_out_of_memory(exception) and not is_noted(exception):
                self._report_oom(trainer, exception)
            self._sample("event")
        except Exception as problem:
            # a device that failed repeats its error from then on
            log.warning(
                "memory at the end of the run cannot be read: %s: %s",
                type(problem).__name__,
                problem,
            )
        self.undo(trainer)
        self._draw(trainer)

    @override
    def undo(self, trainer: Trainer) -> None:
        self._undo.close()
        if self._is_recording:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._is_recording = False

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        """Note an event of another callback, and write a report of an out-of-memory error."""
        if event.name == "batch_size":
            self._size = event.values.get("size", self._size)
        if self._record is None:  # the event came in the setup of another callback
            return
        if event.name == "oom":
            self._report_oom(trainer, error)
        elif event.name in MARK_STYLES:
            self._record.mark(event.name)
        self._sample("event")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "ooms": self._ooms, "peaks": dict(self._peaks)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Checked here, where it is known that the checkpoint is at fault.
        check_saved_counts("MemoryMonitor", state_dict, ("steps", "ooms"))
        self._steps = state_dict["steps"]
        self._ooms = state_dict["ooms"]
        self._raise_peaks(state_dict["peaks"])

    def summary(self) -> dict[str, float | int | str]:
        """Return the peaks, ``memory/ooms``, and the growth once it is known.

        The peaks are ``memory/peak_rss_bytes`` and likewise for pss, allocated and reserved; those
        of the host are the largest samples. The result is empty before the first sample.
        """
        if not self._peaks:
            return {}
        growth = self._record.read_growth() if self._record else {}
        return _prefix({**self._peaks, "ooms": self._ooms, **growth})

    @property
    def measured(self) -> MemoryRecord:
        """Measurements since `setup`."""
        if self._record is None:
            raise RuntimeError(
                "MemoryMonitor has not been set up: give it to a Trainer, which does that"
            )
        return self._record

    def _sample(self, moment: Moment = "step") -> dict[str, float]:
        size = self._size
        if size is None:  # no other callback splits batches
            size = self._seen[-1].samples if self._seen else math.nan
        values = self.measured.sample(size, moment)
        peaks = {}
        for name, peak in _PEAKS.items():
            if name in values:
                peaks[peak] = int(values[name])
        self._raise_peaks(peaks)
        return values

    def _raise_peaks(self, peaks: Mapping[str, int]) -> None:
        for name, value in peaks.items():
            self._peaks[name] = max(value, self._peaks.get(name, 0))

    def _report_oom(self, trainer: Trainer, error: BaseException | None) -> None:
        self._ooms += 1
        self.measured.mark("oom")
        path = self._write_report(trainer, error)
        if error is not None:
            report = f": {path} lists what held it" if path else ""
            note_error(error, f"number {self._ooms} of this run{report}")

    def _write_report(self, trainer: Trainer, error: BaseException | None) -> Path | None:
        if not trainer.is_global_zero:
            return None
        if self._folder is None:
            if self._ooms == 1:
                log.warning(
                    "out of memory: path=FOLDER gives a report of what held it; %s", advise(trainer)
                )
            return None
        return self._post_mortems.write(
            self._folder,
            trainer,
            error,
            self.measured.gauge.read(),
            self._seen,
            with_snapshot=self._is_recording,
        )

    def _draw(self, trainer: Trainer) -> None:
        is_drawn = self.plot and trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_drawn and self._folder is not None:
            write_picture(self._folder / "memory.png", self.measured.draw)


def _log(trainer: Trainer, values: Mapping[str, float]) -> None:
    log_metrics(trainer, _prefix(values))


def _prefix(values: Mapping[str, float]) -> dict[str, Any]:
    return {f"memory/{name}": value for name, value in values.items()}
