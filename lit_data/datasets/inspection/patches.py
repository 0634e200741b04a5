"""Patches of single images: more of those that show a defect, none that show nothing, also beside the grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice, check_share
from lit_data.datasets.inspection.occupancy import Occupancy, PartialMasks, find_blank, find_occupancy, is_defect
from lit_data.datasets.stripes.dataset import FIXED, StripeDataset
from lit_data.errors import ConfigError
from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.store.shared_arrays import share_state
from lit_data.rng import Stream, random_words
from lit_data.types import Array, FieldSpec, SampleRuns

Ints = NDArray[np.int64]
_NOWHERE: Final = -1
_RING_PX: Final = 11  # of the pixels around a defect that is pasted


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Which patches train; validation and test take every patch of the grid.

    Args:
        positives: Share of samples with a defect, chosen anew in each epoch; or for names of classes their shares,
            which add up to at most 1; None takes every patch once.
        random_places: Samples are moved from their places in the grid by up to half a stride, anew in each epoch; a
            defect they were chosen for stays in them.
        skip_blank: Patches without a defect are left out where the standard deviation of their pixels is below this
            share of the value range, such as 0.01; None keeps them.

        paste: Share of the samples without a defect into which one is pasted that is cut out of another training patch,
            mirrored or not, and brought to the brightness around it; None pastes nothing.

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
        occupancy: The patches of all images that show a defect; needed for shares, for defects that are pasted, and
            where blank patches are left out.
        blank: Numbers of the blank patches among those of all images.
        seed: Of the choice and of the places.

    Raises:
        ConfigError: A share is that of an unknown class.
    """

    options: SamplingOptions = field(default_factory=SamplingOptions)
    classes: Sequence[str] = ()
    occupancy: Occupancy | None = None
    blank: Ints | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in filter(None, self.options.shares):
            check_choice("sampling.positives", name, tuple(self.classes))

    def look(self, masks: PartialMasks, grid: PatchGrid, bank: ImageBank, least: float, folder: Path | None) -> Self:
        """With the patches of a set that show a defect and those that are blank, where that matters.

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
        found = replace(self, occupancy=find_occupancy(masks, grid, folder))
        return found if options.skip_blank is None else replace(found, blank=find_blank(bank, grid, least, folder))


class _Pool(NamedTuple):
    """Patches of which one is taken: their numbers in the split, and (y, x) of a pixel that stays in it, or -1."""

    patch: Ints
    anchor: Ints

    def take(self, place: NDArray[np.float64]) -> "_Pool":
        chosen = np.minimum((place * len(self.patch)).astype(np.int64), len(self.patch) - 1)
        return _Pool(self.patch[chosen], self.anchor[chosen])


class InspectionDataset(StripeDataset):
    """Patches of a split, each sample chosen and placed anew in each epoch if `sampling` asks for that.

    What a sample shows depends on the seed, the epoch and its number alone, so an epoch is the same after a resume, on
    any number of ranks and with any batch size. Samples are those of `StripeDataset` and ``draw`` int64, the number of
    the sample among those of the split, of which its augmentation is drawn.

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
        self._pools, self._others = self._find_pools(sampling)
        self._donors = np.zeros(0, np.int64)
        if sampling.occupancy is not None and sampling.options.paste is not None:
            self._donors = np.unique(self._number(sampling.occupancy.patch)[1])
        self._edges, self._leaves_out = np.cumsum([*sampling.options.shares.values()]), sampling.blank is not None
        self._count = self._count_kept() if self._leaves_out else super().__len__()
        self.sampling = replace(sampling, occupancy=None, blank=None)  # what is needed of them is in the pools

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

    def choose(self, indices: Ints, epoch: int) -> Ints:
        """[M] the patch of each sample in an epoch."""
        return self._choose(indices, self._draw(indices, epoch)).patch

    @override
    def describe_sample(self, index: int) -> str:
        if self.sampling.options.positives is None and not self.sampling.options.random_places:
            return super().describe_sample(int(self.choose(np.array([index]), 0)[0]))
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
        words = self._draw(indices, epoch)
        chosen = self._choose(indices, words)
        split_image, index, image, y, x = self._locate(chosen.patch)
        if self.sampling.options.random_places:
            y = self._move(y, words[:, 2], chosen.anchor[:, 0], self.grid.heights_px[image], 0)
            x = self._move(x, words[:, 3], chosen.anchor[:, 1], self.grid.widths_px[image], 1)
        return split_image, index, image, y, x

    def _paste(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """Paste defects of other patches into samples that show none."""
        words = random_words(self.sampling.seed, Stream.PASTES, indices, epoch, 4) * 2.0**-32
        free = ~is_defect(rows["mask"]).any((1, 2, 3)) & (words[:, 0] < (self.sampling.options.paste or 0))
        chosen = np.flatnonzero(free)
        if not len(chosen):
            return
        donors = self._donors[(words[chosen, 1] * len(self._donors)).astype(np.int64)]
        split_image, _, image, y, x = self._locate(donors)
        pixels, masks = self.cut(image, np.stack((y, x), axis=1)), np.empty_like(rows["mask"][chosen])
        assert self.masks is not None
        cut_patches(self.masks, split_image, y - self.margin_px[0], x - self.margin_px[1], masks)
        for row, donor, donor_mask in zip(chosen.tolist(), pixels, masks, strict=True):
            turn = np.s_[:, :: 1 - 2 * int(words[row, 2] < 0.5), :: 1 - 2 * int(words[row, 3] < 0.5)]
            paste_defect(rows["image"][row], rows["mask"][row], donor[turn], donor_mask[turn])

    def _draw(self, indices: Ints, epoch: int) -> NDArray[np.float64]:
        """[M, 4] in 0..1: class, patch, y and x of each sample."""
        words = random_words(self.sampling.seed, Stream.POSITIVES, indices, epoch, 4)
        return words.astype(np.float64) * 2.0**-32

    def _choose(self, indices: Ints, words: NDArray[np.float64]) -> _Pool:
        if not self._pools:
            patch = self._others.patch[indices] if self._leaves_out else indices
            return _Pool(patch, np.full((len(patch), 2), _NOWHERE))
        if not len(self._others.patch) and len(self._pools) == 1 and not self.sampling.options.random_places:
            return _Pool(indices, np.full((len(indices), 2), _NOWHERE))  # every patch shows a defect
        pools = [*self._pools, *([self._others] if len(self._others.patch) else self._pools[-1:])]
        wanted = np.searchsorted(self._edges, words[:, 0], side="right")
        taken = [pool.take(words[:, 1]) for pool in pools]
        rows = np.arange(len(indices))
        patch, anchor = (np.stack(parts)[wanted, rows] for parts in zip(*taken, strict=True))
        return _Pool(patch, anchor)

    def _move(self, start: Ints, word: NDArray[np.float64], anchor: Ints, length_px: Ints, axis: int) -> Ints:
        """Starts moved by up to half a stride, within the image and around the anchor if there is one."""
        side, stride = self.grid.patch_px[axis], (self.grid.vertical, self.grid.horizontal)[axis].stride_px
        low, high = np.maximum(start - stride // 2, 0), np.minimum(start + stride // 2, length_px - side)
        has = anchor != _NOWHERE
        low = np.where(has, np.maximum(low, anchor - side + 1), low)
        high = np.where(has, np.minimum(high, anchor), high)
        moved: Ints = low + (word * (high - low + 1)).astype(np.int64)
        return moved

    def _find_pools(self, sampling: Sampling) -> tuple[list[_Pool], _Pool]:
        """The patches of each wanted class, and those that show no defect and are not blank."""
        count = super().__len__()
        shows, blank = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        occupancy = sampling.occupancy
        pools = []
        if occupancy is not None:
            rows, number = self._number(occupancy.patch)
            shows[number] = True
            kinds, anchors = occupancy.kind[rows], np.stack((occupancy.y[rows], occupancy.x[rows]), axis=1)
            for wanted, share in sampling.options.shares.items():
                own = kinds == sampling.classes.index(wanted) + 1 if wanted else np.ones(len(number), np.bool_)
                firsts = np.unique(number[own], return_index=True)[1]
                pools.append(_Pool(number[own][firsts], anchors[own][firsts]))
                if not len(firsts):
                    raise ConfigError(
                        f"data.sampling.positives={share}, but none of the {count} training patches shows "
                        f"{repr(wanted) if wanted else 'a defect'}: are the masks right? Set "
                        "data.sampling.positives=null, or other data.splits"
                    )
        if sampling.blank is not None:
            blank[self._number(sampling.blank)[1]] = True
        free = np.flatnonzero(~shows & ~blank if pools else shows | ~blank)
        return pools, _Pool(free, np.full((len(free), 2), _NOWHERE))

    def _count_kept(self) -> int:
        """Samples of an epoch where blank patches are left out."""
        shown = np.concatenate([self._others.patch, *(pool.patch for pool in self._pools)])
        if not len(shown):
            raise ConfigError("data.sampling.skip_blank leaves no patch to train with: set a lower one")
        return len(np.unique(shown))

    def _number(self, patches: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Which of some patches of all images are of this split, and the numbers of those in it."""
        counts = np.cumsum(self.grid.rows * self.grid.columns)
        image = np.searchsorted(counts, patches, side="right")
        rows = np.isin(image, self.images)
        place = np.argsort(self.images)[np.searchsorted(np.sort(self.images), image[rows])]
        return rows, patches[rows] - self._shifts[place]


def paste_defect(image: Array, mask: Array, donor: Array, donor_mask: Array) -> None:
    """Blend the defect of another patch into one that shows none, in place.

    The defect keeps its difference to what is around it: that takes the brightness of the new place.

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
