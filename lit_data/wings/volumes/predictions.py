"""Drawing and writing of samples and reconstructions of volumes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning import LightningModule
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX, Array, Batch, Stage
from lit_data.datasets.splits import UNDIVIDED
from lit_data.predict.answers import ask_step, check_probabilities
from lit_data.predict.figures import CELL_INCHES, new_axes, save_figure
from lit_data.predict.journal import Entry
from lit_data.predict.options import Predicted, PredictOptions, PredictRun, Use
from lit_data.predict.task import Task
from lit_data.predict.writer import PredictionWriter, Written
from lit_data.wings.volumes.datamodule import CTDataModule
from lit_data.wings.volumes.files.sources import open_volume
from lit_data.wings.volumes.files.volume import Volume
from lit_data.wings.volumes.files.writing import write_volume
from lit_data.wings.volumes.label_predictions import (
    InputVolumesWriter,
    LabelWriter,
    draw_label_samples,
    draw_labels,
)
from lit_data.wings.volumes.views import PLANES, VolumeShown, show_slice, show_view

_ANGLES_DEG = (30, 120)

Reconstruction = Mapping[str, Tensor]
"""Voxels of one volume: ``coords`` [n, 3] (z, y, x), ``values`` and ``scores`` [n] in 0..1."""
_SCORES = ("iou", "f1", "value_mae", "psnr")
COLUMNS = ("volume", "file", "occupied", "found", "both", *_SCORES)
_PEAK_DB = 120.0  # of values without an error


class VolumeTask(Task[CTDataModule]):
    """Task of volumes, drawn as central slices and as views of their occupied voxels from outside."""

    predicts = "reconstructions"
    candidates = 8
    _surface_mm = 1.0  # of a model without this option
    unexported = (
        "lit_inspect reads images, but neither NIfTI nor DICOM, and does not resample volumes: "
        "predict also runs on a CPU (trainer=cpu)"
    )
    predict_data: ClassVar[Mapping[str, Any]] = {"splits": UNDIVIDED}
    trained_data = ("classes", "occupied_hu", "resolution", "window")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        draw = draw_label_samples if self.datamodule.classes else draw_volume_samples
        return draw(self.datamodule, batch, path, title, count=count)

    @override
    def draw_predictions(
        self, model: LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        draw = draw_labels if self.datamodule.classes else draw_reconstructions
        return draw(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, rows: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Do nothing: the augmentation of volumes is not drawn."""

    @override
    def predict(
        self, model: LightningModule, run: PredictRun, options: PredictOptions
    ) -> Predicted:
        self._surface_mm = float(getattr(model, "surface_mm", self._surface_mm))
        return super().predict(model, run, options)

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> PredictionWriter:
        if self.datamodule.classes:
            options.refuse_unused("labels of volumes", Use.INPUTS | Use.WINDOWS)
            self.datamodule.overlap_windows(options.overlap_px)
            return LabelWriter(self.datamodule, run.folder, surface_mm=self._surface_mm)
        options.refuse_unused("volumes", self.uses)
        return VolumeWriter(self.datamodule, run.folder, threshold=options.least_score)


def draw_volume_samples(
    datamodule: CTDataModule, batch: Batch, path: Path, title: str, *, count: int
) -> list[int]:
    """Draw each sample in a row: three central slices and two views.

    Slices of whole volumes are read from the files again, so that they have all voxels, with the
    occupied ones tinted.

    Args:
        datamodule: Gives window and resolution of the samples.
        batch: A finished batch of points or windows on the host.
        path: The PNG to write.
        title: Title of the picture.
        count: Maximum number of samples.

    Returns:
        Rows of the batch that are drawn: those with the most occupied voxels.
    """
    # Nearly empty windows show nothing.
    order = torch.argsort(_count_occupied(batch), descending=True, stable=True)
    rows: list[int] = order[:count].tolist()
    views = [f"from {angle}°" for angle in _ANGLES_DEG]
    figure, cells = new_axes(len(rows), 5, CELL_INCHES * len(rows) + 0.7)
    for cell, name in zip(cells[0], (*PLANES, *views), strict=True):
        cell.set_title(name, fontsize=10)
    for row, line in zip(rows, cells, strict=True):
        volume = read_shown(batch, row)
        # Fetched volumes are occupied voxels only: there are no files to read slices from.
        if volume.slices is None and not datamodule.volumes.bank.fetches:
            slices = _read_slices(datamodule, int(batch["volume_index"][row]))
            volume = volume._replace(slices=slices)
        for axis in range(3):
            show_slice(line[axis], volume, axis, mark=volume.slices is not None)
        for cell, angle in zip(line[3:], _ANGLES_DEG, strict=True):
            show_view(cell, volume, angle)
        size = " x ".join(map(str, volume.shape))
        line[0].set_ylabel(f"{volume.name}\n{len(volume.coords)} of {size}", fontsize=8)
    save_figure(figure, path, f"{title}; tinted: foreground voxels", ())
    return rows


