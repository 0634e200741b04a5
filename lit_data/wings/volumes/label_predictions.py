"""Labels of whole volumes, joined from overlapping windows, written and scored."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.files import explaining, replacing
from lit_data.core.types import Array, Batch, Bytes
from lit_data.predict.answers import ask_step, check_probabilities
from lit_data.predict.journal import Entry
from lit_data.predict.writer import PredictionWriter, Written
from lit_data.wings.volumes.datamodule import CTDataModule
from lit_data.wings.volumes.datasets.points import WindowRows
from lit_data.wings.volumes.files.resampling import resample_labels
from lit_data.wings.volumes.files.sources import open_labels, open_volume
from lit_data.wings.volumes.files.volume import Volume
from lit_data.wings.volumes.files.writing import write_volume
from lit_data.wings.volumes.joined_windows import WindowBlend
from lit_data.wings.volumes.scores import average_scores, score_class
from lit_data.wings.volumes.views import LabelledSlices, cut_labelled, draw_labelled
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_SCORES = ("dice", "surface_dice", "hausdorff_95_mm")
COLUMNS = ("volume", "file", "class", "voxels", "volume_ml", "true_ml", *_SCORES)
_DECIMALS = {"volume_ml": 4, "true_ml": 4, "hausdorff_95_mm": 4}
_PARTS = ".shown"  # folder of the data of pictures, which another process may draw
_DRAWN = 4  # volumes in a picture
_AXES = ("z", "y", "x")


class InputVolumesWriter(PredictionWriter):
    """Writer of predictions of whole volumes, one for each input.

    Args:
        datamodule: Datamodule of the volumes.
        folder: Output folder.
    """

    def __init__(self, datamodule: CTDataModule, folder: Path) -> None:
        self._folder = folder
        self._volumes = datamodule.volumes
        self._numbers: list[int] = datamodule.volumes.of("predict").tolist()
        self.names = [self._volumes.sources[number].name for number in self._numbers]
        self.bad = self._volumes.bank.skipped

    @override
    def stamp(self, number: int) -> Sequence[int]:
        return self._volumes.bank.stamp(self._numbers[number])

    @override
    def path(self, number: int) -> str:
        return self._volumes.bank.name(self._numbers[number])

    def write_table(
        self, columns: Sequence[str], entries: Sequence[Entry]
    ) -> list[Mapping[str, Any]]:
        """Write the rows of the finished volumes into ``volumes.csv``, and return them."""
        rows = [row for entry in entries for row in entry.rows]
        log.info("volumes: %s", self.write_rows(self._folder / "volumes", columns, rows))
        return rows

    def is_shown(self, number: int) -> bool:
        """Return True if the picture shows a volume."""
        return number < _DRAWN

    def write_part(self, number: int, **arrays: Any) -> Path:  # noqa: ANN401 - what NumPy can save
        """Write a volume's part of the picture, completely or not at all; return its path."""
        path = self._folder / _PARTS / f"{self.names[number]}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with explaining(path), replacing(path) as file:
            np.savez(file, **arrays)
        return path

    def bring_parts(self, entries: Sequence[Entry]) -> list[Path]:
        """Return the files of `write_part` of the finished volumes."""
        paths = []
        for entry in entries[:_DRAWN]:
            for file_name in entry.files:
                if file_name.startswith(f"{_PARTS}/"):
                    paths.append(self.bring(self._folder / file_name))
        return paths


