"""Training and evaluation steps in micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import ActiveBatch
from lit_data.callbacks.adaptive.merge import fill_batch
from lit_data.callbacks.adaptive.ranks import Ranks
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.snapshot import Restore, save_gradients
from lit_data.core.lightning_internals import (
    closure_parts,
    is_accumulating,
    results_of,
    save_progress,
)
from lit_data.core.out_of_memory import make_memory_error


class TrainingSteps:
    """Wraps Lightning's closure and optimizer step.

    Because a failed forward or backward is repeated inside the closure, Lightning counts one step,
    and clipping, unscaling and the optimizer run once, on the gradient of the whole batch.

    Args:
        replay: Replay with the current batch.
        ranks: The ranks, if there are several.
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
        """Wrap ``_make_closure`` to repeat the closure in micro-batches if needed."""
        closure = call(kwargs, optimizer, batch_idx)
        active = self.replay.active
        if active is None:
            return closure
        return _RepeatedClosure(closure, partial(self._run, active, kwargs))

    def optimizer_step(self, call: Callable[..., None], batch_idx: int, closure: Closure) -> None:
        """Wrap ``_optimizer_step`` to end the run with advice if the optimizer itself fails.

        Raises:
            BatchMemoryError: Memory ran out after the closure, when weights may have changed.
        """
        active = self.replay.active
        if active is None:
            return call(batch_idx, closure)
        try:
            return call(batch_idx, closure)
        except Exception as error:
            text = self.replay.note(error, active)
        raise make_memory_error(
            f"memory ran out in the optimizer step of batch {active.index}, which cannot be "
            f"repeated ({text}): use an optimizer with fused=True or foreach=False, which needs no "
            "extra memory, or a smaller AdaptiveBatchSize(max_size=...)"
        )

    def _run(self, active: ActiveBatch, kwargs: dict[str, Any], closure: Closure) -> ClosureResult:
        attempt = partial(self._attempt, closure, active, kwargs)
        undo = self._save_step(active, closure)
        if self.ranks is None:
            return self.replay.run(active, attempt, undo)
        synchronise = not is_accumulating(self.replay.trainer)
        with self.ranks.together(active, self.replay.module, synchronise=synchronise):
            return self.replay.run(active, attempt, undo)

    def _save_step(self, active: ActiveBatch, closure: Closure) -> Restore:
        """Keep the state at the beginning of the step, and return a function that restores it."""
        restore_state = self.replay.save_state(active)
        restore_progress = save_progress(self.replay.trainer)
        # A batch that begins an accumulation window zeroes the gradients in each attempt; a later
        # one adds to what is there.
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
        if active.whole is not None and active.to_device is None and active.is_at_once:
            active.begin_attempt()
            return Closure.closure(closure)
        batch_name = next(iter(kwargs))
        batch = kwargs[batch_name]
        is_first = True

        def step(micro_batch: Any, count: int) -> ClosureResult:  # noqa: ANN401
            nonlocal is_first
            kwargs[batch_name] = micro_batch
            output = _run_micro_batch(closure, count / active.samples, is_first=is_first)
            is_first = False
            return output

        try:
            with torch.enable_grad():  # as in Lightning's closure
                outputs = active.run(step, results_of(self.replay.trainer))
        finally:
            kwargs[batch_name] = batch
        return self._join(outputs, active.counts())

    def _join(self, outputs: list[ClosureResult], counts: list[int]) -> ClosureResult:
        """Join the results of micro-batches, except those whose ``training_step`` returned None."""
        losses, extras, loss_counts = [], [], []
        for output, count in zip(outputs, counts, strict=True):
            if output.closure_loss is not None:
                losses.append(output.closure_loss)
                extras.append(output.extra)
                loss_counts.append(count)
        if not losses:
            return ClosureResult(None)
        extra = self.replay.join(extras, loss_counts)
        return ClosureResult(torch.stack(losses).sum(), extra=extra)


class _RepeatedClosure(Closure):
    """Lightning's closure, passed to a function that runs it as often as needed."""

    def __init__(self, closure: Closure, run: Callable[[Closure], ClosureResult]) -> None:
        super().__init__(*closure_parts(closure))
        # No bound method of this object, or batches would stay until garbage collection.
        self._run = run

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._run(self)


