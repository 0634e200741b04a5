"""Where in a run the host waits: in a training step, in an evaluation, or elsewhere."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tests.simulated.log import LOG


class Phases:
    """Waits by phase.

    Attributes:
        waits: For ``train`` and ``eval``: how often the host waited, for what and where.
        steps: Training steps.
    """

    def __init__(self) -> None:
        self.waits = {"train": Counter(), "eval": Counter()}
        self.steps = 0
        self._inner = 0


@contextmanager
def counting() -> Iterator[Phases]:
    """Count the waits of the Trainers that run inside."""
    phases = Phases()
    undo = [
        _wrap(_TrainingEpochLoop, "advance", "train", phases),
        _wrap(_EvaluationLoop, "run", "eval", phases),
    ]
    try:
        yield phases
    finally:
        for owner, name, method in undo:
            setattr(owner, name, method)


def _wrap(owner: Any, name: str, phase: str, phases: Phases) -> tuple[Any, str, Any]:
    method = getattr(owner, name)

    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = len(LOG.waits)
        try:
            return method(self, *args, **kwargs)
        finally:
            phases.waits[phase].update(LOG.waits[first:])
            phases.steps += phase == "train"

    setattr(owner, name, around)
    return owner, name, method
