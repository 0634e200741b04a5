"""Samples before and after augmentation, side by side."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from lit_data.commands.figures import CELL_INCHES, new_axes, save_figure
from lit_data.datamodules.base import BaseDataModule
from lit_data.types import Batch, Stage

ShowSample = Callable[[Sequence[Axes], Batch, int], None]
"""Fills one cell for each column with a sample of a batch."""


def draw_before_after(
    datamodule: BaseDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
    show: ShowSample,
    columns: Sequence[str] = ("",),
    cell_inches: float = CELL_INCHES,
) -> bool:
    """Draw samples before and after augmentation.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch on the host.
        rows: Which of its samples.
        path: The PNG to write.
        stage: Whose samples.
        show: Fills the cells of a sample.
        columns: Titles of these.
        cell_inches: Side of a cell.

    Returns:
        Whether it was drawn: the stage may have no augmentation.
    """
    before, after = datamodule.inspect(stage).draw(planned), datamodule.finish_batch(planned, stage)
    if before is None:
        return False
    titles = [f"{name} {moment}".strip() for moment in ("before", "after") for name in columns]
    size_inches = cell_inches * len(rows) + 0.7, cell_inches * len(titles)
    figure, axes = new_axes(len(rows), len(titles), size_inches[0], width_inches=size_inches[1])
    for cell, title in zip(axes[0], titles, strict=True):
        cell.set_title(title, fontsize=10)
    for cells, row in zip(axes.tolist(), rows, strict=True):
        for first, batch in ((0, before), (len(columns), after)):
            show(cells[first : first + len(columns)], batch, row)
    save_figure(figure, path, f"{stage} samples before and after augmentation", ())
    return True