class LabelWriter(InputVolumesWriter):
    """Writes the labels of each volume as soon as its last window is predicted.

    The folder gets ``labels/<name>.nii.gz`` with the grid and the affine of the input, or ``.npy``
    if it has no affine; ``volumes.csv`` with a row for each class of each volume; and
    ``predictions.png`` with slices of the first volumes. A row has voxels and volume, and if the
    input has labels, their volume, Dice, and the scores of `score_surfaces`, which are empty if one
    of both masks is empty.

    Args:
        datamodule: Datamodule of the volumes.
        folder: Output folder.
        surface_mm: Distance up to which surfaces agree.
    """

    expects = "probabilities [B, K, D, H, W] of the background and of each class"

    def __init__(self, datamodule: CTDataModule, folder: Path, *, surface_mm: float) -> None:
        super().__init__(datamodule, folder)
        self._classes = datamodule.classes
        self._surface_mm = surface_mm
        self._sides = datamodule.windows.sides
        self._window = datamodule.window
        self._blends: dict[int, WindowBlend] = {}
        resolution = datamodule.source.resolution
        has_files = not self._volumes.bank.fetches
        if resolution.fit != "resample" or not (has_files or resolution.is_original):
            raise ConfigError(
                "labels are written on the grid of the input, which is unknown for shards with "
                "data.resolution and for data.resolution.fit=pad_crop: remove these"
            )
        dataset = datamodule.dataset("predict")
        assert isinstance(dataset.rows, WindowRows)  # classes are refused of others
        self._rows = dataset.rows
        volumes = self._rows.volumes_of(np.arange(len(dataset)))
        # The windows of a volume are consecutive.
        self._starts = np.searchsorted(volumes, self._numbers).tolist()
        self._ends = np.searchsorted(volumes, self._numbers, side="right").tolist()

    @override
    def samples(self, number: int) -> Sequence[int]:
        return range(self._starts[number], self._ends[number])

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[int] | None:
        """Add windows to their volumes; the answer for each is the number of its volume."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 5:
            return None
        count = len(self._classes) + 1
        if outputs.shape[1] != count:
            raise ConfigError(
                f"the model has {counted(outputs.shape[1], 'class', 'classes')}, but {count} are needed, for the "
                f"background and {', '.join(self._classes)}"
            )
        check_probabilities(outputs)
        volumes: list[int] = batch["volume_index"].tolist()
        starts = batch["position"].tolist()
        for row, (volume, start) in enumerate(zip(volumes, starts, strict=True)):
            if volume not in self._blends:
                shape = self._volumes.bank.shapes[volume]
                self._blends[volume] = WindowBlend(shape, self._sides, count)
            probability = outputs[row].float().cpu().numpy()
            self._blends[volume].add(probability, start)
        return volumes

    @override
    def join(self, number: int, answers: Sequence[int]) -> Bytes:
        return self._blends.pop(self._numbers[number]).finish()

    @override
    def write(self, number: int, answer: Bytes, seconds: float) -> Written:
        volume_number = self._numbers[number]
        volume = self._volumes.bank[volume_number]
        picture_parts = [self._write_slices(number, answer)] if self.is_shown(number) else []
        spacing_mm, affine = volume.spacing_mm, volume.affine
        true: NDArray[np.generic] | None = None
        if not self._volumes.bank.fetches:
            # The bank only has the resampled volume.
            source = self._volumes.sources[volume_number]
            with open_volume(source) as original:
                answer = resample_labels(answer, original, spacing_mm)
                spacing_mm, affine = original.spacing_mm, original.affine
                true = _read_true(open_labels(source, original))
        name = self.names[number]
        path = write_volume(self.folder_of(self._folder / "labels", name), name, answer, affine)
        file_name = path.relative_to(self._folder).as_posix()
        rows = []
        for label, name in enumerate(self._classes, 1):
            row: dict[str, Any] = {"volume": self.names[number], "file": file_name, "class": name}
            true_mask = None if true is None else true == label
            scores = score_class(answer == label, true_mask, spacing_mm, self._surface_mm)
            for score, value in scores.items():
                row[score] = round(value, _DECIMALS.get(score, 6))
            rows.append(row)
        return Written([path, *picture_parts], rows)

    def _write_slices(self, number: int, labels: Bytes) -> Path:
        """Write a volume's part of the picture, which `load_slices` reads."""
        dense = self._rows.densify(self._numbers[number])
        slices = cut_labelled(
            self.names[number][-24:],
            dense.values,
            labels,
            dense.labels,
            spacing_mm=self._volumes.bank[self._numbers[number]].spacing_mm,
            window=self._window,
        )
        return self.write_part(
            number,
            name=slices.name,
            spacing_mm=slices.spacing_mm,
            positions=slices.positions,
            **dict(zip(_AXES, slices.planes, strict=True)),
        )

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = self.write_table(COLUMNS, entries)
        slices = [load_slices(path) for path in self.bring_parts(entries)]
        if slices:
            title = "volumes with their labels and the predicted ones"
            path = self._folder / "predictions.png"
            draw_labelled(slices, self._classes, path, title, beside="predicted")
        metrics: dict[str, Any] = {"predict/volumes": len(entries)}
        for name, value in average_scores(rows, self._classes, _SCORES).items():
            metrics[f"predict/{name}"] = value
        return metrics


