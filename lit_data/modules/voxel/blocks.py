"""The parts of `PointVoxelNet`: points into a grid, a grid to latents and back, and a grid read between its cells."""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lit_data.modules.voxel.points import Points, find_cells

_GROUPS: Final = 4


class PointScatter(nn.Module):
    """Each point alone through a small perceptron, then the mean over the points of each cell.

    Two of the channels are no means: whether there is a point in it, and the share of its voxels
    that are occupied. Points go through in chunks, and in training each chunk is worked out again
    in the backward pass, so that memory does not grow with their number but for the points
    themselves.

    Args:
        channels: Columns of the points' features.
        width: Channels in all, at least 3.
        grid: Cells along an axis.
        chunk: Points at once.
    """

    def __init__(self, channels: int, width: int, *, grid: int, chunk: int) -> None:
        super().__init__()
        self.grid, self.chunk, self.means = grid, chunk, width - 2
        self.layers = nn.Sequential(
            nn.Linear(channels + 3, width), nn.SiLU(), nn.Linear(width, self.means)
        )

    @override
    def forward(self, points: Points) -> Tensor:
        """[B, width, G, G, G]."""
        volumes, grid = len(points.shapes), self.grid
        sums = points.feats.new_zeros(volumes * grid**3, self.means)
        counts = points.feats.new_zeros(volumes * grid**3)
        for start in range(0, len(points.rows), self.chunk):
            part = slice(start, start + self.chunk)
            rows, places, feats = points.rows[part], points.places[part], points.feats[part]
            shapes = points.shapes[rows]
            cells = flat_cells(rows, find_cells(places, shapes, grid), grid)
            inputs = torch.cat((feats, find_offsets(places, shapes, grid)), dim=1)
            again = torch.is_grad_enabled() and len(points.rows) > self.chunk
            outputs = self.layers(inputs) if not again else self._work_out_twice(inputs)
            sums = sums.index_add(0, cells, outputs.float())
            counts = counts.index_add(0, cells, torch.ones_like(cells, dtype=counts.dtype))
        means = sums / counts.clamp(min=1)[:, None]
        voxels = points.shapes.prod(1) / grid**3 * points.kept_share()
        filled = (counts.view(volumes, -1) / voxels[:, None]).flatten()
        cells = torch.cat((means, filled[:, None], (counts > 0).float()[:, None]), dim=1)
        return cells.view(volumes, grid, grid, grid, -1).movedim(-1, 1)  # channels last in memory

    def _work_out_twice(self, inputs: Tensor) -> Tensor:
        # Draws nothing.
        outputs: Tensor = checkpoint(
            self.layers, inputs, use_reentrant=False, preserve_rng_state=False
        )
        return outputs


class VoxelResidual(nn.Module):
    """Two convolutions added to their input; normalised within each volume, so none depends on its batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(_GROUPS, channels),
            nn.SiLU(),
            nn.Conv3d(channels, channels, 3, padding=1),
            nn.GroupNorm(_GROUPS, channels),
            nn.SiLU(),
            nn.Conv3d(channels, channels, 3, padding=1),
        )

    @override
    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = features + self.layers(features)
        return added


def make_encoder(width: int, *, levels: int, latent: int) -> nn.Sequential:
    """[B, width, G, G, G] to [B, latent, g, g, g] with g = G / 2^levels; each level doubles the channels."""
    layers: list[nn.Module] = [nn.Conv3d(width, width, 3, padding=1)]
    for level in range(levels):
        layers += [
            nn.SiLU(),
            nn.Conv3d(width << level, width << level + 1, 2, stride=2),
            VoxelResidual(width << level + 1),
        ]
    return nn.Sequential(
        *layers,
        nn.GroupNorm(_GROUPS, width << levels),
        nn.SiLU(),
        nn.Conv3d(width << levels, latent, 1),
    )


def make_decoder(latent: int, width: int, *, levels: int) -> nn.Sequential:
    """[B, latent, g, g, g] to [B, width, G, G, G]."""
    layers: list[nn.Module] = [nn.Conv3d(latent, width << levels, 3, padding=1)]
    for level in reversed(range(levels)):
        layers += [
            VoxelResidual(width << level + 1),
            nn.ConvTranspose3d(width << level + 1, width << level, 2, stride=2),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers, nn.Conv3d(width, width, 3, padding=1), nn.SiLU())


def flat_cells(rows: Tensor, cells: Tensor, grid: int) -> Tensor:
    """[...] int64: number of each cell among those of all volumes, from [...] rows and [..., 3] cells (z, y, x)."""
    z, y, x = cells.unbind(-1)
    return ((rows * grid + z) * grid + y) * grid + x


def find_offsets(places: Tensor, shapes: Tensor, grid: int) -> Tensor:
    """[..., 3] float32 in -1..1: where in its cell the centre of a voxel lies."""
    return ((2 * places + 1) * grid % (2 * shapes)).float() / shapes - 1


def read_between(
    features: Tensor, rows: Tensor, places: Tensor, shapes: Tensor, grid: int
) -> Tensor:
    """Interpolate features of a grid at voxels.

    Linear between the centres of the eight cells around, constant beyond the last.

    One weighted gather, because the gradient of `grid_sample` has no deterministic kernel on a GPU.

    Args:
        features: [B * G^3, C] float32, of the cells of all volumes in the order (row, z, y, x).
        rows: [Q] int64.
        places: [Q, 3] int64 (z, y, x).
        shapes: [Q, 3] int64, of the volume of each.
        grid: G.

    Returns:
        [Q, C] float32.
    """
    position = ((places + 0.5) * grid / shapes - 0.5).clamp(0, grid - 1)
    low = position.long().clamp(max=max(grid - 2, 0))
    share = position - low
    corners, weights = zip(*_find_corners(rows, low, share, grid), strict=True)
    return F.embedding_bag(
        torch.stack(corners, dim=1),
        features,
        mode="sum",
        per_sample_weights=torch.stack(weights, dim=1),
    )


def _find_corners(
    rows: Tensor, low: Tensor, share: Tensor, grid: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cell and weight of each of the eight corners."""
    first, steps = flat_cells(rows, low, grid), (grid * grid, grid, 1)
    sides = [(1 - share[:, axis], share[:, axis]) for axis in range(3)]
    for corner in range(8):
        far = [corner >> axis & 1 for axis in range(3)]
        step = sum(side * size for side, size in zip(far, steps, strict=True))
        yield first + step, sides[0][far[0]] * sides[1][far[1]] * sides[2][far[2]]
