"""Pictures of batches that nothing is known of but that they may hold images."""

import logging
from pathlib import Path

import numpy as np
from torch import Tensor

from lit_data.commands.figures import CELL_INCHES, new_axes, save_figure
from lit_data.commands.gan_pictures import show_pixels
from lit_data.types import Batch

log = logging.getLogger(__name__)


def draw_plain_samples(batch: Batch, path: Path, title: str, *, count: int) -> list[int]:
    """Draw the images of a finished batch on the host in one row.

    Args:
        batch: Any; images are looked for under ``image`` [B, C, H, W], in 0..1.
        path: The PNG to write.
        title: Of the picture.
        count: Samples of the picture.

    Returns:
        Which samples are shown; none if there are no images.
    """
    images = batch.get("image") if isinstance(batch, dict) else None
    if not isinstance(images, Tensor) or images.ndim != 4:
        log.info("no %s: the batch has no image [B, C, H, W]", path.name)
        return []
    rows: list[int] = np.unique(np.linspace(0, len(images) - 1, min(len(images), count)).astype(np.int64)).tolist()
    figure, axes = new_axes(1, len(rows), CELL_INCHES + 0.5)
    for cell, row in zip(axes[0], rows, strict=True):
        show_pixels(cell, images[row].float())
    save_figure(figure, path, title, ())
    return rows
