"""Features for comparing sets of images, and torchmetrics' FID and KID of them."""

import itertools
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, first_line
from lit_data.core.rng import Stream, uniform

Extractor = Literal["small", "inception"]

_SMALL_SEED = 5
_SMALL_WIDTHS = (16, 32, 48, 48)
_SUBSET = 1000
"""Number of images in a subset of KID (Binkowski et al., "Demystifying MMD GANs", ICLR 2018, 4)."""
_SUBSETS = 50


class SmallFeatures(nn.Module):
    """Net of four layers with fixed random weights that gives 288 features.

    This is the only feature module that needs no file or download: torchmetrics' own needs
    Inception's weights. The features are the mean response of each filter of three scales, and that
    of the coarsest scale in each quarter of the image. Random filters respond to colors, contrasts,
    edges, textures and their places, but not to meaning. Use their scores to compare runs on the
    same data, never with published ones (Naeem et al., "Reliable fidelity and diversity metrics for
    generative models", ICML 2020, 4.2 compare such embeddings with trained ones).
    """

    num_features = sum(_SMALL_WIDTHS[:3]) + 4 * _SMALL_WIDTHS[3]

    def __init__(self) -> None:
        super().__init__()
        inputs = 3
        for number, width in enumerate(_SMALL_WIDTHS):
            self.register_buffer(f"weight_{number}", _draw_filters(number, width, inputs))
            inputs = width

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, 288] of images [B, 3, H, W] in 0..1."""
        maps = 2 * images - 1
        features = []
        for number in range(len(_SMALL_WIDTHS)):
            weight: Tensor = getattr(self, f"weight_{number}")
            maps = F.relu(F.conv2d(maps, weight, stride=1 if number == 0 else 2, padding=1))
            features.append(maps.mean((2, 3)))
        features[-1] = F.adaptive_avg_pool2d(maps, 2).flatten(1)  # of each quarter of the image
        return torch.cat(features, 1)


def open_extractor(extractor: Extractor | nn.Module, weights: str | None) -> tuple[nn.Module, str]:
    """Return the net that computes features, and the suffix of the metrics made with them.

    Args:
        extractor: ``small``, ``inception`` or a net from images [B, 3, H, W] float32 in 0..1 to
            features [B, D].
        weights: File with Inception's weights.

    Returns:
        The net, in evaluation mode and without gradients, and the suffix: ``_small``, empty for
        Inception, or ``_`` and the name of your class.

    Raises:
        ConfigError: The file does not exist or holds more than weights, a package is missing, or
            `weights` are given for another net.
    """
    if isinstance(extractor, nn.Module):
        net, suffix = extractor, f"_{type(extractor).__name__.lower()}"
    else:
        check_choice("extractor", extractor, get_args(Extractor))
        if extractor == "small":
            net, suffix = SmallFeatures(), "_small"
        else:
            net, suffix = _open_inception(weights), ""
    if weights is not None and extractor != "inception":
        raise ConfigError(f"weights={weights!r} are only for extractor='inception': remove them")
    return net.eval().requires_grad_(False), suffix


@contextmanager
def on_device(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep a net on the device while it is used, and on the host otherwise."""
    net.to(device)
    try:
        yield
    finally:
        net.to("cpu")


@torch.inference_mode()
def extract(net: nn.Module, images: Tensor, *, batch_size: int) -> Tensor:
    """Return the features of images, batch by batch.

    Args:
        net: Net of `open_extractor`.
        images: [N, C, H, W] in 0..1 with one or three channels, on any device.
        batch_size: Number of images at once.

    Returns:
        Features [N, D] float32 on the host.

    Raises:
        ConfigError: The images have another number of channels, or the net gives no such features.
    """
    if images.shape[1] not in (1, 3):
        raise ConfigError(
            f"images of {images.shape[1]} channels cannot be compared: features need one or three"
        )
    weights = itertools.chain(net.parameters(), net.buffers())
    device = next((weight.device for weight in weights), torch.device("cpu"))
    parts = []
    for part in torch.split(images.detach(), batch_size):
        features = net(part.to(device, torch.float32).expand(-1, 3, -1, -1))
        if not isinstance(features, Tensor) or features.ndim != 2:
            raise ConfigError(
                f"extractor {type(net).__name__} must return features [B, D] of images [B, 3, H, W]"
            )
        parts.append(features.float().cpu())
    return torch.cat(parts)


