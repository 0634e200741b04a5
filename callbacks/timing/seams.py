"""Where a `StepClock` learns, from Lightning, which part of a training step is on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from lit_data.callbacks.timing.clock import Part, StepClock
from lit_data.callbacks.wrapping import wrap
from lit_data.lightning_internals import AFTER_FETCH, BEFORE_FETCH
from lit_data.types import CountsAssembly

_BATCH_HOOKS: Final[dict[str, Part]] = {
    "on_before_batch_transfer": "assemble",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "augment",
}


def attach(clock: StepClock, trainer: L.Trainer, pl_module: L.LightningModule) -> Callable[[], None]:
    """Let a clock follow the training steps of a Trainer, with automatic or manual optimisation.

    The caller's hooks ``on_before_backward``, ``on_after_backward`` and ``on_before_optimizer_step`` are for
    ``backward``, for what was on before it, and for ``optimizer``, which ends with the optimizer's step.

    Args:
        clock: What is told of each part.
        trainer: Which is about to train.
        pl_module: What it trains.

    Returns:
        A function that ends it.
    """
    strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
    fetch = _Fetch(clock, [leaf for leaf in tree_leaves(trainer.train_dataloader) if isinstance(leaf, CountsAssembly)])
    undo = [
        wrap(loop, BEFORE_FETCH, fetch.begin),
        wrap(loop, AFTER_FETCH, fetch.end),
        wrap(strategy, "training_step", partial(clock.measure, "forward")),
        wrap(strategy, "optimizer_step", partial(clock.measure, "other")),
        *(undo for name, part in _BATCH_HOOKS.items() for undo in _attach_hook(clock, trainer, pl_module, name, part)),
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
            self._clock.count_assembly(sum(loader.assemble_s for loader in self._loaders) - self._assembled_s)
        self._clock.enter(self._before)
        call()


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions in their order."""
    for function in functions:
        function()
