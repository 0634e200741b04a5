"""Inputs of a GAN's nets: latents, labels, poses, and places of the pixels; drawn for samples, and cut."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.core.batch_form import cut_evenly
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, uniform_torch
from lit_data.core.types import Batch


class Use(IntEnum):
    """Use of a sample's random numbers; each use has its own numbers."""

    DISCRIMINATOR = 0
    GENERATOR = 1
    SAMPLES = 2


class Conditions(NamedTuple):
    """Label, pose and places of the pixels of each picture of a batch.

    Attributes:
        labels: [B] int64; 0 without labels.
        poses: [B, 2] float32: azimuth and elevation of the camera, rad; 0 without poses.
        grids: [B, K, L, 2] float32: places (x, y) of the pixels, -1..1 from edge to edge; None for
            all pixels.
        offsets: [B, K, L] float32 in [0, 1): start of the points of each ray, in steps between
            them; None for 0.5.
    """

    labels: Tensor
    poses: Tensor
    grids: Tensor | None = None
    offsets: Tensor | None = None

    def split(self, sizes: list[int]) -> "list[Conditions]":
        """Return the conditions of each micro-batch of a batch."""
        fields: list[Any] = []
        for field in self:
            fields.append([None] * len(sizes) if field is None else torch.split(field, sizes))
        return [Conditions(*part) for part in zip(*fields, strict=True)]

    def to(self, device: torch.device) -> "Conditions":
        """Return the same conditions on a device."""
        fields: list[Any] = [None if field is None else field.to(device) for field in self]
        return Conditions(*fields)


@dataclass(frozen=True, slots=True)
class RayPatches:
    """Train on size x size rays of each image, at a random scale and place.

    Memory then depends on the number of rays, and not on the size of the images (Schwarz et al.,
    "GRAF", NeurIPS 2020).

    Args:
        size_px: Rays along each side.
        min_scale: Smallest fraction of the image's sides that the patch spans; at most it spans
            all.

    Raises:
        ConfigError: A number is out of range.
    """

    size_px: int = 16
    min_scale: float = 0.5

    def __post_init__(self) -> None:
        """Check every range."""
        if self.size_px < 1 or not 0 < self.min_scale <= 1:
            raise ConfigError(
                f"size_px={self.size_px}, min_scale={self.min_scale}: need 1 or more, and 0 < min_scale <= 1"
            )

    def draw(self, index: Tensor, *, seed: int, epoch: int, use: Use) -> tuple[Tensor, Tensor]:
        """Draw the places of the pixels, and the start of the points of their rays.

        Each sample has its own random numbers.

        Returns:
            ``grids`` [B, size, size, 2] and ``offsets`` [B, size, size] of `Conditions`.
        """
        size = self.size_px
        # For each sample: one number for the scale, two for the place, one for each ray.
        numbers = _draw(seed, Stream.RAYS, index, epoch, 3 + size * size, use)
        scales = self.min_scale + (1 - self.min_scale) * numbers[:, :1]
        centres = (1 - scales) * (2 * numbers[:, 1:3] - 1)  # the patch stays inside the image
        patch = make_grid(size, size, index.device)
        grids = centres[:, None, None] + scales[:, None, None] * patch
        offsets = numbers[:, 3:].view(-1, size, size)
        return grids, offsets


