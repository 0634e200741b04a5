"""Volumes: what a CT datamodule gives, and what a model makes of it, drawn and written again."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules import CTDataModule
from lit_data.errors import ConfigError
from lit_data.files import write_table
from lit_data.io.shards.volumes import ShardedVolumes
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.streams import import_medical
from lit_data.io.volumes.volume import Volume
from lit_data.tasks.answers import ask_step
from lit_data.tasks.base import Task, register
from lit_data.tasks.figures import CELL_INCHES, new_axes, save_figure
from lit_data.tasks.options import PredictOptions, PredictRun
from lit_data.tasks.volume_views import PLANES, VolumeShown, show_slice, show_view
from lit_data.tasks.writer import Entry, PredictionWriter, Written, stamp_of
from lit_data.types import COUNT_SUFFIX, Array, Batch, Stage

log = logging.getLogger(__name__)


_ANGLES_DEG: Final = (30, 120)

Reconstruction = Mapping[str, Tensor]
"""Of one volume: ``coords`` [n, 3] (z, y, x), ``values`` [n] in 0..1, ``scores`` [n] in 0..1."""


@register(CTDataModule)
class VolumeTask(Task[CTDataModule]):
    """Volumes: central slices, and their occupied voxels seen from outside."""

    predicts = "reconstructions"
    candidates = 8
    neutral_data = (*Task.neutral_data, "processes")

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_volume_samples(self.datamodule, batch, path, title, count=count)

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        return draw_reconstructions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(
        self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage
    ) -> None:
        """Volumes have no augmentation."""

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "VolumeWriter":
        options.refuse("volumes", *self.unused)
        return VolumeWriter(self.datamodule, run.folder, threshold=options.least_score)


def draw_volume_samples(
    datamodule: CTDataModule, batch: Batch, path: Path, title: str, *, count: int
) -> list[int]:
    """Draw each sample in a row: three central slices and two views.

    Occupied voxels are tinted in the slices.

    Slices of whole volumes are read from the files again, so that what is not occupied is seen as
    well.

    Args:
        datamodule: Its window and resolution are those of the samples.
        batch: A finished batch of points or windows on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most samples of it.

    Returns:
        Which samples of the batch are shown: those with the most occupied voxels.
    """
    rows: list[int] = torch.argsort(_count_occupied(batch), descending=True, stable=True)[
        :count
    ].tolist()
    figure, cells = new_axes(len(rows), 5, CELL_INCHES * len(rows) + 0.7)
    for cell, name in zip(
        cells[0], (*PLANES, *(f"from {angle}°" for angle in _ANGLES_DEG)), strict=True
    ):
        cell.set_title(name, fontsize=10)
    for row, line in zip(rows, cells, strict=True):
        shown = read_shown(batch, row)
        if (
            shown.slices is None and datamodule.source.shards is None
        ):  # shards hold the occupied voxels alone
            shown = shown._replace(slices=_read_slices(datamodule, int(batch["volume_index"][row])))
        for axis in range(3):
            show_slice(line[axis], shown, axis, mark=shown.slices is not None)
        for cell, angle in zip(line[3:], _ANGLES_DEG, strict=True):
            show_view(cell, shown, angle)
        line[0].set_ylabel(f"{shown.name}\n{len(shown.coords)} of {_name_shape(shown)}", fontsize=8)
    save_figure(figure, path, f"{title}; tinted: occupied voxels", ())
    return rows


def draw_reconstructions(
    datamodule: CTDataModule,
    model: L.LightningModule,
    batch: Batch,
    path: Path,
    title: str,
    *,
    count: int,
) -> bool:
    """Draw volumes beside what a model reconstructs of them: central slices and views.

    Args:
        datamodule: Cuts batches.
        model: A module whose `predict_step` returns what `VoxelModule.predict_step` does.
        batch: A finished batch of points on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most volumes of it.

    Returns:
        Whether it was drawn: the batch may hold windows, and the module may return something else.
    """
    found = (
        read_reconstructions(ask_step(model, datamodule.slice_batch(batch, 0, count)))
        if "coords" in batch
        else None
    )
    if not found:
        return False
    draw_pairs(
        [
            (read_shown(batch, row), show_found(batch, row, answer))
            for row, answer in enumerate(found)
        ],
        path,
        title,
    )
    return True


def draw_pairs(pairs: list[tuple[VolumeShown, VolumeShown]], path: Path, title: str) -> None:
    """Draw volumes and their reconstructions side by side, each pair in a row.

    Args:
        pairs: Of each volume, what is true and what is found.
        path: The PNG to write.
        title: Of the picture.
    """
    figure, cells = new_axes(len(pairs), 8, CELL_INCHES * len(pairs) + 0.7)
    for number, name in enumerate((*PLANES, f"from {_ANGLES_DEG[0]}°")):
        cells[0][2 * number].set_title(name, fontsize=10)
        cells[0][2 * number + 1].set_title("reconstructed", fontsize=10)
    for pair, line in zip(pairs, cells, strict=True):
        for side, shown in enumerate(pair):
            for axis in range(3):
                show_slice(line[2 * axis + side], shown, axis, mark=False)
            show_view(line[6 + side], shown, _ANGLES_DEG[0])
        true, found = pair
        line[0].set_ylabel(
            f"{true.name}\n{len(true.coords)}, found {len(found.coords)}", fontsize=8
        )
    save_figure(figure, path, f"{title}: occupied voxels", ())


def read_shown(batch: Batch, row: int) -> VolumeShown:
    """One sample of a finished batch on the host, of points or of windows; of points without slices."""
    name = Path(str(batch["path"][row])).name[-24:]
    spacing: Any = tuple(batch["spacing"][row].tolist())
    if "coords" not in batch:
        image, occupied = batch["image"][row, 0].numpy(), batch["occupied"][row, 0].numpy()
        slices: Any = tuple(
            np.take(image, side // 2, axis) for axis, side in enumerate(image.shape)
        )
        return VolumeShown(
            name, image.shape, spacing, np.argwhere(occupied), image[occupied], slices
        )
    ends = batch[f"coords{COUNT_SUFFIX}"].cumsum(0).tolist()
    own = slice(ends[row - 1] if row else 0, ends[row])
    coords, values = batch["coords"][own, 1:].numpy(), batch["feats"][own, 0].numpy()
    shape: Any = tuple(batch["shape"][row].tolist())
    return VolumeShown(name, shape, spacing, coords, values)


def show_found(batch: Batch, row: int, found: Reconstruction) -> VolumeShown:
    """A reconstruction of one volume of a batch, to be drawn."""
    true = read_shown(batch, row)
    return true._replace(
        coords=found["coords"].cpu().numpy(), values=found["values"].float().cpu().numpy()
    )


def read_reconstructions(outputs: Any) -> list[Reconstruction] | None:  # noqa: ANN401 - what a user's step returns
    """What a `predict_step` returned, on the host; none if it is no list with coords, values and scores."""
    if not isinstance(outputs, list):
        return None
    if not all(
        isinstance(part, dict) and {"coords", "values", "scores"} <= part.keys() for part in outputs
    ):
        return None
    return [{name: part[name].cpu() for name in ("coords", "values", "scores")} for part in outputs]


def _count_occupied(batch: Batch) -> Tensor:
    return (
        batch[f"coords{COUNT_SUFFIX}"] if "coords" in batch else batch["occupied"].flatten(1).sum(1)
    )


def _read_slices(datamodule: CTDataModule, number: int) -> tuple[Array, Array, Array]:
    """The central slices of a volume in 0..1 of the window, read slab by slab."""
    source, window = datamodule.source, datamodule.window
    with open_volume(datamodule.volumes.sources[number], nan_fill=source.nan_fill) as volume:
        resized = source.resolution.apply(volume, fill=window.low_hu)
        axial, coronal, sagittal = (
            np.concatenate(slabs) for slabs in zip(*_cut_slabs(resized), strict=True)
        )
    return window.scale(axial), window.scale(coronal), window.scale(sagittal)


def _cut_slabs(volume: Volume) -> Iterator[tuple[Array, Array, Array]]:
    """Of each slab what it has of the three central slices."""
    middle, row, column = (side // 2 for side in volume.shape)
    for begin, end in volume.slabs():
        slab = volume.read(begin, end)
        inside = slab[middle - begin] if begin <= middle < end else slab[0, :0]
        yield inside, slab[:, row], slab[:, :, column]


def _name_shape(shown: VolumeShown) -> str:
    return " x ".join(map(str, shown.shape))


COLUMNS: Final = ("volume", "file", "occupied", "found", "both", "iou", "f1", "value_mae", "psnr")
_SHOWN: Final = 4
_PEAK_DB: Final = 120.0  # of values without an error


class VolumeWriter(PredictionWriter):
    """Writes each volume again from what a model made of it.

    Into the folder go ``volumes/<name>.nii.gz`` where the source has an affine, else
    ``volumes/<name>.npy``: Hounsfield units [z, y, x] (NIfTI: x, y, z) as int16, at the resolution
    of the samples and within the window, at its lower edge where nothing is found; ``volumes.csv``
    with a row for each; and ``predictions.png`` with the first ones beside what they should be.

    In the table, ``iou`` and ``f1`` compare with the points that the model saw: where `max_points`
    made them a subset, ``both`` is scaled up by their share. ``value_mae`` and ``psnr`` are of the
    window's 0..1, at the points found.

    Args:
        datamodule: The volumes.
        folder: Where to write.
        threshold: Least probability of a voxel.
    """

    expects = "a list with a dict for each volume: coords [n, 3] (z, y, x), values [n] and scores [n] in 0..1"

    def __init__(self, datamodule: CTDataModule, folder: Path, *, threshold: float) -> None:
        if datamodule.sample != "points":
            raise ConfigError(
                f"predict writes whole volumes: set data.sample=points, not {datamodule.sample}"
            )
        self._folder, self._threshold = folder, threshold
        self._volumes, self._window = datamodule.volumes, datamodule.window
        self._numbers = datamodule.volumes.of("predict").tolist()
        self._pairs: dict[str, tuple[VolumeShown, VolumeShown]] = {}
        self.names = [self._volumes.sources[number].name for number in self._numbers]
        self.bad = self._volumes.bank.skipped

    @override
    def stamp(self, number: int) -> Sequence[int]:
        if isinstance(self._volumes.bank, ShardedVolumes):
            return self._volumes.bank.stamp(self._numbers[number])
        path = Path(self.path(number))
        return () if path.is_dir() else stamp_of(str(path))

    @override
    def path(self, number: int) -> str:
        return self._volumes.bank.name(self._numbers[number])

    @override
    def read(
        self, outputs: Any, batch: Any
    ) -> Sequence[tuple[VolumeShown, VolumeShown, int]] | None:
        found = read_reconstructions(outputs)
        if found is None:
            return None
        host = {
            key: value.cpu() if hasattr(value, "cpu") else value for key, value in batch.items()
        }
        answers = []
        for row, answer in enumerate(found):
            sure = answer["scores"] >= self._threshold
            kept: Reconstruction = {name: part[sure] for name, part in answer.items()}
            answers.append(
                (
                    read_shown(host, row),
                    show_found(host, row, kept),
                    int(host["occupied_total"][row]),
                )
            )
        return answers

    @override
    def write(
        self, number: int, answer: tuple[VolumeShown, VolumeShown, int], seconds: float
    ) -> Written:
        true, shown, total = answer
        path, name = self._write(self._numbers[number], shown), self.names[number]
        if len(self._pairs) < _SHOWN:
            self._pairs[name] = true, shown
        row = {"volume": name, "file": path.relative_to(self._folder).as_posix()}
        return Written([path], [row | compare_voxels(true, shown, total=total)])

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        path, rows = self._folder / "volumes.csv", [row for entry in entries for row in entry.rows]
        write_table(path, COLUMNS, rows)
        log.info("volumes: %s", path)
        if self._pairs:
            draw_pairs(
                list(self._pairs.values()),
                self._folder / "predictions.png",
                "volumes and their reconstructions",
            )
        means = (
            {f"predict/{name}": float(np.mean([row[name] for row in rows])) for name in COLUMNS[5:]}
            if rows
            else {}
        )
        return {
            "predict/volumes": len(rows),
            "predict/voxels": sum(row["found"] for row in rows),
            **means,
        }

    def _write(self, number: int, found: VolumeShown) -> Path:
        window, affine = self._window, self._volumes.bank[number].affine
        dense = np.full(found.shape, _to_int16(np.array(window.low_hu)), np.int16)
        dense[tuple(found.coords.T)] = _to_int16(found.values * window.width_hu + window.low_hu)
        ending = ".npy" if affine is None else ".nii.gz"
        path = self._folder / "volumes" / f"{self._volumes.sources[number].name}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if affine is None:
            np.save(path, dense)
        else:
            write_nifti(path, dense, affine)
        return path


def write_nifti(path: Path, volume: NDArray[np.int16], affine: Array) -> None:
    """Write a volume as NIfTI.

    Args:
        path: Ends in .nii.gz.
        volume: [z, y, x].
        affine: [4, 4] from (x, y, z) voxel numbers to mm; its columns hold the spacing.

    Raises:
        ConfigError: nibabel is not installed.
    """
    nibabel = import_medical("nibabel")
    image = nibabel.Nifti1Image(volume.T, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)


def compare_voxels(true: VolumeShown, found: VolumeShown, *, total: int) -> dict[str, float]:
    """Scores of one reconstruction; see `COLUMNS`.

    Args:
        true: Points that the model saw.
        found: What it made of them.
        total: Occupied voxels of the volume, of which the points may be a subset.
    """
    own, its_own = (
        np.ravel_multi_index(tuple(part.coords.T), part.shape) for part in (true, found)
    )
    _, mine, its = np.intersect1d(own, its_own, assume_unique=True, return_indices=True)
    both = len(mine) * total / max(len(true.coords), 1)
    union, sizes = total + len(found.coords) - both, total + len(found.coords)
    errors = true.values[mine].astype(np.float64) - found.values[its]
    squared = float(np.mean(errors**2)) if len(mine) else 1.0
    return {
        "occupied": total,
        "found": len(found.coords),
        "both": round(both, 1),
        "iou": round(both / union, 6) if union else 1.0,
        "f1": round(2 * both / sizes, 6) if sizes else 1.0,
        "value_mae": round(float(np.abs(errors).mean()), 6) if len(mine) else 1.0,
        "psnr": round(min(-10 * float(np.log10(max(squared, 1e-12))), _PEAK_DB), 3),
    }


def _to_int16(values_hu: Array) -> NDArray[np.int16]:
    limits = np.iinfo(np.int16)
    return np.rint(values_hu).clip(limits.min, limits.max).astype(np.int16)
