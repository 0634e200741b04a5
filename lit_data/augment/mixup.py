"""`MixUp`: two samples shown through each other."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform

_KEY: Final = "augment_mixup"
_KNOTS: Final = 2049


class MixUp(Augmentation):
    """Blend of a sample with another one of its batch, which has the boxes of both.

    The weight of the sample itself is drawn from Beta(alpha, alpha) as by Zhang et al., "mixup:
    Beyond empirical risk minimization" (ICLR 2018); boxes as in ultralytics (``data/augment.py``,
    `MixUp`), whose alpha is 32: both images are seen about equally well. The numbers of a sample
    come from its own stream; the image that becomes its partner depends on the batch. A batch of
    one sample stays as it is.

    Where boxes are mixed this waits for the device, because their number changes.

    Args:
        probability: Fraction of the samples that are blended.
        alpha: Above 0; small numbers leave one of the two images faint.

    Raises:
        ConfigError: An argument is out of its range; later, that there are masks, which cannot be
            blended.
    """

    def __init__(self, *, probability: float = 0.0, alpha: float = 32.0) -> None:
        super().__init__()
        if not (0 <= probability <= 1 and 0 < alpha < np.inf):
            raise ConfigError(
                f"probability={probability}, alpha={alpha}: need a probability in 0..1 and alpha > "
                "0"
            )
        self.probability = probability
        self.alpha = float(alpha)

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """``augment_mixup`` [B, 2] float32: the weight of the sample itself, and its partner.

        The weight is 1 where the sample is not blended. The partner is a number in [0, 1), which
        `transform` spreads over the other samples of the batch.
        """
        return (_KEY,)

    @property
    def takes_bytes(self) -> bool:
        """True where no sample changes; see `Augmentation`."""
        return self.is_off

    @property
    def is_off(self) -> bool:
        """Return True if no sample changes."""
        return not self.probability

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw weights and partners; see `Augmentation.draw`."""
        if self.is_off:
            return {}
        chance, level, partner = uniform(seed, Stream.MIXUP, index, epoch, 3).T
        weight = np.where(chance < self.probability, invert_beta(level, self.alpha), 1.0)
        return {_KEY: torch.from_numpy(np.stack((weight, partner), axis=1).astype(np.float32))}

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Blend as drawn."""
        samples = len(layers.images)
        if self.is_off or samples == 1:
            return layers
        if layers.masks is not None:
            raise ConfigError("MixUp has no meaning for masks: leave it out")
        weight, choice = draws[_KEY].unbind(dim=1)
        sample = torch.arange(samples, device=weight.device)
        # The product can round up to the number of the other samples.
        step = 1 + (choice * (samples - 1)).long().clamp_(max=samples - 2)
        partner = torch.where(weight < 1, (sample + step) % samples, sample)
        images = torch.lerp(layers.images[partner], layers.images, weight[:, None, None, None])
        boxes = None if layers.boxes is None else _join_boxes(layers.boxes, sample, partner)
        return Layers(images, boxes=boxes)


def _join_boxes(boxes: Tensor, sample: Tensor, partner: Tensor) -> Tensor:
    """Return the boxes of each sample and of its partner, ordered by sample.

    A sample that is its own partner keeps its boxes.
    """
    owner = boxes[:, 0]
    # A box belongs to its own sample and to all whose partner that is: pairs of (sample, box).
    belongs = (owner == sample[:, None]) | (owner == partner[:, None])
    row, box = belongs.nonzero(as_tuple=True)
    return torch.cat((row[:, None].to(boxes.dtype), boxes[box, 1:]), dim=1)


def invert_beta(levels: NDArray[np.float32], alpha: float) -> NDArray[np.float64]:
    """Return numbers of Beta(alpha, alpha) from uniform ones."""
    logits, probability = _tabulate_beta(alpha)
    logit = np.interp(levels, probability, logits)
    numbers: NDArray[np.float64] = (1 + np.tanh(logit / 2)) / 2
    return numbers


@lru_cache(maxsize=8)
def _tabulate_beta(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return logits, and the probability that Beta(alpha, alpha) stays below each.

    As a logit it has a single hump for any alpha, with density (x (1 - x))^alpha; its tails end
    where e^-20 is left.
    """
    end = 20 / alpha + np.sqrt(80 / alpha)
    logits = np.linspace(-end, end, _KNOTS)
    density = np.exp(-2 * alpha * (np.logaddexp(logits / 2, -logits / 2) - np.log(2)))
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))  # trapezoids
    return logits, area / area[-1]
