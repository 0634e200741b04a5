"""Manual optimisation: a step that has not stepped an optimizer can be repeated, any other cannot."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
from torch.optim import Optimizer

from lit_data.batch_form import cut_evenly
from lit_data.callbacks.adaptive.active_batch import Hand, LoggedPieces, merge_outputs
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
    forget_scaling,
    manual_loop,
    read_output,
    replace_output,
    results_of,
    scalers_of,
)

log = logging.getLogger(__name__)


AfterStep = Literal["raise", "skip"]


class ManualSteps:
    """Stands around a ``training_step`` that steps optimizers itself.

    Each piece of a batch is a ``training_step`` of its own, with the optimizer steps that this
    means: nobody but the module knows how its losses belong together. So the effective batch is
    smaller for as long as pieces are needed.

    Args:
        replay: Has the batch in hand.
        after_step: What to do when memory runs out after an optimizer has stepped.

    Attributes:
        skipped: Pieces that were given up.
    """

    def __init__(self, replay: Replay, after_step: AfterStep) -> None:
        self.replay, self.after_step, self.skipped = replay, after_step, 0
        self._stepped: set[int] = set()  # optimizers, in the last training_step
        self._begun: set[int] = set()  # optimizers whose step is under way
        self._ever: set[int] = set()
        self._warned = False
        self._snapshot: StepSnapshot | None = None
        self._parameters, self._parts = (
            list(replay.module.parameters()),
            list(replay.module.modules()),
        )
        self._optimizers = [OptimizerSnapshot(optimizer) for optimizer in replay.trainer.optimizers]
        self._handles = [
            handle
            for optimizer in replay.trainer.optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._note_begin),
                optimizer.register_step_post_hook(self._note_step),
            )
        ]

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()

    def advance(self, call: Callable[..., None], kwargs: dict[str, Any]) -> None:
        """Around the manual loop's ``advance``."""
        hand = self.replay.hand
        if hand is None:
            return call(kwargs)
        loop, name = manual_loop(self.replay.trainer), next(iter(kwargs))
        batch, logged = kwargs[name], LoggedPieces(results_of(self.replay.trainer))
        outputs: list[Any] = []
        counts: list[int] = []
        start = 0
        while start < hand.samples:
            stop = start + cut_evenly(hand.samples - start, hand.search.size)[0][1]
            done = self._try_piece(call, kwargs, logged, (start, stop))
            if done:
                outputs.append(read_output(loop))
                counts.append(stop - start)
            if done or self._stepped:
                start = stop
        logged.merge()
        kwargs[name] = batch
        hand.largest, hand.pieces = max(counts, default=0), len(counts)
        self._warn_of_steps(hand)
        if len(outputs) > 1:
            replace_output(loop, merge_outputs(outputs, counts))
        return None

    def _warn_of_steps(self, hand: Hand) -> None:
        if hand.pieces > 1 and not self._warned:
            self._warned = True
            log.warning(
                "batch %d went through in %d pieces, each a training_step of its own: with manual optimisation the "
                "optimizers step %d times for this batch, on gradients of fewer samples, and learning rate and "
                "schedules count these steps; a batch size that fits avoids it",
                hand.index,
                hand.pieces,
                hand.pieces,
            )

    def _try_piece(
        self,
        call: Callable[..., None],
        kwargs: dict[str, Any],
        logged: LoggedPieces,
        piece: tuple[int, int],
    ) -> bool:
        """Whether a piece went through; if not, its step is undone, or given up."""
        hand, name, samples = self.replay.hand, next(iter(kwargs)), piece[1] - piece[0]
        assert hand is not None
        undo = self._prepare(hand, first=not piece[0])
        self._stepped.clear()
        self._begun.clear()
        try:
            kwargs[name] = hand.part(*piece)
            logged.begin(kwargs[name], samples)
            call(kwargs)
            logged.end()
            return True
        except Exception as error:
            text = self.replay.note(error, hand)
        finally:
            kwargs[name] = None
        logged.close()
        if undo():
            self.replay.shrink(hand, text, samples)
        else:
            self._give_up(hand, text, samples)
        return False

    def _give_up(self, hand: Hand, text: str, samples: int) -> None:
        self._stepped.add(0)  # a step that broke off counts as one
        if self.after_step == "raise":
            raise BatchMemoryError(
                f"memory ran out in batch {hand.index} after an optimizer had stepped, so the step cannot be repeated "
                f"({text}): lower the batch size, or set AdaptiveBatchSize(after_step='skip') to go on without it"
            )
        self.skipped += 1
        log.warning(
            "batch %d: %d samples are skipped, memory ran out after an optimizer step",
            hand.index,
            samples,
        )
        if samples > hand.search.min_size:
            self.replay.shrink(hand, text, samples)

    def _prepare(self, hand: Hand, *, first: bool) -> Callable[[], bool]:
        """Take the state; the result puts it back, and says whether that was possible."""
        trainer, module = self.replay.trainer, self.replay.module
        snapshot = self._snapshot = renew(self._snapshot, module, results_of(trainer))
        # An optimizer that has stepped will be zeroed before its next backward; another may be
        # adding up gradients.
        gradients = {
            id(o): GradientSnapshot(_parameters(o), keep=id(o) not in self._stepped)
            for o in trainer.optimizers
        }
        for saved in self._optimizers:
            saved.take(first=id(saved.optimizer) not in self._ever)
        restores = [_save_progress(trainer), _save_scalers(trainer)]
        restores.append(
            (first and hand.restore_random) or save_random_state(trainer.strategy.root_device)
        )
        restore_flags = self._save_flags(module)

        def undo() -> bool:
            self._end_step()
            restore_flags()
            for key in gradients.keys() - self._stepped:
                gradients[key].restore()
            begun = [saved for saved in self._optimizers if id(saved.optimizer) in self._begun]
            if self._stepped or not all(saved.restore() for saved in begun):
                return False
            snapshot.restore()
            for restore in restores:
                restore()
            return True

        return undo

    def _end_step(self) -> None:
        """Tell Lightning and the scaler that no optimizer is stepping any more."""
        trainer: Any = self.replay.trainer  # its profiler is not typed
        progress = manual_loop(trainer).optim_step_progress
        if progress.total.ready > progress.total.completed:
            trainer.profiler.stop("optimizer_step")
            progress.total.ready, progress.current.ready = (
                progress.total.completed,
                progress.current.completed,
            )
        for optimizer in trainer.optimizers:
            forget_scaling(trainer.precision_plugin, optimizer)

    def _save_flags(self, module: L.LightningModule) -> Restore:
        """Keep what is trained and how, which an error leaves changed between ``toggle_optimizer`` and its end."""
        toggled = module._param_requires_grad_state
        trained = [parameter.requires_grad for parameter in self._parameters]
        training = [part.training for part in self._parts]

        def restore() -> None:
            module._param_requires_grad_state = toggled
            for parameter, flag in zip(self._parameters, trained, strict=True):
                parameter.requires_grad = flag
            for part, flag in zip(self._parts, training, strict=True):
                part.training = flag

        return restore

    def _note_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._begun.add(id(optimizer))

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._stepped.add(id(optimizer))
        self._ever.add(id(optimizer))


def _save_progress(trainer: L.Trainer) -> Restore:
    """Keep Lightning's count of optimizer steps, which holds those that a gradient scaler skipped."""
    progress = manual_loop(trainer).optim_step_progress
    before = [(count, count.ready, count.completed) for count in (progress.total, progress.current)]

    def restore() -> None:
        for count, ready, completed in before:
            count.ready, count.completed = ready, completed

    return restore


def _save_scalers(trainer: L.Trainer) -> Restore:
    """Keep the loss scales, which change with a step that is skipped."""
    before = [
        (scaler, name, value if value is None else value.clone())
        for scaler in scalers_of(trainer.precision_plugin)
        for name in ("_scale", "_growth_tracker")
        for value in (getattr(scaler, name),)
    ]

    def restore() -> None:
        for scaler, name, value in before:
            setattr(scaler, name, value)

    return restore


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
