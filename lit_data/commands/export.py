"""Write a rendered set to a folder: images, masks and COCO annotations of one epoch of training."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.io.images.writing import write_image
from lit_data.io.progress import track
from lit_data.loading import MicroBatchLoader
from lit_data.synthesis import FAMILIES
from lit_data.types import Array, Batch, Stage

log = logging.getLogger(__name__)


_BATCH: Final = 32
README: Final = """A set of samples rendered by lit_data.

images/            [H, W, 3] target, ref1, ref2: whole pixel values as PNG or TIFF, or 0..1 as float32 TIFF
masks/             the same stems; 255 where a true defect visibly changes the target, else 0
annotations.json   COCO: true defects; bbox [x, y, width, height] px, uncompressed RLE, `change` (mean, in shares of
                   the value range) and `severity` (the same in standard deviations of the noise around the defect)
distractors.json   the same for what looks like a defect and is none, with the images that show it (`channels`)
export.json        what the set was made from
"""


def export_set(
    datamodule: BaseDataModule, folder: Path, *, stage: Stage, epoch: int, origin: dict[str, Any]
) -> dict[str, int]:
    """Write all samples of a stage as they are drawn for an epoch.

    Args:
        datamodule: A prepared and opened datamodule.
        folder: An empty or new folder.
        stage: Whose samples.
        epoch: The epoch they are drawn for.
        origin: What `export.json` holds beside that.

    Returns:
        Numbers of samples, defects and distractors.

    Raises:
        ConfigError: The folder holds files already, or samples have no mask.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"prepare.export={folder} is not empty: name a new folder")
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    book = _Book(datamodule, folder, stage)
    for batch in _read_in_order(datamodule, stage, epoch):
        book.add(batch)
    book.write_lists()
    (folder / "README.txt").write_text(README, encoding="utf-8")
    origin = origin | {"stage": stage, "epoch": epoch}
    (folder / "export.json").write_text(json.dumps(origin, indent=1), encoding="utf-8")
    log.info("exported %d samples to %s", len(book.images), folder)
    return {
        "samples": len(book.images),
        "defects": len(book.lists[True]),
        "distractors": len(book.lists[False]),
    }


class _Book:
    """The files of an export, and the lists that are written at its end."""

    def __init__(self, datamodule: BaseDataModule, folder: Path, stage: Stage) -> None:
        self.datamodule, self.folder, self.stage = datamodule, folder, stage
        self.inspection = datamodule.inspect(stage)
        self.images: list[dict[str, Any]] = []
        self.lists: dict[bool, list[dict[str, Any]]] = {True: [], False: []}

    def add(self, batch: Batch) -> None:
        """Write the samples of a batch that the loader gave."""
        planned = self.datamodule.plan_batch(batch, self.stage)
        annotated = self.inspection.annotate(planned)
        finished = self.datamodule.finish_batch(planned, self.stage)
        if "mask" not in finished or finished["mask"].ndim > 4:  # of windows of volumes
            raise ConfigError(f"the {self.stage} samples have no masks: there is nothing to export")
        first = len(self.images)
        for row in range(len(finished["index"])):
            self._write_sample(finished, row)
        if annotated is None:  # defects are those of the files, whose masks are written
            return
        plan, annotations = annotated
        for number in range(len(plan)):
            row = int(plan.row[number])
            is_shown = annotations.labels[row] == number + 1  # 0 is the background
            entry = _outline(is_shown)
            if not entry["area"]:
                continue
            entry["image_id"] = first + row
            entry["category_id"] = _category(plan, number)
            entry["change"] = round(float(annotations.change[number]), 5)
            entry["severity"] = round(float(annotations.severity[number]), 3)
            is_true = bool(plan.is_true[number])
            if not is_true:
                channels = is_shown.flatten(1).any(1).nonzero()
                entry["channels"] = channels.flatten().tolist()
            self.lists[is_true].append(entry)

    def write_lists(self) -> None:
        """Write the annotations."""
        categories = [{"id": number, "name": name} for number, name in enumerate(FAMILIES, start=1)]
        for is_true, name in ((True, "annotations.json"), (False, "distractors.json")):
            numbered = enumerate(self.lists[is_true], start=1)
            entries = [{"id": number} | entry for number, entry in numbered]
            content = {"images": self.images, "categories": categories, "annotations": entries}
            (self.folder / name).write_text(json.dumps(content), encoding="utf-8")

    def _write_sample(self, finished: Batch, row: int) -> None:
        index = int(finished["index"][row])
        image, mask = finished["image"][row], finished["mask"][row]
        name = write_image(self.folder / "images" / f"{index:08d}", self._to_pixels(image))
        write_image(self.folder / "masks" / f"{index:08d}", (mask.numpy() * 255).astype(np.uint8))
        entry: dict[str, Any] = {
            "id": len(self.images),
            "file_name": f"images/{name}",
            "index": index,
            "height": image.shape[1],
            "width": image.shape[2],
        }
        for key in ("image_index", "position"):  # of samples that are parts of an image
            if key in finished:
                entry[key] = finished[key][row].tolist()
        self.images.append(entry)

    def _to_pixels(self, image: Tensor) -> Array:
        """Return a finished sample in the values of its files, where those are whole numbers."""
        pixel_values = self.inspection.whole_values()
        if pixel_values is None:
            return image.numpy()
        dtype, values = pixel_values
        pixels = torch.round(image.double() * values.scale + values.low)
        return pixels.numpy().astype(dtype)


def _read_in_order(datamodule: BaseDataModule, stage: Stage, epoch: int) -> Iterator[Batch]:
    dataset = datamodule.dataset(stage)
    loader = MicroBatchLoader(dataset, datamodule.loader)
    starts = range(0, len(dataset), _BATCH)
    for start in track(starts, "exporting", len(starts)):
        yield loader.read(np.arange(start, min(start + _BATCH, len(dataset))), epoch)


def _category(plan: Any, number: int) -> int:  # noqa: ANN401 - a DefectPlan
    return list(FAMILIES).index(plan.spec.members[int(plan.family[number])].name) + 1


def _outline(is_shown: Tensor) -> dict[str, Any]:
    """Box, area and run lengths of a defect in any of the images that show it: [C, H, W] bool."""
    mask: NDArray[np.bool_] = is_shown.any(0).numpy()
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    box_px = [0, 0, 0, 0]  # left, top, width, height
    if rows.size:
        top, left = int(rows[0]), int(columns[0])
        box_px = [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
    return {
        "bbox": box_px,
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": list(mask.shape), "counts": _run_lengths(mask)},
    }


def _run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of a mask by columns, background first: COCO's uncompressed form."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist()
    if flat.size and flat[0]:  # the first run of background is empty
        return [0, *lengths]
    return lengths
