"""Sampling of patches: more patches with defects, no blank ones, and positions off the grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_choice, check_share
from lit_data.core.errors import ConfigError
from lit_data.core.grid import Axis, PatchGrid
from lit_data.core.rng import Stream, random_words
from lit_data.core.types import Array, Bools, Doubles, FieldSpec, Ints
from lit_data.datasets.occupancy import (
    PICKS,
    MaskObjects,
    ObjectPool,
    PartialMasks,
    find_blank,
    find_objects,
    find_occupancy,
    is_defect,
    split_by_kind,
)
from lit_data.datasets.patch_source import GridPatches, Places
from lit_data.images.bank import ImageBank

_RING_PX = 11  # width of the ring around a pasted defect


@dataclass(frozen=True, kw_only=True)
class PositiveOptions:
    """Fractions of the training samples that show an object.

    Args:
        positives: One fraction, or a fraction for each class name; these add up to at most 1.

    Raises:
        ConfigError: A fraction is out of range.
    """

    positives: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            check_share(f"sampling.positives.{name}".rstrip("."), share)
        if sum(self.shares.values()) > 1 + 1e-9:
            raise ConfigError(f"sampling.positives={dict(self.shares)} must add up to at most 1")

    @property
    def shares(self) -> Mapping[str, float]:
        """Fraction of each class by its name; an empty name stands for all classes."""
        if self.positives is None:
            return {}
        if isinstance(self.positives, Mapping):
            return dict(self.positives)
        return {"": self.positives}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(PositiveOptions):
    """Options to sample training patches; validation and test take every patch of the grid.

    Args:
        positives: Fraction of samples that show a defect, chosen again in each epoch, or a
            fraction for each class name; these add up to at most 1. None takes every patch once. A
            positive is cut at a random position around a pixel of an object: each kind (class, and
            kind of image if folders tell them apart) is equally likely, then each image of the
            kind, then each object of the image, so that neither large defects nor many small ones
            dominate.
        random_places: Move the other samples from their grid positions by up to half a stride,
            again in each epoch.
        skip_blank: Skip patches without a defect if the standard deviation of their pixels is
            below this fraction of the value range, such as 0.01; None keeps them.
        paste: Fraction of the samples without a defect that get one pasted in. It is cut from
            another training patch, randomly mirrored, and adjusted to the brightness around it.
            None pastes nothing.

    Raises:
        ConfigError: A fraction is out of range.
    """

    random_places: bool = False
    skip_blank: float | None = None
    paste: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("skip_blank", "paste"):
            if getattr(self, name) is not None:
                check_share(f"sampling.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options, and the patches and objects of a dataset that they need.

    Args:
        options: Sampling options.
        classes: Names of the classes, which are numbered from 1.
        image_kinds: Kind of each image of the dataset; empty if unknown.
        occupancy: Numbers of the patches that show a defect, among those of all images; needed for
            `positives`, for `paste`, and to skip blank patches.
        objects: Objects of all images; needed for `positives`.
        blank: Numbers of the blank patches among those of all images.
        seed: Seed of the choice and of the positions.

    Raises:
        ConfigError: A fraction is given for an unknown class.
    """

    options: SamplingOptions = field(default_factory=SamplingOptions)
    classes: Sequence[str] = ()
    image_kinds: Sequence[str] = ()
    occupancy: Ints | None = None
    objects: MaskObjects | None = None
    blank: Ints | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in filter(None, self.options.shares):
            check_choice("sampling.positives", name, tuple(self.classes))

    def look(
        self,
        masks: PartialMasks,
        grid: PatchGrid,
        bank: ImageBank,
        least: float,
        folder: Path | None,
    ) -> Self:
        """Return a copy with the objects, defective patches and blank patches that the options need.

        Args:
            masks: Masks of all images.
            grid: Grid of all patches.
            bank: The images.
            least: Least standard deviation of the pixels of a patch that is not blank.
            folder: Folder that keeps the results for the next run; `None` keeps nothing.
        """
        options = self.options
        if options.positives is None and options.skip_blank is None and options.paste is None:
            return self
        sampling = replace(self, occupancy=find_occupancy(masks, grid, folder))
        if options.positives is not None:
            sampling = replace(sampling, objects=find_objects(masks, folder))
        if options.skip_blank is not None:
            sampling = replace(sampling, blank=find_blank(bank, grid, least, folder))
        return sampling


