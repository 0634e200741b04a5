"""Drawing and writing of samples and predictions of images with boxes."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from lightning import LightningModule
from matplotlib.axes import Axes
from typing_extensions import override

from lit_data.annotations.writing import ImageLabels, Labelled
from lit_data.core.errors import ConfigError
from lit_data.core.files import write_text
from lit_data.core.types import Batch, Bytes, Stage
from lit_data.predict.answers import ask_step, check_probabilities, read_classes
from lit_data.predict.figures import save_figure, shorten_name, stretch, write_jpeg
from lit_data.predict.journal import Entry
from lit_data.predict.net_facts import NetFacts
from lit_data.predict.options import ExportRequest, Predicted, PredictOptions, PredictRun, Use
from lit_data.predict.task import Task, choose_strata, draw_before_after
from lit_data.predict.verdict_table import (
    COUNTED_COLUMNS,
    Row,
    VerdictTable,
    describe_row,
    is_wrong,
)
from lit_data.predict.worst_images import draw_worst
from lit_data.predict.writer import BankWriter, Written
from lit_data.wings.detection.box_errors import SHOWN, BoxErrors
from lit_data.wings.detection.box_figures import (
    COLUMNS,
    FOUND_LABELS,
    INCHES,
    NO_BOXES,
    Boxes,
    find_true,
    open_cells,
    open_pairs,
    paint_boxes,
    show_boxes,
    show_found,
)
from lit_data.wings.detection.box_truth import BoxTruth
from lit_data.wings.detection.datamodule import DetectionDataModule
from lit_data.wings.detection.exported_net import describe_boxes
from lit_data.wings.detection.model.module import DetectionModule
from lit_inspect import coco
from lit_inspect.boxes import LEAST_SCORE, Box, Objects, join_windows, score_image
from lit_inspect.counts import counted
from lit_inspect.regions import round_score
from lit_inspect.verdicts import DEFECT, GOOD

log = logging.getLogger(__name__)


class BoxTask(Task[DetectionDataModule]):
    """Task of images with boxes."""

    predicts = "list of objects"
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": {"train": 1.0}}
    trained_data = ("classes", "read", "size_px", "patch_px", "stride_px", "value_range")
    uses = Use.INPUTS | Use.FINDING | Use.VERDICTS | Use.PICTURES

    @property
    @override
    def truth(self) -> BoxTruth:
        return BoxTruth(self.datamodule.files.labels)

    @override
    def list_split(self, split: Stage) -> list[int]:
        return list(self.datamodule.files.splits[split])

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw samples of all classes as the model sees them, with many and with few boxes."""
        strata = []
        for row in range(len(batch["image"])):
            classes = find_true(batch, row).classes
            strata.append(int(classes.mode().values) if len(classes) else -1)
        rows = choose_strata(strata, batch["boxes_count"].tolist(), count, good=-1)
        figure, cells = open_cells(len(rows), min(COLUMNS, len(rows)))
        for cell, row in zip(cells, rows, strict=False):
            self._show_true(cell, batch, row)
            cell.set_title(Path(str(batch["path"][row])).name[-32:], fontsize=8)
        save_figure(figure, path, title, ())
        return rows

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        """Draw samples with their true boxes beside the detections of a model."""
        images = batch["image"]
        # Spread evenly: neighbors in the order of their names are often of one class.
        rows = np.unique(np.linspace(0, len(images) - 1, count).astype(np.int64)).tolist()
        detections = []
        for row in rows:
            sample = self.datamodule.slice_batch(batch, row, row + 1)
            objects = read_objects(ask_step(model, sample))
            if objects is None:
                return False
            detections += objects
        figure, cells = open_pairs(len(rows), ("labeled boxes", "predicted boxes, and missed ones"))
        for pair, (row, boxes) in enumerate(zip(rows, detections, strict=True)):
            true_cell, detected_cell = cells[2 * pair : 2 * pair + 2]
            true_cell.set_ylabel(shorten_name(Path(str(batch["path"][row])).name), fontsize=8)
            self._show_true(true_cell, batch, row)
            ignored = find_true(batch, row, "ignored") if "ignored" in batch else NO_BOXES
            true, names = find_true(batch, row), self.datamodule.classes
            show_found(detected_cell, images[row], boxes, true, ignored, names)
        save_figure(figure, path, title, tuple(FOUND_LABELS), tuple(FOUND_LABELS.values()))
        return True

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        def show(cells: Sequence[Axes], batch: Batch, row: int) -> None:
            self._show_true(cells[0], batch, row)

        draw_before_after(
            self.datamodule, planned, rows, path, stage=stage, show=show, cell_inches=INCHES
        )

    def _show_true(self, cell: Axes, batch: Batch, row: int) -> None:
        image = batch["image"][row]
        show_boxes(cell, image, find_true(batch, row), self.datamodule.classes)

    @override
    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        if isinstance(model, DetectionModule):
            # A little lower, because the writer includes boxes with just this score, and because
            # images are
            # scored by all boxes.
            model.score_threshold = min(LEAST_SCORE, _BELOW * options.least_score)
        return super().predict(model, run, options)

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "BoxWriter":
        self._take_overlap(options)
        return BoxWriter(self.datamodule, self.truth, run, options)

    @override
    def export(self, request: ExportRequest) -> NetFacts:
        self._take_overlap(request.options)
        return describe_boxes(self.datamodule, request)

    def _take_overlap(self, options: PredictOptions) -> None:
        """Cut images into windows with the overlap of the options.

        Raises:
            ConfigError: An option does not apply to boxes.
        """
        uses = self.uses
        if self.datamodule.windows is not None:
            uses |= Use.WINDOWS
            if options.overlap_px is not None:
                self.datamodule.overlap_windows(options.overlap_px)
        options.refuse_unused("images with boxes", uses)
        options.refuse("images with boxes", "image_score_fraction")


