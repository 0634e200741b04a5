"""Indices of the batches handed out, in the form in which Lightning's ``predict`` looks for them."""

import sys
from collections.abc import Sequence
from typing import Any, overload

from lit_data.loading.assembly import EpochProgress
from lit_data.loading.order import EpochOrder

_MODULES = ("lightning.pytorch.overrides.distributed", "pytorch_lightning.overrides.distributed")
_WRAPPER = "_IndexBatchSamplerWrapper"


class SeenIndices(Sequence[list[int]]):
    """Sample indices of the batches of a pass, computed when somebody asks.

    Args:
        progress: Of the pass; none before the first one.
        order: Its order.
    """

    def __init__(self, progress: EpochProgress | None, order: EpochOrder) -> None:
        self._progress, self._order = progress, order

    def __len__(self) -> int:
        return self._progress.batches if self._progress else 0

    @overload
    def __getitem__(self, batch: int) -> list[int]: ...

    @overload
    def __getitem__(self, batch: slice) -> list[list[int]]: ...

    def __getitem__(self, batch: int | slice) -> list[int] | list[list[int]]:
        numbers = range(len(self))[batch]
        return self._find(numbers) if isinstance(numbers, int) else list(map(self._find, numbers))

    def _find(self, batch: int) -> list[int]:
        located = self._progress.locate(batch) if self._progress else None
        if located is None:
            raise IndexError(f"batch {batch} was handed out too long ago")
        epoch, position, taken = located
        indices: list[int] = self._order.indices(position, taken, epoch).tolist()
        return indices


def wrap_for_lightning(seen: SeenIndices) -> Any:  # noqa: ANN401 - a class of Lightning
    """Return an object of the class by which Lightning knows a record of indices.

    Lightning is not imported for it: None where nobody has.
    """
    modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
    kinds = [getattr(module, _WRAPPER) for module in modules if hasattr(module, _WRAPPER)]
    if not kinds:
        return None
    kind: Any = type(SeenIndices.__name__, tuple(kinds), {})
    record = kind.__new__(kind)
    record.seen_batch_indices = seen
    return record