def divide_objects(
    objects: MaskObjects,
    shares: Mapping[str, float],
    classes: Sequence[str],
    image_kinds: Sequence[str],
    what: tuple[str, str, str],
) -> list[tuple[MaskObjects, float]]:
    """Divide the objects of a split into groups, with the fraction of samples of each.

    Args:
        objects: Objects of the split.
        shares: See `PositiveOptions.shares`.
        classes: Names of the classes, which are numbered from 1.
        image_kinds: Kind of each image; empty if unknown.
        what: Names of the samples, an object and the labels for messages, such as ``9 training
            patches``, ``a defect`` and ``masks``.

    Returns:
        The objects of each group, and the fraction of samples that show one of them.

    Raises:
        ConfigError: A class has no objects.
    """
    groups: list[tuple[MaskObjects, float]] = []
    for class_name, fraction in shares.items():
        if class_name:
            is_of_class = objects.kind == classes.index(class_name) + 1
            kinds = [objects.take(is_of_class)] if is_of_class.any() else []
        else:
            kinds = split_by_kind(objects, image_kinds)
        if not kinds:
            samples, mark, labels = what
            mark = repr(class_name) if class_name else mark
            raise ConfigError(
                f"data.sampling.positives={fraction}, but none of the {samples} shows {mark}: are "
                f"the {labels} right? Set data.sampling.positives=null, or other data.splits"
            )
        groups += [(of_kind, fraction / len(kinds)) for of_kind in kinds]
    return groups


