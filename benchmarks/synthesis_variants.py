"""What mode `synthesis` draws, and the ways of drawing it one defect at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from typing_extensions import override

from benchmarks.spots import Floats, PlacedSpot, place_spots
from lit_data.commands.build import build_datamodule
from lit_data.datamodules.stripe_transform import StripeTransform
from lit_data.datamodules.stripes import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.families.base import Parameters
from lit_data.synthesis.families.spot import Spot
from lit_data.synthesis.kernels import window_start
from lit_data.synthesis.renderer import draw
from lit_data.synthesis.values import ValueRange
from lit_data.types import Batch

if TYPE_CHECKING:
    from lit_data.synthesis.windows import Windows

_EPOCHS: Final = 100
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

    transformation: StripeTransform
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
        index, shape = (
            self.batch["index"].numpy(),
            cast(tuple[int, int, int], tuple(self.patches.shape[1:])),
        )
        plans = (
            sample_plan(spec, self.transformation.seed, epoch, index, shape)
            for epoch in range(_EPOCHS)
        )
        plan = next((plan for plan in plans if len(plan)), None)
        if plan is None:
            raise ConfigError(
                f"data.synthesis draws no defects in {_EPOCHS} batches of {len(index)}: raise its probability or count"
            )
        return plan


class Alone(NamedTuple):
    """One defect: the image it is drawn into, and a plan of it alone, for a batch of that image alone."""

    row: int
    plan: DefectPlan


class WholeSpot(Spot):
    """A spot that computes its formula at every pixel of its window, where `Spot` looks into a table."""

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> Tensor:
        number = parameters["shape"].long().view(-1).tolist()
        shapes = [self.shapes[n] for n in number]
        down = _profile(
            windows.y,
            windows.top - windows.nearest_y,
            [(s.height_px, s.sigma_y_px) for s in shapes],
        )
        across = _profile(
            windows.x.mT,
            windows.left - windows.nearest_x,
            [(s.width_px, s.sigma_x_px) for s in shapes],
        )
        return (down * across.mT).float()


def open_scene(cfg: DictConfig, batch_size: int) -> Scene:
    """The pixels of an experiment, clean; its patches are repeated where they do not fill a batch.

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
    transformation, dataset = datamodule.transformation, datamodule.dataset("train")
    if not len(dataset):
        raise ConfigError("the train split holds no images to draw into: check data.splits")
    samples = [dataset[number % len(dataset)] for number in range(batch_size)]
    batch = transformation.plan(
        {key: torch.stack([s[key] for s in samples]) for key in samples[0]}, "train"
    )
    patches, values = transformation.spread(batch["image"], batch)
    whole = torch.from_numpy(np.array(datamodule.bank[int(batch["image_index"][0])]))[None]
    first = transformation.plan({"index": batch["index"][:1], "epoch": batch["epoch"][:1]}, "train")
    patches, image = (
        _copy_pixels(pixels) for pixels in (patches, transformation.spread(whole, first)[0])
    )
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
    """The same defects in the middle of the image, in windows that are exactly the image.

    Where a defect lies does not change what the whole-image way costs, and windows around the
    middle need no margin.

    Args:
        plan: Defects on the host.
        shape_px: (H, W) of the image.
    """
    middle_y, middle_x = (np.float32((length - 1) // 2) for length in shape_px)
    families = tuple(
        WholeSpot(
            weight=member.weight,
            amplitude=member.amplitude,
            contrast=member.contrast,
            shapes=member.shapes,
        )
        if isinstance(member, Spot)
        else member
        for member in plan.spec.members
    )
    return replace(
        plan,
        y=plan.y - np.floor(plan.y + np.float32(0.5)) + middle_y,
        x=plan.x - np.floor(plan.x + np.float32(0.5)) + middle_x,
        groups=tuple(
            group._replace(height_px=shape_px[0], width_px=shape_px[1]) for group in plan.groups
        ),
        spec=replace(plan.spec, families=families),
    )


def take_alone(plan: DefectPlan, numbers: Iterable[int]) -> list[Alone]:
    """Some defects of a plan, each by itself.

    Args:
        plan: Defects on the host.
        numbers: Which.
    """
    plans = [plan.select(np.arange(len(plan)) == number) for number in numbers]
    return [
        Alone(int(one.row[0]), replace(one, row=np.zeros_like(one.row)).to("cpu")) for one in plans
    ]


def draw_in_turn(
    images: Tensor, masks: Tensor, defects: Iterable[Alone], values: ValueRange
) -> None:
    """Draw defects one after the other, with a call for each.

    Args:
        images: [B, C, H, W] float32, contiguous, on the CPU; changed in place.
        masks: [B, 1, H, W], contiguous; set to 1.
        defects: What to draw, and into which image.
        values: The value range of the images.
    """
    for row, plan in defects:
        draw(images[row : row + 1], masks[row : row + 1], plan, values)


def place_alone(
    patches: Tensor, plan: DefectPlan, numbers: Iterable[int], values: ValueRange
) -> list[PlacedSpot]:
    """Spots of a plan as the NumPy ways take them.

    Args:
        patches: [B, C, h, w] float32 pixel values.
        plan: Spots for these, on the host.
        numbers: Which of them.
        values: The value range of the patches.
    """
    spots = []
    for number in numbers:
        spots += place_spots(to_unit(patches[plan.row[number], 0], values), plan, [number], 0, 0)
    return spots


def to_unit(pixels: Tensor, values: ValueRange) -> Floats:
    """A copy of pixel values, scaled to 0..1."""
    unit: Floats = (pixels.numpy() - np.float32(values.low)) / np.float32(values.scale)
    return unit


def _copy_pixels(pixels: Tensor) -> Tensor:
    return torch.empty(pixels.shape).copy_(pixels)


def _profile(distance: Tensor, first: Tensor, shapes: Sequence[tuple[int, float]]) -> Tensor:
    """One axis of spots, in double as in their table: [n, h, 1].

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