def draw_latents(index: Tensor, size: int, *, seed: int, epoch: int, use: Use) -> Tensor:
    """Return standard normal latents of samples, each a pure function of (seed, epoch, index, use).

    Args:
        index: [B] int64 sample indices.
        size: Length of a latent.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**32.
        use: Use of the latents.

    Returns:
        [B, size] float32 on the device of `index`.
    """
    pairs = -(-size // 2)  # two uniform numbers give two of a Gaussian
    numbers = _draw(seed, Stream.LATENT, index, epoch, 2 * pairs, use)
    # Box and Muller, Annals of Mathematical Statistics 1958; 1 - u is in (0, 1].
    radii = (-2 * torch.log(1 - numbers[:, :pairs])).sqrt()
    angles = 2 * math.pi * numbers[:, pairs:]
    return torch.cat((radii * angles.cos(), radii * angles.sin()), dim=1)[:, :size]


def draw_choices(index: Tensor, counts: tuple[int, int], *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a label and a pose for each sample to show, each from 0 to its count, exclusive.

    Returns:
        Two [B] int64; 0 if a count is 0.
    """
    numbers = _draw(seed, Stream.RAYS, index, 0, 2, Use.SAMPLES)
    label_count, pose_count = counts
    labels = (numbers[:, 0] * label_count).long()
    poses = (numbers[:, 1] * pose_count).long()
    return labels, poses


def make_grid(height: int, width: int, device: torch.device) -> Tensor:
    """Return the centers (x, y) of all pixels, [height, width, 2] float32, -1..1 from edge to edge."""
    rows = _find_centres(height, device)
    columns = _find_centres(width, device)
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)


def _find_centres(length: int, device: torch.device) -> Tensor:
    return (2 * torch.arange(length, device=device) + 1) / length - 1


def read_at(images: Tensor, grids: Tensor | None) -> Tensor:
    """Return images at places, linearly interpolated between pixels.

    Args:
        images: [B, C, H, W].
        grids: Those of `Conditions`; None returns the images as they are.

    Returns:
        [B, C, K, L].
    """
    if grids is None:
        return images
    return F.grid_sample(images, grids.to(images.dtype), padding_mode="border", align_corners=False)


def _draw(seed: int, stream: Stream, index: Tensor, epoch: int, draws: int, use: Use) -> Tensor:
    """Draw [B, draws] float32 in [0, 1) for one use, from the numbers of all uses."""
    # All uses are drawn and one is taken, so that no use depends on another.
    numbers = uniform_torch(seed, stream, index, epoch, draws * len(Use))
    return numbers[:, draws * use : draws * (use + 1)]


class Part(NamedTuple):
    """A micro-batch: samples that go through the nets at once.

    Attributes:
        images: [B, C, H, W] real images in 0..1.
        latents: [B, latent_size] of the fakes.
        conditions: Conditions of real images and fakes.
        fraction: B divided by the samples of the whole batch.
    """

    images: Tensor
    latents: Tensor
    conditions: Conditions
    fraction: float

    def read_real(self) -> Tensor:
        """Return the real images in -1..1, at the places of the conditions."""
        return read_at(self.images, self.conditions.grids).mul(2).sub(1)


@dataclass(frozen=True, slots=True)
class PartDraws:
    """Cuts batches into micro-batches, and draws random numbers that depend on the sample only.

    Attributes:
        latent_size: Length of the latents.
        seed: Seed of all random numbers.
        patches: Places of the pixels; None for whole images.
        posed: True to refuse batches without poses.
    """

    latent_size: int
    seed: int
    patches: RayPatches | None
    posed: bool

    def cut(self, batch: Batch, size: int | None, *, epoch: int, use: Use) -> Iterator[Part]:
        """Yield micro-batches of up to `size` samples, as equal as possible; a single one for None.

        Raises:
            ConfigError: The batch lacks images, indices or poses.
        """
        _check_batch(batch, self.posed)
        index = batch["index"]
        images = batch["image"]
        samples = len(index)
        sizes = [stop - start for start, stop in cut_evenly(samples, size or samples)]
        latents = draw_latents(index, self.latent_size, seed=self.seed, epoch=epoch, use=use)
        conditions = self._read_conditions(batch, epoch, use)
        parts = zip(
            torch.split(images, sizes),
            torch.split(latents.to(images.dtype), sizes),
            conditions.split(sizes),
            strict=True,
        )
        for part_images, part_latents, part_conditions in parts:
            fraction = len(part_images) / samples
            yield Part(part_images, part_latents, part_conditions, fraction)

    def _read_conditions(self, batch: Batch, epoch: int, use: Use) -> Conditions:
        index = batch["index"]
        labels = batch.get("label")
        if labels is None:  # nets without labels ignore them
            labels = torch.zeros_like(index)
        poses = batch.get("pose")
        if poses is None:
            poses = torch.zeros(len(index), 2, device=index.device)
        if self.patches is None:
            return Conditions(labels, poses)
        grids, offsets = self.patches.draw(index, seed=self.seed, epoch=epoch, use=use)
        return Conditions(labels, poses, grids, offsets)


def _check_batch(batch: Batch, posed: bool) -> None:
    keys = ("image", "index", "pose") if posed else ("image", "index")
    missing = [key for key in keys if key not in batch]
    if missing:
        raise ConfigError(
            f"the batch has no {' and no '.join(map(repr, missing))} but {', '.join(sorted(batch))}: set data.views "
            "for nets that depend on poses, and batch_format=dict"
        )
