"""`SampleDigest`: proof that two runs trained on the same samples."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lit_data.batch_form import batch_tensors, slice_batch
from lit_data.callbacks.loader_facts import count_batch
from lit_data.errors import ConfigError
from lit_data.types import COUNT_SUFFIX

_MODULUS: Final = 2**256
_UNDER_WAY: Final = 3
"""Batches that may be on their way to the host; a host that is farther ahead of its device waits for them."""


class SampleDigest(L.Callback):
    """SHA-256 of the training samples as the model received them, after synthesis and augmentation.

    Each sample is hashed by itself and the digests are added modulo 2**256, so the result does not
    depend on the batch size, on the order or on the number of ranks, only on which samples were
    trained and on every byte of them. Hashing reads each sample back to the host (about 1 ms per
    MB), hence the bound. From a GPU a batch comes back while its step is under way, and is hashed
    in a later one, so that the host does not wait.

    Boxes, voxels and the like lie flat in a dict, with the number of each sample's under
    ``NAME_count``: they are hashed with their sample, without the row in the batch that their first
    column may hold. In a batch that is no dict, tensors of another length than the batch cannot be
    told apart and are left out.

    Args:
        max_samples: Stop after this many samples, those of all ranks together; none hashes all.
    """

    def __init__(self, max_samples: int | None = 20_000) -> None:
        self.max_samples = max_samples
        self.samples = 0
        self._sum = 0
        self._coming: deque[tuple[Any, Any, int]] = (
            deque()
        )  # a batch on its way to the host, an event, samples

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.max_samples is not None and self.samples >= self.max_samples:
            return
        count = count_batch(trainer, batch)
        device = next(
            (t.device for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_cuda), None
        )
        if device is not None and trainer.world_size == 1 and _is_plain(batch):
            self.samples += count
            self._coming.append((*_send(batch, device), count))
            self._read(leave=_UNDER_WAY)
            return
        digest = sum(map(_hash_sample, _list_samples(batch, count)))
        if trainer.world_size > 1:
            count, digest = _add_ranks(trainer, count, digest % _MODULUS)
        self.samples += count
        self._sum = (self._sum + digest) % _MODULUS

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._coming.clear()  # their device may be broken

    @override
    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"samples": self.samples, "sum": f"{self._sum:064x}"}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples, self._sum = state_dict["samples"], int(state_dict["sum"], 16)

    def summary(self) -> dict[str, str | int]:
        """``samples_sha256`` (64 hexadecimal digits) and ``train/samples_hashed``; empty before the first step."""
        self._read()
        return (
            {"samples_sha256": f"{self._sum:064x}", "train/samples_hashed": self.samples}
            if self.samples
            else {}
        )

    def _read(self, leave: int = 0) -> None:
        """Hash what has come, and of the rest all but so many batches."""
        while self._coming:
            batch, event, count = self._coming[0]
            if not event.query():
                if len(self._coming) <= leave:
                    return
                event.synchronize()
            self._coming.popleft()
            self._sum = (self._sum + sum(map(_hash_sample, _list_samples(batch, count)))) % _MODULUS


def _is_plain(batch: object) -> bool:
    """Whether a batch is a tensor or nested dicts, lists and tuples of what copies as it is."""
    if isinstance(batch, dict):
        return all(map(_is_plain, batch.values()))
    if type(batch) in (list, tuple):
        return all(map(_is_plain, cast(Sequence[Any], batch)))
    return isinstance(batch, Tensor | str | int | float | None)


def _send(batch: Any, device: torch.device) -> tuple[Any, Any]:  # noqa: ANN401 - any nesting
    """A batch on its way to the host, and the event behind it."""
    sent = tree_map_only(
        Tensor, lambda tensor: tensor.detach().to("cpu", copy=True, non_blocking=True), batch
    )
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return sent, event


def _list_samples(batch: Any, count: int) -> Iterator[Sequence[Tensor]]:  # noqa: ANN401 - any form
    """The tensors of each sample, on the host: of stacked ones their parts, of a list its entries."""
    if isinstance(batch, list | tuple) and not all(
        getattr(p, "ndim", 0) and len(p) == count for p in batch
    ):
        with suppress(ConfigError):  # a tuple of fields of which one belongs to no sample
            for sample in range(count):
                found = batch_tensors(slice_batch(batch, sample, sample + 1, count))
                yield [tensor.detach().cpu().contiguous() for tensor in found]
            return
    fields = list(_split_fields(batch, count))
    yield from ([samples[sample] for samples in fields] for sample in range(count))


def _add_ranks(trainer: L.Trainer, count: int, digest: int) -> tuple[int, int]:
    """Sum over all ranks, the digest in pieces of 32 bits whose sums fit into int64."""
    pieces = [digest >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)]
    mine = torch.tensor([count, *pieces], device=trainer.strategy.root_device)
    count, *pieces = trainer.strategy.reduce(mine, reduce_op="sum").tolist()
    return count, sum(piece << 32 * place for place, piece in enumerate(pieces))


def _split_fields(batch: Any, count: int) -> Iterator[Sequence[Tensor]]:  # noqa: ANN401 - any nesting of tensors
    """For each tensor of a batch its part in each sample, on the host."""
    named = batch if isinstance(batch, Mapping) else {}
    counts = {
        key: named[f"{key}{COUNT_SUFFIX}"].tolist()
        for key in named
        if f"{key}{COUNT_SUFFIX}" in named
    }
    by_length = {sum(found): found for found in counts.values()}
    for key in sorted(named) or [None]:
        for tensor in batch_tensors(batch if key is None else named[key]):
            here = tensor.detach().cpu().contiguous()
            own = counts.get(key, None if len(here) == count else by_length.get(len(here)))
            if own is not None:
                yield [_leave_out_row(part, row) for row, part in enumerate(torch.split(here, own))]
            elif len(here) == count:
                yield here.unbind()


def _leave_out_row(items: Tensor, row: int) -> Tensor:
    has_row = items.ndim > 1 and len(items) > 0 and bool((items[:, 0] == row).all())
    return items[:, 1:].contiguous() if has_row else items


def _hash_sample(parts: Sequence[Tensor]) -> int:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big")
