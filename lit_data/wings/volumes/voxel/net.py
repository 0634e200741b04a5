"""`PointVoxelNet`: occupied voxels to a small grid of latents, and whole volumes out of it again."""

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

_PRIOR = 0.1  # share of occupied cells that the untrained net expects


@dataclass(frozen=True)
class Field:
    """Encoded volumes: everything that is needed to ask about their voxels.

    Attributes:
        features: [B * G^3, C] float32, of the cells in the order (row, z, y, x).
        cells: [B, G, G, G] float32 logits of a cell holding an occupied voxel.
        shapes: [B, 3] int64 voxels.
        codes: [B, tokens] int64 of the codebook; none without a quantiser.
        misses: [B] float32: mean squared distance of latents to their codes; 0 without a quantiser.
    """

    features: Tensor
    cells: Tensor
    shapes: Tensor
    codes: Tensor | None
    misses: Tensor


class PointVoxelNet(nn.Module):
    """An autoencoder of sets of voxels of any number, in volumes of any size.

    Encoder: a small perceptron on each point (features, and its place in its cell), their mean in
    each cell of a coarse grid over the volume (Qi et al., "PointNet", CVPR 2017; Liu et al.,
    "Point-Voxel CNN", NeurIPS 2019), 3-D convolutions down to the latents; these may be quantized.
    Decoder: convolutions back up to the grid. A voxel is asked for by reading the grid between the
    cells around it, and a perceptron says whether it is occupied and its value (Peng et al.,
    "Convolutional occupancy networks", ECCV 2020). One more head says which cells hold anything, so
    that a volume can be written without asking for every voxel of the air around the patient.

    No volume sees another: normalization is within a volume, and points come in one order, whatever
    theirs was.

    Args:
        channels: Columns of the points' features.
        grid: Cells along each axis, a multiple of 2^levels; a cell is shape / grid voxels.
        width: Channels at the grid, a multiple of 4; doubled at each level.
        levels: Halvings between the grid and the latents.
        latent: Channels of the latents; with a quantiser, its width.
        hidden: Width of the perceptron that answers.
        quantiser: Replaces latents by codes; none keeps them.
        point_chunk: Points that go through the encoder at once, see `PointScatter`.

    Raises:
        ConfigError: A number is not positive, or two do not go together.
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
        # The untrained head says `_PRIOR` everywhere, so that its loss does not begin with a jump.
        nn.init.constant_(self.cells.bias, math.log(_PRIOR / (1 - _PRIOR)))  # type: ignore[arg-type]
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # a third faster on the CPU

    @override
    def forward(self, points: Points) -> Field:
        """Take in volumes.

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
        """Predict what lies at voxels.

        Args:
            field: Of the volumes.
            rows: [Q] int64.
            places: [Q, 3] int64 (z, y, x).

        Returns:
            [Q] float32 logits of being occupied, and [Q] float32 values, which are learned within
            0..1.
        """
        shapes = field.shapes[rows]
        features = read_between(field.features, rows, places, shapes, self.grid)
        # Sine and cosine of the place in the cell: smooth within it.
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

    Each cell has as many numbers as the largest of all cells has voxels: number n is that of place n modulo that
    count, z first, within cell n divided by it. Smaller cells have numbers that name no voxel.

    Args:
        field: What a net has made of the volumes.
        grid: Its cells along an axis.
        cell_threshold: Least probability of a cell that can hold something.
    """

    def __init__(self, field: Field, *, grid: int, cell_threshold: float) -> None:
        self._shapes, self._grid = field.shapes, grid
        # Only these are looked into, so the air around a patient costs nothing.
        alive = (field.cells.sigmoid() >= cell_threshold).nonzero()
        self._rows, self._cells = alive[:, 0], alive[:, 1:]
        # Of the largest cell.
        self._sides: list[int] = (-(-field.shapes.amax(0) // grid)).tolist()
        self._per_cell = math.prod(self._sides)

    def __len__(self) -> int:
        return len(self._rows) * self._per_cell

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n] and places [n, 3] of those of the numbers [N] that name a voxel."""
        chosen = numbers // self._per_cell
        rows, cells = self._rows[chosen], self._cells[chosen]
        shapes = self._shapes[rows]
        # A cell c begins with the first place p whose middle lies in it, (p + 1/2) / shape >= c / grid.
        firsts = (2 * shapes * cells + self._grid - 1) // (2 * self._grid)
        within = torch.unravel_index(numbers % self._per_cell, self._sides)
        places = firsts + torch.stack(within, dim=1)
        is_in_cell = (find_cells(places, shapes, self._grid) == cells).all(1)
        is_voxel = is_in_cell & (places < shapes).all(1)
        return rows[is_voxel], places[is_voxel]


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
    # float32 ends at 2^24 voxels.
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
        # Of more voxels than wanted, the middle one of each of `count` equal stretches.
        rows, places = voxels.find((2 * numbers + 1) * total // max(2 * count, 1))
        yield _ask(net, field, rows, places, options), total / max(count, 1)


def _ask(
    net: PointVoxelNet, field: Field, rows: Tensor, places: Tensor, options: Decoding
) -> Answers:
    logits, values = net.ask(field, rows, places)
    z, y, x = find_cells(places, field.shapes[rows], net.grid).unbind(1)
    # Points may lie in cells that the net takes for empty: nothing is found there.
    dead = field.cells[rows, z, y, x].sigmoid() < options.cell_threshold
    return Answers(rows, places, logits.masked_fill(dead, -torch.inf), values.clamp(0, 1))


def _is_found(answers: Answers, options: Decoding) -> Tensor:
    return answers.logits.sigmoid() > options.threshold


def _keep(answers: Answers, options: Decoding) -> Answers:
    is_point = _is_found(answers, options)
    return Answers(*(part[is_point] for part in answers))
