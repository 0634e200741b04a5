"""Parts of `PointVoxelNet`: points to a grid, the grid to latents and back, codes, and interpolation."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.wings.volumes.voxel.points import Points, find_cells

_GROUPS = 4
# A prime (Knuth, "The Art of Computer Programming", 6.4): steps over M latents without repeat.
_SPREAD = 2654435761


class PointScatter(nn.Module):
    """A small perceptron on each point, then the mean over the points of each cell.

    Two of the channels are not means: one marks cells with a point, the other is the fraction of
    the cell's voxels that are occupied. Points are processed in chunks. In training each chunk
    is computed again in the backward pass, so that only the memory of the points themselves
    grows with their number.

    Args:
        channels: Columns of the points' features.
        width: Total number of channels, at least 3.
        grid: Cells along an axis.
        chunk: Points at once.
    """

    def __init__(self, channels: int, width: int, *, grid: int, chunk: int) -> None:
        super().__init__()
        self.grid = grid
        self.chunk = chunk
        self.means = width - 2  # the other two channels are counted, not learned
        self.layers = nn.Sequential(
            nn.Linear(channels + 3, width), nn.SiLU(), nn.Linear(width, self.means)
        )

    @override
    def forward(self, points: Points) -> Tensor:
        """Return the features of the cells: [B, width, G, G, G]."""
        volumes, grid = len(points.shapes), self.grid
        # Sums and counts in float32 at any precision: half precision cannot count beyond 2048
        # points.
        sums = points.feats.new_zeros(volumes * grid**3, self.means)
        counts = points.feats.new_zeros(volumes * grid**3)
        for start in range(0, len(points.rows), self.chunk):
            part = slice(start, start + self.chunk)
            rows, places, feats = points.rows[part], points.places[part], points.feats[part]
            shapes = points.shapes[rows]
            cells = flat_cells(rows, find_cells(places, shapes, grid), grid)
            inputs = torch.cat((feats, find_offsets(places, shapes, grid)), dim=1)
            if torch.is_grad_enabled() and len(points.rows) > self.chunk:
                # The layers use no random numbers, so the state of the generators need not be kept.
                outputs = checkpoint(
                    self.layers, inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                outputs = self.layers(inputs)
            sums = sums.index_add(0, cells, outputs.float())
            counts = counts.index_add(0, cells, torch.ones_like(cells, dtype=counts.dtype))
        means = sums / counts.clamp(min=1)[:, None]
        # Voxels of a cell that could be points, if points are a subset of the occupied ones.
        voxels = points.shapes.prod(1) / grid**3 * points.kept_share()
        filled = (counts.view(volumes, -1) / voxels[:, None]).flatten()
        cells = torch.cat((means, filled[:, None], (counts > 0).float()[:, None]), dim=1)
        return cells.view(volumes, grid, grid, grid, -1).movedim(-1, 1)  # channels last in memory


class VoxelResidual(nn.Module):
    """Two convolutions added to their input, normalized within each volume, so independent of the batch."""

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
    """Map [B, width, G, G, G] to [B, latent, g, g, g], g = G / 2^levels; each level doubles the channels."""
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
    """Map [B, latent, g, g, g] to [B, width, G, G, G]."""
    layers: list[nn.Module] = [nn.Conv3d(latent, width << levels, 3, padding=1)]
    for level in reversed(range(levels)):
        layers += [
            VoxelResidual(width << level + 1),
            nn.ConvTranspose3d(width << level + 1, width << level, 2, stride=2),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers, nn.Conv3d(width, width, 3, padding=1), nn.SiLU())


def flat_cells(rows: Tensor, cells: Tensor, grid: int) -> Tensor:
    """Return the number of each cell among those of all volumes, from rows [...] and cells [..., 3]: [...] int64."""
    z, y, x = cells.unbind(-1)
    return ((rows * grid + z) * grid + y) * grid + x


def find_offsets(places: Tensor, shapes: Tensor, grid: int) -> Tensor:
    """Return the position of a voxel's center in its cell: [..., 3] float32 in -1..1."""
    return ((2 * places + 1) * grid % (2 * shapes)).float() / shapes - 1


def read_between(
    features: Tensor, rows: Tensor, places: Tensor, shapes: Tensor, grid: int
) -> Tensor:
    """Interpolate features of a grid at voxels.

    Interpolation is linear between the centers of the eight surrounding cells, and constant beyond
    the outermost ones. It is one weighted gather, because the gradient of `grid_sample` has no
    deterministic kernel on a GPU.

    Args:
        features: [B * G^3, C] float32, of the cells of all volumes in the order (row, z, y, x).
        rows: [Q] int64 volume of each voxel.
        places: [Q, 3] int64 (z, y, x).
        shapes: [Q, 3] int64 shape of the volume of each voxel.
        grid: G.

    Returns:
        [Q, C] float32.
    """
    # In cells, from the center of the first one.
    position = ((places + 0.5) * grid / shapes - 0.5).clamp(0, grid - 1)
    low = position.long().clamp(max=max(grid - 2, 0))
    share = position - low  # weight of the farther cell along each axis
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
    """Yield cell and weight of each of the eight corners."""
    first, steps = flat_cells(rows, low, grid), (grid * grid, grid, 1)
    sides = [(1 - share[:, axis], share[:, axis]) for axis in range(3)]
    for corner in range(8):
        far = [corner >> axis & 1 for axis in range(3)]
        step = sum(side * size for side, size in zip(far, steps, strict=True))
        yield first + step, sides[0][far[0]] * sides[1][far[1]] * sides[2][far[2]]


