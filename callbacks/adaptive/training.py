"""Automatic optimisation: forward and backward in pieces, inside the closure that the optimizer calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import Hand, LoggedPieces, merge_outputs
from lit_data.callbacks.adaptive.ranks import Ranks
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.snapshot import (
    GradientSnapshot,
    OptimizerSnapshot,
    Restore,
    StepSnapshot,
    renew,
    save_random_state,
)
from lit_data.errors import BatchMemoryError
from lit_data.lightning_internals import (
    closure_parts,
    forget_scaling,
    is_accumulating,
    results_of,
    save_progress,
)


class TrainingSteps:
    """Stands around Lightning's closure and optimizer step.

    Because a failed forward or backward is repeated inside the closure, Lightning counts one step,
    and clipping, unscaling and the optimizer run once, on the gradient of the whole batch.

    Args:
        replay: Has the batch in hand.
        ranks: The other processes, if there are any.
    """

    def __init__(self, replay: Replay, ranks: Ranks | None) -> None:
        self.replay, self.ranks = replay, ranks
        self._snapshot: StepSnapshot | None = None
        self._undo: Restore = _nothing
        self._has_stepped = False
        self._parameters = list(replay.module.parameters())
        self._optimizer = OptimizerSnapshot(replay.trainer.optimizers[0])

    def make_closure(
        self,
        call: Callable[..., Closure],
        kwargs: dict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
    ) -> Closure:
        """Around ``_make_closure``: the same closure, which runs in pieces."""
        closure = call(kwargs, optimizer, batch_idx)
        hand = self.replay.hand
        return closure if hand is None else _Closure(closure, partial(self._run, hand, kwargs))

    def optimizer_step(self, call: Callable[..., None], batch_idx: int, closure: Closure) -> None:
        """Around ``_optimizer_step``: again from the start if memory runs out after the closure.

        Raises:
            BatchMemoryError: The optimizer was under way, or the gradients are those of several
                ranks already.
        """
        hand, trainer = self.replay.hand, self.replay.trainer
        if hand is None:
            return call(batch_idx, closure)
        restore_progress, hook = save_progress(trainer), self.replay.module._current_fx_name
        while True:
            self._optimizer.take(first=not self._has_stepped)
            try:
                call(batch_idx, closure)
                self._has_stepped = (
                    self._has_stepped or self._optimizer.has_written()
                )  # a gradient scaler may skip it
                self._undo = _nothing
                return None
            except Exception as error:
                text = self.replay.note(error, hand)
            if self.ranks is not None or not self._optimizer.restore():
                raise BatchMemoryError(_describe_optimizer(hand, text))
            forget_scaling(trainer.precision_plugin, trainer.optimizers[0])
            self._undo()
            restore_progress()
            self.replay.module._current_fx_name = hook
            self.replay.shrink(hand, text)

    def _run(self, hand: Hand, kwargs: dict[str, Any], closure: Closure) -> ClosureResult:
        self._undo = _nothing  # it may hold a copy of the gradients
        zero = _Zero(closure, self._parameters)
        undo = self._undo = self._prepare(hand, zero)
        if self.ranks is None:
            return self.replay.run(hand, lambda: self._attempt(closure, hand, kwargs, zero), undo)
        with self.ranks.together(
            hand, self.replay.module, synchronise=not is_accumulating(self.replay.trainer)
        ):
            return self.replay.run(hand, lambda: self._attempt(closure, hand, kwargs, zero), undo)

    def _attempt(
        self, closure: Closure, hand: Hand, kwargs: dict[str, Any], zero: "_Zero"
    ) -> ClosureResult:
        if hand.size >= hand.samples and hand.whole is not None:
            hand.largest, hand.pieces = hand.samples, 1
            return Closure.closure(closure)
        with torch.enable_grad():  # as in Lightning's closure
            return self._attempt_pieces(closure, hand, kwargs, zero)

    def _attempt_pieces(
        self, closure: Closure, hand: Hand, kwargs: dict[str, Any], zero: "_Zero"
    ) -> ClosureResult:
        step, backward, _ = closure_parts(closure)
        name = next(iter(kwargs))
        batch, logged = kwargs[name], LoggedPieces(results_of(self.replay.trainer))
        outputs: list[ClosureResult] = []
        counts: list[int] = []
        try:
            for part, count in hand.parts():
                kwargs[name] = part
                logged.begin(part, count)
                outputs.append(self._run_piece(step, backward, zero, count / hand.samples))
                counts.append(count)
                logged.end()
            logged.merge()
        finally:
            kwargs[name] = batch
            logged.close()
        return _merge(outputs, counts)

    def _run_piece(self, step: Any, backward: Any, zero: "_Zero", share: float) -> ClosureResult:  # noqa: ANN401
        output: ClosureResult = step()
        zero()
        if output.closure_loss is not None:
            loss = output.closure_loss * share if share != 1 else output.closure_loss
            if backward is not None:
                backward(loss)
            output.closure_loss = loss.detach()
        output.extra = recursive_detach(output.extra)
        return output

    def _prepare(self, hand: Hand, zero: "_Zero") -> Restore:
        """Take the state at the beginning of the step; the result puts it back."""
        replay, results = self.replay, results_of(self.replay.trainer)
        snapshot = self._snapshot = renew(self._snapshot, replay.module, results)
        restore_random = hand.restore_random or save_random_state(
            replay.trainer.strategy.root_device
        )
        restore_progress = save_progress(replay.trainer)

        def undo() -> None:
            snapshot.restore()
            zero.undo()
            restore_progress()
            restore_random()
            snapshot.take()  # without what the transfer of the whole batch did

        return undo


class _Closure(Closure):
    """Lightning's closure, which `run` replays: it must not hold itself, or batches wait for the garbage collector."""

    def __init__(self, closure: Closure, run: Callable[[Closure], ClosureResult]) -> None:
        super().__init__(*closure_parts(closure))
        self._run = run

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._run(self)