def load_slices(path: Path) -> LabelledSlices:
    """Read the slices of a volume that `LabelWriter` wrote for the picture."""
    with np.load(path, allow_pickle=False) as parts:
        spacing_mm: Any = tuple(parts["spacing_mm"].tolist())
        positions: Any = tuple(parts["positions"].tolist())
        z, y, x = (parts[axis] for axis in _AXES)
        return LabelledSlices(str(parts["name"]), spacing_mm, positions, (z, y, x))


def _read_true(labels: Volume | None) -> Array | None:
    """Return the labels beside a volume, [Z, Y, X], and close their file."""
    if labels is None:
        return None
    with labels:
        true = np.empty(labels.shape, np.uint8)  # more than 254 classes are refused
        for begin, end in labels.slabs():
            true[begin:end] = labels.read(begin, end)
    return true


def draw_labels(
    datamodule: CTDataModule,
    model: LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
) -> bool:
    """Draw windows with their labels beside those that a model predicts.

    Args:
        datamodule: Cuts batches, and has the names of the classes.
        model: Its `predict_step` returns probabilities [B, K, D, H, W].
        batch: A finished batch of windows on the host.
        path: The PNG to write.
        title: Title of the picture.
        count: Maximum number of windows.

    Returns:
        True if it was drawn; False if the model returns something else.
    """
    batch = datamodule.slice_batch(batch, 0, count)
    outputs = ask_step(model, batch)
    if not isinstance(outputs, Tensor) or outputs.ndim != 5:
        return False
    predicted = outputs.argmax(1).to("cpu", torch.uint8).numpy()
    windows = []
    for row, labels in enumerate(predicted):
        windows.append(_cut_window(batch, row, labels, batch["mask"][row, 0].numpy()))
    draw_labelled(windows, datamodule.classes, path, title, beside="predicted")
    return True


def draw_label_samples(
    datamodule: CTDataModule, batch: Batch, path: Path, title: str, *, count: int
) -> list[int]:
    """Draw windows with each of their slices beside the same slice with labels.

    Args:
        datamodule: Has the names of the classes.
        batch: A finished batch of windows on the host.
        path: The PNG to write.
        title: Title of the picture.
        count: Maximum number of windows.

    Returns:
        Rows of the batch that are drawn: those with the most labeled voxels.
    """
    voxels = (batch["mask"] > 0).flatten(1).sum(1)
    rows: list[int] = torch.argsort(voxels, descending=True, stable=True)[:count].tolist()
    windows = [_cut_window(batch, row, batch["mask"][row, 0].numpy(), None) for row in rows]
    draw_labelled(windows, datamodule.classes, path, title, beside="labels")
    return rows


def _cut_window(batch: Batch, row: int, labels: Array, true: Array | None) -> LabelledSlices:
    """Cut the slices of a window of a batch for drawing; see `cut_labelled`."""
    name = Path(str(batch["path"][row])).name[-24:]
    spacing_mm: Any = tuple(batch["spacing"][row].tolist())
    image = batch["image"][row, 0].numpy()
    return cut_labelled(name, image, labels, true, spacing_mm=spacing_mm)
