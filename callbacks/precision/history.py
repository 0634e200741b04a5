"""Optimizer steps that overflowed and losses that were not finite: kept on the device, read many at a time."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

_LOSS: Final = -1  # counted like an optimizer of its own
_LISTED_BATCHES: Final = 20


class WatchedScaler(torch.amp.GradScaler):
    """torch's scaler, which also keeps what each update met: one scalar on the device, read by nobody yet.

    Args:
        device_type: Where it scales.
        init_scale: First loss scale.
        growth_interval: Steps without an overflow before it doubles.
    """

    def __init__(self, device_type: str, init_scale: float, growth_interval: int) -> None:
        super().__init__(device_type, init_scale=init_scale, growth_interval=growth_interval)
        self._overflows: list[tuple[int, Tensor]] = []

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        for optimizer_id, state in self._per_optimizer_states.items():
            overflows = list(state["found_inf_per_device"].values())
            if overflows:
                total = overflows[0].clone()  # torch adds to the first one in place
                for overflow in overflows[1:]:
                    total += overflow.to(total.device, non_blocking=True)
                self._overflows.append((optimizer_id, total))
        super().update(new_scale)

    def take_overflows(self) -> list[tuple[int, Tensor]]:
        """Return what the optimizer steps since the last call met.

        Returns:
            For each step the ``id`` of its optimizer, and how many devices had a gradient that is
            not finite ([] float32).
        """
        overflows, self._overflows = self._overflows, []
        return overflows

    def forget_failed_step(self) -> None:
        """Begin anew after a run that an error ended within a step."""
        self._overflows.clear()
        self._per_optimizer_states.clear()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and growth tracker; the growth interval is this run's."""
        super().load_state_dict({**state_dict, "growth_interval": self._growth_interval})


class _Unread(NamedTuple):
    """A step or a loss that nobody has read yet.

    Attributes:
        key: Index of the optimizer, or `_LOSS`.
        first: First batch of its window.
        last: Last batch of its window.
        value: [] on the device; of a step 0 where nothing overflowed.
    """

    key: int
    first: int
    last: int
    value: Tensor


class StepHistory:
    """Counts steps skipped for an overflow, and batches with a loss that is not finite.

    They are counted once they are read.

    Attributes:
        skipped: Steps skipped of each optimizer, by its index.
        rows: Of each optimizer, how many steps were skipped since the last that was not; under -1
            the same of losses.
    """

    def __init__(self) -> None:
        self.skipped: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()
        self._bad_windows: list[str] = []
        self._window_starts: dict[int, int] = {}
        self._losses: list[Tensor] = []
        self._unread: list[_Unread] = []

    def forget_windows(self) -> None:
        """End all windows: none reaches over the end of an epoch, or of a run."""
        self._window_starts.clear()
        self._losses.clear()

    def add_steps(
        self,
        batch_idx: int,
        optimizers: Sequence[Optimizer],
        overflows: Sequence[tuple[int, Tensor]],
    ) -> None:
        """Note the steps of a batch.

        It is the first in the window of each optimizer that stepped in the one before.

        Args:
            batch_idx: The batch that ends.
            optimizers: All of them.
            overflows: As `WatchedScaler.take_overflows` returns them; a step was skipped if its
                number is not 0.
        """
        indices = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
        for index in indices.values():
            self._window_starts.setdefault(index, batch_idx)
        for optimizer_id, overflow in overflows:
            index = indices.get(optimizer_id, 0)
            # A second step within the batch has a window of this batch alone.
            first = self._window_starts.pop(index, batch_idx)
            self._unread.append(_Unread(index, first, batch_idx, overflow))

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss of the batch under way; what is kept is one number."""
        loss = loss.detach()
        # A copy of one number costs half as much as a product.
        self._losses.append(loss.clone() if loss.ndim == 0 else (loss * 0).sum())

    def add_losses(self, batch_idx: int) -> None:
        """Note the losses of a batch that ends as one, which is not finite unless all are."""
        if not self._losses:
            return
        loss = self._losses[0]
        if len(self._losses) > 1:
            loss = (torch.stack(self._losses) * 0).sum()  # 0, or NaN
        self._unread.append(_Unread(_LOSS, batch_idx, batch_idx, loss))
        self._losses.clear()

    def read(self) -> None:
        """Wait for the device and count what was noted."""
        if not self._unread:
            return
        values = torch.stack([unread.value for unread in self._unread]).tolist()
        for unread, value in zip(self._unread, values, strict=True):
            is_loss = unread.key == _LOSS
            is_good = math.isfinite(value) if is_loss else value == 0
            if is_good:
                self.rows[unread.key] = 0
                continue
            self.rows[unread.key] += 1
            if unread.first == unread.last:
                self._bad_windows.append(f"{unread.last}")
            else:
                self._bad_windows.append(f"{unread.first}-{unread.last}")
            if not is_loss:
                self.skipped[unread.key] += 1
        self._unread.clear()

    def describe_bad(self) -> str:
        """List the batches that were bad since the last time; empty if none was."""
        listed = ", ".join(self._bad_windows[:_LISTED_BATCHES])
        more = len(self._bad_windows) - _LISTED_BATCHES
        self._bad_windows.clear()
        return f"{listed} and {more} more" if more > 0 else listed

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, of plain types."""
        self.read()
        state: dict[str, Any] = {}
        for name, counts in self._counts().items():
            state[name] = {str(key): count for key, count in counts.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        for name, counts in self._counts().items():
            counts.clear()
            counts.update({int(key): count for key, count in state[name].items()})

    def _counts(self) -> dict[str, Counter[int]]:
        return {"skipped_steps": self.skipped, "in_a_row": self.rows}
