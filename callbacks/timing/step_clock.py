"""Which part of a training step the time goes into: a stopwatch for the host, and one for a CUDA device."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from lit_data.callbacks.wrapping import wrap
from lit_data.lightning_internals import AFTER_FETCH, BEFORE_FETCH
from lit_data.types import CountsAssembly

Part = Literal[
    "wait", "assemble", "transfer", "augment", "forward", "backward", "optimizer", "other"
]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

Seconds = tuple[float, ...]
"""Seconds of each of `PARTS`."""

_NOTHING: Final = dict.fromkeys(PARTS, 0.0)
_PENDING: Final = 64
"""Steps whose device times wait to be read, before those that are over are read without being asked for."""


class StepClock:
    """Reads the host's clock. At any moment one part is on, so the parts of a step add up to all of
    its time.

    Attributes:
        known: Number and seconds of the parts of each step, for the owner to take out.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, Seconds]] = []
        self._part: Part = "other"
        self._running = False
        self._began_s = self._since_s = self._assembled_s = 0.0
        self._seconds = _NOTHING.copy()

    def enter(self, part: Part) -> Part:
        """From now on this part is on; returns the one before."""
        before, self._part = self._part, part
        if self._running:
            now_s = time.perf_counter()
            self._seconds[before] += now_s - self._since_s
            self._since_s = now_s
        return before

    def measure(self, part: Part, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any call
        """Call something as one part; afterwards the part before is on again."""
        before = self.enter(part)
        try:
            return call(*args, **kwargs)
        finally:
            self.enter(before)

    def count_assembly(self, seconds_s: float) -> None:
        """So much of this step's ``wait`` was the loader's own work: it moves to ``assemble``."""
        self._assembled_s += seconds_s

    def lap(self, step: int) -> float | None:
        """A step ends and the next begins, with ``other``.

        Args:
            step: Number of the step that ends.

        Returns:
            Its seconds; none if it was dropped.
        """
        self.enter("other")
        now_s, seconds_s = self._since_s, None
        if self._running:
            seconds_s = now_s - self._began_s
            self._finish(step)
        else:
            self._running, now_s = True, time.perf_counter()
        self._seconds, self._assembled_s = _NOTHING.copy(), 0.0
        self._began_s = self._since_s = now_s
        return seconds_s

    def drop(self) -> None:
        """Forget the step under way: what happens in it is none of its work."""
        self._running = False

    def read(self, *, wait: bool = False) -> None:
        """Find out about steps that are over; with `wait`, about all that are over for the host."""

    def _finish(self, step: int) -> None:
        self.known.append((step, _split_wait(self._seconds, self._assembled_s)))


class _Mark(NamedTuple):
    part: Part
    event: Any  # recorded when the part ended


class CudaStepClock(StepClock):
    """Reads the clock of a CUDA device: how long it does, or waits for, each part.

    Of the waiting for a batch only that counts during which the device had nothing to do. The
    device is never waited for: events are recorded between the parts, in some steps drawn at random
    (not every n-th one, which a number of workers could beat with), and read when they are over.

    Args:
        share: Of the steps to look at, above 0 to 1.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._random = random.Random(0)
        self._free: list[Any] = []
        self._marks: list[_Mark] | None = None
        self._pending: deque[tuple[int, float, list[_Mark]]] = deque()

    def enter(self, part: Part) -> Part:
        """From now on this part is on; returns the one before."""
        before = super().enter(part)
        if self._marks is not None:
            self._marks.append(_Mark(before, self._record_event()))
        return before

    def lap(self, step: int) -> float | None:
        """A step ends and the next begins."""
        seconds_s = super().lap(step)
        if self._random.random() < self._share:
            self._marks = [_Mark("other", self._record_event())]
        return seconds_s

    def drop(self) -> None:
        """Forget the step under way."""
        super().drop()
        self._forget_marks()

    def read(self, *, wait: bool = False) -> None:
        """Find out about steps that the device is through with; with `wait`, about all that are over for the host."""
        while self._pending and (wait or self._pending[0][-1][-1].event.query()):
            step, assembled, marks = self._pending.popleft()
            marks[-1].event.synchronize()
            seconds = _NOTHING.copy()
            for before, mark in pairwise(marks):
                seconds[mark.part] += before.event.elapsed_time(mark.event) / 1000
            self._free += [mark.event for mark in marks]
            self.known.append((step, _split_wait(seconds, assembled * seconds["wait"])))

    def _finish(self, step: int) -> None:
        marks, self._marks = self._marks, None
        if marks is not None:
            waited_s = self._seconds["wait"]
            self._pending.append((step, self._assembled_s / waited_s if waited_s else 0.0, marks))
        if len(self._pending) >= _PENDING:
            self.read()

    def _record_event(self) -> Any:  # noqa: ANN401 - torch's events have no types
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _forget_marks(self) -> None:
        self._free += [mark.event for mark in self._marks or ()]
        self._marks = None


def _split_wait(seconds: dict[Part, float], assembled_s: float) -> Seconds:
    if assembled_s:
        assembled_s = min(assembled_s, seconds["wait"])
        seconds["wait"] -= assembled_s
        seconds["assemble"] += assembled_s
    return tuple(seconds.values())


_BATCH_HOOKS: Final[dict[str, Part]] = {
    "on_before_batch_transfer": "assemble",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "augment",
}


def attach(
    clock: StepClock, trainer: L.Trainer, pl_module: L.LightningModule
) -> Callable[[], None]:
    """Let a clock follow the training steps of a Trainer, with automatic or manual optimisation.

    The caller's hooks ``on_before_backward``, ``on_after_backward`` and
    ``on_before_optimizer_step`` are for ``backward``, for what was on before it, and for
    ``optimizer``, which ends with the optimizer's step.

    Args:
        clock: What is told of each part.
        trainer: Which is about to train.
        pl_module: What it trains.

    Returns:
        A function that ends it.
    """
    strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
    fetch = _Fetch(
        clock,
        [
            leaf
            for leaf in tree_leaves(trainer.train_dataloader)
            if isinstance(leaf, CountsAssembly)
        ],
    )
    undo = [
        wrap(loop, BEFORE_FETCH, fetch.begin),
        wrap(loop, AFTER_FETCH, fetch.end),
        wrap(strategy, "training_step", partial(clock.measure, "forward")),
        wrap(strategy, "optimizer_step", partial(clock.measure, "other")),
        *(
            undo
            for name, part in _BATCH_HOOKS.items()
            for undo in _attach_hook(clock, trainer, pl_module, name, part)
        ),
    ]
    return lambda: call_all(undo)


def _attach_hook(
    clock: StepClock, trainer: L.Trainer, pl_module: L.LightningModule, name: str, part: Part
) -> Sequence[Callable[[], None]]:
    """Around a hook of whom Lightning asks: the DataModule if it has one of its own, else the module."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # its data connector sets it
    owner = datamodule if datamodule is not None and is_overridden(name, datamodule) else pl_module
    if part != "transfer" and not is_overridden(name, owner):
        return ()  # by default the others do nothing

    def around(call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - a function: copies of a module share it
        return clock.measure(part, call, *args)

    return (wrap(owner, name, around),)


class _Fetch:
    """A request for a batch, around which Lightning makes two calls."""

    def __init__(self, clock: StepClock, loaders: Sequence[CountsAssembly]) -> None:
        self._clock, self._loaders = clock, loaders
        self._before: Part = "other"
        self._assembled_s = 0.0

    def begin(self, call: Callable[[], None]) -> None:
        call()
        self._before = self._clock.enter("wait")
        if self._loaders:
            self._assembled_s = sum(loader.assemble_s for loader in self._loaders)

    def end(self, call: Callable[[], None]) -> None:
        if self._loaders:
            self._clock.count_assembly(
                sum(loader.assemble_s for loader in self._loaders) - self._assembled_s
            )
        self._clock.enter(self._before)
        call()


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions in their order."""
    for function in functions:
        function()
