"""`VolumeAugment`: flips, rotates and scales windows of volumes, and changes their values."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_data.core.checks import check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform

DRAWS = "augment_volume"
"""Key of the random numbers in a planned batch."""

_MOVED = ("image", "occupied", "mask")
_WARP_DRAWS = 3  # warped or not, angle, scale
_VALUE_DRAWS = 3  # gain, offset, gamma


class VolumeAugment(nn.Module):
    """Flips, rotations about z, scaling, and changes of the values of windows [B, 1, D, H, W].

    Random numbers are drawn on the host. Those of a sample come from its own streams and are a pure
    function of (seed, epoch, index). Voxels are changed on the device of the batch. Labels take the
    nearest voxel, so that no new label appears. Beyond its edges, a window is continued with its
    outermost voxels.

    Args:
        flip: (z, y, x), whether windows are mirrored along each axis, with probability 1/2.
        rotate_deg: Largest rotation about z, in both directions. Voxels are assumed to be as long
            along y as along x.
        scale: Smallest and largest factor, the same along all axes.
        probability: Fraction of samples that are rotated and scaled.
        gain: Values are multiplied by a factor in [1 - gain, 1 + gain].
        offset: Largest number added, in units of the window of values, 0..1.
        gamma: Values are raised to a power in [1 - gamma, 1 + gamma].

    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        *,
        flip: Sequence[bool] = (False, False, True),
        rotate_deg: float = 15.0,
        scale: Sequence[float] = (0.85, 1.15),
        probability: float = 0.5,
        gain: float = 0.1,
        offset: float = 0.05,
        gamma: float = 0.1,
    ) -> None:
        super().__init__()
        check_fraction("augment.probability", probability)
        check_fraction("augment.gain", gain, 0.99)
        check_fraction("augment.offset", offset)
        check_fraction("augment.gamma", gamma, 0.99)
        check_fraction("augment.rotate_deg", rotate_deg, 180)
        if len(flip) != 3 or len(scale) != 2 or not 0 < scale[0] <= scale[1]:
            raise ConfigError(
                f"flip={list(flip)}, scale={list(scale)}: give (z, y, x) of true or false, and the "
                "smallest and the largest factor, above 0"
            )
        self.flip = tuple(flip)
        self.rotate_deg = rotate_deg
        self.scale = tuple(scale)
        self.probability = probability
        self.value_ranges = (gain, offset, gamma)

    def draw(self, seed: int, epoch: int, index: ArrayLike) -> Tensor:
        """Draw the numbers of a batch on the host.

        Args:
            seed: 0 <= seed < 2**64.
            epoch: The epoch.
            index: [B] numbers of the samples.

        Returns:
            [B, 8] float32: signs of (z, y, x), angle in rad, scale factor, gain, offset, gamma.
        """
        warps = uniform(seed, Stream.GEOMETRY, index, epoch, 3 + _WARP_DRAWS)
        values = uniform(seed, Stream.PHOTOMETRY, index, epoch, _VALUE_DRAWS)
        signs = np.where((warps[:, :3] < 0.5) & np.array(self.flip), -1, 1)
        # Each number is drawn in any case, so that no option changes the others.
        is_warped = warps[:, 3] < self.probability
        angle = (2 * warps[:, 4] - 1) * math.radians(self.rotate_deg) * is_warped
        smallest, largest = self.scale
        factor = np.where(is_warped, smallest + warps[:, 5] * (largest - smallest), 1)
        changes = (2 * values - 1) * np.array(self.value_ranges)
        columns = np.column_stack((signs, angle, factor, changes))
        return torch.from_numpy(columns.astype(np.float32))

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Change the windows of a batch.

        Args:
            batch: ``image`` [B, 1, D, H, W] float32 in 0..1, and ``occupied`` and ``mask`` if they
                exist.
            draws: Numbers of `draw`, on the device of the batch.

        Returns:
            The same keys.
        """
        grid = F.affine_grid(
            _make_matrices(draws, batch["image"].shape[2:]),
            list(batch["image"].shape),
            align_corners=False,
        )
        moved: dict[str, Tensor] = {}
        for name in _MOVED:
            if name in batch:
                moved[name] = _sample(batch[name], grid, nearest=name != "image")
        gain, offset, gamma = draws[:, 5:, None, None, None, None].unbind(1)
        values = (moved["image"] * (1 + gain) + offset).clamp(0, 1)
        moved["image"] = values ** (1 + gamma)
        return moved


def _make_matrices(draws: Tensor, sides: Sequence[int]) -> Tensor:
    """Return [B, 3, 4] matrices from output to input coordinates, (x, y, z) in -1..1."""
    z_sign, y_sign, x_sign, angle, factor = draws[:, :5].unbind(1)
    _, height, width = sides
    matrices = draws.new_zeros(len(draws), 3, 4)
    cos, sin = angle.cos() / factor, angle.sin() / factor
    matrices[:, 0, 0] = x_sign * cos
    # Half a window is 1 along each axis, however many voxels it has.
    matrices[:, 0, 1] = -x_sign * sin * height / width
    matrices[:, 1, 0] = y_sign * sin * width / height
    matrices[:, 1, 1] = y_sign * cos
    matrices[:, 2, 2] = z_sign / factor
    return matrices


def _sample(voxels: Tensor, grid: Tensor, *, nearest: bool) -> Tensor:
    mode = "nearest" if nearest else "bilinear"
    sampled = F.grid_sample(
        voxels.float(), grid, mode=mode, padding_mode="border", align_corners=False
    )
    return sampled.to(voxels.dtype)
