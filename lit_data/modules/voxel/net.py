"""`PointVoxelNet`: occupied voxels to a small grid of latents, and from it back to any voxel that is asked for."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.errors import ConfigError
from lit_data.modules.voxel.blocks import (
    PointScatter,
    find_offsets,
    make_decoder,
    make_encoder,
    read_between,
)
from lit_data.modules.voxel.points import Points
from lit_data.modules.voxel.vector_quantiser import VectorQuantiser

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
    "Point-Voxel CNN", NeurIPS 2019), 3-D convolutions down to the latents; these may be quantised.
    Decoder: convolutions back up to the grid. A voxel is asked for by reading the grid between the
    cells around it, and a perceptron says whether it is occupied and its value (Peng et al.,
    "Convolutional occupancy networks", ECCV 2020). One more head says which cells hold anything, so
    that a volume can be written without asking for every voxel of the air around the patient.

    No volume sees another: normalisation is within a volume, and points come in one order, whatever
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
                "numbers, a grid that is a multiple of 2^levels, and a width that is one of 4"
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
                f"the points have {points.feats.shape[1]} features: set model.net.channels to "
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
        angle = math.pi * find_offsets(places, shapes, self.grid)
        logits, values = (
            self.answer(torch.cat((features, angle.sin(), angle.cos()), dim=1)).float().unbind(1)
        )
        return logits, values

    def _quantise(self, latents: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.quantiser is None:
            return latents, None, latents.new_zeros(len(latents), dtype=torch.float32)
        last = latents.movedim(1, -1)
        quantised = self.quantiser(last.flatten(0, 3))
        vectors = quantised.latents.view_as(last).movedim(-1, 1)
        volumes = len(latents)
        return (
            vectors,
            quantised.codes.view(volumes, -1),
            quantised.misses.view(volumes, -1).mean(1),
        )
