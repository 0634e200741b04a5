"""`SampleDigest`: proof that two runs trained on the same samples."""

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import Cut
from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.callbacks.loader_facts import WRONG_FORM, count_batch, find_method
from lit_data.core.batch_form import batch_tensors, slice_batch
from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX, Bytes

log = logging.getLogger(__name__)

_MODULUS = 2**256
_WORD_BITS = 32
_MOST_COMING = 3
"""Number of batches that may be in transfer before the host waits for them."""


class _ComingBatch(NamedTuple):
    """A batch in transfer to the host.

    Attributes:
        batch: Batch of tensors on the host, which may not be filled yet.
        arrived: Event recorded after the copies.
        samples: Number of samples in the batch.
        cut: The ``slice_batch`` of a module or datamodule that counts its samples itself.
    """

    batch: Any
    arrived: Any
    samples: int
    cut: Cut | None


class SampleDigest(Callback):
    """SHA-256 of the training samples as the model received them, after synthesis and augmentation.

    Each sample is hashed separately and the digests are added modulo 2**256, so the result depends
    only on the bytes of the training samples, not on batch size, order or number of ranks. Hashing
    copies each sample back to the host (about 1 ms per MB), so it is limited to `max_samples`. From
    a GPU a batch is copied during its step and hashed in a later one, so the host does not wait.

    Boxes, voxels and the like are concatenated in a dict, with the number per sample under
    ``NAME_count``. They are hashed with their sample, without the batch row that their first column
    may hold. If the batch is not a dict, tensors whose length differs from that of the batch cannot
    be assigned to samples and are skipped.

    Args:
        max_samples: Number of samples of all ranks together after which hashing stops; None hashes
            all.
    """

    def __init__(self, max_samples: int | None = 20_000) -> None:
        self.max_samples = max_samples
        self.samples = 0
        self._sum = 0
        self._coming: deque[_ComingBatch] = deque()
        self._has_told = False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.max_samples is not None and self.samples >= self.max_samples:
            return
        count = self._count(trainer, batch)
        counts_itself = find_method(trainer, "count_samples") is not None
        cut = find_method(trainer, "slice_batch") if counts_itself else None
        device = _find_cuda(batch)
        if device is not None and trainer.world_size == 1 and _is_plain(batch):
            self.samples += count
            self._coming.append(_send(batch, device, count, cut))
            self.read(leave=_MOST_COMING)
            return
        # On several ranks at once, as the sum needs all.
        digest = sum(hash_samples(batch, count, cut))
        if trainer.world_size > 1:
            count, digest = _add_ranks(trainer, count, digest % _MODULUS)
        self.samples += count
        self._sum = (self._sum + digest) % _MODULUS

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._coming.clear()  # their device may be broken

    @override
    def state_dict(self) -> dict[str, Any]:
        self.read()
        return {"samples": self.samples, "sum": f"{self._sum:064x}"}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]
        self._sum = int(state_dict["sum"], 16)

    def summary(self) -> dict[str, str | int]:
        """Return ``samples_sha256`` (64 hexadecimal digits) and ``train/samples_hashed``.

        The result is empty before the first step.
        """
        self.read()
        if not self.samples:
            return {}
        return {"samples_sha256": f"{self._sum:064x}", "train/samples_hashed": self.samples}

    def read(self, leave: int = 0) -> None:
        """Hash the batches that have arrived, and of the others all but the last `leave`."""
        while self._coming:
            coming = self._coming[0]
            if not coming.arrived.query():
                if len(self._coming) <= leave:
                    return
                coming.arrived.synchronize()
            self._coming.popleft()
            digest = sum(hash_samples(coming.batch, coming.samples, coming.cut))
            self._sum = (self._sum + digest) % _MODULUS

    def _count(self, trainer: Trainer, batch: Any) -> int:  # noqa: ANN401 - any form
        """Count the samples that can be hashed, and log once if none can."""
        callbacks = getattr(trainer, "callbacks", ())
        adaptive = [callback for callback in callbacks if isinstance(callback, AdaptiveBatchSize)]
        if any(callback.leaves_on_host(batch) for callback in adaptive):
            self._tell("a batch that reaches the device only in micro-batches")
            return 0
        count = count_batch(trainer, batch)
        if not count:
            self._tell(f"a {type(batch).__name__} whose samples cannot be counted")
        return count

    def _tell(self, what: str) -> None:
        if not self._has_told:
            log.warning("SampleDigest skips %s, so its sum does not cover all samples", what)
        self._has_told = True


