"""Images that a LightningModule generates, and grids of them for files and loggers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, TensorBoardLogger
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.lightning_internals import count_logged_steps
from lit_data.core.types import Bytes, HasPoses
from lit_data.images.writing import write_png

_GAP_PX = 2
_LEAST_PX = 64
"""Shortest side of a cell; smaller images are enlarged by repeating pixels."""


class SamplesImages(Protocol):
    """A module that generates images."""

    def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
        """Return images [count, C, H, W] float32 in 0..1 on the host, a function of the seed."""
        ...


class SweepsViews(Protocol):
    """A module that generates objects and can show them from any side."""

    def sweep_views(self, count: int, poses: Tensor, seed: int) -> Tensor:
        """Return each object in each of the `poses` [V, 2] (rad).

        The result is [count, V, C, H, W] float32 in 0..1 on the host.
        """
        ...


def sweeps_views(module: LightningModule) -> bool:
    """Return True if a module, or a stand-in for one, is a `SweepsViews`.

    Since Python 3.12, ``isinstance`` with a protocol ignores what ``__getattr__`` provides.
    """
    return callable(getattr(module, "sweep_views", None))


def check_sampling(module: LightningModule, owner: str) -> None:
    """Refuse a module that generates no images.

    Raises:
        ConfigError: The module has no `sample_images`.
    """
    if not callable(getattr(module, "sample_images", None)):
        raise ConfigError(
            f"{owner}: {type(module).__name__} has no method sample_images(count, *, seed, "
            "batch_size), which returns [count, C, H, W] float32 in 0..1: write one, or remove "
            f"{owner}"
        )


def sample(module: LightningModule, count: int, *, seed: int, batch_size: int) -> Tensor:
    """Return images of a module without changing the random numbers of the training.

    Args:
        module: Module with `sample_images`.
        count: Number of images.
        seed: Seed of the images.
        batch_size: Number of images generated at once.

    Returns:
        Images [count, C, H, W] float32 in 0..1 on the host.
    """
    with _own_random_numbers(module.device):
        images = cast(SamplesImages, module).sample_images(count, seed=seed, batch_size=batch_size)
    return _check_images(images, count, "sample_images", dimensions=4)


def sweep(module: LightningModule, count: int, poses: Tensor, *, seed: int) -> Tensor:
    """Return objects of a module from several sides, without changing random numbers like `sample`.

    Args:
        module: Module with `sweep_views`.
        count: Number of objects.
        poses: [V, 2] in rad.
        seed: Seed of the objects.

    Returns:
        Views [count, V, C, H, W] float32 in 0..1 on the host.
    """
    with _own_random_numbers(module.device):
        images = cast(SweepsViews, module).sweep_views(count, poses, seed)
    return _check_images(images, count, "sweep_views", dimensions=5)


def find_poses(trainer: Trainer, module: LightningModule) -> Tensor | None:
    """Return the poses [V, 2] in which the data shows its objects, if the module can take them."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # its data connector sets it
    return data.poses if isinstance(data, HasPoses) and sweeps_views(module) else None


def turns(views: Tensor) -> bool:
    """Return True if objects [count, V, C, H, W] differ from side to side.

    A module may ignore the sides.
    """
    return not torch.equal(views, views[:, :1].expand_as(views))


def read_images(batch: Any, key: str) -> Tensor:  # noqa: ANN401 - any batch
    """Return the images [B, C, H, W] of a batch.

    Args:
        batch: A dict with images under `key`; otherwise the first tensor with four dimensions is
            used.
        key: Key of the images if the batch is a dict.

    Raises:
        ConfigError: The batch has no images.
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
    """Restore torch's generators afterwards, so that sampling does not affect training."""
    devices = [device] if device.type == "cuda" else []  # the CPU's is always among them
    with torch.random.fork_rng(devices, device_type="cuda"), torch.no_grad():
        yield


@runtime_checkable
class TakesPictures(Protocol):
    """A logger such as Lightning's for Weights & Biases."""

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        """Log pictures [H, W, 3] uint8."""
        ...


@runtime_checkable
class TakesTables(Protocol):
    """A logger such as Lightning's for Weights & Biases."""

    def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:
        """Log a table."""
        ...


def draw_grid(images: Tensor, *, columns: int | None = None) -> Bytes:
    """Return images side by side, row by row, on white.

    Args:
        images: [N, C, H, W] in 0..1 with one or three channels; of more, only the first is shown.
        columns: Number of images in a row; by default as many as rows, or slightly more.

    Returns:
        Picture [H, W, 3] uint8.
    """
    count, _, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    times = max(1, math.ceil(_LEAST_PX / max(height, width)))
    cells = _to_bytes(images).repeat(times, 1).repeat(times, 2)
    height, width = times * height, times * width
    step_y, step_x = height + _GAP_PX, width + _GAP_PX
    grid = np.full((rows * step_y + _GAP_PX, columns * step_x + _GAP_PX, 3), 255, np.uint8)
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        top, left = row * step_y + _GAP_PX, column * step_x + _GAP_PX
        grid[top : top + height, left : left + width] = cell
    return grid


def publish(trainer: Trainer, key: str, picture: Bytes, path: Path) -> None:
    """Write a picture [H, W, 3] and pass it to the loggers that accept pictures."""
    write_png(path, picture)
    step = count_logged_steps(trainer)
    for logger in trainer.loggers:
        _log_picture(logger, key, picture, step)


def _log_picture(logger: Logger, key: str, picture: Bytes, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(key, picture, step, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, picture, key=key.replace("/", "_"), step=step)
    elif isinstance(logger, CometLogger):
        logger.experiment.log_image(picture, name=key, step=step)
    elif isinstance(logger, TakesPictures):
        logger.log_image(key, [picture], step=step)


def hand_over_file(trainer: Trainer, path: Path) -> None:
    """Pass a written picture to the loggers that accept pictures, under its file's name."""
    import cv2

    if path.is_file() and any(_takes_pictures(logger) for logger in trainer.loggers):
        picture = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        for logger in trainer.loggers:
            _log_picture(logger, path.stem, picture, count_logged_steps(trainer))


def hand_over_table(trainer: Trainer, key: str, values: Mapping[str, float]) -> None:
    """Pass named figures to the loggers that accept tables."""
    figures = {name: float(value) for name, value in values.items()}
    if not figures:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):  # it takes Markdown
            lines = ["| name | value |", "|---|---|"]
            lines += [f"| {name} | {value:.4g} |" for name, value in figures.items()]
            logger.experiment.add_text(key, "\n".join(lines), count_logged_steps(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_dict(logger.run_id, figures, f"{key}.json")
        elif isinstance(logger, CometLogger):
            headers = ["name", "value"]
            logger.experiment.log_table(f"{key}.csv", [*figures.items()], headers=headers)
        elif isinstance(logger, TakesTables):
            rows = [[name, value] for name, value in figures.items()]
            logger.log_table(key, columns=["name", "value"], data=rows)


def _takes_pictures(logger: Logger) -> bool:
    return isinstance(logger, TensorBoardLogger | MLFlowLogger | CometLogger | TakesPictures)


def _to_bytes(images: Tensor) -> Bytes:
    """Return images [N, C, H, W] in 0..1 as [N, H, W, 3] uint8."""
    colours = images if images.shape[1] == 3 else images[:, :1].expand(-1, 3, -1, -1)
    levels = (colours.clamp(0, 1) * 255).round().byte()
    channels_last: Bytes = levels.permute(0, 2, 3, 1).numpy()
    return channels_last
