"""Pictures of the images whose scores differ most from their truth."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lit_data.core.types import Bytes
from lit_data.predict.figures import CELL_INCHES, new_axes, save_figure, shorten_names
from lit_data.predict.verdict_table import Row, describe_row, is_wrong, rank_errors
from lit_inspect.verdicts import GOOD

WORST = 6  # of each kind
Paint = Callable[[Row], Sequence[Bytes]]
"""Returns the pictures [h, w, 3] of an image, from top to bottom."""


def draw_worst(
    rows: Sequence[Row],
    path: Path,
    paint: Paint,
    *,
    legend: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> None:
    """Draw the defective images with the lowest scores above the good ones with the highest.

    Titles of misses and false alarms are red.

    Args:
        rows: Rows of ``images.csv`` with the truth.
        path: Path of the picture; nothing is drawn if there are no rows.
        paint: Returns the pictures of an image.
        legend: Words and their colors.
    """
    groups = [group[:WORST] for group in rank_errors(rows) if group]
    if not groups:
        return
    painted = [[paint(row) for row in group] for group in groups]
    lines = len(painted[0][0])
    columns = max(map(len, groups))
    shapes = [picture.shape for group in painted for pictures in group for picture in pictures]
    tallest = float(np.median([height / width for height, width, _ in shapes]))
    height_inches = len(groups) * (lines * CELL_INCHES * min(tallest, 2) + 0.5) + 0.6
    figure, axes = new_axes(lines * len(groups), columns, height_inches)
    names = iter(shorten_names([row["image"] for group in groups for row in group]))
    for first, (group, pictures_of) in enumerate(zip(groups, painted, strict=True)):
        cells = axes[lines * first : lines * (first + 1)].T
        for row, pictures, column in zip(group, pictures_of, cells, strict=False):
            _show(column, row, next(names), pictures)
        unused: list[Any] = list(cells[len(group) :].flat)
        for cell in unused:
            cell.set_axis_off()
    title = "defective images with the lowest scores"
    if len(groups) == 2:
        title += ", and below good ones with the highest"
    elif groups[0][0]["truth"] == GOOD:
        title = "good images with the highest scores"
    save_figure(figure, path, title, *legend)


def _show(cells: Sequence[Axes], row: Row, name: str, pictures: Sequence[Bytes]) -> None:
    for cell, picture in zip(cells, pictures, strict=True):
        cell.imshow(picture)
    title = f"{name}\n{describe_row(row)}"
    cells[0].set_title(title, fontsize=7, color="crimson" if is_wrong(row) else "black")
