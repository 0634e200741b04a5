"""The whole batch on the device, which hooks get and micro-batches are cut out of."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lit_data.callbacks.adaptive.active_batch import Cut
from lit_data.callbacks.adaptive.attributes import find_values, read_version
from lit_data.callbacks.adaptive.snapshot import BufferCopy
from lit_data.callbacks.loader_facts import WRONG_FORM
from lit_data.core.batch_form import batch_tensors
from lit_data.core.out_of_memory import make_memory_error

_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
_LIGHTNING = ("lightning", "pytorch_lightning")


def has_transfer_hooks(owner: LightningModule | LightningDataModule) -> bool:
    """Return True if a hook may give a batch another form on its way to the device."""
    return any(_is_users(getattr(owner, hook)) for hook in _TRANSFER_HOOKS)


def _is_users(hook: Callable[..., Any]) -> bool:
    """Return True for a hook that neither `lightning` nor `pytorch_lightning` defines."""
    return hook.__module__.partition(".")[0] not in _LIGHTNING


def copy_tensors(batch: Any) -> Any:  # noqa: ANN401 - any nesting
    """Return a copy of a batch whose tensors may be changed in place."""
    return tree_map_only(Tensor, torch.clone, batch)


def can_cut(whole: Any, cut: Cut, start: int, stop: int, expected: Any) -> bool:  # noqa: ANN401 - any form
    """Return True if samples cut out of a batch on the device equal those transferred separately.

    Floating-point values may differ because of random augmentation.

    Args:
        whole: The batch on the device.
        cut: Function that cuts samples out of the batch.
        start: Index of the first sample.
        stop: Index after the last sample.
        expected: The same samples, cut before the transfer.
    """
    try:
        piece = cut(whole, start, stop)
    except WRONG_FORM:
        return False
    if type(piece) is not type(expected):
        return False
    parts, expected_parts = batch_tensors(piece), batch_tensors(expected)
    if len(parts) != len(expected_parts):
        return False
    samples = stop - start
    return all(
        _is_alike(found_part, part, samples)
        for found_part, part in zip(parts, expected_parts, strict=True)
    )


def _is_alike(found: Any, expected: Any, samples: int) -> bool:  # noqa: ANN401 - tensors or arrays
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not isinstance(found, Tensor):
        return bool(np.array_equal(found, expected))
    # Row numbers of concatenated values, and all integers, must be those of the piece.
    may_differ = found.is_floating_point() and len(found) == samples
    return may_differ or torch.equal(found, expected)


class BatchCopy:
    """Keeps a batch at the beginning of a step, which may change it in place.

    Tensors are not copied if a version shows whether they were changed.

    Args:
        batch: Batch on its device.
        moved_versions: Versions of its tensors right after the transfer; None if that cannot be
            repeated.
        reload: Function that transfers the batch again.
    """

    def __init__(
        self,
        batch: Any,  # noqa: ANN401
        moved_versions: Sequence[int | None] | None,
        reload: Callable[[], Any],
    ) -> None:
        self._content, self._tensors = find_values(batch)
        self._versions = [read_version(tensor) for tensor in self._tensors]
        self._moved_versions = moved_versions
        self._reload = reload
        self._copy: BufferCopy | None = None
        if None in self._versions:
            self._copy = BufferCopy(self._tensors)
            self._copy.take()

    def restore(self) -> None:
        """Restore the batch.

        Raises:
            BatchMemoryError: The step changed a tensor whose content is lost.
        """
        for content in self._content:
            content.put()
        if self._copy is not None:
            self._copy.restore()
            return
        if [read_version(tensor) for tensor in self._tensors] == self._versions:
            return
        if self._moved_versions != self._versions:
            raise make_memory_error(
                "memory ran out in a step that had changed its batch in place, so the step "
                "cannot be repeated: change a copy (x = x - mean instead of x -= mean), or "
                "lower data.loader.batch_size"
            )
        _, tensors = find_values(self._reload())
        with torch.no_grad():
            for tensor, fresh in zip(self._tensors, tensors, strict=True):
                tensor.copy_(fresh)
        self._versions = [read_version(tensor) for tensor in self._tensors]
        self._moved_versions = self._versions
