"""Whole volumes out of a net's field, in chunks, and only where there can be anything."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_data.devices import widest_float
from lit_data.errors import ConfigError
from lit_data.modules.voxel.net import Field, PointVoxelNet
from lit_data.modules.voxel.points import Points, find_cells, find_key


@dataclass(frozen=True, slots=True)
class Decoding:
    """Options of decoding whole volumes.

    Attributes:
        threshold: Predicted voxels are occupied with a higher probability.
        cell_threshold: Cells with a lower probability of holding anything are not looked into.
        query_chunk: Voxels at once.
        score_voxels: Most voxels of a batch to score volumes by; of more, this many that lie evenly
            spread among them.

    Raises:
        ConfigError: A number is out of range.
    """

    threshold: float = 0.5
    cell_threshold: float = 0.05
    query_chunk: int = 131072
    score_voxels: int = 4_194_304

    def __post_init__(self) -> None:
        if not (
            0 < self.threshold < 1
            and 0 <= self.cell_threshold < 1
            and min(self.query_chunk, self.score_voxels) > 0
        ):
            raise ConfigError(
                f"threshold={self.threshold}, cell_threshold={self.cell_threshold}, "
                f"query_chunk={self.query_chunk}, score_voxels={self.score_voxels}: need 0 < "
                "threshold < 1, 0 <= cell_threshold < 1 and the rest >= 1"
            )


class Answers(NamedTuple):
    """Answers of a net at Q voxels.

    Attributes:
        rows: [Q] int64: of which volume.
        places: [Q, 3] int64 (z, y, x).
        logits: [Q] float32; minus infinity in cells that hold nothing.
        values: [Q] float32 in 0..1.
    """

    rows: Tensor
    places: Tensor
    logits: Tensor
    values: Tensor


class CellVoxels:
    """The voxels of all cells that can hold something, by number; never all of them in memory.

    Args:
        field: What a net has made of the volumes.
        grid: Its cells along an axis.
        cell_threshold: Least probability of a cell that can hold something.
    """

    def __init__(self, field: Field, *, grid: int, cell_threshold: float) -> None:
        self._shapes, self._grid = field.shapes, grid
        alive = (field.cells.sigmoid() >= cell_threshold).nonzero()
        self._rows, self._cells = alive[:, 0], alive[:, 1:]
        # A cell has up to this many voxels along an axis; numbers of places beyond it name no
        # voxel.
        self._sides: list[int] = (-(-field.shapes.amax(0) // grid)).tolist()
        self._per_cell = math.prod(self._sides)

    def __len__(self) -> int:
        return len(self._rows) * self._per_cell

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n] and places [n, 3] of those of the numbers [N] that name a voxel."""
        cell, inside = numbers // self._per_cell, numbers % self._per_cell
        _, height, width = self._sides
        step = torch.stack(
            (inside // (height * width), inside // width % height, inside % width), dim=1
        )
        rows, cells = self._rows[cell], self._cells[cell]
        shapes = self._shapes[rows]
        # From the first voxel of the cell.
        places = (2 * shapes * cells + self._grid - 1) // (2 * self._grid) + step
        real = (find_cells(places, shapes, self._grid) == cells).all(1) & (places < shapes).all(1)
        return rows[real], places[real]


def reconstruct(net: PointVoxelNet, field: Field, options: Decoding) -> list[dict[str, Tensor]]:
    """The predicted voxels of each volume.

    Args:
        net: The net.
        field: What it has made of the volumes.
        options: Thresholds and chunks.

    Returns:
        For each volume, in the order z, y, x: ``coords`` [n, 3] int32, ``values`` [n] float32 in
            0..1, ``scores`` [n]
        float32 in 0..1, the probabilities.
    """
    kept_answers = [_keep(answers, options) for answers, _ in _decode(net, field, options)]
    rows, places, logits, values = (torch.cat(parts) for parts in zip(*kept_answers, strict=True))
    order = find_key(rows, places).argsort()
    counts = torch.bincount(rows, minlength=len(field.shapes)).tolist()
    answers = {
        "coords": places[order].int(),
        "values": values[order],
        "scores": logits[order].sigmoid(),
    }
    parts = {name: torch.split(part, counts) for name, part in answers.items()}
    return [{name: part[row] for name, part in parts.items()} for row in range(len(counts))]


def compare(
    net: PointVoxelNet, field: Field, points: Points, options: Decoding
) -> tuple[Tensor, ...]:
    """Count hits and errors for `VoxelScores`.

    Args:
        net: The net.
        field: What it has made of the points.
        points: Of B volumes.
        options: Thresholds, chunks, and how many voxels are looked at.

    Returns:
        ``both``, ``true``, ``predicted`` [B] float64 voxels, and ``errors`` [3] float64. Where
        points are a subset of the occupied voxels, ``both`` is the share of the points that is
        found, of all occupied voxels.
    """
    exact = widest_float(field.shapes.device)
    hits, predicted = field.shapes.new_zeros(2, len(field.shapes), dtype=exact)
    errors = hits.new_zeros(3)
    for start in range(0, len(points.rows), options.query_chunk):
        part = slice(start, start + options.query_chunk)
        answers = _ask(net, field, points.rows[part], points.places[part], options)
        hits.index_add_(0, answers.rows, _is_found(answers, options).to(exact))
        error = (answers.values - points.feats[part, 0]).to(exact)
        errors += torch.stack(
            (error.abs().sum(), error.square().sum(), torch.ones_like(error).sum())
        )
    for answers, weight in _decode(net, field, options, most=options.score_voxels):
        predicted.index_add_(0, answers.rows, _is_found(answers, options).to(exact) * weight)
    return hits / points.kept_share(), points.totals.to(exact), predicted, errors


def _decode(
    net: PointVoxelNet, field: Field, options: Decoding, *, most: int | None = None
) -> Iterator[tuple[Answers, float]]:
    """Answers for the voxels of all cells that can hold something, at least one chunk, and what each stands for."""
    voxels = CellVoxels(field, grid=net.grid, cell_threshold=options.cell_threshold)
    total = len(voxels)
    count = total if most is None else min(total, most)
    for start in range(0, max(count, 1), options.query_chunk):
        numbers = torch.arange(
            start, min(start + options.query_chunk, count), device=field.cells.device
        )
        rows, places = voxels.find((2 * numbers + 1) * total // max(2 * count, 1))
        yield _ask(net, field, rows, places, options), total / max(count, 1)


def _ask(
    net: PointVoxelNet, field: Field, rows: Tensor, places: Tensor, options: Decoding
) -> Answers:
    logits, values = net.ask(field, rows, places)
    z, y, x = find_cells(places, field.shapes[rows], net.grid).unbind(1)
    dead = field.cells[rows, z, y, x].sigmoid() < options.cell_threshold
    return Answers(rows, places, logits.masked_fill(dead, -torch.inf), values.clamp(0, 1))


def _is_found(answers: Answers, options: Decoding) -> Tensor:
    return answers.logits.sigmoid() > options.threshold


def _keep(answers: Answers, options: Decoding) -> Answers:
    is_point = _is_found(answers, options)
    return Answers(*(part[is_point] for part in answers))
