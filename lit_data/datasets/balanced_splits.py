"""Splits of single images that share out every kind of defect and let nothing that belongs together straddle."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError, show_path
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
"""Fractions where no image shows a defect, without which a test says nothing."""
_UNEVEN = 1 / 3  # of its fraction, by which a split may miss it
_FEW = 20  # images of which fractions are rough in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSplitter:
    """Choice of the images that train, validate and test.

    Args:
        names: Of the images, below the root.
        kinds: Kind of each, ``good`` for those without a defect; empty if folders do not show it.
        has_mask: [n] of each; `None` where there are no masks.
        count_classes: Gives [n, classes] pixels of each class, the background first; `None` as
            `has_mask`.
        find_groups: Gives for the names the number of the group of each image that stays in one
            split.
        seed: Chooses the images of each share.
        root: Folder of the set, for lists of splits.
        others: Images that lists may name too, such as bad ones that are skipped.
        leftovers: Takes the images that lists leave out.
        unmarked: [n] which images show a defect by their folder, and have no mask; `None` where
            folders are not asked.
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
        """Return for each split the numbers of its images.

        Args:
            splits: As `InspectionDataModule` has it.

        Raises:
            ConfigError: The splits cannot be made so.
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
        """Return the fractions by which `split` shares out the images of the splits that they name.

        Args:
            splits: As for `split`.

        Returns:
            The fractions; none where folders or lists say the split of each image.
        """
        if splits != "auto":
            return read_fractions(splits)
        named = self._find_named()
        return DEFAULT_SHARES if named is None else named.fractions

    def add_unmasked(self, by_split: Mapping[str, Ints], shared: Mapping[str, float]) -> None:
        """Add what has no mask to what is not used: all of a split, and other images.

        Images in folders that tell need none, and of splits that are shared out it is chance.

        Args:
            by_split: Numbers of the images of each split.
            shared: Fractions of those that are shared out.
        """
        if self.leftovers is None:
            return
        if self.unmarked is not None:
            cure = "they are scored as images, and not by their pixels"
            used = np.sort(np.concatenate(list(by_split.values())))
            names = self._list_names(used[self.unmarked[used]])
            self.leftovers.add(
                "image shows a defect that no mask marks",
                "images show a defect that no mask marks",
                names,
                cure,
            )
        if self.has_mask is None:
            return
        is_unmasked = ~self._is_labelled(self.has_mask)
        for split, images in by_split.items():
            if len(images) and not shared.get(split) and is_unmasked[images].all():
                is_left_out = bool(np.isin(images, self.find_unknown()).all())
                names = self._list_names(images)
                self.leftovers.add_split(split, names, "mask", is_left_out=is_left_out)
                is_unmasked[images] = False
        cure = "they count as good; data.exclude skips them"
        names = self._list_names(np.flatnonzero(is_unmasked))
        self.leftovers.add("image has no mask", "images have no mask", names, cure)

    def add_unused(self, by_split: Mapping[str, Ints], is_good: Bools) -> None:
        """Add images with a defect that are in no split, as only good ones train."""
        is_split = sum(map(len, by_split.values())) > len(by_split["train"])
        if self.leftovers is not None and is_split:  # and not predicted
            used = np.concatenate(list(by_split.values()))
            names = self._list_names(np.setdiff1d(np.flatnonzero(~is_good), used))
            cure = "training uses only good ones; those of val and test are scored"
            self.leftovers.add(
                "image shows a defect and is not in any split",
                "images show a defect and are not in any split",
                names,
                cure,
            )

    def _list_names(self, images: Ints) -> list[str]:
        return [self.names[number] for number in images.tolist()]

    def check_protocol(self, layout: str) -> None:
        """Refuse a set that does not lie in the folders that ``data.protocol=mvtec`` asks for.

        Args:
            layout: How its masks lie.

        Raises:
            ConfigError: Says which folders it needs.
        """
        # Without masks folders still say which images are good, and images are scored by that.
        if layout not in ("anomaly", "none") or not self.has_split_folders:
            raise ConfigError(
                f"{show_path(self.root or Path())}: data.protocol=mvtec needs the folders "
                "train/good and test/KIND, with the masks in ground_truth/KIND if there are "
                f"any, and nothing else (found: layout {layout}); see docs/anomaly.md"
            )

    def find_unknown(self) -> Ints:
        """Return the numbers of images of which nothing says whether they show a defect.

        Those are all of val or test by their folder, none of which has a mask, where every image of
        the other folders has one or lies in a folder of good ones.
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
        """[n] which images have a mask, or lie in a folder that says if they show a defect."""
        is_labelled: Bools = has_mask | (np.array(self.kinds) == GOOD)
        return is_labelled if self.unmarked is None else is_labelled | self.unmarked

    def split_good(self, splits: Splits, is_good: Bools) -> dict[str, Ints]:
        """As `split`, but only images without a defect train.

        `auto` takes folders named after splits at their word: test is all of test, and without a
        val that is a part of the good images of train, and all defective ones of it. Else shares are
        those of the good images, and the others are shared out over val and test alone. Defective
        images of listed training splits are left out.

        Args:
            splits: As for `split`.
            is_good: [n] which images show no defect.
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
                # They cannot train, and a threshold needs all that there are.
                by_split["val"] = np.union1d(by_split["val"], train[~is_good[train]])
        elif fractions is not None:
            split_images(self.names, splits)  # checks the fractions
            return self._share_out_good(fractions, is_good)
        else:
            by_split = self._split_by_list(splits)
        train = by_split["train"]
        return by_split | {"train": train[is_good[train]]}

    def split_folds(self, folds: int, fold: int) -> dict[str, Ints]:
        """Return the splits of one fold of a cross-validation: over all folds each image is in test once.

        Kinds, classes and sizes of defects are spread over the folds, and images that belong
        together are in one. The next fold validates, the others train.

        Args:
            folds: At least 3.
            fold: Number of the fold that is test, from 0.

        Raises:
            ConfigError: There are fewer images, or groups of them, than folds.
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
        """Share out good images by the fractions, and the others over val and test alone."""
        by_split = self._share_out(np.flatnonzero(is_good), fractions)
        val, test = fractions["val"], fractions["test"]
        if val + test == 0:
            return by_split
        # Images with a defect go to val and test alone, in proportion to their fractions.
        of_scored = {"val": val / (val + test), "test": test / (val + test)}
        others = self._share_out(np.flatnonzero(~is_good), of_scored)
        for split, numbers in others.items():
            by_split[split] = np.sort(np.concatenate([by_split[split], numbers]))
        return by_split

    @property
    def has_split_folders(self) -> bool:
        """Return True if images lie in folders named after splits, or lists name theirs."""
        named = self._find_named()
        return named is not None and not named.names_train_alone

    def _find_named(self) -> NamedSplits | None:
        return find_named_splits(self.names, root=self.root, others=self.others)

    def _complete(self, named: NamedSplits) -> dict[str, Ints]:
        """Return named splits, with a part of train for val if nothing names that."""
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
        """Return the strata of images: kind, classes, and size of the defects to a factor of two."""
        if self.has_mask is None or self.count_classes is None:
            return self.kinds
        counts = self.count_classes()
        defect_fractions = 1 - counts[:, 0] / counts.sum(1)
        # Powers of two above 2^-40, so that sizes are numbers above 0, and 0 is no defect.
        exponents = np.log2(np.maximum(defect_fractions, 1e-9)) + 40
        sizes = np.where(defect_fractions > 0, exponents, 0).astype(np.int64)
        strata = []
        for number, kind in enumerate(self.kinds):
            present = "".join(str(int(count > 0)) for count in counts[number, 1:])
            strata.append(f"{kind} {self.has_mask[number]} {present} {sizes[number]:02}")
        return strata


