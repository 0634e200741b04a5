"""``predict`` for volumes: each one written again from what a model makes of it."""

import logging
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.commands.result import write_table
from lit_data.commands.volume_pictures import (
    Reconstruction,
    draw_pairs,
    read_reconstructions,
    read_shown,
    show_found,
)
from lit_data.commands.volume_views import VolumeShown
from lit_data.datamodules import CTDataModule
from lit_data.errors import ConfigError
from lit_data.io.volumes.medical import import_medical
from lit_data.types import Array

log = logging.getLogger(__name__)

COLUMNS: Final = ("volume", "file", "occupied", "found", "both", "iou", "f1", "value_mae", "psnr")
_SHOWN: Final = 4
_PEAK_DB: Final = 120.0  # of values without an error


class VolumeWriter(L.Callback):
    """Writes each volume as soon as a model has reconstructed it.

    Into the folder go ``volumes/<name>.nii.gz`` where the source has an affine, else ``volumes/<name>.npy``: Hounsfield
    units [z, y, x] (NIfTI: x, y, z) as int16, at the resolution of the samples and within the window, at its lower edge
    where nothing is found; ``volumes.csv`` with a row for each; and ``predictions.png`` with the first ones beside what
    they should be.

    In the table, ``iou`` and ``f1`` compare with the points that the model saw: where `max_points` made them a subset,
    ``both`` is scaled up by their share. ``value_mae`` and ``psnr`` are of the window's 0..1, at the points found.

    Args:
        datamodule: The volumes.
        folder: Where to write.
        threshold: Least probability of a voxel.
    """

    def __init__(self, datamodule: CTDataModule, folder: Path, *, threshold: float) -> None:
        if datamodule.sample != "points":
            raise ConfigError(f"predict writes whole volumes: set data.sample=points, not {datamodule.sample}")
        self._folder, self._threshold = folder, threshold
        self._volumes, self._window = datamodule.volumes, datamodule.window
        self._rows: list[dict[str, Any]] = []
        self._pairs: list[tuple[VolumeShown, VolumeShown]] = []

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
        found = read_reconstructions(outputs)
        if found is None:
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} must return a list with a dict for each volume: coords "
                "[n, 3] (z, y, x), values [n] and scores [n] in 0..1"
            )
        host = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in batch.items()}
        for row, answer in enumerate(found):
            sure = answer["scores"] >= self._threshold
            kept: Reconstruction = {name: part[sure] for name, part in answer.items()}
            true, shown = read_shown(host, row), show_found(host, row, kept)
            number = int(host["volume_index"][row])
            path = self._write(number, shown)
            named = {"volume": self._volumes.sources[number].name, "file": path.relative_to(self._folder).as_posix()}
            scores = compare_voxels(true, shown, total=int(host["occupied_total"][row]))
            self._rows.append({**named, **scores})
            if len(self._pairs) < _SHOWN:
                self._pairs.append((true, shown))

    def finish(self) -> dict[str, Any]:
        """Write the table and the picture.

        Returns:
            The numbers for summary.json: means over the volumes.
        """
        path = self._folder / "volumes.csv"
        write_table(path, COLUMNS, self._rows)
        log.info("volumes: %s", path)
        if self._pairs:
            draw_pairs(self._pairs, self._folder / "predictions.png", "volumes and their reconstructions")
        means = {f"predict/{name}": float(np.mean([row[name] for row in self._rows])) for name in COLUMNS[5:]}
        return {
            "predict/volumes": len(self._rows),
            "predict/voxels": sum(row["found"] for row in self._rows),
            **(means if self._rows else {}),
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
    own, its_own = (np.ravel_multi_index(tuple(part.coords.T), part.shape) for part in (true, found))
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
