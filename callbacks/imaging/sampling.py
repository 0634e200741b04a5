"""Ask a LightningModule for the images that it generates."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import lightning as L
import torch
from torch import Tensor

from lit_data.errors import ConfigError
from lit_data.types import HasPoses


class SamplesImages(Protocol):
    """A module that generates images."""

    def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
        """[count, C, H, W] float32 in 0..1 on the host, a pure function of the seed."""
        ...


class SweepsViews(Protocol):
    """A module that generates objects which it can show from any side."""

    def sweep_views(self, count: int, poses: Tensor, seed: int) -> Tensor:
        """[count, V, C, H, W] float32 in 0..1 on the host: each object from each of the `poses` [V, 2] (rad)."""
        ...


def sweeps_views(module: L.LightningModule) -> bool:
    """Whether a module, or what stands in for one, is a `SweepsViews`.

    From Python 3.12 on ``isinstance`` with a protocol does not see what ``__getattr__`` hands on.
    """
    return callable(getattr(module, "sweep_views", None))


def check_sampling(module: L.LightningModule, owner: str) -> None:
    """Refuse a module that generates no images.

    Raises:
        ConfigError: It has no `sample_images`.
    """
    if not callable(getattr(module, "sample_images", None)):
        raise ConfigError(
            f"{owner}: {type(module).__name__} has no method sample_images(count, *, seed, batch_size), which returns "
            f"[count, C, H, W] float32 in 0..1: write one, or leave {owner} out"
        )


def sample(module: L.LightningModule, count: int, *, seed: int, batch_size: int) -> Tensor:
    """Images of a module, which leave the random numbers of the training as they are.

    Args:
        module: Has `sample_images`.
        count: How many images.
        seed: Of the images.
        batch_size: Images generated at once.

    Returns:
        [count, C, H, W] float32 in 0..1 on the host.
    """
    with _own_random_numbers(module.device):
        images = cast(SamplesImages, module).sample_images(count, seed=seed, batch_size=batch_size)
    return _check_images(images, count, "sample_images", dimensions=4)


def sweep(module: L.LightningModule, count: int, poses: Tensor, *, seed: int) -> Tensor:
    """Objects of a module from several sides, as `sample` does it: [count, V, C, H, W] float32 in 0..1 on the host."""
    with _own_random_numbers(module.device):
        images = cast(SweepsViews, module).sweep_views(count, poses, seed)
    return _check_images(images, count, "sweep_views", dimensions=5)


def find_poses(trainer: L.Trainer, module: L.LightningModule) -> Tensor | None:
    """The poses [V, 2] from which the data shows its objects, if the module can take them."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # its data connector sets it
    return data.poses if isinstance(data, HasPoses) and sweeps_views(module) else None


def turns(views: Tensor) -> bool:
    """Whether objects [count, V, C, H, W] differ from side to side: a module may know of no sides."""
    return not torch.equal(views, views[:, :1].expand_as(views))


def read_images(batch: Any, key: str) -> Tensor:  # noqa: ANN401 - any batch
    """The images [B, C, H, W] of a batch: under a key of a dict, otherwise the first tensor of four
    dimensions.

    Raises:
        ConfigError: There are none.
    """
    parts = (
        [batch.get(key)]
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else [batch]
    )
    for part in parts:
        if isinstance(part, Tensor) and part.ndim == 4:
            return part
    keys = f"; its keys are {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise ConfigError(f"key={key!r}: the batch has no images [B, C, H, W] there{keys}")


def _check_images(images: Tensor, count: int, method: str, *, dimensions: int) -> Tensor:
    if images.ndim != dimensions or len(images) != count:
        raise ConfigError(
            f"{method} returned a tensor of shape {tuple(images.shape)}: {dimensions} dimensions with {count} first "
            "are needed"
        )
    return images.detach().float().cpu()


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """A module may draw from torch's generators: the training after it must be that of a run without samples."""
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"),
        torch.no_grad(),
    ):
        yield
