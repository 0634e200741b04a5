"""`DataWaitMonitor`: how much of the training time goes into waiting for a batch."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_data.types import count_samples


class DataWaitMonitor(L.Callback):
    """Measures from the end of one training step to the start of the next, and from there to its end.

    Logged with the Trainer's ``log_every_n_steps``, over the steps since the last time:

    - ``data/wait_fraction``: share of the time between steps, 0 to 1: the loader, the transfer and the work of the
      transfer hooks. On a GPU, work that was queued is counted where the host waits for it.
    - ``data/samples_per_s``: samples trained per second.

    `summary` gives both over the whole training, without the first step of each epoch, which starts the workers.
    """

    def __init__(self) -> None:
        self._total = _Window()
        self._recent = _Window()
        self._step_began_s: float | None = None
        self._step_ended_s: float | None = None

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step_ended_s = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_began_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        if self._step_ended_s is not None and self._step_began_s is not None:
            for window in (self._total, self._recent):
                window.add(self._step_began_s - self._step_ended_s, now_s - self._step_ended_s, count_samples(batch))
        self._step_ended_s = now_s
        every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
        if (batch_idx + 1) % every_n_steps == 0 and self._recent.seconds:
            pl_module.log_dict({f"data/{key}": value for key, value in self._recent.rates().items()}, batch_size=1)
            self._recent = _Window()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step_ended_s = None

    def summary(self) -> dict[str, float]:
        """``data_wait_fraction`` and ``samples_per_s`` over all training steps so far; empty before the second."""
        if not self._total.seconds:
            return {}
        rates = self._total.rates()
        return {"data_wait_fraction": rates["wait_fraction"], "samples_per_s": rates["samples_per_s"]}


class _Window:
    """Time and samples of some steps."""

    def __init__(self) -> None:
        self.wait_s = self.seconds = 0.0
        self.samples = 0

    def add(self, wait_s: float, seconds: float, samples: int) -> None:
        self.wait_s += wait_s
        self.seconds += seconds
        self.samples += samples

    def rates(self) -> dict[str, float]:
        return {"wait_fraction": self.wait_s / self.seconds, "samples_per_s": self.samples / self.seconds}