def draw_reconstructions(
    datamodule: CTDataModule,
    model: LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
) -> bool:
    """Draw volumes beside their reconstructions: central slices and views.

    Args:
        datamodule: Cuts batches.
        model: A module whose `predict_step` returns what `VoxelModule.predict_step` does.
        batch: A finished batch of points on the host.
        path: The PNG to write.
        title: Title of the picture.
        count: Maximum number of volumes.

    Returns:
        True if it was drawn; False if the batch has windows, or the module returns something else.
    """
    if "coords" not in batch:
        return False
    outputs = ask_step(model, datamodule.slice_batch(batch, 0, count))
    reconstructions = read_reconstructions(outputs)
    if not reconstructions:
        return False
    pairs = []
    for row, reconstruction in enumerate(reconstructions):
        true = read_shown(batch, row)
        pairs.append((true, show_found(true, reconstruction)))
    draw_pairs(pairs, path, title)
    return True


def draw_pairs(pairs: list[tuple[VolumeShown, VolumeShown]], path: Path, title: str) -> None:
    """Draw volumes and their reconstructions side by side, each pair in a row.

    Args:
        pairs: Each volume and its reconstruction.
        path: The PNG to write.
        title: Title of the picture.
    """
    figure, cells = new_axes(len(pairs), 8, CELL_INCHES * len(pairs) + 0.7)
    for view, name in enumerate((*PLANES, f"from {_ANGLES_DEG[0]}°")):
        cells[0][2 * view].set_title(name, fontsize=10)
        cells[0][2 * view + 1].set_title("reconstructed", fontsize=10)
    for pair, line in zip(pairs, cells, strict=True):
        for side, volume in enumerate(pair):
            for axis in range(3):
                show_slice(line[2 * axis + side], volume, axis, mark=False)
            show_view(line[6 + side], volume, _ANGLES_DEG[0])
        true, reconstructed = pair
        counts = f"{len(true.coords)}, found {len(reconstructed.coords)}"
        line[0].set_ylabel(f"{true.name}\n{counts}", fontsize=8)
    save_figure(figure, path, f"{title}: foreground voxels", ())


