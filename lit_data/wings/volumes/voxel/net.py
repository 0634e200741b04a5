"""`PointVoxelNet`: encodes occupied voxels as a small grid of latents, and decodes whole volumes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.devices import widest_float
from lit_data.core.errors import ConfigError
from lit_data.wings.volumes.voxel.blocks import (
    PointScatter,
    VectorQuantiser,
    find_offsets,
    make_decoder,
    make_encoder,
    read_between,
)
from lit_data.wings.volumes.voxel.points import Points, find_cells, find_key
from lit_inspect.counts import counted

_PRIOR = 0.1  # fraction of occupied cells that the untrained net expects


@dataclass(frozen=True)
class Field:
    """Encoded volumes, with everything needed to query their voxels.

    Attributes:
        features: [B * G^3, C] float32, of the cells in the order (row, z, y, x).
        cells: [B, G, G, G] float32 logits of a cell containing an occupied voxel.
        shapes: [B, 3] int64 voxels.
        codes: [B, tokens] int64 of the codebook; None without a quantizer.
        misses: [B] float32: mean squared distance of latents to their codes; 0 without a quantizer.
    """

    features: Tensor
    cells: Tensor
    shapes: Tensor
    codes: Tensor | None
    misses: Tensor


class PointVoxelNet(nn.Module):
    """An autoencoder of any number of voxels, in volumes of any size.

    Encoder: a small perceptron on each point (features, and its position in its cell), their mean
        in each cell of a coarse grid over the volume (Qi et al., "PointNet", CVPR 2017; Liu et al.,
        "Point-Voxel CNN", NeurIPS 2019), and 3-D convolutions down to the latents, which may be
        quantized. Decoder: convolutions back up to the grid. To query a voxel, the grid is
        interpolated between the cells around it, and a perceptron predicts the voxel's occupancy
        and value (Peng et al., "Convolutional occupancy networks", ECCV 2020). Another head
        predicts which cells contain anything, so that a volume can be decoded without querying
        every voxel of the air around the patient.

    No volume affects another: normalization is within a volume, and points are sorted.

    Args:
        channels: Columns of the points' features.
        grid: Cells along each axis, a multiple of 2^levels; a cell has shape / grid voxels.
        width: Channels at the grid, a multiple of 4; doubled at each level.
        levels: Number of halvings between the grid and the latents.
        latent: Channels of the latents; with a quantizer, its width.
        hidden: Width of the perceptron that predicts voxels.
        quantiser: Replaces latents by codes; None keeps them.
        point_chunk: Points that go through the encoder at once, see `PointScatter`.

    Raises:
        ConfigError: A number is not positive, or two do not match.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        grid: int = 32,
        width: int = 16,
        levels: int = 1,
        latent: int = 16,
        hidden: int = 48,
        quantiser: VectorQuantiser | None = None,
        point_chunk: int = 131072,
    ) -> None:
        super().__init__()
        if (
            min(channels, grid, levels, latent, hidden, point_chunk) < 1
            or grid % 2**levels
            or width < 4
            or width % 4
        ):
            raise ConfigError(
                f"channels={channels}, grid={grid}, width={width}, levels={levels}, "
                f"latent={latent}, hidden={hidden}, point_chunk={point_chunk}: need positive "
                "numbers, a grid that is a multiple of 2^levels, and a width that is a multiple "
                "of 4"
            )
        if quantiser is not None and quantiser.width != latent:
            raise ConfigError(f"quantiser.width={quantiser.width}: it must be latent={latent}")
        self.channels, self.grid, self.quantiser = channels, grid, quantiser
        self.scatter = PointScatter(channels, width, grid=grid, chunk=point_chunk)
        self.encoder = make_encoder(width, levels=levels, latent=latent)
        self.decoder = make_decoder(latent, width, levels=levels)
        self.cells = nn.Conv3d(width, 1, 1)
        self.answer = nn.Sequential(
            nn.Linear(width + 6, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 2),
        )
        # The untrained head predicts `_PRIOR` everywhere, so that its loss does not start with a
        # jump.
        nn.init.constant_(self.cells.bias, math.log(_PRIOR / (1 - _PRIOR)))  # type: ignore[arg-type]
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # a third faster on the CPU

    @override
    def forward(self, points: Points) -> Field:
        """Encode the points of volumes.

        Raises:
            ConfigError: The points have another number of features.
        """
        if points.feats.shape[1] != self.channels:
            raise ConfigError(
                f"the points have {counted(points.feats.shape[1], 'feature')}: set model.net.channels to "
                f"that, not {self.channels}"
            )
        latents = self.encoder(self.scatter(points))
        latents, codes, misses = self._quantise(latents)
        features = self.decoder(latents)
        cells = self.cells(features).float()[:, 0]
        flat = features.float().movedim(1, -1).flatten(0, 3)
        return Field(flat, cells, points.shapes, codes, misses)

    def ask(self, field: Field, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Predict voxels.

        Args:
            field: Encoded volumes.
            rows: [Q] int64 volume of each voxel.
            places: [Q, 3] int64 (z, y, x).

        Returns:
            [Q] float32 logits of being occupied, and [Q] float32 values, which are trained to be
            within 0..1.
        """
        shapes = field.shapes[rows]
        features = read_between(field.features, rows, places, shapes, self.grid)
        # Sine and cosine of the position in the cell: smooth within it.
        angle = math.pi * find_offsets(places, shapes, self.grid)
        logits, values = (
            self.answer(torch.cat((features, angle.sin(), angle.cos()), dim=1)).float().unbind(1)
        )
        return logits, values

    def _quantise(self, latents: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.quantiser is None:
            return latents, None, latents.new_zeros(len(latents), dtype=torch.float32)
        last = latents.movedim(1, -1)  # channels last: a code is a row
        quantised = self.quantiser(last.flatten(0, 3))
        vectors = quantised.latents.view_as(last).movedim(-1, 1)
        volumes = len(latents)
        return (
            vectors,
            quantised.codes.view(volumes, -1),
            quantised.misses.view(volumes, -1).mean(1),
        )


@dataclass(frozen=True, slots=True)
class Decoding:
    """Options of decoding whole volumes.

    Attributes:
        threshold: Voxels with a higher probability are predicted as occupied.
        cell_threshold: Cells with a lower probability of containing anything are skipped.
        query_chunk: Voxels at once.
        score_voxels: Maximum number of voxels of a batch to score volumes by; of more, this many
            are taken, evenly spread.

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
    """Predictions of a net at Q voxels.

    Attributes:
        rows: [Q] int64 volume of each voxel.
        places: [Q, 3] int64 (z, y, x).
        logits: [Q] float32; minus infinity in cells predicted as empty.
        values: [Q] float32 in 0..1.
    """

    rows: Tensor
    places: Tensor
    logits: Tensor
    values: Tensor


class CellVoxels:
    """Numbered voxels of all cells that may contain something, never all in memory at once.

    Each cell has as many numbers as the largest cell has voxels, `count`: number n is place n %
    count, z first, in cell n // count. In smaller cells, some numbers belong to no voxel.

    Args:
        field: Encoded volumes.
        grid: Cells of the net along an axis.
        cell_threshold: Lowest probability of a cell that may contain something.
    """

    def __init__(self, field: Field, *, grid: int, cell_threshold: float) -> None:
        self._shapes, self._grid = field.shapes, grid
        # Only these are queried, so the air around a patient costs nothing.
        alive = (field.cells.sigmoid() >= cell_threshold).nonzero()
        self._rows, self._cells = alive[:, 0], alive[:, 1:]
        # Of the largest cell.
        self._sides: list[int] = (-(-field.shapes.amax(0) // grid)).tolist()
        self._per_cell = math.prod(self._sides)

    def __len__(self) -> int:
        return len(self._rows) * self._per_cell

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [n] and places [n, 3] of those of the numbers [N] that belong to a voxel."""
        chosen = numbers // self._per_cell
        rows, cells = self._rows[chosen], self._cells[chosen]
        shapes = self._shapes[rows]
        # A cell c begins with the first place p whose center is in it, (p + 1/2) / shape >= c /
        # grid.
        firsts = (2 * shapes * cells + self._grid - 1) // (2 * self._grid)
        within = torch.unravel_index(numbers % self._per_cell, self._sides)
        places = firsts + torch.stack(within, dim=1)
        is_in_cell = (find_cells(places, shapes, self._grid) == cells).all(1)
        is_voxel = is_in_cell & (places < shapes).all(1)
        return rows[is_voxel], places[is_voxel]


def reconstruct(net: PointVoxelNet, field: Field, options: Decoding) -> list[dict[str, Tensor]]:
    """Return the predicted voxels of each volume.

    Args:
        net: The net.
        field: Encoded volumes.
        options: Thresholds and chunks.

    Returns:
        For each volume, in the order z, y, x: ``coords`` [n, 3] int32, ``values`` [n] float32 in
        0..1, ``scores`` [n] float32 in 0..1, the probabilities.
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
        field: Encoded points.
        points: Points of B volumes.
        options: Thresholds, chunks, and the maximum number of voxels.

    Returns:
        ``both``, ``true``, ``predicted`` [B] float64 voxels, and ``errors`` [3] float64. If points
        are a subset of the occupied voxels, ``both`` is the fraction of points found, times the
        number of occupied voxels.
    """
    # float32 counts exactly up to 2^24 voxels only.
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
    """Yield predictions for the voxels of all cells that may contain something, in chunks, and their weight."""
    voxels = CellVoxels(field, grid=net.grid, cell_threshold=options.cell_threshold)
    total = len(voxels)
    count = total if most is None else min(total, most)
    for start in range(0, max(count, 1), options.query_chunk):
        numbers = torch.arange(
            start, min(start + options.query_chunk, count), device=field.cells.device
        )
        # If there are too many voxels, the middle one of each of `count` equal ranges.
        rows, places = voxels.find((2 * numbers + 1) * total // max(2 * count, 1))
        yield _ask(net, field, rows, places, options), total / max(count, 1)


def _ask(
    net: PointVoxelNet, field: Field, rows: Tensor, places: Tensor, options: Decoding
) -> Answers:
    logits, values = net.ask(field, rows, places)
    z, y, x = find_cells(places, field.shapes[rows], net.grid).unbind(1)
    # Points may be in cells that the net predicts as empty: nothing is found there.
    dead = field.cells[rows, z, y, x].sigmoid() < options.cell_threshold
    return Answers(rows, places, logits.masked_fill(dead, -torch.inf), values.clamp(0, 1))


def _is_found(answers: Answers, options: Decoding) -> Tensor:
    return answers.logits.sigmoid() > options.threshold


def _keep(answers: Answers, options: Decoding) -> Answers:
    is_point = _is_found(answers, options)
    return Answers(*(part[is_point] for part in answers))
