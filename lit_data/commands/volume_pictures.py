"""Pictures of volumes: what a CT datamodule gives, and what a model makes of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_data.commands.figures import CELL_INCHES, new_axes, save_figure
from lit_data.commands.volume_views import PLANES, VolumeShown, show_slice, show_view
from lit_data.datamodules import CTDataModule
from lit_data.io.volumes.reading import open_volume
from lit_data.io.volumes.volume import Volume
from lit_data.types import COUNT_SUFFIX, Array, Batch

_ANGLES_DEG: Final = (30, 120)

Reconstruction = Mapping[str, Tensor]
"""Of one volume: ``coords`` [n, 3] (z, y, x), ``values`` [n] in 0..1, ``scores`` [n] in 0..1."""


def draw_volume_samples(datamodule: CTDataModule, batch: Batch, path: Path, title: str, *, count: int) -> list[int]:
    """Draw each sample in a row: its three central slices with the occupied voxels tinted, and two views of them.

    Slices of whole volumes are read from the files again, so that what is not occupied is seen as well.

    Args:
        datamodule: Its window and resolution are those of the samples.
        batch: A finished batch of points or windows on the host.
        path: The PNG to write.
        title: Of the picture.
        count: Most samples of it.

    Returns:
        Which samples of the batch are shown: those with the most occupied voxels.
    """
    rows: list[int] = torch.argsort(_count_occupied(batch), descending=True, stable=True)[:count].tolist()
    figure, cells = new_axes(len(rows), 5, CELL_INCHES * len(rows) + 0.7)
    for cell, name in zip(cells[0], (*PLANES, *(f"from {angle}°" for angle in _ANGLES_DEG)), strict=True):
        cell.set_title(name, fontsize=10)
    for row, line in zip(rows, cells, strict=True):
        shown = read_shown(batch, row)
        if shown.slices is None:
            shown = shown._replace(slices=_read_slices(datamodule, int(batch["volume_index"][row])))
        for axis in range(3):
            show_slice(line[axis], shown, axis, mark=True)
        for cell, angle in zip(line[3:], _ANGLES_DEG, strict=True):
            show_view(cell, shown, angle)
        line[0].set_ylabel(f"{shown.name}\n{len(shown.coords)} of {_name_shape(shown)}", fontsize=8)
    save_figure(figure, path, f"{title}; tinted: occupied voxels", ())
    return rows


def draw_reconstructions(
    datamodule: CTDataModule, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
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
    found = _predict(model, datamodule.slice_batch(batch, 0, count)) if "coords" in batch else None
    if not found:
        return False
    draw_pairs(
        [(read_shown(batch, row), show_found(batch, row, answer)) for row, answer in enumerate(found)], path, title
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
        line[0].set_ylabel(f"{true.name}\n{len(true.coords)}, found {len(found.coords)}", fontsize=8)
    save_figure(figure, path, f"{title}: occupied voxels", ())


def read_shown(batch: Batch, row: int) -> VolumeShown:
    """One sample of a finished batch on the host, of points or of windows; of points without slices."""
    name = Path(str(batch["path"][row])).name[-24:]
    spacing = cast(tuple[float, float, float], tuple(batch["spacing"][row].tolist()))
    if "coords" not in batch:
        image, occupied = batch["image"][row, 0].numpy(), batch["occupied"][row, 0].numpy()
        slices = tuple(np.take(image, side // 2, axis) for axis, side in enumerate(image.shape))
        return VolumeShown(name, image.shape, spacing, np.argwhere(occupied), image[occupied], cast(Any, slices))
    ends = batch[f"coords{COUNT_SUFFIX}"].cumsum(0).tolist()
    own = slice(ends[row - 1] if row else 0, ends[row])
    coords, values = batch["coords"][own, 1:].numpy(), batch["feats"][own, 0].numpy()
    return VolumeShown(name, cast(Any, tuple(batch["shape"][row].tolist())), spacing, coords, values)


def show_found(batch: Batch, row: int, found: Reconstruction) -> VolumeShown:
    """A reconstruction of one volume of a batch, to be drawn."""
    true = read_shown(batch, row)
    return true._replace(coords=found["coords"].cpu().numpy(), values=found["values"].float().cpu().numpy())


def read_reconstructions(outputs: Any) -> list[Reconstruction] | None:  # noqa: ANN401 - what a user's step returns
    """What a `predict_step` returned, on the host; none if it is no list with coords, values and scores."""
    if not isinstance(outputs, list):
        return None
    if not all(isinstance(part, dict) and {"coords", "values", "scores"} <= part.keys() for part in outputs):
        return None
    return [{name: part[name].cpu() for name in ("coords", "values", "scores")} for part in outputs]


@torch.no_grad()
def _predict(model: L.LightningModule, batch: Batch) -> list[Reconstruction] | None:
    training = model.training
    model.eval()
    moved = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    outputs = model.predict_step(moved, 0)
    model.train(training)
    return read_reconstructions(outputs)


def _count_occupied(batch: Batch) -> Tensor:
    return batch[f"coords{COUNT_SUFFIX}"] if "coords" in batch else batch["occupied"].flatten(1).sum(1)


def _read_slices(datamodule: CTDataModule, number: int) -> tuple[Array, Array, Array]:
    """The central slices of a volume in 0..1 of the window, read slab by slab."""
    source, window = datamodule.source, datamodule.window
    with open_volume(datamodule.volumes.sources[number], nan_fill=source.nan_fill) as volume:
        resized = source.resolution.apply(volume, fill=window.low_hu)
        axial, coronal, sagittal = (np.concatenate(slabs) for slabs in zip(*_cut_slabs(resized), strict=True))
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
