"""Objects that a detector missed, and its false alarms, in labeled images."""

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.annotations.labels import LabelTable
from lit_data.core.types import Ints
from lit_data.images.bank import ImageBank
from lit_data.predict.cells import show_stored
from lit_data.predict.figures import CELL_INCHES, TRUE_COLOUR, new_axes, save_figure, shorten_name
from lit_data.wings.detection.box_figures import Boxes, compare_boxes, outline_box
from lit_data.wings.detection.windows import part_boxes

SHOWN = 6
_LEAST_PX = 48.0
_AROUND = 3.0  # side of the shown window, in sides of the box


class BoxError(NamedTuple):
    """An object that was missed, or a false alarm.

    Attributes:
        image: Number of the image.
        corners: (left, top, right, bottom) px in the image on the disk.
        kind: Number of the class.
        score: Score of a false alarm; 0 for a missed object.
    """

    image: int
    corners: tuple[float, ...]
    kind: int
    score: float

    @property
    def area_px(self) -> float:
        """Area of the box."""
        left, top, right, bottom = self.corners
        return (right - left) * (bottom - top)


class BoxErrors:
    """Misses and false alarms of many images at IoU 0.5, see `BoxScores`.

    Args:
        labels: Boxes of all images.
        sizes_px: [I, 2] (height, width) of the images on the disk.

    Attributes:
        missed: Labeled objects without a matching detection.
        false_alarms: Detections that match no object of their class and are in no ignored region.
    """

    def __init__(self, labels: LabelTable, sizes_px: Ints) -> None:
        self._labels = labels
        self._sizes_px = sizes_px
        self.missed: list[BoxError] = []
        self.false_alarms: list[BoxError] = []

    def add(self, image: int, detections: Boxes) -> None:
        """Compare the detections of an image with its labels, in px of the image on the disk."""
        marked = []
        for boxes in part_boxes(self._labels.of(image), self._sizes_px[image]):
            corners, classes = torch.from_numpy(boxes.corners), torch.from_numpy(boxes.classes)
            marked.append(Boxes(corners, classes, torch.zeros(len(classes))))
        true, ignored = marked
        ranked, is_missed, is_false = compare_boxes(detections, true, ignored)
        self.missed += _list_errors(image, true, is_missed)
        self.false_alarms += _list_errors(image, ranked, is_false)

    def draw(self, bank: ImageBank, names: Sequence[str], path: Path) -> None:
        """Draw the largest missed objects, and below them the false alarms with the highest scores.

        Args:
            bank: Stored images.
            names: Names of the images.
            path: Path of the picture; without errors, nothing is drawn.
        """
        missed = sorted(self.missed, key=lambda error: -error.area_px)[:SHOWN]
        alarms = sorted(self.false_alarms, key=lambda error: -error.score)[:SHOWN]
        columns = max(len(missed), len(alarms))
        if not columns:
            return
        rows = [errors for errors in (missed, alarms) if errors]
        figure, axes = new_axes(len(rows), columns, len(rows) * (CELL_INCHES + 0.6))
        for cells, errors in zip(axes, rows, strict=True):
            for cell in cells[len(errors) :]:
                cell.set_axis_off()
            for cell, error in zip(cells, errors, strict=False):
                self._show(cell, error, bank)
                score = f" {error.score:.2f}" if error.score else " missed"
                name = shorten_name(PurePath(names[error.image]).name)
                cell.set_title(f"{self._labels.classes[error.kind]}{score}\n{name}", fontsize=7)
        title = (
            "the largest missed objects, and below the false alarms (white) with the highest scores"
        )
        save_figure(figure, path, title, ("true box",))

    def _show(self, cell: Any, error: BoxError, bank: ImageBank) -> None:  # noqa: ANN401 - Axes
        """Show the surroundings of an error, with the true boxes there."""
        image = bank[error.image]
        scale = np.tile(image.shape[2:0:-1] / self._sizes_px[error.image][::-1], 2)
        left, top, right, bottom = error.corners * scale
        side = int(max(_LEAST_PX, _AROUND * (right - left), _AROUND * (bottom - top)))
        # In small images and near edges, the window is clipped to the image.
        height, width = (min(side, length) for length in image.shape[1:])
        y = int(np.clip((top + bottom - height) / 2, 0, image.shape[1] - height))
        x = int(np.clip((left + right - width) / 2, 0, image.shape[2] - width))
        show_stored(cell, image[:, y : y + height, x : x + width])
        objects, _ = part_boxes(self._labels.of(error.image), self._sizes_px[error.image])
        for corners in objects.corners * scale - [x, y, x, y]:
            outline_box(cell, corners, TRUE_COLOUR)
        if error.score:
            outline_box(cell, np.array([left - x, top - y, right - x, bottom - y]), "white")
        cell.set_xlim(-0.5, width - 0.5)
        cell.set_ylim(height - 0.5, -0.5)


def _list_errors(image: int, boxes: Boxes, is_error: Tensor) -> list[BoxError]:
    errors = []
    for number in is_error.nonzero().flatten().tolist():
        corners = tuple(boxes.corners[number].tolist())
        kind = int(boxes.classes[number])
        errors.append(BoxError(image, corners, kind, float(boxes.scores[number])))
    return errors
