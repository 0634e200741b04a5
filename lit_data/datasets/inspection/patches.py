"""Patches of single images: more of those that show a defect, none that show nothing, also beside the grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice, check_share
from lit_data.datasets.inspection.objects import (
    PICKS,
    MaskObjects,
    ObjectPool,
    find_objects,
    split_by_kind,
)
from lit_data.datasets.inspection.occupancy import (
    PartialMasks,
    find_blank,
    find_occupancy,
    is_defect,
)
from lit_data.datasets.stripes.dataset import FIXED, StripeDataset
from lit_data.errors import ConfigError
from lit_data.grid import Axis, PatchGrid
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.store.shared_arrays import share_state
from lit_data.rng import Stream, random_words
from lit_data.types import Array, FieldSpec, SampleRuns

Ints = NDArray[np.int64]
_RING_PX: Final = 11  # of the pixels around a defect that is pasted


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Which patches train; validation and test take every patch of the grid.

    Args:
        positives: Fraction of samples that show a defect, chosen anew in each epoch, or for names
            of classes their fractions, which add up to at most 1; None takes every patch once. A
            positive is cut at a random place around a pixel of an object: kinds (classes, and kinds
            of images where folders tell them apart) are drawn alike often, then the images of a
            kind, then the objects of an image, so that neither large defects nor many small ones
            crowd out the others.
        random_places: The other samples are moved from their places in the grid by up to half a
            stride, anew in each epoch.
        skip_blank: Patches without a defect are left out where the standard deviation of their
            pixels is below this share of the value range, such as 0.01; None keeps them.

        paste: Share of the samples without a defect into which one is pasted that is cut out of
            another training patch, mirrored or not, and brought to the brightness around it; None
            pastes nothing.

    Raises:
        ConfigError: A share is out of its range.
    """

    positives: float | Mapping[str, float] | None = None
    random_places: bool = False
    skip_blank: float | None = None
    paste: float | None = None

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            check_share(f"sampling.positives{f'.{name}' if name else ''}", share)
        if sum(self.shares.values()) > 1 + 1e-9:
            raise ConfigError(f"sampling.positives={dict(self.shares)} must add up to at most 1")
        for name in ("skip_blank", "paste"):
            if getattr(self, name) is not None:
                check_share(f"sampling.{name}", getattr(self, name))

    @property
    def shares(self) -> Mapping[str, float]:
        """For the name of each class its share; an empty name stands for all of them."""
        given = self.positives
        return {} if given is None else dict(given) if isinstance(given, Mapping) else {"": given}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options, and what they need to know of a set.

    Args:
        options: Which patches are wanted.
        classes: Names of the classes, which are numbered from 1.
        image_kinds: Kind of each image of the dataset; empty where nothing says it.
        occupancy: Numbers of the patches that show a defect among those of all images; needed for
            `positives`, for defects that are pasted, and where blank patches are left out.
        objects: The objects of all images; needed for `positives`.
        blank: Numbers of the blank patches among those of all images.
        seed: Of the choice and of the places.

    Raises:
        ConfigError: A share is that of an unknown class.
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
        """Return the same with objects, patches that show a defect and blank patches, where they
        matter.

        Args:
            masks: Of all images.
            grid: Of all patches.
            bank: The images.
            least: Standard deviation of the pixels of patches that are not blank.
            folder: Where is kept what was found by reading the set; `None` keeps nothing.
        """
        options = self.options
        if (options.positives, options.skip_blank, options.paste) == (None, None, None):
            return self
        sampling = replace(self, occupancy=find_occupancy(masks, grid, folder))
        if options.positives is not None:
            sampling = replace(sampling, objects=find_objects(masks, folder))
        if options.skip_blank is not None:
            sampling = replace(sampling, blank=find_blank(bank, grid, least, folder))
        return sampling