def read_objects(outputs: Any) -> list[Boxes] | None:  # noqa: ANN401 - what a user's predict_step returns
    """Return the detections of a `predict_step` on the host, one for each image.

    ``labels`` instead of ``classes`` count from 1, as in torchvision.

    Returns:
        None if the outputs are not a list of dicts with boxes, classes and scores.
    """
    if not isinstance(outputs, list):
        return None
    detections = []
    for objects in outputs:
        if not isinstance(objects, dict) or not {"boxes", "scores"} <= objects.keys():
            return None
        classes = read_classes(objects)
        if classes is None:
            return None
        corners = objects["boxes"].float().cpu()
        scores = objects["scores"].float().cpu()
        detections.append(Boxes(corners, classes.long().cpu(), scores))
    return detections


def read_boxes(outputs: Any, classes: int) -> list[Boxes] | None:  # noqa: ANN401 - as of `read_objects`
    """Return the result of `read_objects` after checking that a writer can use it.

    Args:
        outputs: Outputs of a `predict_step`.
        classes: Number of classes.

    Raises:
        ConfigError: A score is not a probability, a corner is not finite, or a class is unknown.
    """
    detections = read_objects(outputs)
    for boxes in detections or ():
        check_probabilities(boxes.scores)
        if not boxes.corners.isfinite().all():
            raise ConfigError("predict_step returned boxes whose corners are not finite")
        highest_class = max(boxes.classes.tolist(), default=-1)
        if highest_class >= classes:
            raise ConfigError(
                f"the model finds class {highest_class}, but the dataset has {classes}, from 0: "
                "set model.net.classes to that, and train again"
            )
    return detections


_BELOW = 0.999
_SHOWN_PX = 1200


class _Found(NamedTuple):
    """Objects of an image, and its score."""

    boxes: Boxes
    score: float


