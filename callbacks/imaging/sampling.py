"""Images that a LightningModule generates, as callbacks ask for them."""

from collections.abc import Iterator, Mapping, Sequence
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
        """Return images [count, C, H, W] float32 in 0..1 on the host, a function of the seed."""
        ...


class SweepsViews(Protocol):
    """A module that generates objects which it can show from any side."""

    def sweep_views(self, count: int, poses: Tensor, seed: int) -> Tensor:
        """Return each object from each of the `poses` [V, 2] (rad).

        As [count, V, C, H, W] float32 in 0..1 on the host.
        """
        ...


def sweeps_views(module: L.LightningModule) -> bool:
    """Return True if a module, or what stands in for one, is a `SweepsViews`.

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
            f"{owner}: {type(module).__name__} has no method "
            "sample_images(count, *, seed, batch_size), which returns [count, C, H, W] float32 "
            f"in 0..1: write one, or leave {owner} out"
        )


def sample(module: L.LightningModule, count: int, *, seed: int, batch_size: int) -> Tensor:
    """Return images of a module, and leave the random numbers of the training as they are.

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
    """Return objects of a module from several sides, in the way of `sample`.

    Args:
        module: Has `sweep_views`.
        count: Number of objects.
        poses: [V, 2] rad.
        seed: Of the objects.

    Returns:
        [count, V, C, H, W] float32 in 0..1 on the host.
    """
    with _own_random_numbers(module.device):
        images = cast(SweepsViews, module).sweep_views(count, poses, seed)
    return _check_images(images, count, "sweep_views", dimensions=5)


def find_poses(trainer: L.Trainer, module: L.LightningModule) -> Tensor | None:
    """Return the poses [V, 2] in which the data shows its objects, if the module can take them."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # its data connector sets it
    return data.poses if isinstance(data, HasPoses) and sweeps_views(module) else None


def turns(views: Tensor) -> bool:
    """Return True if objects [count, V, C, H, W] differ from side to side.

    A module may know of no sides.
    """
    return not torch.equal(views, views[:, :1].expand_as(views))


def read_images(batch: Any, key: str) -> Tensor:  # noqa: ANN401 - any batch
    """Return the images [B, C, H, W] of a batch.

    Args:
        batch: A dict with images under `key`; otherwise the first tensor of four dimensions counts.
        key: See `batch`.

    Raises:
        ConfigError: There are none.
    """
    keys = ""
    parts: Sequence[Any]
    if isinstance(batch, Mapping):
        parts = [batch.get(key)]
        keys = f"; its keys are {', '.join(map(str, batch))}"
    else:
        parts = batch if isinstance(batch, list | tuple) else [batch]
    for part in parts:
        if isinstance(part, Tensor) and part.ndim == 4:
            return part
    raise ConfigError(f"key={key!r}: the batch has no images [B, C, H, W] there{keys}")


def _check_images(images: Tensor, count: int, method: str, *, dimensions: int) -> Tensor:
    if images.ndim != dimensions or len(images) != count:
        raise ConfigError(
            f"{method} returned a tensor of shape {tuple(images.shape)}: "
            f"{dimensions} dimensions with {count} first are needed"
        )
    return images.detach().float().cpu()


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Give torch's generators back as they were: training must go on as without samples."""
    devices = [device] if device.type == "cuda" else []  # the CPU's is always among them
    with torch.random.fork_rng(devices, device_type="cuda"), torch.no_grad():
        yield
