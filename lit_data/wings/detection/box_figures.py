"""Images with their boxes, in cells of figures and painted into pixels."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from lit_data.core.types import Array, Batch
from lit_data.predict.cells import show_pixels
from lit_data.predict.figures import (
    CELL_INCHES,
    FALSE_COLOUR,
    FOUND_COLOUR,
    TRUE_COLOUR,
    new_axes,
    stretch,
)
from lit_data.wings.detection.model.scores import match_objects

COLUMNS = 3
INCHES = 2 * CELL_INCHES  # of an image: objects may be small
_PAIRS = 2  # in a row
_NAME_HEIGHT = 0.03  # of a picture
_COLOURS = matplotlib.colormaps["tab10"]
FOUND_LABELS = {"found": FOUND_COLOUR, "missed": TRUE_COLOUR, "false alarm": FALSE_COLOUR}
"""Colors of boxes that are compared with labels."""


class Boxes(NamedTuple):
    """Objects of one image.

    Attributes:
        corners: [n, 4] (left, top, right, bottom) px.
        classes: [n] int64.
        scores: [n] float32 in 0..1; empty for labeled boxes.
    """

    corners: Tensor
    classes: Tensor
    scores: Tensor


NO_BOXES = Boxes(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0))


def find_true(batch: Batch, row: int, key: str = "boxes") -> Boxes:
    """Return the true boxes, or the ``ignored`` regions, of one sample of a finished batch."""
    height, width = batch["image"].shape[-2:]
    boxes = batch[key][batch[key][:, 0] == row]
    # A row of boxes is (sample, class, cx, cy, w, h), the last four in fractions of the image.
    centre = boxes[:, 2:4]
    half_size = boxes[:, 4:] / 2
    corners = torch.cat((centre - half_size, centre + half_size), dim=1)
    corners_px = corners * torch.tensor([width, height, width, height])
    return Boxes(corners_px, boxes[:, 1].long(), boxes.new_empty(0))


def compare_boxes(predicted: Boxes, true: Boxes, ignored: Boxes) -> tuple[Boxes, Tensor, Tensor]:
    """Sort predicted boxes by descending score, and compare them with the labels by `match_objects`.

    Returns:
        The sorted boxes, a mask of the missed true boxes, and a mask of the predicted false alarms.
    """
    order = predicted.scores.argsort(descending=True, stable=True)
    ranked = Boxes(*(part[order] for part in predicted))
    objects = []
    for boxes in (ranked, true, ignored):
        objects.append({"boxes": boxes.corners, "classes": boxes.classes})
    return ranked, *match_objects(*objects)


def paint_boxes(pixels: Array, boxes: Boxes, names: Sequence[str]) -> Array:
    """Return a copy of a stored image with its objects drawn into it: [H, W, 3] uint8."""
    import cv2

    painted = np.ascontiguousarray(np.moveaxis(stretch(pixels), 0, -1))
    for corners, kind, name in _name_boxes(boxes, names):
        left, top, right, bottom = np.rint(corners).astype(np.int64).tolist()
        colour = [round(255 * part) for part in _COLOURS(kind % 10)[:3]]
        # OpenCV includes its second corner; right and bottom of a box are one behind its last
        # pixel.
        last_pixel = (max(left, right - 1), max(top, bottom - 1))
        cv2.rectangle(painted, (left, top), last_pixel, colour, 1)
        origin = (left, max(8, top - 2))  # below the upper edge of the image
        cv2.putText(
            painted,
            name,
            origin,
            cv2.FONT_HERSHEY_SIMPLEX,
            0.3,
            colour,
            1,
            cv2.LINE_AA,
        )
    return painted


def open_cells(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """Return at least `count` cells in rows; extra cells are invisible."""
    rows = -(-count // columns)
    figure, axes = new_axes(rows, columns, INCHES * rows + 0.7, width_inches=INCHES * columns)
    cells = cast(list[Axes], list(axes.flat))
    for cell in cells[count:]:
        cell.set_visible(False)
    return figure, cells


def open_pairs(count: int, titles: tuple[str, str]) -> tuple[Figure, list[Axes]]:
    """Return two cells side by side for each of `count` samples, with a title over each column."""
    columns = 2 * min(_PAIRS, count)
    figure, cells = open_cells(2 * count, columns)
    for column, cell in enumerate(cells[:columns]):
        cell.set_title(titles[column % 2], fontsize=10)
    return figure, cells


def show_boxes(cell: Axes, image: Tensor, boxes: Boxes, names: Sequence[str]) -> None:
    """Show an image, [C, H, W] in 0..1, with a rectangle and a name for each box."""
    show_pixels(cell, image)
    colours = [_COLOURS(kind % 10) for kind in boxes.classes.tolist()]
    _outline_boxes(cell, image, boxes, names, colours, text_colour="white")


def show_found(
    cell: Axes, image: Tensor, predicted: Boxes, true: Boxes, ignored: Boxes, names: Sequence[str]
) -> None:
    """Show the objects a model finds in an image, in the colors of `FOUND_LABELS`.

    Args:
        cell: Axes to draw into.
        image: [C, H, W] in 0..1.
        predicted: Boxes found by the model.
        true: Labeled boxes. A predicted box matches one of its class at an IoU of 0.5 or more.
        ignored: Regions in which no box of their class is a false alarm.
        names: Names of the classes.
    """
    show_pixels(cell, image)
    ranked, is_missed, is_false = compare_boxes(predicted, true, ignored)
    missed = Boxes(true.corners[is_missed], true.classes[is_missed], true.scores)
    colours = [FALSE_COLOUR if is_wrong else FOUND_COLOUR for is_wrong in is_false.tolist()]
    _outline_boxes(cell, image, missed, names, [TRUE_COLOUR] * len(missed.classes))
    _outline_boxes(cell, image, ranked, names, colours)


def _outline_boxes(
    cell: Axes,
    image: Tensor,
    boxes: Boxes,
    names: Sequence[str],
    colours: Sequence[Any],
    *,
    text_colour: str = "black",
) -> None:
    """Draw a rectangle and a name for each box, each in its own color."""
    for colour, (corners, _, name) in zip(colours, _name_boxes(boxes, names), strict=True):
        left, top = outline_box(cell, corners, colour)
        frame = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
        # Above the box, or inside it at the top of the image, where the name would be cut off.
        side = "bottom" if top > _NAME_HEIGHT * image.shape[-2] else "top"
        left, top = max(left, -0.5), max(top, -0.5)
        cell.text(left, top, name, fontsize=6, color=text_colour, va=side, bbox=frame, clip_on=True)


def outline_box(cell: Axes, corners: Sequence[float] | Array, colour: Any) -> tuple[float, float]:  # noqa: ANN401 - any of Matplotlib's
    """Draw a rectangle around (left, top, right, bottom) px; return left and top in the cell."""
    # Matplotlib puts the centers of pixels at whole numbers, boxes put their corners there.
    left, top, right, bottom = (float(edge) - 0.5 for edge in corners)
    rectangle = Rectangle(
        (left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.2
    )
    cell.add_patch(rectangle)
    return left, top


def _name_boxes(boxes: Boxes, names: Sequence[str]) -> Iterator[tuple[list[float], int, str]]:
    """Yield the corners, class and text of each box.

    A class that the dataset does not have is shown by its number; true boxes have no score.
    """
    corners = boxes.corners.tolist()
    scores = boxes.scores.tolist()
    for number, kind in enumerate(boxes.classes.tolist()):
        name = names[kind] if kind < len(names) else str(kind)
        score = f" {scores[number]:.2f}" if scores else ""
        yield corners[number], kind, f"{name}{score}"