class SampledPatches(GridPatches):
    """Patches of a split, which `sampling` may choose and place again in each epoch.

    A sample depends only on the seed, the epoch and its number, so an epoch is the same after a
    resume, on any number of ranks and with any batch size.

    Args:
        grid: The patches of all images of the bank.
        images: Numbers of the images of the split.
        sampling: Sampling options with their data; by default every patch of the grid is taken
            once.

    Attributes:
        donors: [D] numbers in the split of the patches whose defects may be pasted into others.

    Raises:
        ConfigError: No patch of the split shows a requested defect, or all are blank.
    """

    fields = MappingProxyType({"draw": FieldSpec((), "int64")})

    def __init__(
        self, grid: PatchGrid, images: Sequence[int] | Ints, sampling: Sampling | None = None
    ) -> None:
        super().__init__(grid, images)
        sampling = sampling or Sampling()
        self.options = sampling.options
        self.seed = sampling.seed
        self._pools, self._pool_ends = self._find_pools(sampling)
        is_defective = self._mark(sampling.occupancy)
        is_blank = self._mark(sampling.blank)
        is_other = ~is_defective & ~is_blank
        if not self._pools:
            # A defective patch is then drawn like any other, even if it is blank.
            is_other = is_defective | ~is_blank
        self._others = np.flatnonzero(is_other)
        self._leaves_out_blank = sampling.blank is not None
        self._count = super().__len__()
        if self._leaves_out_blank:
            is_kept = is_defective | is_other
            if not is_kept.any():
                raise ConfigError(
                    "data.sampling.skip_blank leaves no patch to train on: set a lower value"
                )
            self._count = int(is_kept.sum())
        self.donors = np.zeros(0, np.int64)
        if sampling.options.paste is not None:
            self.donors = np.flatnonzero(is_defective)

    @override
    def __len__(self) -> int:
        return self._count

    @property
    @override
    def image_ends(self) -> Ints | None:
        return None if self._pools or self._leaves_out_blank else super().image_ends

    @override
    def locate(self, indices: Ints, epoch: int) -> Places:
        if not self._is_drawn:
            return super().locate(self._skip_blank(indices), epoch)
        # All numbers are drawn even if unused, so that no option changes those of another.
        words = random_words(self.seed, Stream.POSITIVES, indices, epoch, 4 + PICKS)
        draws = words.astype(np.float64) * 2.0**-32
        pool_draws, patch_draws, place_draws = draws[:, 0], draws[:, 1], draws[:, 2:4]
        pick_draws = draws[:, 4:]  # image, object and pixel of a positive
        places = super().locate(self._choose_patches(indices, patch_draws), epoch)
        if self.options.random_places:
            self._move_places(places, place_draws)
        pool_numbers = np.searchsorted(self._pool_ends, pool_draws, side="right")
        if not len(self._others):  # all samples are positives
            pool_numbers = np.minimum(pool_numbers, len(self._pools) - 1)
        for number, pool in enumerate(self._pools):
            rows = np.flatnonzero(pool_numbers == number)
            places.put(rows, self._place_around(pool.pick(pick_draws[rows]), place_draws[rows]))
        return places

    @override
    def locate_always(self, index: int, epoch: int) -> Places | None:
        return None if self._is_drawn else super().locate_always(index, epoch)

    def locate_donors(self, draws: Doubles) -> Places:
        """Return patches that show a defect.

        Args:
            draws: [M] in [0, 1).
        """
        donors = self.donors[(draws * len(self.donors)).astype(np.int64)]
        return super().locate(donors, 0)

    @property
    def _is_drawn(self) -> bool:
        return bool(self._pools) or self.options.random_places

    def _skip_blank(self, indices: Ints) -> Ints:
        """Return the patch of each sample, if every patch that is not skipped is taken once."""
        return self._others[indices] if self._leaves_out_blank else indices

    def _choose_patches(self, indices: Ints, draws: Doubles) -> Ints:
        """Return the patch of each sample, regardless of positives."""
        if not self._pools:
            return self._skip_blank(indices)
        if not len(self._others):  # all of them are positives
            return indices
        return self._others[(draws * len(self._others)).astype(np.int64)]

    def _move_places(self, places: Places, draws: Doubles) -> None:
        """Move positions by up to half a stride."""
        grid, image = self.grid, places.image
        y, x = places.position.T
        y[:] = _move(y, draws[:, 0], grid.heights_px[image], grid.vertical)
        x[:] = _move(x, draws[:, 1], grid.widths_px[image], grid.horizontal)

    def _place_around(self, pixels: MaskObjects, draws: Doubles) -> Places:
        """Place each sample so that it shows the given pixel of an object."""
        grid, image = self.grid, self.images[pixels.image]
        y = _start_around(pixels.y, draws[:, 0], grid.heights_px[image], grid.patch_px[0])
        x = _start_around(pixels.x, draws[:, 1], grid.widths_px[image], grid.patch_px[1])
        # The nearest patch of the grid stands for the position in messages.
        index = grid.nearest(image, y, x)
        return Places(pixels.image, image, index, np.stack((y, x), axis=1))

    def _find_pools(self, sampling: Sampling) -> tuple[list[ObjectPool], Doubles]:
        """Return the pools of objects, and the ends of their intervals in [0, 1).

        The random number of a sample falls into the interval of its pool. The images of the pools
        have their numbers in the split.
        """
        pools: list[ObjectPool] = []
        fractions: list[float] = []
        if sampling.objects is None:
            return pools, np.zeros(0)
        of_split = sampling.objects.take(np.isin(sampling.objects.image, self.images))
        what = f"{super().__len__()} training patches", "a defect", "masks"
        shares, kinds = sampling.options.shares, sampling.image_kinds
        for objects, fraction in divide_objects(of_split, shares, sampling.classes, kinds, what):
            numbered = objects._replace(image=self._number_images(objects.image))
            pools.append(ObjectPool(numbered))
            fractions.append(fraction)
        return pools, np.cumsum(fractions)

    def _mark(self, patches: Ints | None) -> Bools:
        """Mark the patches of the split that are among the given patches of all images."""
        is_marked = np.zeros(super().__len__(), np.bool_)
        if patches is not None:
            is_marked[self._number(patches)] = True
        return is_marked

    def _number(self, patches: Ints) -> Ints:
        """Return the numbers in this split of the given patches, without those of other splits."""
        image, _, _ = self.grid.locate(patches)
        is_of_split = np.isin(image, self.images)
        shifts = self._shifts[self._number_images(image[is_of_split])]
        numbers: Ints = patches[is_of_split] - shifts
        return numbers

    def _number_images(self, images: Ints) -> Ints:
        """Return the numbers in this split of images of the bank, all of which belong to it."""
        order = np.argsort(self.images)
        return order[np.searchsorted(self.images, images, sorter=order)]