class InspectionDataset(StripeDataset):
    """Patches of a split, each sample chosen and placed anew in each epoch if `sampling` asks for
    that.

    What a sample shows depends on the seed, the epoch and its number alone, so an epoch is the same
    after a resume, on any number of ranks and with any batch size. Samples are those of
    `StripeDataset` and ``draw`` int64, the number of the sample among those of the split, of which
    its augmentation is drawn.

    Args:
        bank: See `StripeDataset`, as all others.
        grid: See there.
        sampling: Which patches; by default every one of the grid once.
        labels: [n] label of each image of the bank, which samples then hold as ``label`` int64.

    Raises:
        ConfigError: No patch of the split shows a wanted defect, or all are blank.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - see `StripeDataset`
        sampling: Sampling | None = None,
        labels: Ints | None = None,
        **options: Any,  # noqa: ANN401 - see there
    ) -> None:
        self.labels = labels
        super().__init__(*args, **options)
        sampling = sampling or Sampling()
        self._pools, self._pool_ends = self._find_pools(sampling)
        defective, blank = self._mark(sampling.occupancy), self._mark(sampling.blank)
        self._donors = np.flatnonzero(defective if sampling.options.paste is not None else ())
        self._leaves_out = sampling.blank is not None
        # Where no sample is drawn around an object, a patch that shows one is as good as any, blank
        # or not.
        is_other = ~defective & ~blank if self._pools else defective | ~blank
        self._others = np.flatnonzero(is_other)
        self._count = (
            self._count_kept(defective | is_other) if self._leaves_out else super().__len__()
        )
        self.sampling = replace(
            sampling, occupancy=None, objects=None, blank=None
        )  # the pools have what is needed

    @override
    def __len__(self) -> int:
        return self._count

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["draw"][:] = indices
        super().write_into(rows, indices, epoch)
        if len(self._donors):
            self._paste(rows, indices, epoch)
        if self.labels is not None:
            rows["label"][:] = self.labels[rows["image_index"]]

    @property
    @override
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """See `StripeDataset`; anew in each epoch where `sampling` chooses patches, none where it pastes defects."""
        if len(self._donors):
            return None
        return self._group_runs if self._pools or self._leaves_out else super().runs

    @override
    def describe_sample(self, index: int) -> str:
        if self.sampling.options.positives is None and not self.sampling.options.random_places:
            return super().describe_sample(int(self._number_kept(np.array([index]))[0]))
        return f"sample {index}, whose patch is chosen anew in each epoch"

    @override
    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, (*FIXED, "_pools", "_others", "_donors", "labels"))

    @override
    def _describe(self) -> dict[str, FieldSpec]:
        names = ("draw",) if self.labels is None else ("draw", "label")
        return super()._describe() | {name: FieldSpec((), "int64") for name in names}

    @override
    def _place(self, indices: Ints, epoch: int) -> tuple[Ints, ...]:
        if not self._pools and not self.sampling.options.random_places:  # nothing is drawn
            return self._locate(self._number_kept(indices))
        words = random_words(self.sampling.seed, Stream.POSITIVES, indices, epoch, 4 + PICKS)
        draws = (
            words.astype(np.float64) * 2.0**-32
        )  # pool, patch, y, x; image, object and pixel of a positive
        split_image, index, image, y, x = self._locate(self._choose_patches(indices, draws[:, 1]))
        if self.sampling.options.random_places:
            y = _move(y, draws[:, 2], self.grid.heights_px[image], self.grid.vertical)
            x = _move(x, draws[:, 3], self.grid.widths_px[image], self.grid.horizontal)
        placed = np.stack((split_image, index, image, y, x))
        pool_number = np.searchsorted(self._pool_ends, draws[:, 0], side="right")
        if not len(self._others):
            pool_number = np.minimum(pool_number, len(self._pools) - 1)
        for number, pool in enumerate(self._pools):
            rows = np.flatnonzero(pool_number == number)
            placed[:, rows] = self._place_around(pool.pick(draws[rows, 4:]), draws[rows, 2:4])
        return tuple(placed)

    def _number_kept(self, indices: Ints) -> Ints:
        """Return the patch of each sample where each patch that is not left out is taken once."""
        return self._others[indices] if self._leaves_out else indices

    def _choose_patches(self, indices: Ints, draws: NDArray[np.float64]) -> Ints:
        """Return the patch of each sample, were none of them a positive."""
        if not self._pools:
            return self._number_kept(indices)
        if not len(self._others):  # then all of them are
            return indices
        return self._others[(draws * len(self._others)).astype(np.int64)]

    def _place_around(self, pixels: MaskObjects, draws: NDArray[np.float64]) -> Ints:
        """Place each sample so that it shows a pixel of an object of a pool; [5, M] as the rows of `_place`."""
        image, grid = self.images[pixels.image], self.grid
        y = _start_around(pixels.y, draws[:, 0], grid.heights_px[image], grid.patch_px[0])
        x = _start_around(pixels.x, draws[:, 1], grid.widths_px[image], grid.patch_px[1])
        return np.stack((pixels.image, grid.nearest(image, y, x), image, y, x))

    def _paste(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """Paste defects of other patches into samples that show none."""
        words = random_words(self.sampling.seed, Stream.PASTES, indices, epoch, 4) * 2.0**-32
        free = ~is_defect(rows["mask"]).any((1, 2, 3)) & (
            words[:, 0] < (self.sampling.options.paste or 0)
        )
        chosen = np.flatnonzero(free)
        if not len(chosen):
            return
        donors = self._donors[(words[chosen, 1] * len(self._donors)).astype(np.int64)]
        split_image, _, image, y, x = self._locate(donors)
        pixels, masks = (
            self.cut(image, np.stack((y, x), axis=1)),
            np.empty_like(rows["mask"][chosen]),
        )
        assert self.masks is not None
        cut_patches(self.masks, split_image, y - self.margin_px[0], x - self.margin_px[1], masks)
        for row, donor, donor_mask in zip(chosen.tolist(), pixels, masks, strict=True):
            turn = np.s_[
                :, :: 1 - 2 * int(words[row, 2] < 0.5), :: 1 - 2 * int(words[row, 3] < 0.5)
            ]
            paste_defect(rows["image"][row], rows["mask"][row], donor[turn], donor_mask[turn])

    def _find_pools(self, sampling: Sampling) -> tuple[list[ObjectPool], NDArray[np.float64]]:
        """Return the pools of objects, and where in [0, 1) the part of each ends in the draw that
        chooses one.

        Images have their numbers in the split there.
        """
        pools: list[ObjectPool] = []
        fractions: list[float] = []
        if sampling.objects is None:
            return pools, np.zeros(0)
        of_split = sampling.objects.take(np.isin(sampling.objects.image, self.images))
        for class_name, fraction in sampling.options.shares.items():
            if class_name:
                is_of_class = of_split.kind == sampling.classes.index(class_name) + 1
                kinds = [of_split.take(is_of_class)] if is_of_class.any() else []
            else:
                kinds = split_by_kind(of_split, sampling.image_kinds)
            if not kinds:
                raise ConfigError(
                    f"data.sampling.positives={fraction}, but none of the {super().__len__()} training patches shows "
                    f"{repr(class_name) if class_name else 'a defect'}: are the masks right? Set "
                    "data.sampling.positives=null, or other data.splits"
                )
            pools += [
                ObjectPool(objects._replace(image=self._number_images(objects.image)))
                for objects in kinds
            ]
            fractions += [fraction / len(kinds)] * len(kinds)
        return pools, np.cumsum(fractions)

    def _mark(self, patches: Ints | None) -> NDArray[np.bool_]:
        """Return for each patch of the split whether it is among some patches of all images."""
        is_marked = np.zeros(super().__len__(), np.bool_)
        if patches is not None:
            is_marked[self._number(patches)] = True
        return is_marked

    def _count_kept(self, is_kept: NDArray[np.bool_]) -> int:
        """Count the samples of an epoch where blank patches are left out."""
        if not is_kept.any():
            raise ConfigError(
                "data.sampling.skip_blank leaves no patch to train with: set a lower one"
            )
        return int(is_kept.sum())

    def _number(self, patches: Ints) -> Ints:
        """Return the numbers in this split of those patches of all images that are of it."""
        counts = np.cumsum(self.grid.rows * self.grid.columns)
        image = np.searchsorted(counts, patches, side="right")
        rows = np.isin(image, self.images)
        numbers: Ints = patches[rows] - self._shifts[self._number_images(image[rows])]
        return numbers

    def _number_images(self, images: Ints) -> Ints:
        """Return the numbers in this split of images of the bank, all of which are of it."""
        order = np.argsort(self.images)
        return order[np.searchsorted(self.images, images, sorter=order)]


# Places beyond the image's edge are brought back to it: patches at the edge are then common, as
# they are in validation, and pixels near it are shown as often as others.


def _move(start: Ints, draws: NDArray[np.float64], length_px: Ints, axis: Axis) -> Ints:
    """Return starts moved by up to half a stride."""
    half_px = axis.stride_px // 2
    moved = start + (draws * (2 * half_px + 1)).astype(np.int64) - half_px
    return moved.clip(0, length_px - axis.patch_px)


def _start_around(pixel: Ints, draws: NDArray[np.float64], length_px: Ints, side_px: int) -> Ints:
    """Return starts of patches that hold a pixel, which may lie anywhere in the patch."""
    start = pixel - (draws * side_px).astype(np.int64)
    return start.clip(0, length_px - side_px)


def paste_defect(image: Array, mask: Array, donor: Array, donor_mask: Array) -> None:
    """Blend the defect of another patch into one that shows none, in place.

    The defect keeps its difference to what is around it: that takes the brightness of the new
    place.

    Args:
        image: [C, h, w].
        mask: [1, h, w] uint8 numbers of classes.
        donor: [C, h, w] with the defect.
        donor_mask: [1, h, w], where it is.
    """
    import cv2

    marked = is_defect(donor_mask[0]).astype(np.uint8)
    inside = cv2.dilate(marked, np.ones((3, 3), np.uint8))
    around = cv2.dilate(marked, np.ones((_RING_PX, _RING_PX), np.uint8)) > inside
    share = np.minimum(cv2.GaussianBlur(inside.astype(np.float32), (0, 0), 1.0), 1)
    if not around.any():
        return
    for own, other in zip(image, donor, strict=True):
        shift = own[around].mean(dtype=np.float64) - other[around].mean(dtype=np.float64)
        blended = own + share * (other.astype(np.float32) + np.float32(shift) - own)
        if own.dtype.kind == "u":
            blended = np.rint(blended).clip(0, np.iinfo(own.dtype).max)
        own[...] = blended
    mask[0][marked > 0] = donor_mask[0][marked > 0]
