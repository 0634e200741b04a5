"""Pictures of what a generative model makes, beside what it learns from."""

from pathlib import Path
from typing import Final

import lightning as L
from matplotlib.axes import Axes
from torch import Tensor

from lit_data.callbacks.imaging.pictures import draw_grid
from lit_data.callbacks.imaging.sampling import SweepsViews, sample, sweep, turns
from lit_data.commands.figures import new_axes, save_figure
from lit_data.types import Batch

SEED: Final = 0
OBJECTS: Final = 4
"""Objects that are shown from all sides."""
_PANEL_INCHES: Final = 5.0
_TITLE_INCHES: Final = 0.3


def draw_generated(
    model: L.LightningModule, batch: Batch, poses: Tensor | None, path: Path, title: str, *, count: int
) -> None:
    """Draw real images beside generated ones, and below some generated objects from all sides.

    Args:
        model: A module with `sample_images`, and `sweep_views` for the sides.
        batch: A finished batch of real images, on the host.
        poses: [V, 2] rad of the sides; none shows none.
        path: The PNG to write.
        title: Of the picture.
        count: Images along each side of a panel, at most.

    """
    real = batch["image"][: count * count]
    generated = sample(model, len(real), seed=SEED, batch_size=len(real))
    views = sweep_objects(model, poses, OBJECTS, seed=SEED)
    below_inches = 0.0 if views is None else 2 * _PANEL_INCHES * len(views) / views.shape[1] + _TITLE_INCHES
    figure, axes = new_axes(
        1 if views is None else 2, 2, _PANEL_INCHES + below_inches + 2 * _TITLE_INCHES, width_inches=2 * _PANEL_INCHES
    )
    for cell, name, images in zip(axes[0], ("real", "generated"), (real, generated), strict=True):
        _show(cell, images, name)
    if views is not None:
        grid = axes[1, 0].get_gridspec()
        grid.set_height_ratios((_PANEL_INCHES, below_inches))
        for cell in axes[1]:
            cell.remove()
        wide = figure.add_subplot(grid[1, :], xticks=[], yticks=[])
        _show(wide, views.flatten(0, 1), "generated objects from all sides", columns=views.shape[1])
    save_figure(figure, path, title, ())


def sweep_objects(model: L.LightningModule, poses: Tensor | None, count: int, *, seed: int) -> Tensor | None:
    """Objects from all sides, [count, V, C, H, W] in 0..1; none where the model or the data know no sides."""
    if poses is None or not isinstance(model, SweepsViews):
        return None
    views = sweep(model, count, poses, seed=seed)
    return views if turns(views) else None


def _show(cell: Axes, images: Tensor, name: str, *, columns: int | None = None) -> None:
    cell.imshow(draw_grid(images, columns=columns), interpolation="nearest")
    cell.set_title(name, fontsize=10)