class Quantised(NamedTuple):
    """Latents after quantization.

    Attributes:
        latents: [M, D] float32: the values of codes, while gradients pass straight to the inputs.
        codes: [M] int64 number of each code.
        misses: [M] float32: mean squared distance to the code, whose gradient pulls latents to
            their codes.
    """

    latents: Tensor
    codes: Tensor
    misses: Tensor


class VectorQuantiser(nn.Module):
    """Codebook that follows the latents as a running mean.

    It is that of van den Oord et al., NeurIPS 2017, appendix A.1.

    In training `forward` only counts; `update`, called once after each step, moves the codes. So
    the micro-batches of a batch count together, and ranks communicate once a step, whatever each of
    them did in it. A code used less than `restart_share` of the mean use restarts at a latent of
    the last batch; so do all codes at the first update. All state is in buffers, and nothing uses
    torch's random generators.

    Args:
        codes: Size of the codebook.
        width: Length of a code.
        decay: Decay of the running mean per step.
        restart_share: See above; 0 never restarts a code that was used once.

    Raises:
        ConfigError: A number is out of range.
    """

    codebook: Tensor
    sizes: Tensor
    sums: Tensor
    seen_sizes: Tensor
    seen_sums: Tensor
    candidates: Tensor
    updates: Tensor

    def __init__(
        self, codes: int = 512, width: int = 16, *, decay: float = 0.97, restart_share: float = 0.1
    ) -> None:
        super().__init__()
        if codes < 2 or width < 1 or not 0 <= decay < 1 or not 0 <= restart_share < 1:
            raise ConfigError(
                f"codes={codes}, width={width}, decay={decay}, restart_share={restart_share}: need "
                "codes >= 2, width >= 1, 0 <= decay < 1 and 0 <= restart_share < 1"
            )
        self.codes, self.width, self.decay, self.restart_share = codes, width, decay, restart_share
        self.register_buffer("codebook", torch.randn(codes, width))
        for name in ("sizes", "seen_sizes"):
            self.register_buffer(name, torch.zeros(codes))
        for name in ("sums", "seen_sums", "candidates"):
            self.register_buffer(name, torch.zeros(codes, width))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, latents: Tensor) -> Quantised:
        """Replace each latent by its nearest code.

        Args:
            latents: [M, D], at least one.
        """
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float()
            # |latent - code|^2 without |latent|^2, which is the same for all codes.
            near = torch.addmm(
                self.codebook.square().sum(1), latents.detach(), self.codebook.T, alpha=-2
            )
            codes = near.argmin(1)
            nearest = self.codebook[codes]
            if self.training:
                self._count(latents.detach(), codes)
            misses = (latents - nearest).square().mean(1)
            # The value is the code, and the gradient is that of the latent.
            return Quantised(latents + (nearest - latents).detach(), codes, misses)

    @torch.no_grad()
    def update(self) -> None:
        """Move the codes to what was counted since the last call, on all ranks together."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen_sizes)
            dist.all_reduce(self.seen_sums)
            dist.broadcast(self.candidates, 0)  # one rank's, so that codebooks stay equal
        self.sizes.lerp_(self.seen_sizes, 1 - self.decay)
        self.sums.lerp_(self.seen_sums, 1 - self.decay)
        usual = self.seen_sizes.sum() / self.codes
        # If nothing was counted, `usual` is 0, and no code is below it.
        unused = (self.sizes < self.restart_share * usual) | ((self.sizes == 0) & (usual > 0))
        self.sizes.copy_(torch.where(unused, usual, self.sizes))
        self.sums.copy_(torch.where(unused[:, None], self.candidates * usual, self.sums))
        means = self.sums / self.sizes.clamp(min=1e-12)[:, None]
        self.codebook.copy_(torch.where(self.sizes[:, None] > 0, means, self.codebook))
        self.seen_sizes.zero_()
        self.seen_sums.zero_()
        self.updates += 1

    @torch.no_grad()
    def _count(self, latents: Tensor, codes: Tensor) -> None:
        # A step whose loss overflows is skipped by the gradient scaler, so it must not count here.
        finite = latents.isfinite().all(1)
        latents = latents.nan_to_num(0.0, 0.0, 0.0)
        self.seen_sizes.index_add_(0, codes, finite.float())
        self.seen_sums.index_add_(0, codes, latents * finite[:, None])
        # Other latents at each update, without a random generator.
        numbers = torch.arange(self.codes, device=codes.device) + self.updates * self.codes
        self.candidates.copy_(latents[numbers * _SPREAD % len(latents)])
