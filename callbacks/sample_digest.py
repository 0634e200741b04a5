"""`SampleDigest`: proof that two runs trained on the same samples."""

import hashlib
from typing import Any, Final

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.types import batch_tensors

_MODULUS: Final = 2**256


class SampleDigest(L.Callback):
    """SHA-256 of the training samples as the model received them, after synthesis and augmentation.

    Each sample is hashed by itself and the digests are added modulo 2**256, so the result does not depend on the batch
    size, on the order or on the number of ranks, only on which samples were trained and on every byte of them. Hashing
    reads each sample back to the host (about 1 ms per MB), hence the bound.

    Args:
        max_samples: Stop after this many samples, those of all ranks together; none hashes all.
    """

    def __init__(self, max_samples: int | None = 20_000) -> None:
        self.max_samples = max_samples
        self.samples = 0
        self._sum = 0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.max_samples is not None and self.samples >= self.max_samples:
            return
        tensors = [tensor.detach().cpu().contiguous() for tensor in batch_tensors(batch)]
        count = len(tensors[0])
        digest = sum(_hash_sample(tensors, sample) for sample in range(count))
        if trainer.world_size > 1:
            count, digest = _add_ranks(trainer, count, digest % _MODULUS)
        self.samples += count
        self._sum = (self._sum + digest) % _MODULUS

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "sum": f"{self._sum:064x}"}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples, self._sum = state_dict["samples"], int(state_dict["sum"], 16)

    def summary(self) -> dict[str, str | int]:
        """``samples_sha256`` (64 hexadecimal digits) and ``train/samples_hashed``; empty before the first step."""
        return {"samples_sha256": f"{self._sum:064x}", "train/samples_hashed": self.samples} if self.samples else {}


def _add_ranks(trainer: L.Trainer, count: int, digest: int) -> tuple[int, int]:
    """Sum over all ranks, the digest in pieces of 32 bits whose sums fit into int64."""
    pieces = [digest >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)]
    mine = torch.tensor([count, *pieces], device=trainer.strategy.root_device)
    count, *pieces = trainer.strategy.reduce(mine, reduce_op="sum").tolist()
    return count, sum(piece << 32 * place for place, piece in enumerate(pieces))


def _hash_sample(tensors: list[Tensor], sample: int) -> int:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor[sample].reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big")
