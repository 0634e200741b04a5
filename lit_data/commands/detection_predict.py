"""``predict`` for images with boxes: the objects found, as text, as JSON and drawn."""

import json
import logging
import os
from pathlib import Path, PurePath
from typing import Any, Final, cast

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.commands.detection_pictures import Boxes, draw_surest, paint_boxes, read_objects
from lit_data.datamodules import DetectionDataModule
from lit_data.datasets import DetectionDataset
from lit_data.errors import ConfigError
from lit_data.io.image_files import write_image

log = logging.getLogger(__name__)

_SHOWN: Final = 6


class BoxWriter(L.Callback):
    """Writes the objects of each image as soon as they are found.

    Into the folder go ``labels/<image>.txt`` (YOLO text with the score behind each box), ``pictures/<image>.png`` (the
    image as the model sees it, without the grey around it), ``detections.json`` (COCO, with scores; px of the image on
    the disk) and ``predictions.png`` with the images that hold the surest objects.

    Args:
        datamodule: The images.
        folder: Where to write.
        threshold: Least score.
        min_area_px: Smallest area of a box, in the image on the disk.
    """

    def __init__(self, datamodule: DetectionDataModule, folder: Path, *, threshold: float, min_area_px: int) -> None:
        self._dataset = cast(DetectionDataset, datamodule.dataset("predict"))
        self._classes, self._root = datamodule.classes, datamodule.source.folder
        self._folder, self._threshold, self._min_area_px = folder, threshold, min_area_px
        self._seen = 0
        self._annotations: list[dict[str, Any]] = []
        self._surest: list[tuple[float, int, Boxes]] = []

    @override
    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        found = read_objects(outputs)
        if found is None:
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} must return a list with a dict for each image: boxes "
                "[n, 4] px (left, top, right, bottom), classes [n] and scores [n]"
            )
        for boxes in found:
            if len(boxes.classes) and int(boxes.classes.max()) >= len(self._classes):
                raise ConfigError(
                    f"the model finds class {int(boxes.classes.max())}, and the set has {len(self._classes)}, from 0: "
                    "set model.net.classes to that, and train again"
                )
            self._take(self._seen, boxes)
            self._seen += 1

    def finish(self) -> dict[str, Any]:
        """Write the table and the picture.

        Returns:
            The numbers for summary.json.
        """
        path = self._folder / "detections.json"
        sizes = self._dataset.original_px.tolist()
        images = [
            {"id": number + 1, "file_name": self._name(number).as_posix(), "height": height, "width": width}
            for number, (height, width) in enumerate(sizes)
        ]
        kinds = [{"id": number + 1, "name": name} for number, name in enumerate(self._classes)]
        table = {"images": images, "annotations": self._annotations, "categories": kinds}
        path.write_text(json.dumps(table, indent=1), encoding="utf-8", errors="surrogateescape")
        log.info("objects: %s", path)
        shown = [(self._name(n).name, self._pixels(n), boxes) for _, n, boxes in self._surest]
        draw_surest(shown, self._classes, self._folder / "predictions.png")
        return {
            "predict/images": self._seen,
            "predict/images_with_objects": len({row["image_id"] for row in self._annotations}),
            "predict/objects": len(self._annotations),
        }

    def _take(self, number: int, found: Boxes) -> None:
        originals = self._dataset.find_originals(
            found.corners.double().numpy(), np.full(len(found.classes), number, np.int64)
        )
        sides = originals[:, 2:] - originals[:, :2]
        kept = (found.scores.numpy() >= self._threshold) & (sides > 0).all(1)
        kept &= sides.prod(1) >= self._min_area_px
        originals, classes, scores = originals[kept], found.classes.numpy()[kept], found.scores.numpy()[kept]
        self._write_text(number, originals, classes, scores)
        self._note(number, originals, classes, scores)
        pixels, original_px = self._pixels(number), self._dataset.original_px[number]
        shrink = np.tile(np.array(pixels.shape[:0:-1]) / original_px[::-1], 2)
        boxes = Boxes(*(torch.from_numpy(array) for array in (originals * shrink, classes, scores)))
        self._surest = sorted([*self._surest, (-float(scores.max(initial=0)), number, boxes)])[:_SHOWN]
        path = self._folder / "pictures" / self._name(number).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_image(path, paint_boxes(pixels, boxes, self._classes))

    def _write_text(
        self, number: int, boxes: NDArray[np.float64], classes: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> None:
        """``class cx cy w h score`` in shares of the image."""
        shares = boxes / np.tile(self._dataset.original_px[number][::-1], 2)
        rows = np.hstack(((shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2], scores[:, None]))
        lines = [
            f"{kind} {' '.join(f'{value:.6f}' for value in row)}\n"
            for kind, row in zip(classes, rows.tolist(), strict=True)
        ]
        path = self._folder / "labels" / self._name(number).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")

    def _note(
        self, number: int, boxes: NDArray[np.float64], classes: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> None:
        for box, kind, score in zip(boxes.tolist(), classes.tolist(), scores.tolist(), strict=True):
            left, top, right, bottom = (round(edge, 3) for edge in box)
            self._annotations.append(
                {
                    "id": len(self._annotations) + 1,
                    "image_id": number + 1,
                    "category_id": kind + 1,
                    "bbox": [left, top, round(right - left, 3), round(bottom - top, 3)],
                    "area": round((right - left) * (bottom - top), 3),
                    "iscrowd": 0,
                    "score": round(score, 6),
                }
            )

    def _name(self, number: int) -> PurePath:
        """Path of an image below the root."""
        return PurePath(os.path.relpath(self._dataset.bank.name(number), self._root))

    def _pixels(self, number: int) -> NDArray[np.uint8]:
        return self._dataset.bank[number]
