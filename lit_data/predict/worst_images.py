"""Pictures of the images whose scores are farthest from their truth."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from lit_data.core.types import Array
from lit_data.predict.figures import CELL_INCHES, new_axes, save_figure, shorten_name, show_stored
from lit_data.predict.verdict_table import Row, rank_errors, show_row
from lit_inspect.verdicts import DEFECT, GOOD

_WORST = 6  # of each kind
_SHOWN_PX = 600  # no cell shows as many


def draw_worst(rows: Sequence[Row], path: Path, read: Callable[[Row], Array]) -> None:
    """Draw the defective images of the lowest scores above the good ones of the highest.

    Misses and false alarms have titles in red.

    Args:
        rows: Of ``images.csv``, with the truth.
        path: Of the picture.
        read: Returns the pixels of an image, [C, H, W].
    """
    groups = [group[:_WORST] for group in rank_errors(rows) if group]
    columns = max(map(len, groups))
    figure, axes = new_axes(len(groups), columns, len(groups) * (CELL_INCHES + 0.5) + 0.5)
    for cells, group in zip(axes, groups, strict=True):
        for cell in cells[len(group) :]:
            cell.set_axis_off()
        for cell, row in zip(cells, group, strict=False):
            _show(cell, row, read(row))
    title = "defective images of the lowest scores"
    if len(groups) == 2:
        title += ", and below good ones of the highest"
    elif groups[0][0]["truth"] == GOOD:
        title = "good images of the highest scores"
    save_figure(figure, path, title, ())


def _show(cell: Any, row: Row, pixels: Array) -> None:  # noqa: ANN401 - Axes
    step = -(-max(pixels.shape) // _SHOWN_PX)
    show_stored(cell, pixels[:, ::step, ::step])
    is_wrong = (row["truth"], row["verdict"]) in ((DEFECT, GOOD), (GOOD, DEFECT))
    name = shorten_name(PurePath(row["image"]).name)
    title = f"{name}\n{show_row(row)}: {row['verdict']}"
    cell.set_title(title, fontsize=7, color="crimson" if is_wrong else "black")
