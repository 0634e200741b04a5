"""Steps in micro-batches: those of training, inside the optimizer's closure, and those of evaluation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import (
    ActiveBatch,
    LoggedMicroBatches,
    merge_outputs,
)
from lit_data.callbacks.adaptive.ranks import Ranks
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.snapshot import Restore, save_gradients
from lit_data.errors import BatchMemoryError
from lit_data.lightning_internals import (
    closure_parts,
    is_accumulating,
    results_of,
    save_progress,
)


class TrainingSteps:
    """Stands around Lightning's closure and optimizer step.

    Because a failed forward or backward is repeated inside the closure, Lightning counts one step,
    and clipping, unscaling and the optimizer run once, on the gradient of the whole batch.

    Args:
        replay: Has the batch.
        ranks: The other processes, if there are any.
    """

    def __init__(self, replay: Replay, ranks: Ranks | None) -> None:
        self.replay = replay
        self.ranks = ranks
        self._parameters = list(replay.module.parameters())

    def make_closure(
        self,
        call: Callable[..., Closure],
        kwargs: dict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
    ) -> Closure:
        """Around ``_make_closure``: the same closure, repeated in micro-batches if need be."""
        closure = call(kwargs, optimizer, batch_idx)
        active = self.replay.active
        if active is None:
            return closure
        return _RepeatedClosure(closure, partial(self._run, active, kwargs))

    def optimizer_step(self, call: Callable[..., None], batch_idx: int, closure: Closure) -> None:
        """Around ``_optimizer_step``: an error of the optimizer itself ends the run with a remedy.

        Raises:
            BatchMemoryError: Memory ran out after the closure, where weights may have changed.
        """
        active = self.replay.active
        if active is None:
            return call(batch_idx, closure)
        try:
            return call(batch_idx, closure)
        except Exception as error:
            text = self.replay.note(error, active)
        raise BatchMemoryError(_describe_optimizer(active, text))

    def _run(self, active: ActiveBatch, kwargs: dict[str, Any], closure: Closure) -> ClosureResult:
        def attempt() -> ClosureResult:
            return self._attempt(closure, active, kwargs)

        undo = self._save_step(active, closure)
        if self.ranks is None:
            return self.replay.run(active, attempt, undo)
        synchronise = not is_accumulating(self.replay.trainer)
        with self.ranks.together(active, self.replay.module, synchronise=synchronise):
            return self.replay.run(active, attempt, undo)

    def _save_step(self, active: ActiveBatch, closure: Closure) -> Restore:
        """Keep the state at the beginning of the step; the result puts it back."""
        restore_state = self.replay.save_state(active.restore_random)
        restore_progress = save_progress(self.replay.trainer)
        # A batch that begins an accumulation window zeroes the gradients, in each attempt anew; a
        # later one adds to what is there.
        _, _, zero_gradients = closure_parts(closure)
        adds_gradients = zero_gradients is None
        restore_gradients = save_gradients(self._parameters) if adds_gradients else None

        def undo() -> None:
            if restore_gradients is not None:
                restore_gradients()
            restore_progress()
            restore_state()

        return undo

    def _attempt(
        self, closure: Closure, active: ActiveBatch, kwargs: dict[str, Any]
    ) -> ClosureResult:
        if active.on_device is not None and active.size == active.samples:
            active.largest, active.pieces = active.samples, 1
            return Closure.closure(closure)
        with torch.enable_grad():  # as in Lightning's closure
            return self._attempt_micro_batches(closure, active, kwargs)

    def _attempt_micro_batches(
        self, closure: Closure, active: ActiveBatch, kwargs: dict[str, Any]
    ) -> ClosureResult:
        batch_name = next(iter(kwargs))
        batch = kwargs[batch_name]
        logged = LoggedMicroBatches(results_of(self.replay.trainer))
        outputs: list[ClosureResult] = []
        counts: list[int] = []
        try:
            for micro_batch, count in active.micro_batches():
                kwargs[batch_name] = micro_batch
                logged.begin(micro_batch, count)
                fraction = count / active.samples
                outputs.append(_run_micro_batch(closure, fraction, is_first=not outputs))
                counts.append(count)
                logged.end()
            logged.merge()
        finally:
            kwargs[batch_name] = batch
            logged.close()
        return _merge(outputs, counts)


class _RepeatedClosure(Closure):
    """Lightning's closure, given to a function that runs it as often as need be."""

    def __init__(self, closure: Closure, run: Callable[[Closure], ClosureResult]) -> None:
        super().__init__(*closure_parts(closure))
        # No bound method of this object, or batches wait for the garbage collector.
        self._run = run

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._run(self)


def _run_micro_batch(closure: Closure, fraction: float, *, is_first: bool) -> ClosureResult:
    """Forward and backward, as in Lightning's closure, with the loss weighted by its samples."""
    step, backward, zero_gradients = closure_parts(closure)
    output: ClosureResult = step()
    if is_first and zero_gradients is not None:
        zero_gradients()
    if output.closure_loss is not None:
        # Without a factor of 1 the graph is that of Lightning's closure.
        loss = output.closure_loss if fraction == 1 else output.closure_loss * fraction
        if backward is not None:
            backward(loss)
        output.closure_loss = loss.detach()
    output.extra = recursive_detach(output.extra)
    return output


def _merge(outputs: list[ClosureResult], counts: list[int]) -> ClosureResult:
    """Join the results of micro-batches, but of those whose ``training_step`` returned nothing."""
    losses, extras, loss_counts = [], [], []
    for output, count in zip(outputs, counts, strict=True):
        if output.closure_loss is not None:
            losses.append(output.closure_loss)
            extras.append(output.extra)
            loss_counts.append(count)
    if not losses:
        return ClosureResult(None)
    return ClosureResult(torch.stack(losses).sum(), extra=merge_outputs(extras, loss_counts))


def _describe_optimizer(active: ActiveBatch, text: str) -> str:
    return (
        f"memory ran out in the optimizer step of batch {active.index}, which cannot be repeated "
        f"({text}): use an optimizer with fused=True or foreach=False, which needs no extra memory, "
        "or a smaller AdaptiveBatchSize(max_size=...)"
    )


class EvaluationSteps:
    """Stands around the strategy's ``validation_step``, ``test_step`` and ``predict_step``.

    Args:
        replay: Has the batch.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def step(self, call: Callable[..., Any], batch: Any, *args: Any) -> Any:  # noqa: ANN401 - any batch and output
        """Run a step on a batch, in micro-batches if it does not fit."""
        active = self.replay.active
        if active is None:
            return call(batch, *args)

        def attempt() -> Any:  # noqa: ANN401
            return self._attempt(call, active, args)

        output = self.replay.run(active, attempt, self.replay.save_state(active.restore_random))
        if self.replay.finish() is not None:
            self.replay.grow(active)
        return output

    def _attempt(self, call: Callable[..., Any], active: ActiveBatch, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        logged = LoggedMicroBatches(results_of(self.replay.trainer))
        outputs: list[Any] = []
        counts: list[int] = []
        try:
            for micro_batch, count in active.micro_batches():
                logged.begin(micro_batch, count)
                output = call(micro_batch, *args)
                outputs.append(recursive_detach(output) if active.pieces > 1 else output)
                counts.append(count)
                logged.end()
            logged.merge()
        finally:
            logged.close()
        return outputs[0] if len(outputs) == 1 else merge_outputs(outputs, counts)
