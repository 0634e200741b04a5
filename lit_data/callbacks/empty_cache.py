"""`EmptyCache`: returns cached memory to the device or the operating system."""

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.device_memory import CachedMemory, open_cache
from lit_data.callbacks.events import Event, announce, is_logging_step, log_metrics
from lit_data.callbacks.wrapping import SAVE, UndoneCallback, run_after
from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError

log = logging.getLogger(__name__)

_CHECKED_STEPS = 10
"""Steps between two checks of the unused fraction, which take about 50 us each."""


class EmptyCache(UndoneCallback):
    """Empties torch's cache of device memory; on the CPU, returns free heap memory (glibc).

    This frees memory when sizes change, such as between training and validation, and costs time,
    because the memory must be allocated again. Releases that would take more than
    `max_cost_fraction` are skipped, which is logged once.

    Logged with the Trainer's ``log_every_n_steps`` if there was a release since the last time:

    - ``cache/freed_bytes``: memory released since the last time, in bytes: reserved memory on the
      device before minus after; on the CPU the resident set of this process
    - ``cache/seconds``: time it took, in seconds, garbage collection included

    Args:
        every_n_steps: Release after this many training batches; None disables this.
        around_validation: Release before and after each validation.
        after: Methods of the LightningModule after each call of which memory is released, such as
            one that samples images or computes metrics; ``"checkpoint"`` means after a checkpoint
            was written.
        unused_fraction: Release if a larger fraction of the reserved memory, 0 to 1, is in no
            tensor right before a backward pass, when a step uses the most; checked every 10th
            training batch. It has no effect on the CPU, where torch reserves nothing. None disables
            this.
        collect_garbage: Run Python's garbage collection first, which frees tensors in reference
            cycles.
        max_cost_fraction: Fraction of the training time so far, 0 to 1, that all releases together
            may take. The first release of a training shows what one costs.

    Raises:
        ConfigError: A value is out of range, or (at the start) the module has no method that
            `after` names.
    """

    of_run = MappingProxyType({"_undo": ExitStack, "_cache": type(None)})

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        around_validation: bool = True,
        after: Sequence[str] = ("checkpoint",),
        unused_fraction: float | None = None,
        collect_garbage: bool = True,
        max_cost_fraction: float = 0.02,
    ) -> None:
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps, 1)
        if isinstance(after, str) or not all(isinstance(name, str) and name for name in after):
            raise ConfigError(
                f"after={after!r}: give a list of names, 'checkpoint' or those of methods of the "
                "LightningModule"
            )
        fractions = {"unused_fraction": unused_fraction, "max_cost_fraction": max_cost_fraction}
        for name, value in fractions.items():
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name}={value!r}: give a fraction between 0 and 1")
        self.every_n_steps = every_n_steps
        self.around_validation = around_validation
        self.after = tuple(after)
        self.unused_fraction = unused_fraction
        self.collect_garbage = collect_garbage
        self.max_cost_fraction = max_cost_fraction
        self._total = _Freed()
        self._since_logged = _Freed()
        self._batches = 0
        self._spent_s = 0.0  # in this training
        self._last_release_s = 0.0
        self._has_logged_limit = False
        self._has_much_unused = False
        self._began_s: float | None = None
        self._cache: CachedMemory | None = None
        self._undo = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo(trainer)
        device = trainer.strategy.root_device
        self._cache = open_cache(device)
        if self.unused_fraction is not None and device.type == "cpu" and trainer.is_global_zero:
            log.info(
                "EmptyCache: unused_fraction has no effect on the CPU, "
                "where torch reserves no memory"
            )
        for name in self.after:
            owner: LightningModule | Trainer = pl_module
            method = name
            if name == "checkpoint":
                owner = trainer
                method = SAVE
            if not callable(getattr(owner, method, None)):
                raise ConfigError(_describe_missing(name, pl_module))
            release = partial(self._release, trainer, f"after {name}")
            self._undo.callback(run_after(owner, method, release))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_s = time.perf_counter()
        self._spent_s = self._last_release_s = 0.0
        self._has_logged_limit = False

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self.unused_fraction is None or self._cache is None:
            return
        # checked here, where a step holds the most, and released at the end of the step
        if self._batches % _CHECKED_STEPS == 0:
            self._has_much_unused = self._cache.measure_unused() > self.unused_fraction

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        if self.every_n_steps is not None and self._batches % self.every_n_steps == 0:
            self._release(trainer, f"after {self.every_n_steps} training batches")
        elif self._has_much_unused:
            self._release(
                trainer, f"because more than {self.unused_fraction:.0%} of it was in no tensor"
            )
        self._has_much_unused = False
        if is_logging_step(trainer, batch_idx):
            self._log(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.around_validation:
            self._release(trainer, "before validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.around_validation:
            self._release(trainer, "after validation")

    @override
    def undo(self, trainer: Trainer) -> None:
        self._began_s = None
        self._undo.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"total": asdict(self._total), "batches": self._batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total = _Freed(**state_dict["total"])
        self._batches = state_dict["batches"]

    def summary(self) -> dict[str, float | int | str]:
        """Return the totals ``cache/releases``, ``cache/freed_bytes`` and ``cache/seconds``.

        The result is empty before the first release.
        """
        if not self._total.releases:
            return {}
        return {f"cache/{name}": value for name, value in asdict(self._total).items()}

    def can_afford(self) -> bool:
        """Return True if a release would stay within its fraction of the training time."""
        # outside of a training, and for its first release, there is nothing to compare with
        if self._began_s is None or not self._last_release_s:
            return True
        elapsed_s = max(time.perf_counter() - self._began_s, 1e-9)
        cost_fraction = (self._spent_s + self._last_release_s) / elapsed_s
        if cost_fraction <= self.max_cost_fraction:
            return True
        if not self._has_logged_limit:
            self._has_logged_limit = True
            log.info(
                "EmptyCache skips releases that would take more than max_cost_fraction=%g of "
                "the training time (now %.1f %%): release less often, or without collect_garbage",
                self.max_cost_fraction,
                100 * cost_fraction,
            )
        return False

    def _release(self, trainer: Trainer, when: str) -> None:
        if self._cache is None or not self.can_afford():
            return
        began_s = time.perf_counter()
        before_bytes = self._cache.held_bytes()
        if self.collect_garbage:
            gc.collect()
        self._cache.empty()
        # other threads may have allocated memory in the meantime
        freed_bytes = max(before_bytes - self._cache.held_bytes(), 0)
        seconds_s = time.perf_counter() - began_s
        self._total.add(freed_bytes, seconds_s)
        self._since_logged.add(freed_bytes, seconds_s)
        if self._began_s is not None:
            self._spent_s += seconds_s
            self._last_release_s = seconds_s
        text = f"{freed_bytes / 2**20:.0f} MiB were released {when}, in {1000 * seconds_s:.0f} ms"
        values = {"freed_bytes": float(freed_bytes), "seconds": seconds_s}
        announce(trainer, Event("release", text, values))

    def _log(self, trainer: Trainer) -> None:
        recent = self._since_logged
        self._since_logged = _Freed()
        if recent.releases:
            values = {
                "cache/freed_bytes": float(recent.freed_bytes),
                "cache/seconds": recent.seconds,
            }
            log_metrics(trainer, values)


@dataclass
class _Freed:
    """Sums over releases."""

    releases: int = 0
    freed_bytes: int = 0
    seconds: float = 0.0

    def add(self, freed_bytes: int, seconds_s: float) -> None:
        self.releases += 1
        self.freed_bytes += freed_bytes
        self.seconds += seconds_s


def _describe_missing(name: str, pl_module: LightningModule) -> str:
    methods = ["checkpoint"]
    for method in sorted(set(dir(type(pl_module))) - set(dir(LightningModule))):
        if not method.startswith("_") and callable(getattr(pl_module, method)):
            methods.append(method)
    return (
        f"after={name!r}: {type(pl_module).__name__} has no such method; give one of "
        f"{', '.join(map(repr, methods))}, or a hook of Lightning such as 'on_validation_epoch_end'"
    )
