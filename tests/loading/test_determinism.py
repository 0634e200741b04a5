"""Promise P1: a sample is the same to the byte whoever makes it, and in every release until a digest here changes."""

import hashlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from lit_data.core.grid import PatchGrid
from lit_data.core.types import Array
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.images.bank import ImageBank
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec, sample_plan

SEED, EPOCH = 11, 3

# A release that changes one of these changes what people train on, and says so.
GOLDEN_SAMPLES = "8b34c2660fdb7dd52bf1fe7118006ed33bbc6071d4d5398d0558cd0436a3c61b"
GOLDEN_ORDER = "ddab7b3c6d372f4879656d423f35e996930b356b57b6c2b54a09e22337615a54"
GOLDEN_PLANS = "3c58e61df0bb5cecb519bad13c8c09bef1544114360a6c41d9b2a1ac04cb78c0"


class Pattern(ImageBank):
    """Two images of different sizes, made of a formula."""

    channels, dtype, skipped = 3, np.dtype(np.uint8), ()
    heights_px, widths_px = np.array([40, 31]), np.array([37, 52])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Array:
        size = 3 * int(self.heights_px[index]) * int(self.widths_px[index])
        flat = (np.arange(size, dtype=np.uint64) * 2654435761 + index) >> 7
        return flat.astype(np.uint8).reshape(3, int(self.heights_px[index]), -1)

    def name(self, index: int) -> str:
        return f"pattern {index}"


def _dataset() -> PatchDataset:
    bank = Pattern()
    return PatchDataset(bank, GridPatches(PatchGrid(bank.heights_px, bank.widths_px, 16, 12)))


def _digests(batch_size: int, micro: int, world: int, **workers: Any) -> dict[int, str]:
    """Digest of each sample by its index, over all ranks."""
    digests = {}
    for rank in range(world):
        options = LoaderOptions(batch_size=batch_size, micro_batch_size=micro, seed=SEED, **workers)
        loader = MicroBatchLoader(_dataset(), options, shuffle=True, rank=rank, world_size=world)
        loader.set_epoch(EPOCH)
        for batch in loader:
            for row, index in enumerate(batch["index"].tolist()):
                assert index not in digests
                digests[index] = _hash(*(batch[key][row] for key in sorted(batch)))
        loader.close()
    return digests


def _hash(*parts: torch.Tensor | Array) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(np.asarray(part)).tobytes())
    return digest.hexdigest()


@cache
def _expected() -> dict[int, str]:
    return _digests(5, 5, 1, worker_kind="inline")


def test_the_samples_are_those_of_earlier_releases() -> None:
    together = hashlib.sha256("".join(digest for _, digest in sorted(_expected().items())).encode())
    assert together.hexdigest() == GOLDEN_SAMPLES


def test_the_order_is_that_of_earlier_releases() -> None:
    loader = MicroBatchLoader(
        _dataset(), LoaderOptions(seed=SEED, worker_kind="inline"), shuffle=True
    )
    orders = [loader.order.indices(0, len(_dataset()), epoch) for epoch in range(3)]
    assert _hash(*orders) == GOLDEN_ORDER


def test_the_plans_are_those_of_earlier_releases() -> None:
    plan = sample_plan(DefectSpec(), SEED, EPOCH, np.arange(200), (3, 128, 128))
    shape = plan.values[:, 0].astype(np.int64)
    arrays = (plan.row, plan.y, plan.x, shape, plan.amplitude, plan.channels, plan.is_true)
    assert _hash(*arrays) == GOLDEN_PLANS


@pytest.mark.parametrize(
    ("batch_size", "micro", "world"),
    [(1, 1, 1), (1, 1, 4), (3, 1, 2), (3, 2, 4), (3, 4, 1), (8, 1, 2), (8, 4, 1), (8, 4, 4)],
)
def test_samples_do_not_depend_on_threads_batches_or_ranks(
    batch_size: int, micro: int, world: int
) -> None:
    for workers in (0, 1, 2, 4):
        kind = "thread" if workers else "inline"
        found = _digests(batch_size, micro, world, worker_kind=kind, num_workers=workers)
        assert found == {index: _expected()[index] for index in found}
        left_out = len(_dataset()) % world if batch_size == 1 else 0
        assert len(found) == len(_dataset()) - left_out


SLOW = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "workers", "batch_size", "micro", "world"),
    [
        ("fork", 1, 3, 2, 2),
        ("fork", 2, 1, 1, 1),
        ("fork", 2, 8, 1, 2),
        ("fork", 4, 8, 4, 4),
        pytest.param("spawn", 1, 3, 2, 2, marks=SLOW),
        pytest.param("spawn", 4, 8, 4, 1, marks=SLOW),
        pytest.param("forkserver", 4, 3, 2, 2, marks=SLOW),
    ],
)
def test_samples_do_not_depend_on_processes(
    method: str, workers: int, batch_size: int, micro: int, world: int
) -> None:
    kind = {"worker_kind": "process", "num_workers": workers, "start_method": method}
    assert _digests(batch_size, micro, world, **kind) == _expected()
