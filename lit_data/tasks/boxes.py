"""Images with boxes: what a detection datamodule gives, and what a detector finds, drawn and written."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar, Final, NamedTuple, cast

import lightning as L
import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules import DetectionDataModule
from lit_data.errors import ConfigError
from lit_data.files import write_text
from lit_data.io.images.writing import write_image
from lit_data.tasks.answers import ask_step, read_classes
from lit_data.tasks.base import Task, register
from lit_data.tasks.figures import CELL_INCHES, draw_before_after, new_axes, save_figure
from lit_data.tasks.options import PredictOptions, PredictRun
from lit_data.tasks.writer import BankWriter, Entry, Written
from lit_data.types import Array, Batch, Stage

log = logging.getLogger(__name__)


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


@register(DetectionDataModule)
class BoxTask(Task[DetectionDataModule]):
    """Images with their boxes."""

    predicts = "list of objects"
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    trained_data = ("classes", "read", "size_px")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_box_samples(self.datamodule, batch, path, title, count=count)

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        return draw_found_boxes(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        draw_augmented_boxes(self.datamodule, planned, shown, path, stage=stage)

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "BoxWriter":
        options.refuse("images with boxes", *self.unused)
        return BoxWriter(
            self.datamodule,
            run.folder,
            threshold=options.least_score,
            min_area_px=options.min_area_px,
        )


def draw_box_samples(
    datamodule: DetectionDataModule, batch: Batch, path: Path, title: str, *, count: int
) -> list[int]:
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
    rows: list[int] = torch.argsort(batch["boxes_count"], descending=True, stable=True)[
        :count
    ].tolist()
    figure, cells = _open_cells(len(rows), min(_COLUMNS, len(rows)))
    for cell, row in zip(cells, rows, strict=False):
        _show_boxes(cell, batch["image"][row], find_true(batch, row), datamodule.classes)
        cell.set_title(Path(str(batch["path"][row])).name[-32:], fontsize=8)
    save_figure(figure, path, title, ())
    return rows


def draw_found_boxes(
    datamodule: DetectionDataModule,
    model: L.LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
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
    own = datamodule.slice_batch(batch, 0, count) if len(batch["image"]) > count else batch
    found = read_objects(ask_step(model, own))
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
    datamodule: DetectionDataModule,
    planned: Batch,
    rows: Sequence[int],
    path: Path,
    *,
    stage: Stage,
) -> bool:
    """Draw samples before and after augmentation; see `draw_before_after`."""

    def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
        _show_boxes(cells[0], batch["image"][row], find_true(batch, row), datamodule.classes)

    return draw_before_after(
        datamodule, planned, rows, path, stage=stage, show=show, cell_inches=_INCHES
    )


def find_true(batch: Batch, row: int) -> Boxes:
    """The boxes that a finished batch holds of one of its samples."""
    height, width = batch["image"].shape[-2:]
    own = batch["boxes"][batch["boxes"][:, 0] == row]
    centre, half = own[:, 2:4], own[:, 4:] / 2
    corners = torch.cat((centre - half, centre + half), dim=1) * torch.tensor(
        [width, height, width, height]
    )
    return Boxes(corners, own[:, 1].long(), own.new_empty(0))


def read_objects(outputs: Any) -> list[Boxes] | None:  # noqa: ANN401 - what a user's predict_step returns
    """Return the answer of a `predict_step` on the host.

    None if it is no list with boxes, classes and scores.

    ``labels`` in place of ``classes`` count from 1, as torchvision's do.
    """
    if not isinstance(outputs, list) or not all(isinstance(part, dict) for part in outputs):
        return None
    kinds = [read_classes(part) for part in outputs]
    if not all(
        kind is not None and {"boxes", "scores"} <= part.keys()
        for kind, part in zip(kinds, outputs, strict=True)
    ):
        return None
    return [
        Boxes(
            part["boxes"].float().cpu(),
            cast(Tensor, kind).long().cpu(),
            part["scores"].float().cpu(),
        )
        for part, kind in zip(outputs, kinds, strict=True)
    ]


def draw_surest(
    images: Sequence[tuple[str, Array, Boxes]], names: Sequence[str], path: Path
) -> None:
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
        cv2.putText(
            painted,
            name,
            (left, max(8, top - 2)),
            cv2.FONT_HERSHEY_SIMPLEX,
            0.3,
            colour,
            1,
            cv2.LINE_AA,
        )
    return np.moveaxis(painted, -1, 0)


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
        left, top, right, bottom = (
            edge - 0.5 for edge in corners
        )  # whole numbers are the centres of pixels here
        colour = _COLOURS(kind % 10)
        cell.add_patch(
            Rectangle(
                (left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.2
            )
        )
        frame = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
        cell.text(left, top, name, fontsize=6, color="white", va="bottom", bbox=frame, clip_on=True)


def _name_boxes(boxes: Boxes, names: Sequence[str]) -> Iterator[tuple[list[float], int, str]]:
    """Corners, class and text of each box; a class that the set does not know has its number for a name."""
    scores = [f" {score:.2f}" for score in boxes.scores.tolist()] or [""] * len(boxes.classes)
    for corners, kind, score in zip(
        boxes.corners.tolist(), boxes.classes.tolist(), scores, strict=True
    ):
        yield corners, kind, f"{names[kind] if kind < len(names) else kind}{score}"


_SHOWN: Final = 6


class BoxWriter(BankWriter):
    """Writes the objects of each image as soon as they are found.

    Into the folder go ``labels/<image>.txt`` (YOLO text with the score behind each box),
    ``pictures/<image>.png`` (the image as the model sees it, without the grey around it),
    ``detections.json`` (COCO, with scores; px of the image on the disk) and ``predictions.png``
    with the images that hold the surest objects.

    Args:
        datamodule: The images.
        folder: Where to write.
        threshold: Least score.
        min_area_px: Smallest area of a box, in the image on the disk.
    """

    expects = (
        "a list with a dict for each image: boxes [n, 4] px (left, top, right, bottom), "
        "classes [n] and scores [n]"
    )

    def __init__(
        self, datamodule: DetectionDataModule, folder: Path, *, threshold: float, min_area_px: int
    ) -> None:
        self._dataset = datamodule.dataset("predict")
        self._classes, root = datamodule.classes, datamodule.source.folder
        self._folder, self._threshold, self._min_area_px = folder, threshold, min_area_px
        bank = self._dataset.bank
        super().__init__(
            bank,
            [PurePath(os.path.relpath(bank.name(n), root)).as_posix() for n in range(len(bank))],
        )

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[Boxes] | None:
        found = read_objects(outputs)
        for boxes in found or ():
            if len(boxes.classes) and int(boxes.classes.max()) >= len(self._classes):
                raise ConfigError(
                    f"the model finds class {int(boxes.classes.max())}, and the set has {len(self._classes)}, from 0: "
                    "set model.net.classes to that, and train again"
                )
        return found

    @override
    def write(self, number: int, answer: Boxes, seconds: float) -> Written:
        originals = self._dataset.find_originals(
            answer.corners.double().numpy(), np.full(len(answer.classes), number, np.int64)
        )
        sides = originals[:, 2:] - originals[:, :2]
        kept = (answer.scores.numpy() >= self._threshold) & (sides > 0).all(1)
        kept &= sides.prod(1) >= self._min_area_px
        originals, classes, scores = (
            originals[kept],
            answer.classes.numpy()[kept],
            answer.scores.numpy()[kept],
        )
        text = self._write_text(number, originals, classes, scores)
        picture = self._folder / "pictures" / PurePath(self.names[number]).with_suffix("")
        picture.parent.mkdir(parents=True, exist_ok=True)
        boxes = self._shrink(number, originals, classes, scores)
        picture = picture.with_name(
            write_image(picture, paint_boxes(self.bank[number], boxes, self._classes))
        )
        rows = _describe(originals, classes, scores)
        return Written([text, picture], rows, float(scores.max(initial=0)))

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self.names)}
        images = [
            {"id": number + 1, "file_name": name, "height": height, "width": width}
            for (name, number), (height, width) in zip(
                numbers.items(), self._dataset.original_px.tolist(), strict=True
            )
        ]
        found = [(numbers[entry.image] + 1, row) for entry in entries for row in entry.rows]
        annotations = [
            {"id": count, "image_id": image, **row} for count, (image, row) in enumerate(found, 1)
        ]
        kinds = [{"id": number + 1, "name": name} for number, name in enumerate(self._classes)]
        table = {"images": images, "annotations": annotations, "categories": kinds}
        write_text(self._folder / "detections.json", json.dumps(table, indent=1))
        log.info("objects: %s", self._folder / "detections.json")
        surest = sorted(entries, key=lambda entry: (-entry.score, numbers[entry.image]))[:_SHOWN]
        if surest:
            shown = [self._read_shown(entry, numbers[entry.image]) for entry in surest]
            draw_surest(shown, self._classes, self._folder / "predictions.png")
        return {
            "predict/images": len(entries),
            "predict/images_with_objects": sum(bool(entry.rows) for entry in entries),
            "predict/objects": len(annotations),
        }

    def _read_shown(self, entry: Entry, number: int) -> tuple[str, Array, Boxes]:
        """Name, pixels, and objects in these, of an image that was written."""
        edges = np.array([row["bbox"] for row in entry.rows], np.float64).reshape(-1, 4)
        edges[:, 2:] += edges[:, :2]
        classes = np.array([row["category_id"] - 1 for row in entry.rows], np.int64)
        scores = np.array([row["score"] for row in entry.rows], np.float32)
        return (
            PurePath(entry.image).name,
            self.bank[number],
            self._shrink(number, edges, classes, scores),
        )

    def _shrink(
        self,
        number: int,
        boxes: NDArray[np.float64],
        classes: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> Boxes:
        """Boxes of the image on the disk in the image as it is stored."""
        scale = np.tile(
            np.array(self.bank[number].shape[:0:-1]) / self._dataset.original_px[number][::-1], 2
        )
        return Boxes(
            torch.from_numpy(boxes * scale), torch.from_numpy(classes), torch.from_numpy(scores)
        )

    def _write_text(
        self,
        number: int,
        boxes: NDArray[np.float64],
        classes: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> Path:
        """``class cx cy w h score`` in shares of the image."""
        shares = boxes / np.tile(self._dataset.original_px[number][::-1], 2)
        rows = np.hstack(
            ((shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2], scores[:, None])
        )
        lines = [
            f"{kind} {' '.join(f'{value:.6f}' for value in row)}\n"
            for kind, row in zip(classes, rows.tolist(), strict=True)
        ]
        path = self._folder / "labels" / PurePath(self.names[number]).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
        return path


def _describe(
    boxes: NDArray[np.float64], classes: NDArray[np.int64], scores: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """The objects of an image as COCO has them, without numbers."""
    parts = zip(boxes.round(3).tolist(), classes.tolist(), scores.tolist(), strict=True)
    return [
        {
            "category_id": kind + 1,
            "bbox": [left, top, round(right - left, 3), round(bottom - top, 3)],
            "area": round((right - left) * (bottom - top), 3),
            "iscrowd": 0,
            "score": round(score, 6),
        }
        for (left, top, right, bottom), kind, score in parts
    ]
