"""Which optimizer steps overflowed and which losses were not finite: kept on the device, read many at a time."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

_LOSS: Final = -1  # counted like an optimizer of its own
_SHOWN: Final = 20


class WatchedScaler(torch.amp.GradScaler):
    """torch's scaler, which also keeps what each update found: one scalar on the device, read by nobody yet.

    Attributes:
        found: Of each optimizer step since the last `take`: ``id`` of the optimizer, and how many devices met a
            gradient that is not finite ([] float32).
    """

    def __init__(self, device_type: str, init_scale: float, growth_interval: int) -> None:
        super().__init__(device_type, init_scale=init_scale, growth_interval=growth_interval)
        self.found: list[tuple[int, Tensor]] = []

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        for key, state in self._per_optimizer_states.items():
            if infs := list(state["found_inf_per_device"].values()):
                total = infs[0].clone()  # torch adds to the first one in place
                for other in infs[1:]:
                    total += other.to(total.device, non_blocking=True)
                self.found.append((key, total))
        super().update(new_scale)

    def take(self) -> list[tuple[int, Tensor]]:
        """What was found since the last time."""
        found, self.found = self.found, []
        return found

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and growth tracker; the growth interval is this run's."""
        kept = {"growth_interval": self._growth_interval}
        super().load_state_dict({**state_dict, **kept})


class StepHistory:
    """Counts steps skipped for an overflow, and batches with a loss that is not finite, once they are read.

    Attributes:
        skipped: Steps skipped of each optimizer, by its index.
        rows: Of each optimizer, how many steps were skipped since the last that was not; under -1 the same of losses.
    """

    def __init__(self) -> None:
        self.skipped: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()
        self._bad: list[str] = []
        self._starts: dict[int, int] = {}
        self._losses: list[Tensor] = []
        self._unread: list[tuple[int, int, int, Tensor]] = []  # optimizer, first and last batch, not 0 if bad

    def begin_epoch(self) -> None:
        """No window reaches over the end of an epoch."""
        self._starts.clear()

    def begin_batch(self, batch_idx: int, optimizers: int) -> None:
        """A batch begins, and with it the window of each optimizer that stepped in the one before."""
        self._losses.clear()
        for index in range(optimizers):
            self._starts.setdefault(index, batch_idx)

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss of this batch; what is kept is one number."""
        mark = loss.detach() * 0  # NaN unless it is finite
        self._losses.append(mark if mark.ndim == 0 else mark.sum())

    def add_step(self, optimizer: int, batch_idx: int, found: Tensor) -> None:
        """Note a step that was skipped if `found` ([] float32) is not 0."""
        self._unread.append((optimizer, self._starts.pop(optimizer, batch_idx), batch_idx, found))

    def end_batch(self, batch_idx: int) -> None:
        """Note this batch's losses as one."""
        if self._losses:
            mark = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
            self._unread.append((_LOSS, batch_idx, batch_idx, mark))
            self._losses.clear()

    def read(self) -> None:
        """Wait for the device and count what was noted."""
        if not self._unread:
            return
        values = torch.stack([value for *_, value in self._unread]).tolist()
        for (key, first, last, _), value in zip(self._unread, values, strict=True):
            if value == 0:
                self.rows[key] = 0
                continue
            self.rows[key] += 1
            self._bad.append(f"{last}" if first == last else f"{first}-{last}")
            if key != _LOSS:
                self.skipped[key] += 1
        self._unread.clear()

    def describe_bad(self) -> str:
        """Which batches were bad since the last time; empty if none was."""
        shown, more = ", ".join(self._bad[:_SHOWN]), len(self._bad) - _SHOWN
        self._bad.clear()
        return f"{shown} and {more} more" if more > 0 else shown

    def state_dict(self) -> dict[str, Any]:
        """The counts, of plain types."""
        self.read()
        return {name: {str(key): n for key, n in counts.items()} for name, counts in self._counts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        for name, counts in self._counts().items():
            counts.clear()
            counts.update({int(key): n for key, n in state[name].items()})

    def _counts(self) -> dict[str, Counter[int]]:
        return {"skipped_steps": self.skipped, "in_a_row": self.rows}
