"""Sampling of images with and without objects, repeated in each epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_data.annotations.labels import LabelTable
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words
from lit_data.core.types import Ints
from lit_data.datasets.balanced_patches import PositiveOptions, divide_objects
from lit_data.datasets.occupancy import MaskObjects, ObjectPool

_WINDOW_POSITIVES = 0.5


@dataclass(frozen=True, kw_only=True)
class BoxSampling:
    """Choice of the training images or windows; validation and test take each once.

    Args:
        positives: Fraction of samples that show an object, chosen again in each epoch, or a mapping
            from class names to fractions, which add up to at most 1. All classes are equally
            likely, then all images with the class, then all windows of the image that show it. None
            takes each sample once; `auto` is 0.5 for windows and None for whole images.

    Raises:
        ConfigError: A fraction is out of its range.
    """

    positives: float | Mapping[str, float] | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        self.find_shares(has_windows=True)

    def find_shares(self, *, has_windows: bool) -> Mapping[str, float]:
        """Return the fraction of each class, see `PositiveOptions.shares`; empty to take each image once."""
        positives = self.positives
        if positives == "auto":
            positives = _WINDOW_POSITIVES if has_windows else None
        if isinstance(positives, str):
            raise ConfigError(
                f"sampling.positives={positives!r} must be auto, null, a fraction, or fractions by "
                "class"
            )
        return PositiveOptions(positives=positives).shares


class PositiveImages:
    """Random images of a split, with a given fraction of images with objects.

    The image of a sample depends only on the seed, the epoch and the sample's number. So an epoch
    is the same after a resume, on any number of ranks and with any batch size.

    Args:
        labels: Boxes of all images.
        images: [K] numbers of the images of the split.
        sources: [K] number of the file that each is cut from.
        shares: Fractions of the classes, see `PositiveOptions.shares`; at least one.
        seed: Seed of the choice.

    Attributes:
        partners: Images to combine with others in a mosaic, with about the same fraction that shows
            objects.

    Raises:
        ConfigError: A class is unknown, or no image of the split shows it.
    """

    def __init__(
        self,
        labels: LabelTable,
        images: Ints,
        sources: Ints,
        shares: Mapping[str, float],
        seed: int,
    ) -> None:
        for name in filter(None, shares):
            check_choice("sampling.positives", name, labels.classes)
        self._seed = seed
        objects = _list_objects(labels, images, sources)
        what = f"{len(images)} training samples", "an object", "labels"
        groups = divide_objects(objects, shares, labels.classes, (), what)
        self._pools = [ObjectPool(group) for group, _ in groups]
        self._pool_ends = np.cumsum([fraction for _, fraction in groups])
        positives = np.unique(objects.y)
        self._others = images[~np.isin(images, positives)]
        self.partners = self._mix_partners(positives, 2 * len(images))

    def choose(self, indices: Ints, epoch: int) -> Ints:
        """Return the image of each sample of an epoch: [M]."""
        words = random_words(self._seed, Stream.POSITIVES, indices, epoch, 5)
        draws = words.astype(np.float64) * 2.0**-32  # pool, other, image, object, and a pixel of it
        pool_numbers = np.searchsorted(self._pool_ends, draws[:, 0], side="right")
        if len(self._others):
            places = draws[:, 1] * len(self._others)
            chosen = self._others[places.astype(np.int64)]
        else:
            last = len(self._pools) - 1
            pool_numbers = np.minimum(pool_numbers, last)
            chosen = np.zeros(len(draws), np.int64)
        for number, pool in enumerate(self._pools):
            rows = np.flatnonzero(pool_numbers == number)
            picked = pool.pick(draws[rows, 2:])
            chosen[rows] = picked.y
        return chosen

    def _mix_partners(self, positives: Ints, count: int) -> Ints:
        if not len(self._others):
            return positives
        with_objects = round(count * float(self._pool_ends[-1]))
        parts = (
            _spread(positives, with_objects),
            _spread(self._others, count - with_objects),
        )
        return np.concatenate(parts)


def _spread(numbers: Ints, count: int) -> Ints:
    """Return `count` of the numbers, each about equally often."""
    places = np.linspace(0, len(numbers), count, endpoint=False)
    return numbers[places.astype(np.int64)]


def _list_objects(labels: LabelTable, images: Ints, sources: Ints) -> MaskObjects:
    """List the images of each class as its objects: with their source as image, and themselves as y."""
    counts = np.diff(labels.ends, prepend=0)
    of_box = np.repeat(np.arange(len(labels)), counts)
    classes = labels.boxes[:, 0].astype(np.int64)
    is_object = classes >= 0
    pairs = np.stack((of_box, classes))[:, is_object]
    pairs = np.unique(pairs, axis=1)  # in the order of the images
    is_of_split = np.isin(pairs[0], images)
    image, class_number = pairs[:, is_of_split]
    source_of = np.zeros(len(labels), np.int64)
    source_of[images] = sources
    numbers = np.arange(len(image))
    return MaskObjects(
        image=source_of[image],
        kind=class_number + 1,
        number=numbers,
        y=image,
        x=np.zeros_like(numbers),
    )