class _Inception(nn.Module):
    """The net that defines FID and KID, which takes images as integers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, images: Tensor) -> Any:
        return self.net((images.clamp(0, 1) * 255).round().byte())


def _open_inception(weights: str | None) -> nn.Module:
    from torchmetrics.image import fid

    if weights is None or not Path(weights).is_file():
        raise ConfigError(
            f"weights={weights!r} is not a file: extractor='inception' needs "
            "pt_inception-2015-12-05-6726825d.pth of torch-fidelity's releases; "
            "extractor='small' needs none"
        )
    try:
        # checked first, because torch-fidelity would run any code in a pickle
        torch.load(weights, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ConfigError(
            f"weights={weights!r} is not a file that holds only weights: {first_line(error)}"
        ) from error
    try:
        return _Inception(
            fid.NoTrainInceptionV3(
                "inception-v3-compat", ["2048"], feature_extractor_weights_path=weights
            )
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            "extractor='inception' needs torch-fidelity: pip install torch-fidelity"
        ) from error


def _draw_filters(number: int, outputs: int, inputs: int) -> Tensor:
    """Return filters [outputs, inputs, 3, 3] of variance 2 / fan-in.

    With this variance, responses keep their size (He et al., ICCV 2015).
    """
    fan_in = 9 * inputs
    limit = np.float32((6 / fan_in) ** 0.5)  # uniform in -limit..limit has variance 2 / fan-in
    units = uniform(_SMALL_SEED, Stream.USER, np.arange(outputs), number, fan_in)
    return torch.from_numpy((2 * units - 1) * limit).view(outputs, inputs, 3, 3)


class Distances:
    """Features of real images, and the distances of generated ones from them.

    FID's sums and KID's features of the real images stay in host memory.

    Args:
        most: Largest number of real images.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.samples = 0
        # built with the first features, because they need the number of features
        self._metrics: tuple[FrechetInceptionDistance, KernelInceptionDistance] | None = None

    @property
    def is_full(self) -> bool:
        """True if there are as many real images as requested."""
        return self.samples >= self.most

    def add(self, features: Tensor) -> None:
        """Add features [N, D] of real images, as many as there is room for."""
        features = features[: self.most - self.samples].cpu()
        self._metrics = self._metrics or _make_metrics(features.shape[1])
        for metric in self._metrics:
            metric.update(features, real=True)
        self.samples += len(features)

    def measure(self, features: Tensor) -> dict[str, float]:
        """Return the distances of features [N, D] of generated images from the real ones.

        Returns:
            ``fid`` and ``kid``; NaN if there are fewer than two real or generated images, or some
            features are not finite.
        """
        smaller = min(self.samples, len(features))
        if self._metrics is None or smaller < 2 or not bool(features.isfinite().all()):
            return {"fid": math.nan, "kid": math.nan}
        fid, kid = self._metrics
        for metric in self._metrics:
            metric.reset()  # forgets only the generated images
            metric.update(features, real=False)
        kid.subset_size = min(smaller, _SUBSET)
        kid.subsets = _SUBSETS if smaller > _SUBSET else 1
        with torch.random.fork_rng(devices=[]):  # subsets are drawn, the same ones each time
            torch.default_generator.manual_seed(0)
            return {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}


def gather_features(features: Tensor, device: torch.device) -> Tensor:
    """Return the features [N, D] of all ranks, whatever their N, in the order of the ranks.

    Args:
        features: Features of this rank.
        device: Device on which the ranks communicate.
    """
    return torch.cat(gather_all_tensors(features.to(device)))


def _make_metrics(features: int) -> tuple[FrechetInceptionDistance, KernelInceptionDistance]:
    # Both metrics get features instead of images, so the net runs once and not twice.
    as_they_are: Any = nn.Identity()
    as_they_are.num_features = features
    options: dict[str, Any] = {"reset_real_features": False, "sync_on_compute": False}
    with warnings.catch_warnings():
        # it keeps features in memory, here a bounded number of them
        warnings.filterwarnings("ignore", ".*will save all extracted features in buffer")
        kid = KernelInceptionDistance(as_they_are, **options)
    return FrechetInceptionDistance(as_they_are, **options), kid