def _run_micro_batch(closure: Closure, fraction: float, *, is_first: bool) -> ClosureResult:
    """Run forward and backward as Lightning's closure does, with the loss weighted by its samples."""
    step, backward, zero_gradients = closure_parts(closure)
    output: ClosureResult = step()
    if is_first and zero_gradients is not None:
        zero_gradients()
    if output.closure_loss is not None:
        # Omitting a factor of 1 keeps the graph of Lightning's closure.
        loss = output.closure_loss if fraction == 1 else output.closure_loss * fraction
        if backward is not None:
            backward(loss)
        output.closure_loss = loss.detach()
    output.extra = recursive_detach(output.extra)
    return output


class EvaluationSteps:
    """Wraps the strategy's ``validation_step``, ``test_step`` and ``predict_step``.

    Args:
        replay: Replay with the current batch.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def step(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any batch and output
        """Run a step on a batch, in micro-batches if it does not fit."""
        active = self.replay.active
        if active is None:
            return call(batch, *args, **kwargs)
        returns_batch = True  # with its results in it, as modules of anomalib do

        def step(micro_batch: Any, count: int) -> Any:  # noqa: ANN401
            nonlocal returns_batch
            output = call(micro_batch, *args, **kwargs)
            returns_batch = returns_batch and output is micro_batch
            # Outputs of all micro-batches stay until the last one is done.
            return output if active.micro_batch_count == 1 else recursive_detach(output)

        def attempt() -> Any:  # noqa: ANN401
            return active.run(step, results_of(self.replay.trainer))

        undo = self.replay.save_state(active)
        outputs = self.replay.run(active, attempt, undo)
        counts = active.counts()
        if self.replay.finish() is not None:
            self.replay.grow(active)
        if len(outputs) == 1:
            return outputs[0]
        joined = self.replay.join(outputs, counts)
        return fill_batch(active.whole, joined) if returns_batch else joined


@runtime_checkable
class MicroBatchModule(Protocol):
    """A module with manual optimization whose step does not depend on how it cuts a batch.

    Attributes:
        micro_batch_size: Number of samples that go through its nets at once; None for the whole
            batch.
    """

    micro_batch_size: int | None

    def add_gradients(self, optimizer: Any, learn: Callable[[Any], Any], batch: Any) -> Any:  # noqa: ANN401
        """Accumulate the gradients of a batch in micro-batches, for an optimizer without gradients.

        Args:
            optimizer: Optimizer of the parameters that learn.
            learn: Function that is called with the batch.
            batch: Batch that ``training_step`` got.

        Returns:
            The result of `learn`.
        """
        ...


class ManualSteps:
    """Wraps ``add_gradients`` of a module, and halves its ``micro_batch_size``.

    The repeated part of a step is that between an optimizer's last step and its next. The
    optimizer's gradients are cleared, and everything else is restored as in automatic optimization.

    Args:
        replay: Replay with the current batch.
        module: Module whose ``micro_batch_size`` is set.
    """

    def __init__(self, replay: Replay, module: MicroBatchModule) -> None:
        self.replay = replay
        self.module = module
        self._configured_size = module.micro_batch_size

    def close(self) -> None:
        """Restore the module's original size."""
        self.module.micro_batch_size = self._configured_size

    def add_gradients(
        self,
        call: Callable[..., Any],
        optimizer: Any,  # noqa: ANN401 - Lightning's or torch's
        learn: Callable[[Any], Any],
        batch: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Wrap ``add_gradients`` to repeat it in smaller micro-batches if memory runs out."""
        active = self.replay.active
        if active is None:
            return call(optimizer, learn, batch)
        if self._configured_size is not None:
            active.search.limit(self._configured_size)
        restore_state = self.replay.save_state(active)

        def attempt() -> Any:  # noqa: ANN401
            active.begin_attempt()
            self.module.micro_batch_size = active.largest
            return call(optimizer, learn, batch)

        def undo() -> None:
            optimizer.zero_grad(set_to_none=True)
            restore_state()

        return self.replay.run(active, attempt, undo)
