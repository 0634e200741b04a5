"""Transfer of a batch to the device as a whole for hooks, even if the step uses micro-batches."""

import logging
from functools import partial
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.apply_func import move_data_to_device

from lit_data.callbacks.adaptive.active_batch import ActiveBatch, Cut
from lit_data.callbacks.adaptive.attributes import find_values, read_version
from lit_data.callbacks.adaptive.merge import Merger
from lit_data.callbacks.adaptive.snapshot import Restore
from lit_data.callbacks.adaptive.whole_batch import (
    BatchCopy,
    can_cut,
    copy_tensors,
    has_transfer_hooks,
)
from lit_data.callbacks.device_memory import MemoryGauge
from lit_data.callbacks.loader_facts import read_loader
from lit_data.core.batch_form import batch_tensors, slice_batch
from lit_data.core.out_of_memory import is_out_of_memory
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_MOST_FRACTION = 1 / 8
"""Largest fraction of device memory for a batch beside its micro-batches; larger ones stay on the host."""
_HOST = torch.device("cpu")


class Delivery:
    """Transfers batches.

    A batch is moved as a whole if it fits, else in micro-batches that are joined. The micro-batches
    of the step are then cut out of it, so that they include what hooks changed. If a transfer hook
    gives the batch a form that cannot be cut, each micro-batch is transferred again.

    Args:
        trainer: Trainer that runs the batches.
        module: Module with the hooks.
        gauge: Gauge of the device's memory.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, gauge: MemoryGauge) -> None:
        self._trainer, self._module, self._gauge = trainer, module, gauge
        self._device = trainer.strategy.root_device
        self._in_pieces: set[str] = set()  # keys of batches that did not fit as a whole
        self._can_cut: dict[str, bool] = {}  # by key
        self._told: set[str] = set()

    def move(self, active: ActiveBatch, undo: Restore, *, on_host: bool) -> Any:  # noqa: ANN401 - a batch
        """Transfer a batch, and return it as hooks get it; None if its pieces cannot be joined.

        Args:
            active: The batch.
            undo: Function that restores what transfer hooks change.
            on_host: Join the pieces on the host.
        """
        if active.is_at_once:
            self._in_pieces.add(active.key)  # unless it fits
            batch = active.move(active.host)
            self._in_pieces.discard(active.key)
            self._note_versions(active, batch)
            return batch
        if active.key not in self._in_pieces:
            batch = self._try_whole(active, undo)
            if batch is not None:
                return batch
        return self._move_pieces(active, on_host=on_host)

    def choose_cut(self, active: ActiveBatch, undo: Restore) -> None:
        """Decide whether micro-batches can be cut out of the whole batch, once for each form.

        Args:
            active: The batch.
            undo: Function that restores what transfer hooks change.
        """
        if active.whole is None or active.is_at_once or active.cut_whole is not None:
            return
        if active.is_manual:  # its module cuts it
            return
        if active.key not in self._can_cut:
            self._can_cut[active.key] = self._try_cut(active)
            undo()
            if not self._can_cut[active.key]:
                self._tell(
                    "batches of this type cannot be split after their transfer: each "
                    "micro-batch is transferred again, without the changes that hooks made to "
                    "the whole batch"
                )
        has_graph = any(
            getattr(part, "requires_grad", False) for part in batch_tensors(active.whole)
        )
        if self._can_cut[active.key] and not has_graph:
            active.cut_whole = self._make_cut(active)

    def keep(self, active: ActiveBatch) -> BatchCopy:
        """Return a copy of a batch as its step gets it."""
        return BatchCopy(active.whole, active.moved_versions, partial(self._reload, active))

    def _try_whole(self, active: ActiveBatch, undo: Restore) -> Any:  # noqa: ANN401
        """Transfer a batch that will be cut as a whole; None if there is too little memory for it."""
        try:
            batch = active.move(active.host)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            self._note_versions(active, batch)
            return self._lay_down(active, batch)
        undo()
        self._in_pieces.add(active.key)
        return None

    def _lay_down(self, active: ActiveBatch, whole: Any) -> Any:  # noqa: ANN401
        """Move a large batch back to the host to leave memory for the step."""
        if self._device.type != "cuda":
            return whole
        size_bytes = sum(part.nbytes for part in batch_tensors(whole))
        if size_bytes <= _MOST_FRACTION * self._gauge.read().limit_bytes:
            return whole
        return self._leave_on_host(active, move_data_to_device(whole, _HOST))

    def _leave_on_host(self, active: ActiveBatch, whole: Any) -> Any:  # noqa: ANN401
        self._tell(
            "batches of %s leave too little memory for their steps on %s: they are "
            "split on the host, where hooks get them; set a smaller data.loader.batch_size to "
            "have hooks run on the device",
            counted(active.samples, "sample"),
            self._device,
        )
        active.to_device = partial(move_data_to_device, device=self._device)
        active.moved_versions = None
        return whole

    def _move_pieces(self, active: ActiveBatch, *, on_host: bool) -> Any:  # noqa: ANN401
        """Transfer a batch in micro-batches and join them."""
        pieces = []
        for start, stop in active.ranges():
            piece = active.move(active.cut(active.host, start, stop))
            pieces.append(move_data_to_device(piece, _HOST) if on_host else piece)
        merger = Merger(active.counts())
        batch = merger.merge(pieces)
        if merger.lost or merger.guessed:
            self._tell(
                "batches of this type cannot be joined after their transfer in micro-batches "
                "(%s): hooks get them as they were before the transfer",
                ", ".join(merger.lost + merger.guessed),
            )
            return None
        cut = self._make_cut(active)
        start, stop = active.ranges()[-1]
        if can_cut(batch, cut, start, stop, pieces[-1]):
            active.cut_whole = cut
        if on_host and self._device.type != "cpu":
            return self._bring(active, batch)
        return batch

    def _bring(self, active: ActiveBatch, whole: Any) -> Any:  # noqa: ANN401
        """Move a batch that was joined on the host to the device if there is enough memory."""
        try:
            return self._lay_down(active, move_data_to_device(whole, self._device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return self._leave_on_host(active, whole)

    def _try_cut(self, active: ActiveBatch) -> bool:
        """Compare the last micro-batch cut before the transfer with the one cut after it."""
        if not any(map(has_transfer_hooks, self._list_owners())):
            return True
        start, stop = active.ranges()[-1]
        expected = active.move(copy_tensors(active.cut(active.host, start, stop)))
        batch = active.whole
        if active.to_device is not None:
            expected = move_data_to_device(expected, _HOST)
        return can_cut(batch, self._make_cut(active), start, stop, expected)

    def _list_owners(self) -> list[LightningModule | LightningDataModule]:
        datamodule: LightningDataModule | None = getattr(self._trainer, "datamodule", None)
        return [self._module] if datamodule is None else [self._module, datamodule]

    def _make_cut(self, active: ActiveBatch) -> Cut:
        """Return the function that cuts a batch in the form of its datamodule."""
        if not isinstance(active.cut, partial):  # a method of the module or its datamodule
            return active.cut
        datamodule = getattr(self._trainer, "datamodule", None)
        stacked = read_loader(self._trainer).stacked and getattr(datamodule, "stacks_samples", True)
        return partial(slice_batch, samples=active.samples, stacked=stacked)

    def _note_versions(self, active: ActiveBatch, whole: Any) -> None:  # noqa: ANN401
        # On the CPU this may be the host's own batch, which cannot be loaded again.
        if self._device.type != "cpu":
            _, tensors = find_values(whole)
            active.moved_versions = [read_version(tensor) for tensor in tensors]

    def _reload(self, active: ActiveBatch) -> Any:  # noqa: ANN401
        """Transfer a batch again, with the random numbers of its first transfer."""
        assert active.restore_random is not None
        active.restore_random()
        return active.move(active.host)

    def _tell(self, text: str, *values: object) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning(text, *values)
