"""Several processes: each finishes its own gradient, however many pieces that takes, and then all meet once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lit_data.callbacks.adaptive.active_batch import Hand
from lit_data.errors import ConfigError, RankMismatchError

_BUCKET_BYTES: Final = 25 * 2**20
"""As DistributedDataParallel's default ``bucket_cap_mb``."""


class Ranks:
    """Takes over from DistributedDataParallel the averaging of gradients, and the copying of rank
    0's buffers.

    DDP meets inside forward and backward, where a rank that ran out of memory would leave the
    others waiting (mosaicml/composer#2117). Here forward and backward are local; then one vote
    tells who failed for good, how many samples each rank had and which size it uses, and gradients
    are summed, weighted by samples.

    Args:
        strategy: After its set-up.
    """

    def __init__(self, strategy: DDPStrategy) -> None:
        assert isinstance(strategy.model, DistributedDataParallel)
        self.strategy, self.model = strategy, strategy.model
        self.copies_buffers = bool(self.model.broadcast_buffers)
        self.model.broadcast_buffers = False
        self._samples = 0

    def close(self) -> None:
        """Leave DDP as it was."""
        self.model.broadcast_buffers = self.copies_buffers

    @contextmanager
    def together(
        self, hand: Hand, module: L.LightningModule, *, synchronise: bool
    ) -> Iterator[None]:
        """Around forward and backward of one batch.

        Args:
            hand: The batch; its search takes over the smallest size of all ranks.
            module: Whose gradients.
            synchronise: The optimizer steps next; otherwise gradients are only added up.

        Raises:
            RankMismatchError: Another rank failed.
        """
        try:
            with self.strategy.block_backward_sync():
                yield
        except Exception:
            self._vote(hand, module, failed=True)
            raise
        self._samples += hand.samples
        share = self._vote(hand, module, failed=False)
        if synchronise:
            self._samples = 0
            self._average(module, share)

    def _vote(self, hand: Hand, module: L.LightningModule, *, failed: bool) -> float:
        """Meet the others; returns this rank's share of the samples."""
        parameters = _trained(module)
        mine = [
            int(failed),
            self._samples,
            hand.search.size,
            *(p.grad is not None for p in parameters),
        ]
        votes = torch.tensor(mine, dtype=torch.int64, device=self.strategy.root_device)
        gathered = [torch.empty_like(votes) for _ in range(self.strategy.world_size)]
        dist.all_gather(gathered, votes)
        table = torch.stack(gathered).cpu()
        broken = table[:, 0].nonzero().flatten().tolist()
        if failed:
            return 0.0
        if broken:
            raise RankMismatchError(
                f"rank {broken[0]} failed in this step: its own message says why"
            )
        smallest = int(table[:, 2].min())
        if smallest < hand.search.size:
            hand.search.change(smallest)
        for parameter, used in zip(parameters, table[:, 3:].any(0).tolist(), strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._samples / int(table[:, 1].sum())

    @torch.no_grad()
    def _average(self, module: L.LightningModule, share: float) -> None:
        gradients = [p.grad for p in _trained(module) if p.grad is not None]
        for sparse in (gradient for gradient in gradients if gradient.is_sparse):
            dist.all_reduce(sparse.mul_(share))
        for bucket in _fill_buckets([gradient for gradient in gradients if not gradient.is_sparse]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).mul_(share)
            dist.all_reduce(flat)
            _copy_back(bucket, flat)
        if self.copies_buffers:
            for bucket in _fill_buckets(list(module.buffers())):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.broadcast(flat, 0)
                _copy_back(bucket, flat)


def find_ranks(trainer: L.Trainer, module: L.LightningModule) -> Ranks | None:
    """The other processes of a run, if there are any.

    Raises:
        ConfigError: The strategy or a module meets the other ranks inside forward.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return None
    if not isinstance(strategy, DDPStrategy) or not isinstance(
        strategy.model, DistributedDataParallel
    ):
        raise ConfigError(
            f"AdaptiveBatchSize works on one device or with DDP, not with {type(strategy).__name__}: use strategy=ddp, "
            "or train without this callback"
        )
    names = [
        name for name, part in module.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)
    ]
    if names:
        raise ConfigError(
            f"{names[0]} is a SyncBatchNorm, which waits for the other ranks in every forward, and AdaptiveBatchSize "
            "lets each rank go on alone: set Trainer(sync_batchnorm=False), or train without this callback"
        )
    return Ranks(strategy)


def _trained(module: L.LightningModule) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _fill_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors of one type, each about as large as a bucket of DDP."""
    bucket: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda found: str(found.dtype)):
        if bucket and (
            bucket[0].dtype != tensor.dtype or sum(t.nbytes for t in bucket) > _BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _copy_back(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(
        tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))
