"""Stopwatches of the parts of a training step: one for the host, and one for a CUDA device."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from lit_data.callbacks.wrapping import SAVE, run_after, wrap
from lit_data.core.lightning_internals import AFTER_FETCH, BEFORE_FETCH
from lit_data.core.types import CountsAssembly

Part = Literal[
    "wait", "assemble", "transfer", "augment", "forward", "backward", "optimizer", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)

Seconds = tuple[float, ...]
"""Seconds of each of `PARTS`."""

_NO_SECONDS = dict.fromkeys(PARTS, 0.0)
_MOST_PENDING = 64
"""Number of steps with unread device times above which finished ones are read."""

_BATCH_HOOKS: dict[str, Part] = {
    "on_before_batch_transfer": "assemble",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "augment",
}


class StepClock:
    """Reads the host's clock.

    One part is active at any moment, so the parts of a step add up to its whole time.

    Attributes:
        known: Number and seconds of the parts of each step, for the owner to remove.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, Seconds]] = []
        self._part: Part = "other"
        self._is_running = False
        self._step_began_s = 0.0
        self._part_began_s = 0.0
        self._assembled_s = 0.0
        self._seconds = _NO_SECONDS.copy()

    def enter(self, part: Part) -> Part:
        """Switch to a part, and return the one before."""
        before = self._part
        self._part = part
        if self._is_running:
            now_s = time.perf_counter()
            self._seconds[before] += now_s - self._part_began_s
            self._part_began_s = now_s
        return before

    def measure(self, part: Part, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any call
        """Call a function as one part, and then switch back to the part before."""
        before = self.enter(part)
        try:
            return call(*args, **kwargs)
        finally:
            self.enter(before)

    def count_assembly(self, seconds_s: float) -> None:
        """Move seconds of the loader's own work from this step's ``wait`` to ``assemble``."""
        self._assembled_s += seconds_s

    def lap(self, step: int) -> float | None:
        """End a step, and begin the next one with ``other``.

        Args:
            step: Number of the step that ends.

        Returns:
            Seconds of the step; None if it was dropped.
        """
        self.enter("other")
        seconds_s = None
        if self._is_running:
            now_s = self._part_began_s  # read just now, so that no time is lost between steps
            seconds_s = now_s - self._step_began_s
            self._finish(step)
        else:
            self._is_running = True  # the first step, or the first after a dropped one
            now_s = time.perf_counter()
        self._seconds = _NO_SECONDS.copy()
        self._assembled_s = 0.0
        self._step_began_s = self._part_began_s = now_s
        return seconds_s

    def drop(self) -> None:
        """Drop the current step, because something other than its work happens in it."""
        self._is_running = False

    def read(self, *, wait: bool = False) -> None:
        """Add finished steps to `known`; with `wait`, all that the host has finished."""

    def _finish(self, step: int) -> None:
        self.known.append((step, _split_wait(self._seconds, self._assembled_s)))


class _Mark(NamedTuple):
    part: Part
    event: Any  # recorded when the part ended


class _MeasuredStep(NamedTuple):
    """A step that the device may not have finished.

    Attributes:
        number: Number of the step.
        assembled_fraction: Fraction of the host's waiting time that was the loader's own work.
        marks: Beginning of the step, then the ends of its parts.
    """

    number: int
    assembled_fraction: float
    marks: Sequence[_Mark]


class CudaStepClock(StepClock):
    """Reads the clock of a CUDA device: the time that it spends on, or waits for, each part.

    Waiting for a batch counts only while the device is idle. The host never waits for the device:
    events are recorded between the parts and read when they are done. This happens in random steps,
    because every n-th step could coincide with the period of the workers.

    Args:
        fraction: Fraction of the steps to measure, above 0 and up to 1.
    """

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self._fraction = fraction
        self._random = random.Random(0)
        self._free_events: list[Any] = []
        self._marks: list[_Mark] | None = None  # of the current step, if it is measured
        self._pending: deque[_MeasuredStep] = deque()

    def enter(self, part: Part) -> Part:
        """Switch to a part, and return the one before."""
        before = super().enter(part)
        if self._marks is not None:
            self._marks.append(_Mark(before, self._record_event()))
        return before

    def lap(self, step: int) -> float | None:
        """End a step and begin the next."""
        seconds_s = super().lap(step)
        if self._random.random() < self._fraction:
            self._marks = [_Mark("other", self._record_event())]
        return seconds_s

    def drop(self) -> None:
        """Drop the current step."""
        super().drop()
        for mark in self._marks or ():
            self._free_events.append(mark.event)
        self._marks = None

    def read(self, *, wait: bool = False) -> None:
        """Add the steps that the device has finished to `known`.

        With `wait`, add all that the host has finished.
        """
        while self._pending:
            step = self._pending[0]
            last = step.marks[-1].event
            if not wait and not last.query():
                return
            self._pending.popleft()
            last.synchronize()
            seconds = _NO_SECONDS.copy()
            for before, mark in pairwise(step.marks):
                seconds[mark.part] += before.event.elapsed_time(mark.event) / 1000
            self._free_events += [mark.event for mark in step.marks]
            assembled_s = step.assembled_fraction * seconds["wait"]
            self.known.append((step.number, _split_wait(seconds, assembled_s)))

    def _finish(self, step: int) -> None:
        if self._marks is not None:
            waited_s = self._seconds["wait"]
            fraction = self._assembled_s / waited_s if waited_s else 0.0
            self._pending.append(_MeasuredStep(step, fraction, self._marks))
        self._marks = None
        if len(self._pending) >= _MOST_PENDING:
            self.read()

    def _record_event(self) -> Any:  # noqa: ANN401 - torch's events have no types
        if self._free_events:  # making one costs more than recording it
            event = self._free_events.pop()
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _split_wait(seconds: dict[Part, float], assembled_s: float) -> Seconds:
    """Return the seconds of the parts, with the loader's own work moved out of ``wait``."""
    assembled_s = min(assembled_s, seconds["wait"])
    seconds["wait"] -= assembled_s
    seconds["assemble"] += assembled_s
    return tuple(seconds.values())


def attach(clock: StepClock, trainer: Trainer, pl_module: LightningModule) -> Callable[[], None]:
    """Attach a clock to the training steps of a Trainer, with automatic or manual optimization.

    The caller switches to ``backward`` in ``on_before_backward``, back to the part before it in
    ``on_after_backward``, and to ``optimizer``, which ends with the optimizer's step, in
    ``on_before_optimizer_step``.

    Args:
        clock: Clock that switches from part to part.
        trainer: Trainer that is about to train.
        pl_module: Module that it trains.

    Returns:
        A function that detaches the clock.
    """
    loop = trainer.fit_loop.epoch_loop
    loaders = [
        leaf for leaf in tree_leaves(trainer.train_dataloader) if isinstance(leaf, CountsAssembly)
    ]
    fetch = _Fetch(clock, loaders)
    strategy = trainer.strategy
    undo = ExitStack()
    undo.callback(wrap(loop, BEFORE_FETCH, fetch.begin))
    undo.callback(wrap(loop, AFTER_FETCH, fetch.end))
    # writing a checkpoint is not part of a step's work
    undo.callback(run_after(trainer, SAVE, clock.drop))
    undo.callback(wrap(strategy, "training_step", partial(clock.measure, "forward")))
    # "other" around it: forward and backward are within, and switch by themselves
    undo.callback(wrap(strategy, "optimizer_step", partial(clock.measure, "other")))
    for name, part in _BATCH_HOOKS.items():
        owner = _find_owner(trainer, pl_module, name)
        # the default of the other hooks does nothing
        if part == "transfer" or is_overridden(name, owner):
            undo.callback(wrap(owner, name, _measure_as(clock, part)))
    return undo.close


def _find_owner(
    trainer: Trainer, pl_module: LightningModule, name: str
) -> LightningModule | LightningDataModule:
    """Return the owner of the hook that Lightning calls: the DataModule if it has one, else the module."""
    datamodule: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]  # its data connector sets it
    if datamodule is not None and is_overridden(name, datamodule):
        return datamodule
    return pl_module


def _measure_as(clock: StepClock, part: Part) -> Callable[..., Any]:
    """Return a function that times a call; it is no method, so that copies of a module share it."""

    def around(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any hook
        return clock.measure(part, call, *args, **kwargs)

    return around


class _Fetch:
    """A request for a batch, around which Lightning makes two calls."""

    def __init__(self, clock: StepClock, loaders: Sequence[CountsAssembly]) -> None:
        self._clock = clock
        self._loaders = loaders
        self._part_before: Part = "other"
        self._assembled_before_s = 0.0

    def begin(self, call: Callable[[], None]) -> None:
        call()
        self._part_before = self._clock.enter("wait")
        self._assembled_before_s = self._sum_assembly()

    def end(self, call: Callable[[], None]) -> None:
        self._clock.count_assembly(self._sum_assembly() - self._assembled_before_s)
        self._clock.enter(self._part_before)
        call()

    def _sum_assembly(self) -> float:
        return sum(loader.assemble_s for loader in self._loaders)