class Paster:
    """Paster of defects from other patches of the split into samples without one; see `SamplingOptions`.

    Args:
        patches: Patches of the split.
    """

    def __init__(self, patches: SampledPatches) -> None:
        self._patches = patches

    def paste_into(
        self,
        rows: Mapping[str, Array],
        indices: Ints,
        epoch: int,
        cut: Callable[[Places], tuple[Array, Array]],
    ) -> None:
        """See `lit_data.datasets.patches.DefectPaster`."""
        words = random_words(self._patches.seed, Stream.PASTES, indices, epoch, 4)
        draws = words * 2.0**-32  # whether, which patch, flipped top to bottom, left to right
        shows_defect = is_defect(rows["mask"]).any((1, 2, 3))
        is_chosen = ~shows_defect & (draws[:, 0] < (self._patches.options.paste or 0))
        chosen = np.flatnonzero(is_chosen)
        if not len(chosen):
            return
        donors, donor_masks = cut(self._patches.locate_donors(draws[chosen, 1]))
        for row, donor, donor_mask in zip(chosen.tolist(), donors, donor_masks, strict=True):
            down = -1 if draws[row, 2] < 0.5 else 1
            right = -1 if draws[row, 3] < 0.5 else 1
            flip = np.s_[:, ::down, ::right]
            paste_defect(rows["image"][row], rows["mask"][row], donor[flip], donor_mask[flip])


# Positions beyond an edge are moved back into the image: patches at the edge are then common, as
# they are in validation, and pixels near the edge are shown as often as others.


def _move(start: Ints, draws: Doubles, length_px: Ints, axis: Axis) -> Ints:
    """Return starts moved by up to half a stride."""
    half_px = axis.stride_px // 2
    moved = start + (draws * (2 * half_px + 1)).astype(np.int64) - half_px
    return moved.clip(0, length_px - axis.patch_px)


def _start_around(pixel: Ints, draws: Doubles, length_px: Ints, side_px: int) -> Ints:
    """Return starts of patches that contain a pixel, at any position in the patch."""
    start = pixel - (draws * side_px).astype(np.int64)
    return start.clip(0, length_px - side_px)


def paste_defect(image: Array, mask: Array, donor: Array, donor_mask: Array) -> None:
    """Blend the defect of another patch into one without a defect, in place.

    The defect keeps its difference from its surroundings, and so takes on the brightness of the
    new place.

    Args:
        image: [C, h, w] patch to paste into.
        mask: [1, h, w] uint8 class numbers of that patch.
        donor: [C, h, w] patch with the defect.
        donor_mask: [1, h, w] class numbers of the donor.
    """
    import cv2

    # The ring is outside the soft edge of the defect, where both patches show background.
    marked = is_defect(donor_mask[0]).astype(np.uint8)
    inside = cv2.dilate(marked, np.ones((3, 3), np.uint8))
    around = cv2.dilate(marked, np.ones((_RING_PX, _RING_PX), np.uint8)) > inside
    opacity = np.minimum(cv2.GaussianBlur(inside.astype(np.float32), (0, 0), 1.0), 1)
    if not around.any():
        return
    for plane, donor_plane in zip(image, donor, strict=True):
        mean = plane[around].mean(dtype=np.float64)
        shift = np.float32(mean - donor_plane[around].mean(dtype=np.float64))
        blended = plane + opacity * (donor_plane.astype(np.float32) + shift - plane)
        if plane.dtype.kind == "u":
            blended = np.rint(blended).clip(0, np.iinfo(plane.dtype).max)
        plane[...] = blended
    mask[0][marked > 0] = donor_mask[0][marked > 0]
