"""Patches of single images: masks of those that have one, and more of the patches that show a defect."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.datasets.stripes.dataset import FIXED, StripeDataset
from lit_data.errors import ConfigError
from lit_data.io.images.image_source import ImageBank
from lit_data.io.store.shared_arrays import share_state
from lit_data.rng import Stream, random_words, uniform
from lit_data.types import Array, FieldSpec

Ints = NDArray[np.int64]
_NO_DEFECT: Final = np.zeros((1, 1, 1), np.uint8)


class PartialMasks:
    """Masks of images of which some have none: nothing is marked there.

    Args:
        images: All images.
        chosen: [n] numbers of those whose masks these are.
        masks: Those that there are.
        of_image: [n] for each of the chosen the number of its mask; -1 where it has none.
    """

    channels = 1
    dtype: "np.dtype[Any]" = np.dtype(np.uint8)

    def __init__(self, images: ImageBank, chosen: Ints, masks: ImageBank | None, of_image: Ints) -> None:
        self._masks, self._of_image = masks, of_image
        self._names = images.name, chosen
        self.heights_px, self.widths_px = images.heights_px[chosen], images.widths_px[chosen]
        if masks is not None:
            has = of_image >= 0
            self.heights_px[has], self.widths_px[has] = (
                masks.heights_px[of_image[has]],
                masks.widths_px[of_image[has]],
            )
        self.skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self._of_image)

    def __getitem__(self, index: int) -> Array:
        """[1, H, W] uint8."""
        number = int(self._of_image[index])
        if number >= 0 and self._masks is not None:
            return self._masks[number]
        return np.broadcast_to(_NO_DEFECT, (1, int(self.heights_px[index]), int(self.widths_px[index])))

    def name(self, index: int) -> str:
        """Path of the mask, or of the image that has none."""
        number, (name, chosen) = int(self._of_image[index]), self._names
        return self._masks.name(number) if number >= 0 and self._masks is not None else name(int(chosen[index]))


class InspectionDataset(StripeDataset):
    """Patches of a split in which a given share shows a defect, each sample chosen anew in each epoch.

    Which patch a sample is depends on the seed, the epoch and its number alone, so an epoch is the same after a resume,
    on any number of ranks and with any batch size. Samples are those of `StripeDataset` and ``draw`` int64, the number
    of the sample among those of the split, of which its augmentation is drawn.

    Args:
        bank: See `StripeDataset`, as all others.
        grid: See there.
        positives: Share of samples with a defect, above 0 and up to 1; None takes every patch once.
        seed: Of the choice.

    Raises:
        ConfigError: No patch of the split shows a defect, or all do.
    """

    def __init__(self, *args: Any, positives: float | None = None, seed: int = 0, **options: Any) -> None:  # noqa: ANN401 - see `StripeDataset`
        super().__init__(*args, **options)
        self.positives, self.seed = positives, seed
        occupied = find_occupied(self) if positives is not None else np.zeros(0, np.bool_)
        self._with, self._without = np.flatnonzero(occupied), np.flatnonzero(~occupied)
        if positives is not None and not len(self._with):
            raise ConfigError(
                f"data.positives={positives}, but none of the {len(self)} training patches shows a defect: are the "
                "masks right? Set data.positives=null, or other data.splits"
            )

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["draw"][:] = indices
        super().write_into(rows, self.choose(indices, epoch), epoch)

    def choose(self, indices: Ints, epoch: int) -> Ints:
        """[M] the patch of each sample in an epoch."""
        if self.positives is None or not len(self._without):
            return indices
        share, place = random_words(self.seed, Stream.POSITIVES, indices, epoch, 2).T * 2.0**-32
        with_defect = share < self.positives
        return np.where(with_defect, _take(self._with, place), _take(self._without, place))

    @override
    def describe_sample(self, index: int) -> str:
        if self.positives is None:
            return super().describe_sample(index)
        return f"sample {index}, whose patch is chosen anew in each epoch"

    @override
    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, (*FIXED, "_with", "_without"))

    @override
    def _describe(self) -> dict[str, FieldSpec]:
        return super()._describe() | {"draw": FieldSpec((), "int64")}


def find_occupied(dataset: StripeDataset) -> NDArray[np.bool_]:
    """Which patches of a split hold a pixel that its masks mark: [N]; each mask is read once."""
    found = np.zeros(len(dataset), np.bool_)
    masks, first = dataset.masks, 0
    for place, image in enumerate(dataset.images.tolist() if masks is not None else []):
        count = int(dataset.grid.rows[image] * dataset.grid.columns[image])
        mask = masks[place][0] > 0  # type: ignore[index]  # there are masks
        if mask.any():
            positions = dataset.locate(np.arange(first, first + count))
            found[first : first + count] = _sum_boxes(mask, positions, dataset.grid.patch_px) > 0
        first += count
    return found


def _sum_boxes(mask: NDArray[np.bool_], positions: Ints, size_px: tuple[int, int]) -> Ints:
    """Marked pixels of boxes at positions [M, 2], by sums from the corner."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int64)
    sums[1:, 1:] = mask.cumsum(0).cumsum(1)
    top, left = np.minimum(positions, mask.shape).T
    bottom, right = np.minimum(positions + size_px, mask.shape).T
    total: Ints = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return total


def _take(numbers: Ints, place: NDArray[np.float64]) -> Ints:
    return numbers[np.minimum((place * len(numbers)).astype(np.int64), len(numbers) - 1)]


def split_stratified(kinds: Sequence[str], groups: Ints, shares: Mapping[str, float], *, seed: int) -> dict[str, Ints]:
    """Share images out so that each kind of defect is in each split, and images of one group in the same.

    Args:
        kinds: Of each image.
        groups: [n] number of the group of each image, such as those that are equal to the byte.
        shares: Of train, val and test.
        seed: Chooses the images of each share.

    Returns:
        For each split the ascending numbers of its images.
    """
    firsts = np.unique(groups, return_index=True)[1]
    shuffled = firsts[np.argsort(uniform(seed, Stream.SPLIT, firsts, 0, 1)[:, 0], kind="stable")].tolist()
    chosen: dict[str, list[int]] = {split: [] for split in shares}
    # Kind after kind, each image to the split that lags furthest behind its share: so all shares are right together.
    for count, number in enumerate(sorted(shuffled, key=lambda number: kinds[number]), 1):
        lag = {split: share * count - len(chosen[split]) for split, share in shares.items() if share > 0}
        chosen[max(lag, key=lambda split: lag[split])].append(number)
    return {split: np.flatnonzero(np.isin(groups, groups[numbers])) for split, numbers in chosen.items()}
