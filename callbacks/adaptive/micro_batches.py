"""Manual optimisation: a module that cuts its batches itself gets smaller micro-batches when memory runs out."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from lit_data.callbacks.adaptive.active_batch import ActiveBatch
from lit_data.callbacks.adaptive.replay import Replay


@runtime_checkable
class MicroBatchModule(Protocol):
    """A module with manual optimisation whose step stays the same however it cuts a batch.

    Attributes:
        micro_batch_size: Samples that go through its nets at once; none: the whole batch.
    """

    micro_batch_size: int | None

    def add_gradients(self, optimizer: Any, learn: Callable[[Any], Any], batch: Any) -> Any:  # noqa: ANN401
        """Add the gradients of a batch up in micro-batches, for an optimizer that has none before.

        Args:
            optimizer: Of the parameters that learn.
            learn: Called with the batch.
            batch: As ``training_step`` got it.

        Returns:
            What `learn` returns.
        """
        ...


class MicroBatches:
    """Stands around ``add_gradients`` of a module, and halves its ``micro_batch_size``.

    What is repeated is one half of a step, between an optimizer's last step and its next: its
    gradients are emptied, and all else is put back as in automatic optimisation.

    Args:
        replay: Has the batch.
        module: Whose sizes.
    """

    def __init__(self, replay: Replay, module: MicroBatchModule) -> None:
        self.replay = replay
        self.module = module
        self._configured_size = module.micro_batch_size

    def close(self) -> None:
        """Give the module back the size that it was made with."""
        self.module.micro_batch_size = self._configured_size

    def add_gradients(
        self,
        call: Callable[..., Any],
        optimizer: Any,  # noqa: ANN401 - Lightning's or torch's
        learn: Callable[[Any], Any],
        batch: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Around ``add_gradients``: again in smaller micro-batches if memory runs out."""
        active = self.replay.active
        if active is None:
            return call(optimizer, learn, batch)
        if self._configured_size is not None:
            active.search.limit(self._configured_size)
        restore_state = self.replay.save_state()

        def attempt() -> Any:  # noqa: ANN401
            self._choose_size(active)
            return call(optimizer, learn, batch)

        def undo() -> None:
            optimizer.zero_grad(set_to_none=True)
            restore_state()

        return self.replay.run(active, attempt, undo)

    def _choose_size(self, active: ActiveBatch) -> None:
        self.module.micro_batch_size = active.largest = active.size
        active.pieces = len(active.cuts())