def read_shown(batch: Batch, row: int) -> VolumeShown:
    """Return a sample of a finished batch of points or windows on the host; points have no slices."""
    name = Path(str(batch["path"][row])).name[-24:]
    spacing: Any = tuple(batch["spacing"][row].tolist())
    if "coords" not in batch:
        image = batch["image"][row, 0].numpy()
        occupied = batch["occupied"][row, 0].numpy()
        slices: Any = tuple(
            np.take(image, side // 2, axis) for axis, side in enumerate(image.shape)
        )
        coords = np.argwhere(occupied)
        return VolumeShown(name, image.shape, spacing, coords, image[occupied], slices)
    # The points of all volumes are consecutive; column 0 is the volume of each.
    ends = batch[f"coords{COUNT_SUFFIX}"].cumsum(0).tolist()
    points = slice(ends[row - 1] if row else 0, ends[row])
    coords = batch["coords"][points, 1:].numpy()
    values = batch["feats"][points, 0].numpy()
    shape: Any = tuple(batch["shape"][row].tolist())
    return VolumeShown(name, shape, spacing, coords, values)


def show_found(true: VolumeShown, reconstruction: Reconstruction) -> VolumeShown:
    """Return the reconstruction of a volume, for drawing."""
    coords = reconstruction["coords"].cpu().numpy()
    values = reconstruction["values"].float().cpu().numpy()
    return true._replace(coords=coords, values=values)


def read_reconstructions(outputs: Any) -> list[Reconstruction] | None:  # noqa: ANN401 - what a user's step returns
    """Return the reconstructions of a `predict_step` on the host, one for each volume.

    Returns:
        None if the outputs are not a list of dicts with coords, values and scores.
    """
    if not isinstance(outputs, list):
        return None
    names = ("coords", "values", "scores")
    reconstructions: list[Reconstruction] = []
    for part in outputs:
        if not isinstance(part, dict) or not part.keys() >= set(names):
            return None
        reconstructions.append({name: part[name].cpu() for name in names})
    return reconstructions


def _count_occupied(batch: Batch) -> Tensor:
    """Return the number of occupied voxels of each sample, [B]."""
    if "coords" in batch:
        return batch[f"coords{COUNT_SUFFIX}"]
    return batch["occupied"].flatten(1).sum(1)


def _read_slices(datamodule: CTDataModule, number: int) -> tuple[Array, Array, Array]:
    """Return the central slices of a volume in 0..1 of the window, read slab by slab."""
    source = datamodule.source
    window = datamodule.window
    with open_volume(datamodule.volumes.sources[number], nan_fill=source.nan_fill) as volume:
        resized = source.resolution.apply(volume, fill=window.low_hu)
        slices = [np.concatenate(parts) for parts in zip(*_cut_slabs(resized), strict=True)]
    axial, coronal, sagittal = (window.scale(values_hu) for values_hu in slices)
    return axial, coronal, sagittal


def _cut_slabs(volume: Volume) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the parts of the three central slices in each slab."""
    middle, row, column = (side // 2 for side in volume.shape)
    for begin, end in volume.slabs():
        slab = volume.read(begin, end)
        # The axial slice is in one slab; the others give no row of it.
        axial = slab[middle - begin] if begin <= middle < end else slab[0, :0]
        yield axial, slab[:, row], slab[:, :, column]


class VolumeWriter(InputVolumesWriter):
    """Writes the reconstruction of each volume.

    The folder gets ``volumes/<name>.nii.gz`` if the source has an affine, otherwise
    ``volumes/<name>.npy``; ``volumes.csv`` with a row for each volume; and ``predictions.png`` with
    the first volumes beside the true ones. Volumes are Hounsfield units [z, y, x] (NIfTI: x, y, z)
    as int16, at the resolution of the samples. They are within the window, and at its lower edge
    for voxels that are not predicted.

    In the table, ``iou`` and ``f1`` compare with the points that the model saw. If `max_points`
    made them a subset, ``both`` is divided by their fraction. ``value_mae`` and ``psnr`` are in
    units of the window's 0..1, at the points found.

    Args:
        datamodule: Datamodule of the volumes.
        folder: Output folder.
        threshold: Lowest probability of a predicted voxel.
    """

    expects = (
        "a list with a dict for each volume: coords [n, 3] (z, y, x), values [n] and scores [n] "
        "in 0..1"
    )

    def __init__(self, datamodule: CTDataModule, folder: Path, *, threshold: float) -> None:
        if datamodule.sample != "points":
            raise ConfigError(
                f"predict writes whole volumes: set data.sample=points, not {datamodule.sample}"
            )
        super().__init__(datamodule, folder)
        self._threshold = threshold
        self._window = datamodule.window

    @override
    def read(
        self, outputs: Any, batch: Any
    ) -> Sequence[tuple[VolumeShown, VolumeShown, int]] | None:
        reconstructions = read_reconstructions(outputs)
        if reconstructions is None:
            return None
        host_batch: Batch = {}
        for key, value in batch.items():
            host_batch[key] = value.cpu() if hasattr(value, "cpu") else value
        answers = []
        for row, reconstruction in enumerate(reconstructions):
            check_probabilities(reconstruction["scores"])
            is_sure = reconstruction["scores"] >= self._threshold
            sure_voxels = {name: part[is_sure] for name, part in reconstruction.items()}
            true = read_shown(host_batch, row)
            reconstructed = show_found(true, sure_voxels)
            answers.append((true, reconstructed, int(host_batch["occupied_total"][row])))
        return answers

    @override
    def write(
        self, number: int, answer: tuple[VolumeShown, VolumeShown, int], seconds: float
    ) -> Written:
        true, reconstructed, total = answer
        files = [self._write(number, reconstructed)]
        if self.is_shown(number):
            files.append(self._write_pair(number, true, reconstructed))
        file_name = files[0].relative_to(self._folder).as_posix()
        row = {"volume": self.names[number], "file": file_name}
        return Written(files, [row | compare_voxels(true, reconstructed, total=total)])

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = self.write_table(COLUMNS, entries)
        pairs = [_read_pair(path) for path in self.bring_parts(entries)]
        if pairs:
            picture = self._folder / "predictions.png"
            draw_pairs(pairs, picture, "volumes and their reconstructions")
        metrics: dict[str, Any] = {
            "predict/volumes": len(rows),
            "predict/voxels": sum(row["found"] for row in rows),
        }
        if rows:
            for name in _SCORES:
                metrics[f"predict/{name}"] = float(np.mean([row[name] for row in rows]))
        return metrics

    def _write(self, number: int, reconstructed: VolumeShown) -> Path:
        """Write a reconstruction in Hounsfield units; return the path of the file."""
        window = self._window
        name = self.names[number]
        affine = self._volumes.bank[self._numbers[number]].affine
        # Air within the window for voxels that are not predicted.
        dense = np.full(reconstructed.shape, _to_int16(np.array(window.low_hu)), np.int16)
        values_hu = reconstructed.values * window.width_hu + window.low_hu
        dense[tuple(reconstructed.coords.T)] = _to_int16(values_hu)
        return write_volume(self.folder_of(self._folder / "volumes", name), name, dense, affine)

    def _write_pair(self, number: int, true: VolumeShown, reconstructed: VolumeShown) -> Path:
        """Write a volume's part of the picture, which `_read_pair` reads."""
        return self.write_part(
            number,
            name=true.name,
            shape=true.shape,
            spacing_mm=true.spacing_mm,
            true_coords=true.coords,
            true_values=true.values,
            coords=reconstructed.coords,
            values=reconstructed.values,
        )


def _read_pair(path: Path) -> tuple[VolumeShown, VolumeShown]:
    with np.load(path, allow_pickle=False) as parts:
        shape: Any = tuple(parts["shape"].tolist())
        spacing_mm: Any = tuple(parts["spacing_mm"].tolist())
        true = VolumeShown(
            str(parts["name"]), shape, spacing_mm, parts["true_coords"], parts["true_values"]
        )
        return true, true._replace(coords=parts["coords"], values=parts["values"])


def compare_voxels(
    true: VolumeShown, reconstructed: VolumeShown, *, total: int
) -> dict[str, float]:
    """Return the scores of one reconstruction; see `COLUMNS`.

    Args:
        true: Points that the model saw.
        reconstructed: Reconstruction of the points.
        total: Number of occupied voxels of the volume; the points may be a subset.
    """
    true_voxels = np.ravel_multi_index(tuple(true.coords.T), true.shape)
    found_voxels = np.ravel_multi_index(tuple(reconstructed.coords.T), reconstructed.shape)
    _, true_rows, found_rows = np.intersect1d(
        true_voxels, found_voxels, assume_unique=True, return_indices=True
    )
    common = len(true_rows)
    both = common * total / max(len(true.coords), 1)  # of all voxels, if the points are a subset
    both_sizes = total + len(reconstructed.coords)
    # |A or B| = |A| + |B| - |A and B|.
    union = both_sizes - both
    errors = true.values[true_rows].astype(np.float64) - reconstructed.values[found_rows]
    # Without a common voxel, the values count as wrong by the whole window.
    mean_error = float(np.abs(errors).mean()) if common else 1.0
    mean_square = float(np.mean(errors**2)) if common else 1.0
    psnr_db = min(-10 * float(np.log10(max(mean_square, 1e-12))), _PEAK_DB)
    return {
        "occupied": total,
        "found": len(reconstructed.coords),
        "both": round(both, 1),
        "iou": round(both / union, 6) if union else 1.0,
        "f1": round(2 * both / both_sizes, 6) if both_sizes else 1.0,
        "value_mae": round(mean_error, 6),
        "psnr": round(psnr_db, 3),
    }


def _to_int16(values_hu: Array) -> NDArray[np.int16]:
    """Round Hounsfield units, clipped to the range of int16."""
    limits = np.iinfo(np.int16)
    return np.rint(values_hu).clip(limits.min, limits.max).astype(np.int16)