def _find_cuda(batch: Any) -> torch.device | None:  # noqa: ANN401 - any nesting
    """Return the CUDA device of a batch; None if it is on the host."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            return leaf.device
    return None


def _is_plain(batch: object) -> bool:
    """Return True for a tensor, and for nested dicts, lists and tuples of values that need no copy."""
    if isinstance(batch, dict):
        return all(map(_is_plain, batch.values()))
    if type(batch) in (list, tuple):
        return all(map(_is_plain, cast(Sequence[Any], batch)))
    return isinstance(batch, Tensor | str | int | float | None)


def _send(
    batch: Any,  # noqa: ANN401 - any nesting
    device: torch.device,
    samples: int,
    cut: Cut | None,
) -> _ComingBatch:
    """Start to copy a batch to the host, and return it with the event that marks its arrival."""
    sent = tree_map_only(Tensor, _copy_to_host, batch)
    arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(device))
    return _ComingBatch(sent, arrived, samples, cut)


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, non_blocking=True)


def hash_samples(batch: Any, count: int, cut: Cut | None = None) -> list[int]:  # noqa: ANN401 - any form
    """Return the SHA-256 of each sample of a batch as the model gets it, as an integer.

    Args:
        batch: Batch of any form.
        count: Number of samples in the batch.
        cut: Function that cuts samples out of the batch, if the module or its datamodule has one.
    """
    if cut is not None:
        with suppress(*WRONG_FORM):  # it may be for batches before their transfer
            return [_hash_sample(parts) for parts in _cut_samples(batch, count, cut)]
    return [_hash_sample(parts) for parts in _list_samples(batch, count)]


def _list_samples(batch: Any, count: int) -> Iterator[Sequence[Bytes]]:  # noqa: ANN401 - any form
    """Yield the bytes of each sample's tensors: parts of stacked ones, or entries of a list."""
    if isinstance(batch, list | tuple) and not _are_stacked(batch, count):
        with suppress(ConfigError):  # a tuple of fields, one of which belongs to no sample
            yield from _cut_samples(batch, count, partial(slice_batch, samples=count))
            return
    fields = list(_split_fields(batch, count))
    for sample in range(count):
        yield [samples[sample] for samples in fields]


def _cut_samples(batch: Any, count: int, cut: Cut) -> Iterator[Sequence[Bytes]]:  # noqa: ANN401
    for sample in range(count):
        tensors = batch_tensors(cut(batch, sample, sample + 1))
        yield [_read_bytes(tensor.detach().cpu()) for tensor in tensors]


def _are_stacked(fields: Sequence[Any], count: int) -> bool:
    return all(getattr(field, "ndim", 0) and len(field) == count for field in fields)


def _add_ranks(trainer: Trainer, count: int, digest: int) -> tuple[int, int]:
    """Return the sums over all ranks; the digest is added in 32-bit words that fit into int64."""
    # 2**31 ranks would fit
    words = [digest >> shift & 0xFFFFFFFF for shift in range(0, 256, _WORD_BITS)]
    numbers = torch.tensor([count, *words], device=trainer.strategy.root_device)
    count, *words = trainer.strategy.reduce(numbers, reduce_op="sum").tolist()
    digest = 0
    for position, word in enumerate(words):
        digest += word << (_WORD_BITS * position)
    return count, digest


def _split_fields(batch: Any, count: int) -> Iterator[Sequence[Bytes]]:  # noqa: ANN401 - any nesting of tensors
    """Yield for each tensor of a batch the bytes of its part in each sample."""
    named = batch if isinstance(batch, Mapping) else {}
    counts: dict[Any, list[int]] = {}  # items of each sample in concatenated fields
    for key in named:
        if f"{key}{COUNT_SUFFIX}" in named:
            counts[key] = named[f"{key}{COUNT_SUFFIX}"].tolist()
    counts_by_length = {sum(items): items for items in counts.values()}
    for key in sorted(named) or [None]:
        for tensor in batch_tensors(batch if key is None else named[key]):
            on_host = tensor.detach().cpu()
            items = counts.get(key)
            # a field without counts that is as long as one with counts is concatenated alike
            if items is None and len(on_host) != count:
                items = counts_by_length.get(len(on_host))
            if items is not None:
                parts = torch.split(on_host, items)
                yield [_read_bytes(_leave_out_row(part, row)) for row, part in enumerate(parts)]
            elif len(on_host) == count:
                yield _read_rows(on_host)


def _leave_out_row(items: Tensor, row: int) -> Tensor:
    """Drop a first column that holds the row of the sample in the batch."""
    has_row = items.ndim > 1 and len(items) > 0 and bool((items[:, 0] == row).all())
    return items[:, 1:] if has_row else items


def _read_rows(tensor: Tensor) -> list[Bytes]:
    """Return the bytes of each row of a tensor, read at once."""
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    return list(rows.contiguous().view(torch.uint8).numpy())


def _read_bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _hash_sample(parts: Sequence[Bytes]) -> int:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    return int.from_bytes(digest.digest(), "big")
