"""Pictures of images with boxes, for what a detection datamodule gives and what a detector finds."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import lightning as L
import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from lit_data.commands.answers import read_classes
from lit_data.commands.before_after import draw_before_after
from lit_data.commands.figures import CELL_INCHES, new_axes, save_figure
from lit_data.datamodules import DetectionDataModule
from lit_data.types import Array, Batch, Stage

_COLUMNS: Final = 3
_PAIRS: Final = 2  # in a row
_COLOURS: Final = matplotlib.colormaps["tab10"]
_INCHES: Final = 2 * CELL_INCHES  # of an image: objects may be small


class Boxes(NamedTuple):
    """Objects of one image.

    Attributes:
        corners: [n, 4] (left, top, right, bottom) px.
        classes: [n] int64.
        scores: [n] float32 in 0..1; empty for boxes that no model has found.
    """

    corners: Tensor
    classes: Tensor
    scores: Tensor


def draw_box_samples(datamodule: DetectionDataModule, batch: Batch, path: Path, title: str, *, count: int) -> list[int]:
    """Draw samples as the model sees them, with their boxes; those with the most boxes come first.

    Args:
        datamodule: Its classes name the boxes.
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most samples of it.

    Returns:
        Which samples of the batch are shown.
    """
    rows: list[int] = torch.argsort(batch["boxes_count"], descending=True, stable=True)[:count].tolist()
    figure, cells = _open_cells(len(rows), min(_COLUMNS, len(rows)))
    for cell, row in zip(cells, rows, strict=False):
        _show_boxes(cell, batch["image"][row], find_true(batch, row), datamodule.classes)
        cell.set_title(Path(str(batch["path"][row])).name[-32:], fontsize=8)
    save_figure(figure, path, title, ())
    return rows


def draw_found_boxes(
    datamodule: DetectionDataModule, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
) -> bool:
    """Draw samples with their own boxes beside those that a model finds.

    Args:
        datamodule: Its classes name the boxes.
        model: A module whose `predict_step` returns `DetectionModule.predict_step`'s list of dicts.
        batch: A finished batch on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most samples of it.

    Returns:
        Whether it was drawn: the module may return something else.
    """
    images = batch["image"][:count]
    found = _find(model, datamodule.slice_batch(batch, 0, count) if len(batch["image"]) > count else batch)
    if found is None:
        return False
    figure, cells = _open_pairs(len(images), ("boxes of the set", "found"))
    for row, (image, objects) in enumerate(zip(images, found, strict=True)):
        truth, answer = cells[2 * row : 2 * row + 2]
        truth.set_ylabel(Path(str(batch["path"][row])).name[-24:], fontsize=8)
        _show_boxes(truth, image, find_true(batch, row), datamodule.classes)
        _show_boxes(answer, image, objects, datamodule.classes)
    save_figure(figure, path, title, ())
    return True


def draw_augmented_boxes(
    datamodule: DetectionDataModule, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
) -> bool:
    """Draw samples before and after augmentation; see `draw_before_after`."""

    def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
        _show_boxes(cells[0], batch["image"][row], find_true(batch, row), datamodule.classes)

    return draw_before_after(datamodule, planned, rows, path, stage=stage, show=show, cell_inches=_INCHES)


def find_true(batch: Batch, row: int) -> Boxes:
    """The boxes that a finished batch holds of one of its samples."""
    height, width = batch["image"].shape[-2:]
    own = batch["boxes"][batch["boxes"][:, 0] == row]
    centre, half = own[:, 2:4], own[:, 4:] / 2
    corners = torch.cat((centre - half, centre + half), dim=1) * torch.tensor([width, height, width, height])
    return Boxes(corners, own[:, 1].long(), own.new_empty(0))


def read_objects(outputs: Any) -> list[Boxes] | None:  # noqa: ANN401 - what a user's predict_step returns
    """What a `predict_step` returned, on the host; none if it is no list with boxes, classes and scores.

    ``labels`` in place of ``classes`` count from 1, as torchvision's do.
    """
    if not isinstance(outputs, list) or not all(isinstance(part, dict) for part in outputs):
        return None
    kinds = [read_classes(part) for part in outputs]
    if not all(
        kind is not None and {"boxes", "scores"} <= part.keys() for kind, part in zip(kinds, outputs, strict=True)
    ):
        return None
    return [
        Boxes(part["boxes"].float().cpu(), cast(Tensor, kind).long().cpu(), part["scores"].float().cpu())
        for part, kind in zip(outputs, kinds, strict=True)
    ]


def draw_surest(images: Sequence[tuple[str, Array, Boxes]], names: Sequence[str], path: Path) -> None:
    """Draw a few images with the objects found in them.

    Args:
        images: For each its name, [3, H, W] uint8 pixels, and its objects in these.
        names: Of the classes.
        path: The PNG to write.
    """
    figure, cells = _open_cells(len(images), min(_COLUMNS, len(images)))
    for cell, (name, pixels, boxes) in zip(cells, images, strict=False):
        _show_boxes(cell, torch.from_numpy(pixels / np.float32(255)), boxes, names)
        cell.set_title(f"{name[-32:]}: {len(boxes.classes)} objects", fontsize=8)
    save_figure(figure, path, "images with the surest objects", ())


def paint_boxes(pixels: Array, boxes: Boxes, names: Sequence[str]) -> Array:
    """A copy of an image, [3, H, W] uint8, with its objects drawn into it."""
    import cv2

    painted = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    for corners, kind, name in _name_boxes(boxes, names):
        left, top, right, bottom = np.rint(corners).astype(np.int64).tolist()
        colour = [round(255 * part) for part in _COLOURS(kind % 10)[:3]]
        cv2.rectangle(painted, (left, top), (max(left, right - 1), max(top, bottom - 1)), colour, 1)
        cv2.putText(painted, name, (left, max(8, top - 2)), cv2.FONT_HERSHEY_SIMPLEX, 0.3, colour, 1, cv2.LINE_AA)
    return np.moveaxis(painted, -1, 0)


@torch.no_grad()
def _find(model: L.LightningModule, batch: Batch) -> list[Boxes] | None:
    training = model.training
    model.eval()
    moved = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    outputs = model.predict_step(moved, 0)
    model.train(training)
    return read_objects(outputs)


def _open_cells(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    """At least `count` cells in rows; those beyond it are not seen."""
    rows = -(-count // columns)
    figure, axes = new_axes(rows, columns, _INCHES * rows + 0.7, width_inches=_INCHES * columns)
    cells = cast(list[Axes], list(axes.flat))
    for cell in cells[count:]:
        cell.set_visible(False)
    return figure, cells


def _open_pairs(count: int, titles: tuple[str, str]) -> tuple[Figure, list[Axes]]:
    """Two cells side by side for each of `count` samples, with a title over each column."""
    figure, cells = _open_cells(2 * count, 2 * min(_PAIRS, count))
    for place, cell in enumerate(cells[: 2 * min(_PAIRS, count)]):
        cell.set_title(titles[place % 2], fontsize=10)
    return figure, cells


def _show_boxes(cell: Axes, image: Tensor, boxes: Boxes, names: Sequence[str]) -> None:
    """[3, H, W] in 0..1, and a rectangle with the name for each box."""
    cell.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
    for corners, kind, name in _name_boxes(boxes, names):
        left, top, right, bottom = (edge - 0.5 for edge in corners)  # whole numbers are the centres of pixels here
        colour = _COLOURS(kind % 10)
        cell.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.2))
        frame = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
        cell.text(left, top, name, fontsize=6, color="white", va="bottom", bbox=frame, clip_on=True)


def _name_boxes(boxes: Boxes, names: Sequence[str]) -> Iterator[tuple[list[float], int, str]]:
    """Corners, class and text of each box; a class that the set does not know has its number for a name."""
    scores = [f" {score:.2f}" for score in boxes.scores.tolist()] or [""] * len(boxes.classes)
    for corners, kind, score in zip(boxes.corners.tolist(), boxes.classes.tolist(), scores, strict=True):
        yield corners, kind, f"{names[kind] if kind < len(names) else kind}{score}"
