"""Which optimizer steps overflowed and which losses were not finite: kept on the device, read many at a time."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

_LOSS: Final = -1  # counted like an optimizer of its own
_SHOWN: Final = 20


class WatchedScaler(torch.amp.GradScaler):
    """torch's scaler, which also keeps what each update found: one scalar on the device, read by
    nobody yet.

    Attributes:
        found: Of each optimizer step since the last `take`: ``id`` of the optimizer, and how many
            devices met a gradient that is not finite ([] float32).
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
    """Counts steps skipped for an overflow, and batches with a loss that is not finite, once they
    are read.

    Attributes:
        skipped: Steps skipped of each optimizer, by its index.
        rows: Of each optimizer, how many steps were skipped since the last that was not; under -1
            the same of losses.
    """

    def __init__(self) -> None:
        self.skipped: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()
        self._bad: list[str] = []
        self._starts: dict[int, int] = {}
        self._losses: list[Tensor] = []
        self._unread: list[
            tuple[int, int, int, Tensor]
        ] = []  # optimizer, first and last batch, found

    def forget_windows(self) -> None:
        """No window reaches over the end of an epoch, or of a run."""
        self._starts.clear()
        self._losses.clear()

    def add_steps(
        self, batch_idx: int, optimizers: int, found: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Note the steps of a batch, which is the first in the window of each optimizer that
        stepped in the one before.

        Args:
            batch_idx: The batch that ends.
            optimizers: How many there are.
            found: Index of the optimizer of each step, which was skipped if the number ([] float32)
                is not 0.
        """
        for index in range(optimizers):
            self._starts.setdefault(index, batch_idx)
        for optimizer, number in found:
            self._unread.append(
                (optimizer, self._starts.pop(optimizer, batch_idx), batch_idx, number)
            )

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss of the batch under way; what is kept is one number."""
        loss = loss.detach()
        self._losses.append(
            loss.clone() if loss.ndim == 0 else (loss * 0).sum()
        )  # a copy alone costs half as much

    def add_losses(self, batch_idx: int) -> None:
        """Note the losses of a batch that ends as one, which is not finite unless all are."""
        if self._losses:
            loss = (
                self._losses[0] if len(self._losses) == 1 else (torch.stack(self._losses) * 0).sum()
            )
            self._unread.append((_LOSS, batch_idx, batch_idx, loss))
            self._losses.clear()

    def read(self) -> None:
        """Wait for the device and count what was noted."""
        if not self._unread:
            return
        values = torch.stack([value for *_, value in self._unread]).tolist()
        for (key, first, last, _), value in zip(self._unread, values, strict=True):
            if math.isfinite(value) if key == _LOSS else value == 0:
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
        return {
            name: {str(key): n for key, n in counts.items()}
            for name, counts in self._counts().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        for name, counts in self._counts().items():
            counts.clear()
            counts.update({int(key): n for key, n in state[name].items()})

    def _counts(self) -> dict[str, Counter[int]]:
        return {"skipped_steps": self.skipped, "in_a_row": self.rows}
