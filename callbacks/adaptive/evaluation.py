"""Validation, test and prediction: the step in pieces, its results in order."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.memory import recursive_detach

from lit_data.callbacks.adaptive.hand import Hand
from lit_data.callbacks.adaptive.logged import LoggedPieces
from lit_data.callbacks.adaptive.pieces import merge_outputs
from lit_data.callbacks.adaptive.random_state import save_random_state
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.snapshot import StepSnapshot, renew
from lit_data.lightning_internals import results_of


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
        snapshot = self._snapshot = renew(self._snapshot, self.replay.module, results_of(self.replay.trainer))
        restore_random = hand.restore_random or save_random_state(self.replay.trainer.strategy.root_device)

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
