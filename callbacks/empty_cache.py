"""`EmptyCache`: gives memory that torch keeps for later back to the device, or the system, and says what that costs."""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import lightning as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.events import Event, announce, is_logging_step, log_metrics
from lit_data.callbacks.memory.record import CachedMemory, open_cache
from lit_data.callbacks.wrapping import wrap
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


_CHECKED_STEPS: Final = 10
"""Steps between two looks at the unused share, which take about 50 us each."""

"""Releases in a training before their cost is judged."""


class EmptyCache(L.Callback):
    """Empties torch's cache of device memory; on the CPU gives free heap back to the system
    (glibc).

    This makes room where sizes change, such as between training and validation, and costs time: the
    memory has to be asked for again. What it costs is measured, and releases that would take more
    than they may are left out; the first is not, which shows what one costs. That some are left out
    is said once.

    Logged with the Trainer's ``log_every_n_steps`` where there was a release since the last time:

    - ``cache/freed_bytes``: memory given back since the last time, in bytes: what was reserved on
      the device before, less what was after; on the CPU the resident set of this process
    - ``cache/seconds``: time it took, in seconds, garbage collection included

    Args:
        every_n_steps: After so many training batches; none: not for that reason.
        around_validation: Before and after each validation.
        after: Methods of the LightningModule after each call of which to release, such as one that
            samples images or computes metrics; ``"checkpoint"`` means after a checkpoint was
            written.
        unused_fraction: When a larger share of what is reserved, 0 to 1, is in no tensor right
            before a backward, where a step holds the most; looked at in every 10th training batch.
            It has no effect on the CPU, where torch reserves nothing. None: not for that reason.
        collect_garbage: Run Python's garbage collection first, which frees tensors in reference
            cycles.
        max_cost_fraction: Share of the training time so far, 0 to 1, that all releases together may
            take.

    Raises:
        ConfigError: A value is out of range, or (at the start) the module has no method of a name
            in `after`.
    """

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
        _check(every_n_steps, after, unused_fraction, max_cost_fraction)
        self.every_n_steps = every_n_steps
        self.around_validation = around_validation
        self.after = tuple(after)
        self.unused_fraction = unused_fraction
        self.collect_garbage = collect_garbage
        self.max_cost_fraction = max_cost_fraction
        self._total, self._recent = _Freed(), _Freed()
        self._batches = 0
        self._costs_s: dict[str, float] = {}  # in this training, by the argument to change
        self._last_s: dict[str, float] = {}  # of the last release, by its cause
        self._left_out = 0
        self._is_loose = False
        self._began_s: float | None = None
        self._cache: CachedMemory | None = None
        self._unwraps: list[Callable[[], None]] = []

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._take_off()
        device = trainer.strategy.root_device
        self._cache = open_cache(device)
        if self.unused_fraction is not None and device.type == "cpu" and trainer.is_global_zero:
            log.info(
                "EmptyCache: unused_fraction has no effect on the CPU, where torch reserves no memory"
            )
        for name in self.after:
            owner, method = (
                (trainer, "save_checkpoint") if name == "checkpoint" else (pl_module, name)
            )
            if not callable(getattr(owner, method, None)):
                raise ConfigError(_describe_missing(name, pl_module))
            self._unwraps.append(wrap(owner, method, self._make_around(trainer, name)))

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began_s, self._left_out = time.perf_counter(), 0
        self._costs_s, self._last_s = {}, {}

    @override
    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        if (
            self.unused_fraction is not None
            and self._batches % _CHECKED_STEPS == 0
            and self._cache is not None
        ):
            self._is_loose = self._cache.measure_unused() > self.unused_fraction

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        if self.every_n_steps is not None and self._batches % self.every_n_steps == 0:
            self._release(trainer, "every_n_steps", f"after {self.every_n_steps} training batches")
        elif self._is_loose:
            self._release(
                trainer,
                "unused_fraction",
                f"as more than {self.unused_fraction:.0%} of it was in no tensor",
            )
        self._is_loose = False
        if is_logging_step(trainer, batch_idx):
            self._log(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.around_validation:
            self._release(trainer, "around_validation", "before validation")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.around_validation:
            self._release(trainer, "around_validation", "after validation")

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._take_off()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._take_off()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"total": asdict(self._total), "batches": self._batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total, self._batches = _Freed(**state_dict["total"]), state_dict["batches"]

    def summary(self) -> dict[str, float | int | str]:
        """``cache/releases``, ``cache/freed_bytes`` and ``cache/seconds`` in all; empty before the first release."""
        return (
            {f"cache/{name}": value for name, value in asdict(self._total).items()}
            if self._total.releases
            else {}
        )

    def _make_around(self, trainer: L.Trainer, name: str) -> Callable[..., Any]:
        """A function, not a method, so that a copy of the module does not copy this callback."""

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
            result = call(*args, **kwargs)
            self._release(trainer, f"after={name!r}", f"after {name}")
            return result

        return around

    def _release(self, trainer: L.Trainer, cause: str, when: str) -> None:
        if self._cache is None or not self.can_afford(cause):
            return
        began_s, before = time.perf_counter(), self._cache.held_bytes()
        if self.collect_garbage:
            gc.collect()
        collected_s = time.perf_counter() - began_s
        self._cache.empty()
        freed_bytes = max(before - self._cache.held_bytes(), 0)
        seconds_s = time.perf_counter() - began_s
        self._total.add(freed_bytes, seconds_s)
        self._recent.add(freed_bytes, seconds_s)
        text = f"{freed_bytes / 2**20:.0f} MiB were given back {when}, in {1000 * seconds_s:.0f} ms"
        announce(
            trainer,
            Event("release", text, {"freed_bytes": float(freed_bytes), "seconds": seconds_s}),
        )
        if self._began_s is not None:
            self._last_s[cause] = seconds_s
            for name, cost_s in (
                (cause, seconds_s - collected_s),
                ("collect_garbage", collected_s),
            ):
                self._costs_s[name] = self._costs_s.get(name, 0.0) + cost_s

    def can_afford(self, cause: str) -> bool:
        """Whether a release would stay within the share of the training time; the first one shows what they cost."""
        if self._began_s is None or not self._last_s:
            return True
        cost_s = sum(self._costs_s.values()) + self._last_s.get(cause, max(self._last_s.values()))
        cost = cost_s / max(time.perf_counter() - self._began_s, 1e-9)
        if cost <= self.max_cost_fraction:
            return True
        self._left_out += 1
        if self._left_out == 1:
            log.info(
                "EmptyCache leaves out releases that would take more than max_cost_fraction=%g of the training time "
                "(now %.1f %%); for fewer, set %s",
                self.max_cost_fraction,
                100 * cost,
                self._advise(cost),
            )
        return False

    def _advise(self, cost: float) -> str:
        """What to set instead, for the argument that costs the most."""
        worst = max(self._costs_s, key=self._costs_s.__getitem__)
        if worst == "every_n_steps" and self.every_n_steps is not None:
            return f"every_n_steps={math.ceil(self.every_n_steps * cost / self.max_cost_fraction)}"
        if worst == "unused_fraction" and self.unused_fraction is not None:
            return f"unused_fraction={(1 + self.unused_fraction) / 2:.2f}, or none"
        if worst in ("collect_garbage", "around_validation"):
            return f"{worst}=False"
        return f"after without {worst.removeprefix('after=')}"

    def _log(self, trainer: L.Trainer) -> None:
        recent, self._recent = self._recent, _Freed()
        if recent.releases:
            values = {
                "cache/freed_bytes": float(recent.freed_bytes),
                "cache/seconds": recent.seconds,
            }
            log_metrics(trainer, values)

    def _take_off(self) -> None:
        unwraps, self._unwraps, self._began_s = self._unwraps, [], None
        for unwrap in unwraps:
            unwrap()


@dataclass
class _Freed:
    releases: int = 0
    freed_bytes: int = 0
    seconds: float = 0.0

    def add(self, freed_bytes: int, seconds_s: float) -> None:
        self.releases += 1
        self.freed_bytes += freed_bytes
        self.seconds += seconds_s


def _check(
    every_n_steps: int | None,
    after: Sequence[str],
    unused_fraction: float | None,
    max_cost_fraction: float,
) -> None:
    if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
        raise ConfigError(
            f"every_n_steps={every_n_steps!r}: give a number of training batches from 1 on, or none"
        )
    if isinstance(after, str) or not all(isinstance(name, str) and name for name in after):
        raise ConfigError(
            f"after={after!r}: give a list of names, 'checkpoint' or those of methods of the LightningModule"
        )
    for name, value in (
        ("unused_fraction", unused_fraction),
        ("max_cost_fraction", max_cost_fraction),
    ):
        if value is not None and not 0 < value < 1:
            raise ConfigError(f"{name}={value!r}: give a share between 0 and 1")


def _describe_missing(name: str, pl_module: L.LightningModule) -> str:
    own = sorted(
        method
        for method in set(dir(type(pl_module))) - set(dir(L.LightningModule))
        if not method.startswith("_") and callable(getattr(pl_module, method))
    )
    return (
        f"after={name!r}: {type(pl_module).__name__} has no such method; give one of "
        f"{', '.join(map(repr, ['checkpoint', *own]))}, or a hook of Lightning such as 'on_validation_epoch_end'"
    )
