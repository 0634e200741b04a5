"""Scene of the suite `synthesis`, and the ways of drawing one defect at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from typing_extensions import override

from benchmarks.spots import Floats, PlacedSpot, place_spots
from lit_data.commands.build import build_datamodule
from lit_data.datamodules import StripeDataModule
from lit_data.datamodules.image_transform import ImageTransform
from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.canvas import ValueRange
from lit_data.synthesis.families.base import Family, Parameters
from lit_data.synthesis.families.spot import Spot, window_start
from lit_data.synthesis.renderer import draw
from lit_data.types import Batch

if TYPE_CHECKING:
    from lit_data.synthesis.windows import Windows

_EPOCHS = 100
"""How many epochs are searched for one in which a small batch has defects."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Pixels of an experiment to draw on.

    Attributes:
        transformation: What happens to its batches.
        spec: Its defects.
        batch: A planned training batch on the host, pixels as they are stored.
        patches: [B, C, h, w] float32 pixel values of that batch.
        masks: [B, 1, h, w] float32, theirs, empty.
        image: [1, C, H, W] float32, the whole first image.
        image_mask: [1, 1, H, W] float32, empty.
        values: The value range of all pixels.
    """

    transformation: ImageTransform
    spec: DefectSpec
    batch: Batch
    patches: Tensor
    masks: Tensor
    image: Tensor
    image_mask: Tensor
    values: ValueRange

    @property
    def size_px(self) -> tuple[int, int]:
        """(H, W) of the image."""
        height, width = self.image.shape[2:]
        return height, width

    def plan(self, spec: DefectSpec) -> DefectPlan:
        """Defects for the batch, in the first epoch that has any.

        Raises:
            ConfigError: None has.
        """
        index = self.batch["index"].numpy()
        channels, height, width = self.patches.shape[1:]
        for epoch in range(_EPOCHS):
            seed = self.transformation.seed
            plan = sample_plan(spec, seed, epoch, index, (channels, height, width))
            if len(plan):
                return plan
        raise ConfigError(
            f"data.synthesis draws no defects in {_EPOCHS} batches of {len(index)}: raise its "
            "probability or count"
        )


class Alone(NamedTuple):
    """One defect.

    Attributes:
        row: The image that it is drawn into.
        plan: A plan of it alone, for a batch of that image alone.
    """

    row: int
    plan: DefectPlan


class WholeSpot(Spot):
    """A spot that computes its formula at every pixel, where `Spot` looks into a table."""

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> Tensor:
        numbers = parameters["shape"].long().view(-1).tolist()
        shapes = [self.shapes[number] for number in numbers]
        heights = [(shape.height_px, shape.sigma_y_px) for shape in shapes]
        widths = [(shape.width_px, shape.sigma_x_px) for shape in shapes]
        down = _profile(windows.y, windows.top - windows.nearest_y, heights)
        across = _profile(windows.x.mT, windows.left - windows.nearest_x, widths)
        return (down * across.mT).float()


def open_scene(cfg: DictConfig, batch_size: int) -> Scene:
    """Read clean pixels of an experiment; patches are repeated where they do not fill a batch.

    Raises:
        ConfigError: It has no images of stripes, no defects, or no training images.
    """
    changed = cfg.copy()
    changed.data.backend = "device"  # else the workers' dataset draws
    if cfg.data.get("cache") == "device":
        changed.data.cache = "store"
    datamodule = build_datamodule(changed)
    if not isinstance(datamodule, StripeDataModule) or datamodule.synthesis is None:
        raise ConfigError(
            "suite=synthesis draws data.synthesis into stripes: set synthesis=library"
        )
    datamodule.setup("fit")
    transformation = datamodule.transformation
    dataset = datamodule.dataset("train")
    if not len(dataset):
        raise ConfigError("the train split holds no images to draw into: check data.splits")
    samples = [dataset[number % len(dataset)] for number in range(batch_size)]
    stacked = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    batch = transformation.plan(stacked, "train")
    patches, values = transformation.spread(batch["image"], batch)
    patches = _copy_pixels(patches)
    first = {"index": batch["index"][:1], "epoch": batch["epoch"][:1]}
    pixels = torch.from_numpy(np.array(datamodule.bank[int(batch["image_index"][0])]))[None]
    image = _copy_pixels(transformation.spread(pixels, transformation.plan(first, "train"))[0])
    return Scene(
        transformation=transformation,
        spec=datamodule.synthesis,
        batch=batch,
        patches=patches,
        masks=torch.zeros_like(patches[:, :1]),
        image=image,
        image_mask=torch.zeros_like(image[:, :1]),
        values=values,
    )


def widen(plan: DefectPlan, shape_px: tuple[int, int]) -> DefectPlan:
    """Move defects into the middle of the image, in windows that are exactly the image.

    Where a defect lies does not change what the whole-image way costs, and windows around the
    middle need no margin.

    Args:
        plan: Defects on the host.
        shape_px: (H, W) of the image.
    """
    middle_y, middle_x = (np.float32((length - 1) // 2) for length in shape_px)
    half = np.float32(0.5)
    families = tuple(_compute_everywhere(member) for member in plan.spec.members)
    groups = []
    for group in plan.groups:
        groups.append(group._replace(height_px=shape_px[0], width_px=shape_px[1]))
    return replace(
        plan,
        y=plan.y - np.floor(plan.y + half) + middle_y,
        x=plan.x - np.floor(plan.x + half) + middle_x,
        groups=tuple(groups),
        spec=replace(plan.spec, families=families),
    )


def _compute_everywhere(member: Family) -> Family:
    """Return a family that computes its formula at every pixel; only spots look into a table."""
    if not isinstance(member, Spot):
        return member
    return WholeSpot(
        weight=member.weight,
        amplitude=member.amplitude,
        contrast=member.contrast,
        shapes=member.shapes,
    )


def take_alone(plan: DefectPlan, numbers: Iterable[int]) -> list[Alone]:
    """Take some defects out of a plan, each by itself.

    Args:
        plan: Defects on the host.
        numbers: Those to take.
    """
    alone = []
    for number in numbers:
        single = plan.select(np.arange(len(plan)) == number)
        row = int(single.row[0])
        alone.append(Alone(row, replace(single, row=np.zeros_like(single.row)).to("cpu")))
    return alone


def draw_in_turn(
    images: Tensor, masks: Tensor, defects: Iterable[Alone], values: ValueRange
) -> None:
    """Draw defects one after the other, with a call for each.

    Args:
        images: [B, C, H, W] float32, contiguous, on the CPU; changed in place.
        masks: [B, 1, H, W], contiguous; set to 1.
        defects: With the image that each is drawn into.
        values: The value range of the images.
    """
    for row, plan in defects:
        draw(images[row : row + 1], masks[row : row + 1], plan, values)


def place_alone(
    patches: Tensor, plan: DefectPlan, numbers: Iterable[int], values: ValueRange
) -> list[PlacedSpot]:
    """Place spots of a plan as the NumPy ways take them.

    Args:
        patches: [B, C, h, w] float32 pixel values.
        plan: Spots for these, on the host.
        numbers: Those to place.
        values: The value range of the patches.
    """
    spots = []
    for number in numbers:
        spots += place_spots(to_unit(patches[plan.row[number], 0], values), plan, [number], 0, 0)
    return spots


def to_unit(pixels: Tensor, values: ValueRange) -> Floats:
    """Return a copy of pixel values, scaled to 0..1."""
    unit: Floats = (pixels.numpy() - np.float32(values.low)) / np.float32(values.scale)
    return unit


def _copy_pixels(pixels: Tensor) -> Tensor:
    return torch.empty(pixels.shape).copy_(pixels)


def _profile(distance: Tensor, first: Tensor, shapes: Sequence[tuple[int, float]]) -> Tensor:
    """Compute one axis of spots, in double as in their table: [n, h, 1].

    Args:
        distance: [n, h, 1] px from the centre.
        first: [n] first row of the window, from the pixel nearest to the centre.
        shapes: [n] (window in px, sigma in px).
    """
    row = first[:, None, None] + torch.arange(distance.shape[1])[:, None]
    start = torch.tensor([-window_start(size) for size, _ in shapes])[:, None, None]
    stop = start + torch.tensor([size for size, _ in shapes])[:, None, None]
    sigma = torch.tensor([sigma for _, sigma in shapes], dtype=torch.float64)[:, None, None]
    return (-(distance.double() ** 2) / (2 * sigma**2)).exp_() * ((row >= start) & (row < stop))