class _Zero:
    """Zeroes the gradients once in an attempt, before the first backward of an accumulation window.

    Args:
        closure: Whose function is used, and replaced.
        parameters: Whose gradients.
    """

    def __init__(self, closure: Closure, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        # The closure keeps this object, or the next `closure` call of the same optimizer step would
        # not zero again.
        function = closure._zero_grad_fn
        self._function: Callable[[], None] | None = (
            function._function if isinstance(function, _Zero) else function
        )
        self._begun = (
            GradientSnapshot(self._parameters, keep=True) if self._function is None else None
        )
        if self._function is not None:
            closure._zero_grad_fn = self

    def __call__(self) -> None:
        if self._begun is None and self._function is not None:
            self._function()
            self._begun = GradientSnapshot(self._parameters, keep=False)

    def undo(self) -> None:
        """The gradients as they were when the step began, or zero if it begins so; the next attempt zeroes again."""
        if self._begun is not None:
            self._begun.restore()
        if self._function is not None:
            self._begun = None


def _merge(outputs: list[ClosureResult], counts: list[int]) -> ClosureResult:
    kept = [
        (output, count)
        for output, count in zip(outputs, counts, strict=True)
        if output.closure_loss is not None
    ]
    if not kept:
        return ClosureResult(None)
    loss = torch.stack(
        [output.closure_loss for output, _ in kept if output.closure_loss is not None]
    ).sum()
    return ClosureResult(
        loss,
        extra=merge_outputs([output.extra for output, _ in kept], [count for _, count in kept]),
    )


def _describe_optimizer(hand: Hand, text: str) -> str:
    return (
        f"memory ran out in the optimizer step of batch {hand.index}, which cannot be repeated once it has begun "
        f"({text}): use an optimizer with fused=True or foreach=False, which needs no extra memory, or a smaller "
        "AdaptiveBatchSize(max_size=...)"
    )


def _nothing() -> None:
    pass


class EvaluationSteps:
    """Stands around the strategy's ``validation_step``, ``test_step`` and ``predict_step``.

    Args:
        replay: Has the batch in hand.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._snapshot: StepSnapshot | None = None

    def step(self, call: Callable[..., Any], batch: Any, *args: Any) -> Any:  # noqa: ANN401 - any batch and output
        """Run a step on a batch, in pieces if it does not fit."""
        hand = self.replay.hand
        if hand is None:
            return call(batch, *args)
        snapshot = self._snapshot = renew(
            self._snapshot, self.replay.module, results_of(self.replay.trainer)
        )
        restore_random = hand.restore_random or save_random_state(
            self.replay.trainer.strategy.root_device
        )

        def undo() -> None:
            snapshot.restore()
            restore_random()
            snapshot.take()  # without what the transfer of the whole batch did

        output = self.replay.run(hand, lambda: self._attempt(call, hand, args), undo)
        if self.replay.finish() is not None:
            self.replay.grow(hand)
        return output

    def _attempt(self, call: Callable[..., Any], hand: Hand, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        logged = LoggedPieces(results_of(self.replay.trainer))
        outputs: list[Any] = []
        counts: list[int] = []
        try:
            for part, count in hand.parts():
                logged.begin(part, count)
                output = call(part, *args)
                outputs.append(recursive_detach(output) if hand.pieces > 1 else output)
                counts.append(count)
                logged.end()
            logged.merge()
        finally:
            logged.close()
        return outputs[0] if len(outputs) == 1 else merge_outputs(outputs, counts)