class BoxWriter(BankWriter):
    """Writes the objects of each image as soon as they are found.

    The folder gets ``labels/<image>.txt`` (YOLO text with the score after each box; the file
    extension of the image is dropped unless another image differs in it alone),
    ``pictures/<image>.jpg`` (the image as the model sees it, without the gray around it),
    ``detections.json`` (COCO, with scores; px of the image on the disk) and ``predictions.png``
    with the images that have the highest scores. If there are labels, ``worst.png`` shows the
    largest missed objects and the false alarms with the highest scores.

    ``images.csv`` has a verdict for each image, see `VerdictTable`. The score of an image is the
    highest score of its boxes, even below the least score of written boxes; ``defects`` counts the
    written boxes. If some images have a box and others have none, ``worst_images.png`` shows the
    worst misses and false alarms among the images.

    Args:
        datamodule: Datamodule of the images.
        truth: Truth of the images, which says whether each shows a defect.
        run: Output folder, and the calibration.
        options: Least score, smallest area of a box in the image on the disk, and the threshold of
            verdicts.
    """

    expects = (
        "a list with a dict for each image: boxes [n, 4] px (left, top, right, bottom), "
        "classes [n] and scores [n]"
    )
    labels = "boxes"

    def __init__(
        self,
        datamodule: DetectionDataModule,
        truth: BoxTruth,
        run: PredictRun,
        options: PredictOptions,
    ) -> None:
        self._dataset = datamodule.dataset("predict")
        self.class_names = datamodule.classes
        self._labels = datamodule.files.labels
        self._folder = run.folder
        self._options = options
        self._table = VerdictTable(truth, datamodule.bank, run, options, expects_good=False)
        self._windows = datamodule.windows.bank if datamodule.windows else None
        bank = datamodule.bank
        self._sizes_px = datamodule.files.sizes_px  # of the images on the disk
        names = []
        for number in range(len(bank)):
            relative_path = os.path.relpath(bank.name(number), datamodule.source.folder)
            names.append(PurePath(relative_path).as_posix())
        super().__init__(bank, names)

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[Boxes] | None:
        return read_boxes(outputs, len(self.class_names))

    @override
    def samples(self, number: int) -> Sequence[int]:
        return (number,) if self._windows is None else self._windows.grid.patches_of(number)

    @override
    def join(self, number: int, answers: Sequence[Boxes]) -> _Found:
        """Return the objects of an image in px of the image on the disk, clipped to it."""
        samples = np.array(self.samples(number), np.int64)
        objects = []
        least = _BELOW * self._options.least_score
        score = 0.0
        for sample, (boxes, classes, scores) in zip(samples, answers, strict=True):
            numbers = np.full(len(classes), sample)
            originals = self._dataset.find_originals(boxes.double().numpy(), numbers)
            in_sample = Objects(originals, classes.numpy(), scores.numpy())
            score = max(score, score_image([in_sample]))
            objects.append(in_sample.take(in_sample.scores >= least))
        joined = objects[0]
        if self._windows is not None:
            frames = self._windows.find_frames(samples)
            joined = join_windows(objects, frames, tuple(self._windows.image_sizes_px[number]))
        return _Found(Boxes(*map(torch.from_numpy, joined)), score)

    @override
    def write(self, number: int, answer: _Found, seconds: float) -> Written:
        boxes = answer.boxes
        corners = boxes.corners  # area and sides count in the image on the disk
        sides_px = corners[:, 2:] - corners[:, :2]
        is_written = (boxes.scores >= self._options.least_score) & (sides_px > 0).all(1)
        is_written &= sides_px.prod(1) >= self._options.min_area_px
        objects = Boxes(corners[is_written], boxes.classes[is_written], boxes.scores[is_written])
        # Text and table are those of `lit_inspect`.
        written = []
        for corner, kind, score in zip(*(part.tolist() for part in objects), strict=True):
            left, top, right, bottom = corner
            written.append(Box(left, top, right, bottom, kind, self.class_names[kind], score))
        files = [self._write_text(number, written)]
        if self._options.pictures:
            files.append(self._write_picture(number, self._shrink(number, objects)))
        return Written(
            files, [coco.describe_object(box) for box in written], round_score(answer.score)
        )

    def _write_picture(self, number: int, boxes: Boxes) -> Path:
        """Write an image with its objects drawn into it; return the path of the file."""
        name = self.names[number]
        folder = self.folder_of(self._folder / "pictures", name)
        path = folder / f"{self.stems[name]}.jpg"
        write_jpeg(paint_boxes(self.bank[number], boxes, self.class_names), path)
        return path

    @override
    def measure_margin(self, entry: Entry) -> float:
        return self._table.measure_margin(entry.score, self._options.least_score)

    @override
    def label(self, entry: Entry) -> ImageLabels:
        number = self.numbers[entry.image]
        height, width = self._sizes_px[number]
        objects = []
        for row in entry.rows:
            kind = row["category_id"]
            left, top, box_width, box_height = row["bbox"]
            box = left, top, box_width, box_height
            objects.append(Labelled(self.class_names[kind - 1], kind, row["score"], box))
        return ImageLabels(
            kind="boxes",
            name=entry.image,
            stem=self.stems[entry.image],
            path=self.path(number),
            size_px=(int(height), int(width)),
            score=entry.score,
            margin=self.measure_margin(entry),
            objects=objects,
        )

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        self._write_coco(entries)
        errors = self._find_errors(entries)
        surest = sorted(entries, key=lambda entry: (-entry.score, self.numbers[entry.image]))
        if surest:
            self._draw_surest(surest[:SHOWN])
        verdicts = self._write_verdicts(entries)
        return {
            "predict/images": len(entries),
            "predict/images_with_objects": sum(bool(entry.rows) for entry in entries),
            "predict/objects": sum(len(entry.rows) for entry in entries),
            **errors,
            **verdicts,
        }

    def _write_verdicts(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = []
        for entry in entries:
            number = self.numbers[entry.image]
            row = self._table.make_row(entry, number, is_found=bool(entry.rows))
            rows.append(row | {"defects": len(entry.rows)})
        metrics = self._table.write(self, rows, COUNTED_COLUMNS)
        if {row["truth"] for row in rows} == {GOOD, DEFECT}:
            entry_of = {entry.image: entry for entry in entries}

            def paint(row: Row) -> Sequence[Bytes]:
                number = self.numbers[row["image"]]
                boxes = self._shrink(number, _read_rows(entry_of[row["image"]]))
                return [paint_boxes(self.bank[number], boxes, self.class_names)]

            draw_worst(rows, self._folder / "worst_images.png", paint)
        return metrics

    def _find_errors(self, entries: Sequence[Entry]) -> dict[str, int]:
        """Draw the worst misses and false alarms, and count them; return nothing without labels."""
        if not self._labels.object_count:
            return {}
        errors = BoxErrors(self._labels, self._sizes_px)
        for entry in entries:
            errors.add(self.numbers[entry.image], _read_rows(entry))
        errors.draw(self.bank, self.names, self._folder / "worst.png")
        return {
            "predict/missed_objects": len(errors.missed),
            "predict/false_objects": len(errors.false_alarms),
        }

    def _write_coco(self, entries: Sequence[Entry]) -> None:
        """Write ``detections.json``; COCO numbers images, annotations and categories from 1."""
        images = []
        sizes_px = self._sizes_px.tolist()
        for image_id, name in enumerate(self.names, 1):
            height, width = sizes_px[image_id - 1]
            images.append({"id": image_id, "file_name": name, "height": height, "width": width})
        annotations: list[dict[str, Any]] = []
        for entry in entries:
            image_id = self.numbers[entry.image] + 1
            for row in entry.rows:
                annotations.append({"id": len(annotations) + 1, "image_id": image_id, **row})
        categories = [
            {"id": number, "name": name} for number, name in enumerate(self.class_names, 1)
        ]
        table = {"images": images, "annotations": annotations, "categories": categories}
        path = self._folder / "detections.json"
        write_text(path, json.dumps(table, indent=1))
        log.info("objects: %s", path)

    def _draw_surest(self, entries: Sequence[Entry]) -> None:
        figure, cells = open_cells(len(entries), min(COLUMNS, len(entries)))
        for cell, entry in zip(cells, entries, strict=False):
            number = self.numbers[entry.image]
            step = -(-max(self.bank[number].shape) // _SHOWN_PX)  # no cell shows as many
            pixels = self.bank[number][:, ::step, ::step]
            image = torch.from_numpy(stretch(pixels) / np.float32(255))
            boxes = self._shrink(number, _read_rows(entry))  # in pixels of the stored image
            boxes = boxes._replace(corners=boxes.corners / step)
            show_boxes(cell, image, boxes, self.class_names)
            row = self._table.make_row(entry, number, is_found=bool(entry.rows))
            count = counted(len(entry.rows), "object")
            title = f"{PurePath(entry.image).name[-32:]}\n{describe_row(row)}, {count}"
            cell.set_title(title, fontsize=8, color="crimson" if is_wrong(row) else "black")
        path = self._folder / "predictions.png"
        save_figure(figure, path, "images with the highest scores", ())

    def _shrink(self, number: int, boxes: Boxes) -> Boxes:
        """Convert boxes from px of the image on the disk to px of the stored image."""
        stored_height, stored_width = self.bank.heights_px[number], self.bank.widths_px[number]
        height, width = self._sizes_px[number]
        scale = torch.tensor(
            [stored_width / width, stored_height / height] * 2, dtype=torch.float64
        )
        return boxes._replace(corners=boxes.corners * scale)

    def _write_text(self, number: int, boxes: Sequence[Box]) -> Path:
        """Write ``class cx cy w h score`` in fractions of the image; return the path of the file."""
        height, width = self._sizes_px[number].tolist()
        name = self.names[number]
        folder = self.folder_of(self._folder / "labels", name)
        path = folder / f"{self.stems[name]}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(coco.describe_boxes(boxes, (height, width)), encoding="utf-8")
        return path


def _read_rows(entry: Entry) -> Boxes:
    """Return the written objects of an image, in px of the image on the disk."""
    corners = torch.tensor([row["bbox"] for row in entry.rows], dtype=torch.float64)
    corners = corners.reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]  # COCO has (left, top, width, height)
    classes = torch.tensor([row["category_id"] - 1 for row in entry.rows], dtype=torch.int64)
    scores = torch.tensor([row["score"] for row in entry.rows], dtype=torch.float32)
    return Boxes(corners, classes, scores)
