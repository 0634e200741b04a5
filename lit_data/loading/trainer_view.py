"""Interface of a loader for a Trainer: a sampler that receives the epoch, and the indices of each batch."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, overload
from weakref import WeakSet

from torch.utils.data import Sampler, SequentialSampler

from lit_data.core.errors import ConfigError
from lit_data.loading.assembly import EpochProgress
from lit_data.loading.order import EpochOrder

log = logging.getLogger(__name__)

_UNFINISHED: WeakSet[Any] = WeakSet()
_MODULES = ("lightning.pytorch.overrides.distributed", "pytorch_lightning.overrides.distributed")
_WRAPPER = "_IndexBatchSamplerWrapper"
EPOCHS = 2**32
"""Number of epochs that have random numbers of their own, see `lit_data.core.rng.random_words`."""
CYCLE = 2**20
"""Number to add to the epoch for each further pass in it, so that no order is used twice."""
PER_PASS = 2
"""Iterators that a Trainer creates for its first pass: one to check the loader, and one to read."""
_LEFT_OUT = ("count_trained", "_workers", "_assembly", "_progress")
OF_PROCESS: Mapping[str, Any] = {**dict.fromkeys(_LEFT_OUT), "_marks": []}
"""Attributes that are not copied with a loader, and the values that a copy has instead."""


class EpochSampler(Sampler[int]):
    """Sampler that receives the epoch from a Trainer; it yields no indices.

    Args:
        length: Samples of the dataset.
        set_epoch: Called by the Trainer at the start of an epoch.
    """

    def __init__(self, length: int, set_epoch: Callable[[int], None]) -> None:
        self.length = length
        self.set_epoch = set_epoch

    def __len__(self) -> int:
        return self.length


class AscendingSampler(SequentialSampler):
    """The same for an ascending order, which `overfit_batches` recognizes by its base class.

    Args:
        length: Samples of the dataset.
        set_epoch: Called by the Trainer at the start of an epoch.
    """

    def __init__(self, length: int, set_epoch: Callable[[int], None]) -> None:
        super().__init__(range(length))
        self.set_epoch = set_epoch


def make_sampler(
    order: EpochOrder, set_epoch: Callable[[int], None]
) -> EpochSampler | AscendingSampler:
    """Return the sampler of an order for a Trainer."""
    kind = EpochSampler if order.shuffle else AscendingSampler
    return kind(order.length, partial(_tell_epoch, set_epoch))


def note_unfinished(loader: object) -> None:
    """Register a loader whose batches are incomplete unless a Trainer has its datamodule."""
    _UNFINISHED.add(loader)


def _tell_epoch(set_epoch: Callable[[int], None], epoch: int) -> None:
    """Pass the epoch to a loader, after the state that the Trainer has loaded for it and kept.

    If a schedule reads `trainer.estimated_stepping_batches`, a Trainer creates the loaders before it
    reads the checkpoint. It then keeps the loaders' states for loaders that it creates later.
    """
    loop = _find_loop()
    if loop is not None:
        loop._load_combined_loader_states()
        if getattr(set_epoch, "__self__", None) in _UNFINISHED:
            _UNFINISHED.clear()
            log.warning(
                "this Trainer has the loader of a datamodule but not the datamodule, which "
                "scales, draws and augments batches on the device: give it datamodule=..., or "
                "call its transform(batch, stage) in each step"
            )
    set_epoch(epoch)


def _find_loop() -> Any:  # noqa: ANN401 - a class of Lightning
    """Return the Trainer's loop that passes the epoch; it is a caller, not an argument."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "on_advance_start":
            caller = frame.f_locals.get("self")
            return caller if hasattr(caller, "_load_combined_loader_states") else None
        frame = frame.f_back
    return None


def check_unread(progress: EpochProgress | None, batches: int) -> None:
    """Refuse a state that is loaded after batches of a pass were read.

    Args:
        progress: Progress of the pass; None if a state was loaded since.
        batches: Number of batches read.

    Raises:
        ConfigError: Batches were read from the beginning of the epoch, before the state was loaded.
    """
    if batches and progress is None:
        raise ConfigError(
            "the Trainer took a batch before it read the checkpoint, because the schedule needs "
            "trainer.estimated_stepping_batches and the loader is resizable: remove "
            "resizable=True, give the schedule a number, or use a BaseDataModule"
        )


class SeenIndices(Sequence[list[int]]):
    """Sample indices of the batches of a pass, computed when they are read.

    Args:
        progress: Progress of the pass; None before the first pass.
        order: Order of the pass.
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
            raise IndexError(f"batch {batch} was returned too long ago")
        epoch, position, taken = located
        indices: list[int] = self._order.indices(position, taken, epoch).tolist()
        return indices


def record_indices(progress: EpochProgress | None, order: EpochOrder) -> Any:  # noqa: ANN401 - a class of Lightning
    """Return the indices of a pass in an object of the class that Lightning recognizes.

    This does not import Lightning: it returns None if Lightning is not imported yet.

    Args:
        progress: Progress of the pass; None before the first pass.
        order: Order of the pass.
    """
    modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
    kinds = [getattr(module, _WRAPPER) for module in modules if hasattr(module, _WRAPPER)]
    if not kinds:
        return None
    kind: Any = type(SeenIndices.__name__, tuple(kinds), {})
    record = kind.__new__(kind)
    record.seen_batch_indices = SeenIndices(progress, order)
    return record
