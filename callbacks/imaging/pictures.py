"""Grids of images as files, and for the loggers that take pictures."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from numpy.typing import NDArray
from torch import Tensor

from lit_data.io.images.writing import write_png
from lit_data.lightning_internals import count_logged_steps

_GAP_PX: Final = 2
_LEAST_PX: Final = 64
"""Side of a cell: smaller images are enlarged, pixel by pixel."""


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


def draw_grid(images: Tensor, *, columns: int | None = None) -> NDArray[np.uint8]:
    """Return images side by side, row by row, on white.

    Args:
        images: [N, C, H, W] in 0..1 with one or three channels; of more the first is shown.
        columns: How many in a row; by default as many as rows, or a little more.

    Returns:
        [H, W, 3] uint8.
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


def publish(trainer: L.Trainer, key: str, picture: NDArray[np.uint8], path: Path) -> None:
    """Write a picture [H, W, 3] and hand it to the loggers that take pictures."""
    write_png(path, picture)
    step = count_logged_steps(trainer)
    for logger in trainer.loggers:
        _log_picture(logger, key, picture, step)


def _log_picture(logger: Logger, key: str, picture: NDArray[np.uint8], step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(key, picture, step, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_image(logger.run_id, picture, key=key.replace("/", "_"), step=step)
    elif isinstance(logger, TakesPictures):
        logger.log_image(key, [picture], step=step)


def hand_over_file(trainer: L.Trainer, path: Path) -> None:
    """Hand a picture that was written to the loggers that take pictures, by its file's name."""
    import cv2

    if path.is_file() and any(_takes_pictures(logger) for logger in trainer.loggers):
        picture = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        for logger in trainer.loggers:
            _log_picture(logger, path.stem, picture, count_logged_steps(trainer))


def hand_over_table(trainer: L.Trainer, key: str, values: Mapping[str, float]) -> None:
    """Hand named figures to the loggers that take tables."""
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
        elif isinstance(logger, TakesTables):
            rows = [[name, value] for name, value in figures.items()]
            logger.log_table(key, columns=["name", "value"], data=rows)


def _takes_pictures(logger: Logger) -> bool:
    return isinstance(logger, TensorBoardLogger | MLFlowLogger | TakesPictures)


def _to_bytes(images: Tensor) -> NDArray[np.uint8]:
    """Return images [N, C, H, W] in 0..1 as [N, H, W, 3] uint8."""
    colours = images if images.shape[1] == 3 else images[:, :1].expand(-1, 3, -1, -1)
    levels = (colours.clamp(0, 1) * 255).round().byte()
    channels_last: NDArray[np.uint8] = levels.permute(0, 2, 3, 1).numpy()
    return channels_last
