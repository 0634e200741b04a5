"""Encoders for anomaly detection: from images to maps of features at a few scales."""

import math
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError, StoreError
from lit_data.models.weights import load_weights_file, read_weights

_DEFAULT_WEIGHTS = Path(__file__).with_name("encoder.pt")
_ANGLES = 6
_LEVELS = 4
_FINE, _COARSE = 2, 3
"""Octaves of the two scales, whose strides are 4 and 8 px."""
_FLOOR = 0.05  # in standard deviations of the image: weaker responses are noise


class TextureEncoder(nn.Module):
    """Fixed oriented filters, and a small learned map of their outputs, at strides of 4 and 8 px.

    The filters are pairs of even and odd Gabor functions of six angles in four octaves; their
    averaged amplitudes are log-scaled (Bruna and Mallat, "Invariant scattering convolution
    networks", PAMI 2013, first order); means, extremes and colors are added. The learned
    maps, one for each scale, make a metric of these numbers; they were trained on textures drawn
    from random numbers. The receptive field is limited to the kernels, so a tile has the same
    features as the whole image.

    Args:
        weights: `default`: the weights of the package; a file with a state dict, from which only
            plain data is read; `None`: random weights.
        width: Number of features of each scale.
        hidden: Width of the hidden layer.

    Raises:
        ConfigError: A width is not positive.
        DataError: The weights are not a file.
        StoreError: The file does not hold all weights of this encoder.
    """

    stride_px = 8
    learned_metric = True
    """Distances of its features were learned, of images of mean 0 and standard deviation 1."""
    kernels: Tensor

    def __init__(
        self, weights: str | None = "default", *, width: int = 48, hidden: int = 96
    ) -> None:
        super().__init__()
        if min(width, hidden) < 1:
            raise ConfigError(f"net.width={width}, net.hidden={hidden}: need at least 1 of each")
        self.register_buffer("kernels", _make_gabor_pairs(), persistent=False)
        # An image of nothing tells how many numbers describe a place at each scale.
        fine, coarse = self.describe(torch.zeros(1, 3, 64, 64))
        self.fine = _Head(fine.shape[1], hidden, width)
        self.coarse = _Head(coarse.shape[1], hidden, width)
        if weights == "default":
            self.load_state_dict(read_weights(_DEFAULT_WEIGHTS))
        else:
            taken = load_weights_file(self, weights)
            lacking = sorted(self.state_dict().keys() - set(taken.taken)) if taken else []
            if lacking:  # nothing trains them
                raise StoreError(f"{weights} lacks weights of TextureEncoder: {', '.join(lacking)}")

    @override
    def forward(self, images: Tensor) -> list[Tensor]:
        """Return features of images.

        Args:
            images: [B, 3, H, W] with sides that are multiples of 8, of mean 0 and standard
                deviation 1 in good images.

        Returns:
            [B, width, H / 4, W / 4] and [B, width, H / 8, W / 8].

        Raises:
            ConfigError: The images have another number of channels.
        """
        fine, coarse = self.describe(images)
        return [self.fine(fine), self.coarse(coarse)]

    def describe(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fixed features of each place: [B, 34, H / 4, W / 4] and [B, 39, H / 8, W / 8].

        The numbers of a place, in their order:

        ==================  =======================  =======================
        what                fine                     coarse
        ==================  =======================  =======================
        colors              2                        2
        of each octave      3 x (6 + 2 + 1), 2 + 1   2 x (6 + 2), 2 x (6 + 2 + 1)
        extremes            2                        2
        gray around                                  1
        ==================  =======================  =======================

        Raises:
            ConfigError: The images have another number of channels than three.
        """
        if images.shape[1] != 3:
            raise ConfigError(
                f"the encoder needs images of 3 channels, but these have {images.shape[1]}: set "
                "data.read.gray_to_rgb=true for gray ones and data.read.alpha=drop for four"
            )
        grey = images.mean(1, keepdim=True)
        # The third channel follows from grey and the other two.
        colours = blur(F.avg_pool2d((images - grey)[:, :2], 4), 1.0)
        fine = [colours]
        coarse = [blur(F.avg_pool2d(colours, 2), 1.5)]
        level = grey
        for octave in range(_LEVELS):
            if octave > 0:
                level = F.avg_pool2d(blur(level, 0.8), 2)
            of_octave = self._describe_octave(level, octave)
            fine += of_octave[0]
            coarse += of_octave[1]
        soft = F.avg_pool2d(blur(grey, 1.0), 2)
        extremes = torch.cat([_find_highest(soft), -_find_highest(-soft)], 1)
        fine.append(F.avg_pool2d(extremes, 2))
        coarse.append(blur(F.avg_pool2d(extremes, 4), 1.5))
        coarse.append(blur(F.avg_pool2d(grey, 8), 3.0))
        return torch.cat(fine, 1), torch.cat(coarse, 1)

    def _describe_octave(self, level: Tensor, octave: int) -> tuple[list[Tensor], list[Tensor]]:
        """Describe places by the gray values of an octave: amplitudes of 6 angles, 2 kinds of ridges, the level.

        Returns:
            At the fine and at the coarse scale. The coarsest octave has no amplitudes of a single place
            of 4 px, and the two finest no level of one of 8 px.
        """
        amplitudes = self._find_amplitudes(level)
        ridges = level - blur(level, 2.0)
        # Bright and dark ones apart, as their mean is 0.
        ridges = torch.cat([ridges.relu(), (-ridges).relu()], 1)
        fine = [
            _average_logarithm(ridges, octave, _FINE, 0.8),
            _bring_to(blur(level, 1.0), octave, _FINE),
        ]
        if octave < _LEVELS - 1:
            fine.insert(0, _average_logarithm(amplitudes, octave, _FINE, 1.0))
        coarse = [
            _average_logarithm(amplitudes, octave, _COARSE, 1.5),
            _average_logarithm(ridges, octave, _COARSE, 1.5),
        ]
        if octave >= _LEVELS - 2:
            coarse.append(blur(_bring_to(level, octave, _COARSE), 1.5))
        return fine, coarse

    def _find_amplitudes(self, level: Tensor) -> Tensor:
        reach = self.kernels.shape[-1] // 2
        responses = F.conv2d(pad_reflected(level, reach, reach, reach, reach), self.kernels)
        even = responses[:, ::2]
        odd = responses[:, 1::2]
        return (even.square() + odd.square() + 1e-6).sqrt()


class _Head(nn.Module):
    """A learned map at each place: what is linear, and a hidden layer beside it."""

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("std", torch.ones(inputs))
        self.plain = nn.Conv2d(inputs, outputs, 1)
        self.first = nn.Conv2d(inputs, hidden, 1)
        self.second = nn.Conv2d(hidden, outputs, 1)

    @override
    def forward(self, maps: Tensor) -> Tensor:
        scaled = (maps - self.mean[:, None, None]) / self.std[:, None, None]
        features: Tensor = self.plain(scaled) + self.second(F.relu(self.first(scaled)))
        return features


def _make_gabor_pairs() -> Tensor:
    """[12, 1, 13, 13]: an even and an odd filter of each angle, longer than wide, of mean 0 and norm 1."""
    places = torch.arange(-6.0, 7.0)
    y = places[:, None]
    x = places[None]
    kernels = []
    for number in range(_ANGLES):
        angle = math.pi * number / _ANGLES
        across = x * math.cos(angle) + y * math.sin(angle)
        along = y * math.cos(angle) - x * math.sin(angle)
        # Gaussian of 1.6 by 3.2 px, waves of 4.5 px.
        bell = (-(across**2) / (2 * 1.6**2) - along**2 / (2 * 3.2**2)).exp()
        phase = 2 * math.pi * across / 4.5
        for wave in (phase.cos(), phase.sin()):
            kernel = bell * wave
            kernel = kernel - bell * (kernel.sum() / bell.sum())  # flat areas give 0
            kernels.append(kernel / kernel.norm())
    return torch.stack(kernels)[:, None]


def _average_logarithm(maps: Tensor, octave: int, target: int, sigma: float) -> Tensor:
    """Return the logarithm of maps of an octave at the stride of another, blurred."""
    return (blur(_bring_to(maps, octave, target), sigma) + _FLOOR).log()


def _bring_to(maps: Tensor, octave: int, target: int) -> Tensor:
    """Maps of an octave, whose stride is 2 to its power, at that of another."""
    if octave == target:
        return maps
    if octave < target:
        return F.avg_pool2d(maps, 2 ** (target - octave))
    size = [side * 2 ** (octave - target) for side in maps.shape[2:]]
    return F.interpolate(maps, size, mode="bilinear")


def _find_highest(maps: Tensor) -> Tensor:
    return F.max_pool2d(pad_reflected(maps, 1, 1, 1, 1), 3, 1)


def blur(maps: Tensor, sigma: float) -> Tensor:
    """Blur [B, C, H, W] by a Gaussian of at most 2.5 standard deviations to each side, reflect-padded."""
    bell = maps.new_tensor(_make_bell(sigma)).expand(maps.shape[1], 1, -1)
    reach = bell.shape[2] // 2
    if reach == 0:
        return maps
    channels = maps.shape[1]
    rows = F.conv2d(pad_reflected(maps, 0, 0, reach, reach), bell[..., None], groups=channels)
    return F.conv2d(pad_reflected(rows, reach, reach, 0, 0), bell[:, :, None], groups=channels)


@cache
def _make_bell(sigma: float) -> list[float]:
    """Return the weights of a Gaussian at each pixel, in numbers, so that a graph holds no steps of it."""
    reach = math.floor(2.5 * sigma)
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    bell = (-0.5 * (places / sigma) ** 2).exp()
    return (bell / bell.sum()).tolist()


def pad_reflected(maps: Tensor, left: int, right: int, top: int, bottom: int) -> Tensor:
    """Reflect-pad [B, C, H, W]; a side too short for that is reflected once, then its first value repeated."""
    # An exported graph is for sides of any length, and cannot ask how long they are.
    if not torch.compiler.is_exporting():
        is_long = maps.shape[3] > max(left, right) and maps.shape[2] > max(top, bottom)
        if is_long:
            return F.pad(maps, (left, right, top, bottom), mode="reflect")
    for axis, before, behind in ((2, top, bottom), (3, left, right)):
        if isinstance(behind, int) and before == behind == 0:
            continue
        last = maps.shape[axis] - 1
        places = torch.arange(-before, last + behind + 1, device=maps.device)
        places = last - (last - places.abs()).abs()
        maps = maps.index_select(axis, places.clamp(min=0))
    return maps