def check_folds(splits: Splits, folds: int | None, fold: int, *, protocol: str) -> None:
    """Refuse a cross-validation that cannot be, or that another option contradicts.

    Args:
        splits: As `InspectionDataModule` has them, like the other arguments.
        folds: Their number; None for none.
        fold: The one that is test.
        protocol: `mvtec` allows neither splits nor folds.

    Raises:
        ConfigError: Says which.
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
    """Warn where groups that stay together make a split much larger or smaller than was asked for."""
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
    """Return ``train 354 (Break 59, good 175), val 76 (...)``, or of nameless kinds ``train 354 (179 positive)``."""
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
    """[n] number of the group of each image: equal files, names that match alike, near-duplicates.

    Args:
        bank: The images.
        names: Their paths below the root.
        pattern: See `group_by_name`.
        with_near_duplicates: True puts them together, see `group_similar`.
        folder: Folder of what was found out, for the next run; `None` keeps nothing.
    """
    groups = [group_equal(bank)]
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
    """Split images so that each kind of defect is in each split, and each group in one.

    Args:
        kinds: Of each image.
        groups: [n] number of the group of each image, such as those that are equal to the byte.
        shares: Of train, val and test.
        seed: Chooses the images of each share.

    Returns:
        For each split the ascending numbers of its images.
    """
    # One image stands for its group: the others follow it.
    firsts = np.unique(groups, return_index=True)[1]
    draws = uniform(seed, Stream.SPLIT, firsts, 0, 1)[:, 0]
    shuffled = firsts[np.argsort(draws, kind="stable")].tolist()
    chosen: dict[str, list[int]] = {split: [] for split, share in shares.items() if share > 0}
    # Kind after kind, each image to the split that lags furthest behind its fraction: so all
    # fractions are right together.
    for count, number in enumerate(sorted(shuffled, key=lambda number: kinds[number]), 1):
        lags = {split: shares[split] * count - len(chosen[split]) for split in chosen}
        chosen[max(lags, key=lags.__getitem__)].append(number)
    parts = {}
    for split in shares:
        groups_of_split = groups[chosen.get(split, [])]
        parts[split] = np.flatnonzero(np.isin(groups, groups_of_split))
    return parts


def group_equal(bank: ImageBank) -> Ints:
    """[n] number of the group of images whose files are equal to the byte; without a store each is its own."""
    if not isinstance(bank, StoredImages):
        return np.arange(len(bank))
    return np.unique(bank.source_states, axis=0, return_inverse=True)[1].reshape(-1)


def join_groups(*labels: Ints) -> Ints:
    """[n] number of the group of what any of some groupings puts together."""
    joined = np.arange(len(labels[0]))
    while True:
        before = joined
        # Each group takes the lowest number of its members, grouping after grouping.
        for label in labels:
            numbers = np.unique(label, return_inverse=True)[1].reshape(-1)
            least = np.full(len(label), len(label))
            np.minimum.at(least, numbers, joined)
            joined = least[numbers]
        if np.array_equal(before, joined):
            return joined
