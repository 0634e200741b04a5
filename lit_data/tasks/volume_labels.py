"""Labels of whole volumes, joined from overlapping windows, written and scored."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules import CTDataModule
from lit_data.errors import ConfigError
from lit_data.files import explaining, replacing
from lit_data.inference.tiling import weigh_tile
from lit_data.io.volumes.resampling import resample_labels
from lit_data.io.volumes.sources import open_labels, open_volume
from lit_data.io.volumes.volume import Spacing, Volume, import_medical
from lit_data.modules.segmentation.volumes import score_surfaces
from lit_data.tasks.answers import ask_step
from lit_data.tasks.figures import CELL_INCHES, new_axes, save_figure
from lit_data.tasks.journal import Entry
from lit_data.tasks.writer import PredictionWriter, Written
from lit_data.types import Array, Batch

log = logging.getLogger(__name__)

_SCORES: Final = ("dice", "surface_dice", "hausdorff_95_mm")
COLUMNS: Final = ("volume", "file", "class", "voxels", "volume_ml", "true_ml", *_SCORES)
_MM3_PER_ML: Final = 1000.0
_LEAST_WEIGHT: Final = 1e-3  # of the corners of a window: some voxels lie in no other one


class WindowBlend:
    """Labels of a volume from the probabilities of windows that overlap.

    Probabilities are added up by the weight of a Gaussian in the middle of each window, of which
    the standard deviation is an eighth of its side, as in nnU-Net and MONAI. Windows come in
    ascending order of z, so that only the slices of one window hold probabilities; those above are
    labels already.

    Args:
        shape: (z, y, x) of the volume.
        sides: (z, y, x) of a window, which may reach past the volume.
        count: Classes with the background.
    """

    def __init__(self, shape: Sequence[int], sides: Sequence[int], count: int) -> None:
        self.labels: NDArray[np.uint8] = np.zeros(tuple(shape), np.uint8)
        self._sides = tuple(sides)
        self._first = 0  # slice of the volume that is the first of the sums
        self._sums = np.zeros((count, sides[0], *shape[1:]), np.float32)
        z, y, x = (np.maximum(weigh_tile(side, "gaussian"), _LEAST_WEIGHT) for side in sides)
        weights = z[:, None, None] * y[:, None] * x
        self._weights = np.maximum(weights, _LEAST_WEIGHT).astype(np.float32)

    def add(self, probability: Array, start: Sequence[int]) -> None:
        """Add a window.

        Args:
            probability: [K, D, H, W] float32.
            start: (z, y, x) of its first voxel.
        """
        self._finish_slices(start[0])
        _, height, width = self.labels.shape
        _, y, x = start
        rows, columns = slice(y, y + self._sides[1]), slice(x, x + self._sides[2])
        weighted = probability * self._weights
        inside = weighted[:, :, : height - y, : width - x]
        self._sums[:, :, rows, columns] += inside

    def finish(self) -> NDArray[np.uint8]:
        """Return the labels, [Z, Y, X], when all windows are there."""
        self._finish_slices(self._first + self._sides[0])
        return self.labels

    def _finish_slices(self, end: int) -> None:
        """Turn the sums of the slices above `end` into labels, and move the others up."""
        count = end - self._first
        if count == 0:
            return
        labels = self.labels[self._first : end]
        # One slice at a time: the largest of all sums would be another copy of them.
        for number, plane in enumerate(labels):
            plane[:] = self._sums[:, number].argmax(0)
        # Class by class, as an overlapping move needs a copy of what it moves.
        for sums in self._sums:
            sums[:-count] = sums[count:].copy()
            sums[-count:] = 0
        self._first = end


class InputVolumesWriter(PredictionWriter):
    """Writer of predictions of whole volumes, one for each input.

    Args:
        datamodule: The volumes.
    """

    def __init__(self, datamodule: CTDataModule) -> None:
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


class LabelWriter(InputVolumesWriter):
    """Writes the labels of each volume as soon as its last window is predicted.

    Into the folder go ``labels/<name>.nii.gz`` with the grid and the affine of the input, ``.npy``
    where that has no affine; and ``volumes.csv`` with a row for each class of each volume: its
    voxels and volume, and beside labels of the input their volume, Dice, and the scores of
    `score_surfaces`, which are left out where one of both is empty.

    Args:
        datamodule: The volumes.
        folder: Where to write.
        surface_mm: Surfaces that are nearer agree.
    """

    expects = "probabilities [B, K, D, H, W] of the background and of each class"

    def __init__(self, datamodule: CTDataModule, folder: Path, *, surface_mm: float) -> None:
        super().__init__(datamodule)
        self._folder = folder
        self._classes = datamodule.classes
        self._surface_mm = surface_mm
        self._sides = datamodule.windows.sides
        self._blends: dict[int, WindowBlend] = {}
        resolution = datamodule.source.resolution
        has_files = not self._volumes.bank.fetches
        if resolution.fit != "resample" or not (has_files or resolution.is_original):
            raise ConfigError(
                "labels are written on the grid of the input, which is not known of shards with "
                "data.resolution, nor with data.resolution.fit=pad_crop: leave these out"
            )
        dataset = datamodule.dataset("predict")
        volumes = dataset.rows.volumes_of(np.arange(len(dataset)))
        # Windows of a volume follow one another.
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
                f"the model tells {outputs.shape[1]} classes apart and {count} are needed, for the "
                f"background and {', '.join(self._classes)}"
            )
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
    def join(self, number: int, answers: Sequence[int]) -> NDArray[np.uint8]:
        return self._blends.pop(self._numbers[number]).finish()

    @override
    def write(self, number: int, answer: NDArray[np.uint8], seconds: float) -> Written:
        volume_number = self._numbers[number]
        volume = self._volumes.bank[volume_number]
        spacing_mm, affine = volume.spacing_mm, volume.affine
        true: NDArray[np.generic] | None = None
        if not self._volumes.bank.fetches:
            # The bank knows the resampled volume alone.
            source = self._volumes.sources[volume_number]
            with open_volume(source) as original:
                answer = resample_labels(answer, original, spacing_mm)
                spacing_mm, affine = original.spacing_mm, original.affine
                true = _read_true(open_labels(source, original))
        path = self._write_labels(self.names[number], answer, affine)
        file_name = path.relative_to(self._folder).as_posix()
        rows = []
        for label, name in enumerate(self._classes, 1):
            row = {"volume": self.names[number], "file": file_name, "class": name}
            rows.append(row | self._describe(answer, true, label, spacing_mm))
        return Written([path], rows)

    def _describe(
        self, labels: Array, true: Array | None, label: int, spacing_mm: Spacing
    ) -> dict[str, Any]:
        """Return size and scores of one class."""
        predicted_mask = labels == label
        count = int(predicted_mask.sum())
        voxel_ml = float(np.prod(spacing_mm)) / _MM3_PER_ML
        row: dict[str, Any] = {"voxels": count, "volume_ml": round(count * voxel_ml, 4)}
        if true is None:
            return row
        true_mask = true == label
        true_count = int(true_mask.sum())
        row["true_ml"] = round(true_count * voxel_ml, 4)
        if count + true_count:
            both = int((predicted_mask & true_mask).sum())
            row["dice"] = round(2 * both / (count + true_count), 6)
        scores = score_surfaces(predicted_mask, true_mask, spacing_mm, self._surface_mm)
        if scores is not None:
            row["surface_dice"] = round(scores.dice, 6)
            row["hausdorff_95_mm"] = round(scores.hausdorff_95_mm, 4)
        return row

    def _write_labels(self, name: str, labels: NDArray[np.uint8], affine: Array | None) -> Path:
        ending = ".npy" if affine is None else ".nii.gz"
        path = self.folder_of(self._folder / "labels", name) / f"{name}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with explaining(path), replacing(path) as file:
            if affine is None:
                np.save(file, labels)
            else:
                file.write(pack_nifti(labels, affine))
        return path

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [row for entry in entries for row in entry.rows]
        path = self.write_rows(self._folder / "volumes", COLUMNS, rows)
        log.info("volumes: %s", path)
        metrics: dict[str, Any] = {"predict/volumes": len(entries)}
        for score in _SCORES:
            means = []
            for name in self._classes:
                values = [row[score] for row in rows if row["class"] == name and score in row]
                if values:
                    means.append(float(np.mean(values)))
                    metrics[f"predict/{score}_{name}"] = means[-1]
            if means:
                metrics[f"predict/mean_{score}"] = float(np.mean(means))
        return metrics


def pack_nifti(labels: NDArray[np.uint8], affine: Array) -> bytes:
    """Return the bytes of a ``.nii.gz`` file.

    Args:
        labels: [z, y, x].
        affine: [4, 4] from (x, y, z) voxel numbers to mm.

    Raises:
        ConfigError: nibabel is not installed.
    """
    import gzip

    nibabel = import_medical("nibabel")
    image = nibabel.Nifti1Image(labels.T, affine)
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), compresslevel=1, mtime=0)


def _read_true(labels: Volume | None) -> Array | None:
    """Return labels that lie beside a volume, [Z, Y, X], and close their file."""
    if labels is None:
        return None
    with labels:
        true = np.empty(labels.shape, np.uint8)  # more than 254 classes are refused
        for begin, end in labels.slabs():
            true[begin:end] = labels.read(begin, end)
    return true


def draw_labels(
    datamodule: CTDataModule,
    model: L.LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
) -> bool:
    """Draw windows with their labels beside those that a model predicts.

    Args:
        datamodule: Its window is that of the values.
        model: Its `predict_step` returns probabilities [B, K, D, H, W].
        batch: A finished batch of windows on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most windows of it.

    Returns:
        True if it was drawn; False if the model returns something else.
    """
    batch = datamodule.slice_batch(batch, 0, count)
    outputs = ask_step(model, batch)
    if not isinstance(outputs, Tensor) or outputs.ndim != 5:
        return False
    labels = {"labels": batch["mask"][:, 0], "predicted": outputs.argmax(1).cpu()}
    figure, cells = new_axes(len(outputs), 3, CELL_INCHES * len(outputs) + 0.7)
    for row, line in enumerate(cells):
        # The slice with the most labelled voxels.
        number = int((batch["mask"][row, 0] > 0).sum((1, 2)).argmax())
        image = batch["image"][row, 0, number].numpy()
        line[0].set_ylabel(
            f"{Path(str(batch['path'][row])).name[-24:]}, slice {number}", fontsize=8
        )
        for cell, name in zip(line, ("image", *labels), strict=True):
            cell.imshow(image, cmap="gray", vmin=0, vmax=1)
            if row == 0:
                cell.set_title(name, fontsize=10)
            if name in labels:
                labelled = np.ma.masked_less(labels[name][row, number].numpy(), 1)
                cell.imshow(
                    labelled, cmap="tab10", vmin=1, vmax=10, alpha=0.6, interpolation="none"
                )
    save_figure(figure, path, f"{title}: {', '.join(datamodule.classes)}", ())
    return True
