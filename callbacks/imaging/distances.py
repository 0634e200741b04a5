"""FID and KID between real and generated images, computed by torchmetrics on the host."""

import math
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

_SUBSET: Final = 1000
"""Images of a subset of KID (Binkowski et al., "Demystifying MMD GANs", ICLR 2018, 4); fewer where there are fewer."""
_SUBSETS: Final = 50


class Distances:
    """Features of real images, and how far those of others are from them.

    Of the real images FID's sums and KID's features are kept, in the memory of the host.

    Args:
        most: Real images to keep.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.samples = 0
        self._metrics: tuple[FrechetInceptionDistance, KernelInceptionDistance] | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are as many real images as asked for."""
        return self.samples >= self.most

    def add(self, features: Tensor) -> None:
        """Add features [N, D] of real images, as many as there is room for."""
        features = features[: self.most - self.samples].cpu()
        self._metrics = self._metrics or _make_metrics(features.shape[1])
        for metric in self._metrics:
            metric.update(features, real=True)
        self.samples += len(features)

    def measure(self, features: Tensor) -> dict[str, float]:
        """How far features [N, D] of generated images are from those of the real ones.

        Returns:
            ``fid`` and ``kid``; not a number where there are fewer than two images on a side, or some are not finite.
        """
        if self._metrics is None or min(self.samples, len(features)) < 2 or not bool(features.isfinite().all()):
            return {"fid": math.nan, "kid": math.nan}
        fid, kid = self._metrics
        for metric in self._metrics:
            metric.reset()  # of the generated ones
            metric.update(features, real=False)
        smaller = min(self.samples, len(features))
        kid.subset_size, kid.subsets = min(smaller, _SUBSET), _SUBSETS if smaller > _SUBSET else 1
        with torch.random.fork_rng(devices=[]):  # subsets are drawn, the same ones each time
            torch.default_generator.manual_seed(0)
            return {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}


def gather_features(features: Tensor, device: torch.device) -> Tensor:
    """The features [N, D] of all ranks, whatever their N, in the order of the ranks.

    Args:
        features: Those of this rank.
        device: Where the ranks talk to each other.
    """
    return torch.cat(gather_all_tensors(features.to(device)))


class _AsTheyAre(nn.Module):
    """In the place of a net: the metrics get features, which were computed on the device."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.num_features = features

    @override
    def forward(self, features: Tensor) -> Tensor:
        return features


def _make_metrics(features: int) -> tuple[FrechetInceptionDistance, KernelInceptionDistance]:
    options: dict[str, Any] = {"reset_real_features": False, "sync_on_compute": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*will save all extracted features in buffer")  # a bounded number of them
        kid = KernelInceptionDistance(_AsTheyAre(features), **options)
    return FrechetInceptionDistance(_AsTheyAre(features), **options), kid
