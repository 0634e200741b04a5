"""Synchronization of ranks that each compute their gradient in any number of micro-batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from lit_data.callbacks.adaptive.active_batch import ActiveBatch
from lit_data.core.errors import ConfigError, RankMismatchError

_BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket, as in DistributedDataParallel's default ``bucket_cap_mb``."""


class Ranks:
    """Averages gradients and copies rank 0's buffers, in place of DistributedDataParallel.

    DDP synchronizes inside forward and backward, where a rank that ran out of memory would leave
    the others waiting (mosaicml/composer#2117). Here forward and backward are local. Then the ranks
    exchange once who failed for good, how many samples each rank had and which size it uses, and
    the gradients are summed, weighted by samples.

    Args:
        strategy: Strategy of the Trainer, after its setup.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        assert isinstance(strategy.model, DistributedDataParallel)
        self.strategy = strategy
        self.model = strategy.model
        self.copies_buffers = bool(self.model.broadcast_buffers)
        self.model.broadcast_buffers = False
        self._samples = 0

    def close(self) -> None:
        """Restore DDP."""
        self.model.broadcast_buffers = self.copies_buffers

    @contextmanager
    def together(
        self, active: ActiveBatch, module: LightningModule, *, synchronise: bool
    ) -> Iterator[None]:
        """Enclose forward and backward of one batch, and synchronize the ranks afterwards.

        Args:
            active: The batch; its search takes over the smallest size of all ranks.
            module: Module with the gradients.
            synchronise: Pass True if the optimizer steps next; False only accumulates gradients.

        Raises:
            RankMismatchError: Another rank failed.
        """
        try:
            with self.strategy.block_backward_sync():
                yield
        except Exception:
            self._vote(active, module, failed=True)  # the others wait for this vote
            raise
        self._samples += active.samples
        fraction = self._vote(active, module, failed=False)
        if synchronise:
            self._samples = 0
            self._average(module, fraction)

    def _vote(self, active: ActiveBatch, module: LightningModule, *, failed: bool) -> float:
        """Exchange results with the other ranks, and return this rank's fraction of the samples."""
        parameters = _list_trained(module)
        has_gradient = [parameter.grad is not None for parameter in parameters]
        ballot = [failed, self._samples, active.search.size, *has_gradient]
        votes = torch.tensor(ballot, dtype=torch.int64, device=self.strategy.root_device)
        gathered = [torch.empty_like(votes) for _ in range(self.strategy.world_size)]
        dist.all_gather(gathered, votes)
        if failed:
            return 0.0
        table = torch.stack(gathered).cpu()  # [ranks, 3 + parameters]
        failed_ranks = table[:, 0].nonzero().flatten().tolist()
        if failed_ranks:
            raise RankMismatchError(
                f"rank {failed_ranks[0]} failed in this step: see its own message"
            )
        smallest_size = int(table[:, 2].min())
        if smallest_size < active.search.size:
            active.search.change(smallest_size)
        # A sum needs a gradient on all ranks if any rank has it.
        is_used = table[:, 3:].any(0).tolist()
        for parameter, used in zip(parameters, is_used, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._samples / int(table[:, 1].sum())

    @torch.no_grad()
    def _average(self, module: LightningModule, fraction: float) -> None:
        """Sum the gradients of all ranks, each times its fraction, and copy the buffers of rank 0."""
        dense_gradients = []
        for parameter in _list_trained(module):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                dist.all_reduce(gradient.mul_(fraction))
            else:
                dense_gradients.append(gradient)
        for bucket, flat in _flatten_in_buckets(dense_gradients):
            dist.all_reduce(flat.mul_(fraction))
            _copy_back(bucket, flat)
        if self.copies_buffers:
            for bucket, flat in _flatten_in_buckets(list(module.buffers())):
                dist.broadcast(flat, 0)
                _copy_back(bucket, flat)


def find_ranks(trainer: Trainer, module: LightningModule) -> Ranks | None:
    """Return the ranks of a run if there are several.

    Raises:
        ConfigError: The strategy or a module communicates with other ranks inside forward.
    """
    if trainer.world_size == 1:
        return None
    strategy: Any = trainer.strategy
    is_ddp = isinstance(strategy, DDPStrategy)
    if not is_ddp or not isinstance(strategy.model, DistributedDataParallel):
        raise ConfigError(
            f"AdaptiveBatchSize works on one device or with DDP, not with {type(strategy).__name__}: use strategy=ddp, "
            "or train without this callback"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"{name} is a SyncBatchNorm, which waits for the other ranks in every forward, "
                "and AdaptiveBatchSize lets each rank continue alone: set "
                "Trainer(sync_batchnorm=False), or train without this callback"
            )
    return Ranks(strategy)


def _list_trained(module: LightningModule) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _flatten_in_buckets(tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield tensors of one type, about as many as a DDP bucket has, and their concatenated values."""
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):  # type: ignore[no-untyped-call]
        yield bucket, _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]


def _copy_back(bucket: Sequence[Tensor], flat: Tensor) -> None:
    parts = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part)
