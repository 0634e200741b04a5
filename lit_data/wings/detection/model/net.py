"""`DetectorNet`: a small convolutional net that predicts at each place of an image the object centered near it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.types import PathText
from lit_data.models.layers import count_outputs, run_in_float32
from lit_data.models.weights import load_weights_file
from lit_data.wings.detection.model.boxes import to_corners

# Probability of each class that the untrained net gives (Lin et al., "Focal loss", ICCV 2017).
_PRIOR = 0.01
# In strides, so that before any training each object is nearest to a level of its own size.
_FIRST_SIZE = 4.0
# e^6 * 4 strides is 13 thousand pixels at least; beyond it exp would leave float32.
_LARGEST_LOG = 6.0


@dataclass(frozen=True, slots=True)
class Level:
    """A grid of places over the image; the place (y, x) has its center at ``(x + 0.5, y + 0.5) * stride_px``."""

    stride_px: int
    rows: int
    columns: int


class Predictions(NamedTuple):
    """Predictions of a detector at its P places, level after level, each row by row.

    Attributes:
        logits: [B, P, classes] float32.
        boxes: [B, P, 4] float32, corners in pixels of the batch image.
        levels: Grids of the places.
    """

    logits: Tensor
    boxes: Tensor
    levels: tuple[Level, ...]


class DetectorNet(nn.Module):
    """Features at strides of 8, 16 and 32 px, optionally also 4 px, with a head for each stride.

    Each level is joined with the coarser one, as in feature pyramids (Lin et al., CVPR 2017). The
    two branches of a head are those of FCOS (Tian et al., ICCV 2019). A head gives one logit for
    each class, and a box as the offset of its center from the place and the logarithm of its size,
    both in strides. Unlike distances to four sides, these describe any box from any place, even a
    box of a single pixel between the places.

    Args:
        classes: Number of classes, or their names; None stands for 1.
        width: Channels of the first layer; deeper ones have up to eight times as many. 16 gives 0.9
            M parameters.
        channels: Number of channels of the images.
        finest_stride_px: 8, or 4 for objects of a few pixels that are close together; 4 takes about
            half as much time again.
        weights: File with the initial weights, see `load_weights_file`.

    Raises:
        ConfigError: A number is not positive, or the width is odd.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        width: int = 16,
        channels: int = 3,
        finest_stride_px: Literal[4, 8] = 8,
        weights: PathText | None = None,
    ) -> None:
        super().__init__()
        check_choice("finest_stride_px", finest_stride_px, (4, 8))
        classes = count_outputs(classes)
        if classes < 1 or width < 2 or width % 2 or channels < 1:
            raise ConfigError(
                f"classes={classes}, width={width}, channels={channels}: need classes >= 1, an even "
                "width >= 2 and channels >= 1"
            )
        self.classes = classes
        self.channels = channels
        self.strides_px = (4, 8, 16, 32) if finest_stride_px == 4 else (8, 16, 32)
        fine = 4 * width
        middle = 8 * width
        coarse = 8 * width
        self.stem = nn.Sequential(
            _convolve(channels, width, stride=2),
            _convolve(width, 2 * width, stride=2),
            _Block(2 * width),
        )
        self.stages = nn.ModuleList(
            nn.Sequential(_convolve(inputs, outputs, stride=2), _Block(outputs))
            for inputs, outputs in ((2 * width, fine), (fine, middle), (middle, coarse))
        )
        widths = (2 * width, fine, middle, coarse)[-len(self.strides_px) :]
        self.pyramid = Pyramid(self.strides_px, widths, fine, classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights_file(self, weights)

    @override
    def forward(self, images: Tensor) -> Predictions:
        """Return the predictions for a batch of images.

        Args:
            images: [B, channels, H, W] float32 in 0..1; any H and W.
        """
        features: Tensor = self.stem(images.contiguous(memory_format=torch.channels_last))
        maps = [features]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        predictions: Predictions = self.pyramid(maps[-len(self.strides_px) :])
        return predictions


class Pyramid(nn.Module):
    """Joins each feature map with the coarser one, and has a head for each.

    Args:
        strides_px: Strides of the maps, the finest first.
        widths: Channels of the maps.
        width: Channels of the joined maps.
        classes: Number of classes.
    """

    def __init__(
        self, strides_px: Sequence[int], widths: Sequence[int], width: int, classes: int
    ) -> None:
        super().__init__()
        self.strides_px = tuple(strides_px)
        self.sides = nn.ModuleList(_convolve(inputs, width, kernel=1) for inputs in widths)
        self.joins = nn.ModuleList(_convolve(width, width) for _ in widths)
        self.heads = nn.ModuleList(_Head(width, classes) for _ in widths)

    @override
    def forward(self, maps: Sequence[Tensor]) -> Predictions:
        """Return the predictions for maps [B, width, rows, columns], the finest first."""
        pairs = zip(self.sides, maps, strict=True)
        joined = self._join([side(level) for side, level in pairs])
        outputs = [head(level) for head, level in zip(self.heads, joined, strict=True)]
        logits, codes = (torch.cat(parts, dim=1).float() for parts in zip(*outputs, strict=True))
        levels = []
        for stride_px, level in zip(self.strides_px, joined, strict=True):
            levels.append(Level(stride_px, *level.shape[-2:]))
        return Predictions(logits, decode(codes, levels), tuple(levels))

    def _join(self, sides: Sequence[Tensor]) -> list[Tensor]:
        """Add the features of coarser levels to each level, from the coarsest down."""
        joined: list[Tensor] = []
        for side, join in zip(reversed(sides), reversed(self.joins), strict=True):
            if joined:
                side = side + F.interpolate(joined[0], size=side.shape[-2:], mode="nearest")
            joined.insert(0, join(side))
        return joined


def decode(codes: Tensor, levels: Sequence[Level]) -> Tensor:
    """Return the boxes that the heads encode, in float32.

    Args:
        codes: [B, P, 4] offsets of the center (x, y) in strides, and logarithms of (w, h) over 4
            strides.
        levels: Grids of the places.

    Returns:
        [B, P, 4] corners in pixels.
    """
    with torch.autocast(codes.device.type, enabled=False):
        centres, strides = place_centres(levels, codes.device)
        middle = centres + codes[..., :2].float() * strides
        size = codes[..., 2:].float().clamp(max=_LARGEST_LOG).exp() * strides * _FIRST_SIZE
        return to_corners(torch.cat((middle, size), dim=-1))


def place_centres(levels: Sequence[Level], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the centers (x, y) [P, 2] of all places, and their strides [P, 1], in pixels."""
    centres = []
    strides = []
    for level in levels:
        rows = torch.arange(level.rows, device=device, dtype=torch.float32)
        columns = torch.arange(level.columns, device=device, dtype=torch.float32)
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        centres.append((torch.stack((x, y), dim=-1).flatten(0, 1) + 0.5) * level.stride_px)
        place_count = level.rows * level.columns
        strides.append(torch.full((place_count, 1), float(level.stride_px), device=device))
    return torch.cat(centres), torch.cat(strides)


class _Block(nn.Module):
    """Two convolutions through half the channels, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolve(channels, channels // 2), _convolve(channels // 2, channels)
        )

    @override
    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = features + self.layers(features)
        return added


class _Head(nn.Module):
    """Classes and boxes of one level, from [B, C, rows, columns] to [B, places, classes] and [B, places, 4]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Sequential(_convolve(channels, channels), nn.Conv2d(channels, classes, 1))
        self.boxes = nn.Sequential(_convolve(channels, channels), nn.Conv2d(channels, 4, 1))
        for branch, bias in ((self.classes, math.log(_PRIOR / (1 - _PRIOR))), (self.boxes, 0.0)):
            last = branch[-1]
            assert isinstance(last, nn.Conv2d)
            nn.init.normal_(last.weight, std=0.01)
            nn.init.constant_(last.bias, bias)  # type: ignore[arg-type]  # a Conv2d without bias has None

    @override
    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits = _run_branch(self.classes, features)
        codes = _run_branch(self.boxes, features)
        return logits.flatten(2).transpose(1, 2), codes.flatten(2).transpose(1, 2)


def _run_branch(branch: nn.Sequential, features: Tensor) -> Tensor:
    convolve, last = branch
    assert isinstance(last, nn.Conv2d)
    return run_in_float32(last, convolve(features))


def _convolve(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))
