"""Splits of single images, stratified by kind of defect, that keep images that belong together in one split."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError, list_some, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Bools, Ints
from lit_data.datasets.good_names import GOOD
from lit_data.datasets.layouts import describe_counts
from lit_data.datasets.near_duplicates import group_similar
from lit_data.datasets.split_names import split_of
from lit_data.datasets.splits import (
    DEFAULT_SHARES,
    NamedSplits,
    Splits,
    find_named_splits,
    group_by_name,
    read_fractions,
    split_images,
)
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import StoredImages
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_GOOD_ALONE = {"train": 0.85, "val": 0.15, "test": 0.0}
"""Fractions if no image shows a defect, without which a test is meaningless."""
_UNEVEN = 1 / 3  # relative deviation of a split from its fraction without a warning
_FEW = 20  # images; fractions of fewer are rough in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSplitter:
    """Splitter of images into training, validation and test.

    Args:
        names: Paths of the images below the root.
        kinds: Kind of each image, ``good`` if it has no defect; empty if folders do not tell.
        has_mask: [n] True for images with a mask; `None` if there are no masks.
        count_classes: Returns [n, classes] pixels of each class, the background first; `None` if
            there are no masks.
        find_groups: Returns the number of the group of each name; a group stays in one split.
        seed: Seed of the choice of images.
        root: Folder of the dataset, for lists of splits.
        others: Images that lists may name too, such as bad ones that are skipped.
        leftovers: Receives the images that lists leave out.
        unmarked: [n] True for images that show a defect by their folder, and have no mask; `None`
            if folders do not count.
    """

    names: Sequence[str]
    kinds: Sequence[str]
    has_mask: Bools | None
    count_classes: Callable[[], Ints] | None
    find_groups: Callable[[Sequence[str]], Ints]
    seed: int
    root: Path | None = None
    others: Sequence[str] = ()
    leftovers: Leftovers | None = None
    unmarked: Bools | None = None

    def split(self, splits: Splits) -> dict[str, Ints]:
        """Return the numbers of the images of each split.

        Args:
            splits: As in `InspectionDataModule`.

        Raises:
            ConfigError: The images cannot be split so.
        """
        if splits == "auto":
            named = self._find_named()
            if named is not None and not named.names_train_alone:
                return self._complete(named)
            splits = DEFAULT_SHARES
        fractions = read_fractions(splits)
        if fractions is None:
            return self._split_by_list(splits)
        if splits is not DEFAULT_SHARES:
            split_images(self.names, splits)  # checks the fractions
        return self._share_out(np.arange(len(self.names)), fractions)

    def find_fractions(self, splits: Splits) -> Mapping[str, float] | None:
        """Return the fractions by which `split` divides the images.

        Args:
            splits: As for `split`.

        Returns:
            The fraction of each split; None if folders or lists give the split of each image.
        """
        if splits != "auto":
            return read_fractions(splits)
        named = self._find_named()
        return DEFAULT_SHARES if named is None else named.fractions

    def add_unmasked(self, by_split: Mapping[str, Ints], shared: Mapping[str, float]) -> None:
        """Report splits without any mask, and other images without a mask, as not used.

        Images in folders that give their kind need no mask. A split that is divided by fractions
        may lack masks by chance.

        Args:
            by_split: Numbers of the images of each split.
            shared: Fractions of the splits that are divided by fractions.
        """
        if self.leftovers is None:
            return
        if self.unmarked is not None:
            cure = "[it is scored as an image|they are scored as images], not by [its|their] pixels"
            used = np.sort(np.concatenate(list(by_split.values())))
            names = self._list_names(used[self.unmarked[used]])
            self.leftovers.add("[image shows|images show] a defect that no mask marks", names, cure)
        if self.has_mask is None:
            return
        is_unmasked = ~self._is_labelled(self.has_mask)
        for split, images in by_split.items():
            if len(images) and not shared.get(split) and is_unmasked[images].all():
                is_left_out = bool(np.isin(images, self.find_unknown()).all())
                names = self._list_names(images)
                self.leftovers.add_split(split, names, "mask", is_left_out=is_left_out)
                is_unmasked[images] = False
        cure = "[it counts|they count] as good; data.exclude skips [it|them]"
        names = self._list_names(np.flatnonzero(is_unmasked))
        self.leftovers.add("[image has|images have] no mask", names, cure)

    def add_unused(self, by_split: Mapping[str, Ints], is_good: Bools) -> None:
        """Report images with a defect that are in no split, because only good ones train."""
        is_split = sum(map(len, by_split.values())) > len(by_split["train"])
        if self.leftovers is not None and is_split:  # and not predicted
            used = np.concatenate(list(by_split.values()))
            names = self._list_names(np.setdiff1d(np.flatnonzero(~is_good), used))
            cure = "training uses only good images; defects of val and test are scored"
            self.leftovers.add(
                "[image shows a defect and is|images show a defect and are] not in any split",
                names,
                cure,
            )

    def _list_names(self, images: Ints) -> list[str]:
        return [self.names[number] for number in images.tolist()]

    def check_protocol(self, layout: str) -> None:
        """Refuse a dataset without the folders that ``data.protocol=mvtec`` needs.

        Args:
            layout: Layout of its masks.

        Raises:
            ConfigError: Folders are missing; the error names them.
        """
        # Without masks, folders still tell which images are good, and images are scored by that.
        if layout not in ("anomaly", "none") or not self.has_split_folders:
            raise ConfigError(
                f"{show_path(self.root or Path())}: data.protocol=mvtec needs the folders "
                "train/good and test/KIND, with the masks in ground_truth/KIND if there are "
                f"any, and nothing else (found: layout {layout}); see docs/anomaly.md"
            )

    def find_unknown(self) -> Ints:
        """Return the numbers of images that may or may not show a defect.

        These are all images of a val or test folder without any mask, if every image of the other
        folders has a mask or is in a folder of good images.
        """
        if self.has_mask is None:
            return np.zeros(0, np.int64)
        is_labelled = self._is_labelled(self.has_mask)
        split_names = np.array([split_of(name) or "" for name in self.names])
        unlabelled = [
            split for split in ("val", "test") if not is_labelled[split_names == split].any()
        ]
        is_unknown = np.isin(split_names, unlabelled)
        others = is_labelled[~is_unknown]
        return np.flatnonzero(is_unknown & bool(len(others) and others.all()))

    def _is_labelled(self, has_mask: Bools) -> Bools:
        """Return [n] True for images with a mask, or in a folder that tells if they show a defect."""
        is_labelled: Bools = has_mask | (np.array(self.kinds) == GOOD)
        return is_labelled if self.unmarked is None else is_labelled | self.unmarked

    def split_good(self, splits: Splits, is_good: Bools) -> dict[str, Ints]:
        """Split like `split`, but train only with images without a defect.

        `auto` follows folders that are named after splits: test is all of test. If there is no val,
        it becomes a part of the good images of train, and all defective images of train. Otherwise
        fractions apply to the good images, and the others are divided between val and test only.
        Defective images of listed training splits are left out.

        Args:
            splits: As for `split`.
            is_good: [n] True for images without a defect.
        """
        fractions = read_fractions(splits)
        if splits == "auto":
            named = self._find_named()
            if named is None or named.names_train_alone:
                has_defects = bool((~is_good).any())
                return self._share_out_good(DEFAULT_SHARES if has_defects else _GOOD_ALONE, is_good)
            by_split = self._complete(named)
            if named.fractions is not None:
                train = by_split["train"]
                # They cannot train, and a threshold needs as many as possible.
                by_split["val"] = np.union1d(by_split["val"], train[~is_good[train]])
        elif fractions is not None:
            split_images(self.names, splits)  # checks the fractions
            return self._share_out_good(fractions, is_good)
        else:
            by_split = self._split_by_list(splits)
        train = by_split["train"]
        return by_split | {"train": train[is_good[train]]}

    def split_folds(self, folds: int, fold: int) -> dict[str, Ints]:
        """Return the splits of one fold of a cross-validation, in which each image is in test once.

        Kinds, classes and sizes of defects are spread over the folds, and images that belong
        together are in one fold. The next fold validates, and the others train.

        Args:
            folds: Number of folds, at least 3.
            fold: Number of the fold for test, from 0.

        Raises:
            ConfigError: There are fewer images, or groups of images, than folds.
        """
        groups = self.find_groups(self.names)
        fractions = {str(number): 1 / folds for number in range(folds)}
        parts = list(split_stratified(self._describe(), groups, fractions, seed=self.seed).values())
        if not all(map(len, parts)):
            raise ConfigError(
                f"data.folds={folds} is more than the {len(np.unique(groups))} images or groups of "
                "images that stay together: choose fewer folds"
            )
        test, val = parts[fold], parts[(fold + 1) % folds]
        train = np.setdiff1d(np.arange(len(self.names)), np.concatenate((val, test)))
        return {"train": train, "val": val, "test": test}

    def _share_out_good(self, fractions: Mapping[str, float], is_good: Bools) -> dict[str, Ints]:
        """Divide good images by the fractions, and the others between val and test only."""
        by_split = self._share_out(np.flatnonzero(is_good), fractions)
        val, test = fractions["val"], fractions["test"]
        if val + test == 0:
            return by_split
        # Images with a defect go only to val and test, in proportion to their fractions.
        of_scored = {"val": val / (val + test), "test": test / (val + test)}
        others = self._share_out(np.flatnonzero(~is_good), of_scored)
        for split, numbers in others.items():
            by_split[split] = np.sort(np.concatenate([by_split[split], numbers]))
        return by_split

    @property
    def has_split_folders(self) -> bool:
        """Return True if images are in folders named after splits, or lists give their splits."""
        named = self._find_named()
        return named is not None and not named.names_train_alone

    def _find_named(self) -> NamedSplits | None:
        return find_named_splits(self.names, root=self.root, others=self.others)

    def _complete(self, named: NamedSplits) -> dict[str, Ints]:
        """Return named splits, with a part of train as val if val is missing."""
        if named.fractions is None:
            return dict(named.numbers)
        return {**named.numbers, **self._share_out(named.numbers["train"], named.fractions)}

    def _split_by_list(self, splits: Splits) -> dict[str, Ints]:
        return split_images(
            self.names, splits, root=self.root, others=self.others, leftovers=self.leftovers
        )

    def _share_out(self, images: Ints, fractions: Mapping[str, float]) -> dict[str, Ints]:
        filled_splits = [split for split, fraction in fractions.items() if fraction > 0]
        if len(filled_splits) == 1 or not len(images):
            return dict.fromkeys(fractions, images[:0]) | {filled_splits[0]: images}
        strata = self._describe()
        groups = self.find_groups(self.names)[images]
        parts = split_stratified(
            [strata[number] for number in images.tolist()], groups, fractions, seed=self.seed
        )
        _warn_of_uneven_splits({split: len(part) for split, part in parts.items()}, fractions)
        return {split: images[part] for split, part in parts.items()}

    def _describe(self) -> Sequence[str]:
        """Return the stratum of each image: kind, classes, and size of the defects to a factor of two."""
        if self.has_mask is None or self.count_classes is None:
            return self.kinds
        counts = self.count_classes()
        defect_fractions = 1 - counts[:, 0] / counts.sum(1)
        # Powers of two above 2^-40, so that sizes are numbers above 0, and 0 means no defect.
        exponents = np.log2(np.maximum(defect_fractions, 1e-9)) + 40
        sizes = np.where(defect_fractions > 0, exponents, 0).astype(np.int64)
        strata = []
        for number, kind in enumerate(self.kinds):
            present = "".join(str(int(count > 0)) for count in counts[number, 1:])
            strata.append(f"{kind} {self.has_mask[number]} {present} {sizes[number]:02}")
        return strata


def check_folds(splits: Splits, folds: int | None, fold: int, *, protocol: str) -> None:
    """Refuse a cross-validation that is impossible, or that another option contradicts.

    Args:
        splits: As in `InspectionDataModule`, like the other arguments.
        folds: Number of folds; None for no cross-validation.
        fold: Number of the fold for test.
        protocol: `mvtec` allows neither splits nor folds.

    Raises:
        ConfigError: The options are refused.
    """
    if protocol == "mvtec" and (splits != "auto" or folds is not None):
        raise ConfigError(
            "data.protocol=mvtec tests on all of the folder test: remove data.splits and data.folds"
        )
    check_count("data.fold", fold, 0)
    if folds is None:
        if fold:
            raise ConfigError(f"data.fold={fold} needs data.folds, which is not set: set it too")
        return
    check_count("data.folds", folds, 3)
    if fold >= folds:
        raise ConfigError(
            f"data.fold={fold} is not one of data.folds={folds}: choose 0 to {folds - 1}"
        )
    if splits != "auto":
        raise ConfigError(
            f"data.folds splits all images, and so does data.splits={splits}: remove one of them"
        )


def _warn_of_uneven_splits(counts: Mapping[str, int], fractions: Mapping[str, float]) -> None:
    """Warn if groups that stay together make a split much larger or smaller than requested."""
    total = sum(counts.values())
    if total < _FEW:
        return
    uneven = []
    for split, fraction in fractions.items():
        expected = fraction / sum(fractions.values())
        if abs(counts[split] / total - expected) > _UNEVEN * expected:
            uneven.append(f"{split} has {counts[split]} of {total} images, not {expected:.0%}")
    if uneven:
        log.warning(
            "%s: images that look alike, or that data.groups joins, stay in one split. If "
            "they show different places of one texture, data.near_duplicates=apart spreads them",
            "; ".join(uneven),
        )


def describe_splits(
    split_images: Mapping[str, Ints],
    kinds: Sequence[str],
    is_positive: Bools | None = None,
) -> str:
    """Return ``train 354 (Break 59, good 175), val 76 (...)``, or ``train 354 (179 positive)`` without kinds."""
    parts = []
    for split, images in split_images.items():
        counts = Counter(kinds[number] for number in images.tolist())
        del counts[""]
        detail = describe_counts(counts)
        if not detail and is_positive is not None:
            detail = f"{is_positive[images].sum()} positive"
        parts.append(f"{split} {len(images)} ({detail})" if detail else f"{split} {len(images)}")
    return ", ".join(parts)


def find_groups(
    bank: ImageBank,
    names: Sequence[str],
    *,
    pattern: str | None,
    with_near_duplicates: bool,
    folder: Path | None,
) -> Ints:
    """Return [n] group numbers of the images, by equal files, matching names and near-duplicates.

    Args:
        bank: The images.
        names: Paths of the images below the root.
        pattern: See `group_by_name`.
        with_near_duplicates: True groups near-duplicates, see `group_similar`.
        folder: Folder that keeps the result for the next run; `None` keeps nothing.
    """
    groups = [_group_equal(bank)]
    if pattern is not None:
        groups.append(group_by_name(names, pattern))
    if with_near_duplicates:
        near_duplicates = group_similar(bank, folder)
        count = len(near_duplicates) - len(np.unique(near_duplicates))
        if count > 0:
            log.info(
                "%s in the split of the original "
                "(data.near_duplicates=apart does not look for them)",
                counted(count, "near-duplicate stays", "near-duplicates stay"),
            )
        groups.append(near_duplicates)
    return join_groups(*groups)


def split_stratified(
    kinds: Sequence[str], groups: Ints, shares: Mapping[str, float], *, seed: int
) -> dict[str, Ints]:
    """Split images so that each kind of defect is in each split, and each group in one split.

    Args:
        kinds: Kind of each image.
        groups: [n] number of the group of each image, for example of byte-identical ones.
        shares: Fractions of train, val and test.
        seed: Seed of the choice of images.

    Returns:
        The numbers of the images of each split, ascending.
    """
    # One image stands for its group, and the others follow it.
    firsts = np.unique(groups, return_index=True)[1]
    draws = uniform(seed, Stream.SPLIT, firsts, 0, 1)[:, 0]
    shuffled = firsts[np.argsort(draws, kind="stable")].tolist()
    chosen: dict[str, list[int]] = {split: [] for split, share in shares.items() if share > 0}
    # Kind by kind, each image goes to the split that is furthest below its fraction, so that all
    # fractions are right together.
    for count, number in enumerate(sorted(shuffled, key=lambda number: kinds[number]), 1):
        lags = {split: shares[split] * count - len(chosen[split]) for split in chosen}
        chosen[max(lags, key=lags.__getitem__)].append(number)
    parts = {}
    for split in shares:
        groups_of_split = groups[chosen.get(split, [])]
        parts[split] = np.flatnonzero(np.isin(groups, groups_of_split))
    return parts


def warn_of_contradictions(bank: ImageBank, names: Sequence[str], truths: Sequence[str]) -> None:
    """Warn of byte-identical images of which different things are said.

    Args:
        bank: The images.
        names: Names of the images.
        truths: Class of each image, empty where it is unknown.
    """
    first_of: dict[int, int] = {}
    pairs = []
    for number, (group, truth) in enumerate(zip(_group_equal(bank).tolist(), truths, strict=True)):
        if not truth:
            continue
        first = first_of.setdefault(group, number)
        if truths[first] != truth:
            pairs.append(f"{names[first]} ({truths[first]}) and {names[number]} ({truth})")
    if pairs:
        log.warning(
            "%s another image with a different class: %s; correct the labels",
            counted(len(pairs), "image is identical to", "images are identical to"),
            list_some(pairs),
        )


def _group_equal(bank: ImageBank) -> Ints:
    """Return [n] group numbers of byte-identical images; without a store, each image is its own group."""
    if not isinstance(bank, StoredImages):
        return np.arange(len(bank))
    return np.unique(bank.source_states, axis=0, return_inverse=True)[1].reshape(-1)


def join_groups(*labels: Ints) -> Ints:
    """Return [n] group numbers that join the groups of all groupings."""
    joined = np.arange(len(labels[0]))
    while True:
        before = joined
        # Each group takes the lowest number of its members, one grouping after another.
        for label in labels:
            numbers = np.unique(label, return_inverse=True)[1].reshape(-1)
            least = np.full(len(label), len(label))
            np.minimum.at(least, numbers, joined)
            joined = least[numbers]
        if np.array_equal(before, joined):
            return joined
