"""Splits of single images that share out every kind of defect and let nothing that belongs together straddle."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import _parser  # type: ignore[attr-defined] # that of `sre_parse`, which Python took out of sight
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.inspection.layouts import describe_counts, split_of
from lit_data.datasets.splits import DEFAULT_SHARES, SPLITS, Splits, split_images
from lit_data.errors import ConfigError
from lit_data.io.images.image_source import ImageBank
from lit_data.io.progress import track
from lit_data.io.store.kept import keep_found
from lit_data.io.store.store import StoredImages
from lit_data.rng import Stream, uniform
from lit_data.types import Array

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]
SIMILAR: Final = 0.9
"""Correlation of small pictures without their slow changes, from which on images count as similar."""
_SAME: Final = 0.97
"""Correlation from which on images of a crowd are frames of one part, if noise alone is between them."""
_NOISE: Final = 1.5
"""Root mean square of the difference of small pictures, in grey levels of 255, that noise of a camera explains."""
_OWN: Final = 0.6
"""Correlation of what images of a crowd do not have in common, from which on they show the same."""
_CROWD: Final = 8
"""Images alike, from which on they may be different places of one texture."""
_GOOD_ALONE: Final = {
    "train": 0.85,
    "val": 0.15,
    "test": 0.0,
}  # without a defect a test says nothing
_UNEVEN: Final = 1 / 3  # of its share, by which a split may miss it
_FEW: Final = 20  # images of which shares are rough in any case
_CHOICES: Final = 10  # of an expression for names
_TIMES: Final = 4  # that an expression may repeat choices
_SIDE_PX: Final = 32
BUCKET: Final = 2048  # images that are compared with each other at once
_BANDS: Final = 8
_LEAST: Final = (
    1e-3  # standard deviation of a small picture, in grey levels of 255, below which it is flat
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSplitter:
    """Chooses which images train, validate and test.

    Args:
        names: Of the images, below the root.
        kinds: Kind of each, ``good`` for those without a defect; empty where no folder says so.
        has_mask: [n] of each; `None` where there are no masks.
        count_classes: Gives [n, classes] pixels of each class, the background first.
        find_groups: Gives for the names the number of the group of each image that stays in one
            split.
        seed: Chooses the images of each share.
    """

    names: Sequence[str]
    kinds: Sequence[str]
    has_mask: NDArray[np.bool_] | None
    count_classes: Callable[[], Ints]
    find_groups: Callable[[Sequence[str]], Ints]
    seed: int

    def split(self, splits: Splits, *, is_anomaly_set: bool) -> dict[str, Ints]:
        """For each split the numbers of its images.

        Args:
            splits: As `InspectionDataModule` has it.
            is_anomaly_set: Folders named after splits hold good images alone for training.

        Raises:
            ConfigError: The splits cannot be made so.
        """
        if splits == "auto":
            folders = None if is_anomaly_set else self._by_folders()
            if folders is not None:
                return folders
            if is_anomaly_set:
                log.info(
                    "train/good shows no defect: images of test are shared out too, see docs/inspection.md"
                )
            splits = DEFAULT_SHARES
        if not isinstance(splits, Mapping) or not all(
            isinstance(share, int | float) for share in splits.values()
        ):
            return split_images(self.names, splits, seed=self.seed)
        split_images(self.names, splits)  # checks the shares
        shares: dict[str, Any] = {split: splits.get(split, 0) for split in SPLITS}
        return self._share_out(np.arange(len(self.names)), shares)

    def split_good(self, splits: Splits, is_good: NDArray[np.bool_]) -> dict[str, Ints]:
        """As `split`, but only images without a defect train.

        `auto` takes folders named after splits at their word, also in the layout `anomaly`: test is
        all of test, and without a val that is a part of train. Else shares are those of the good
        images, and the others are shared out over val and test alone. Defective images of listed
        training splits are left out.

        Args:
            splits: As for `split`.
            is_good: [n] which images show no defect.
        """
        if splits == "auto":
            found = self._by_folders()
            if found is None:
                return self._share_out_good(
                    DEFAULT_SHARES if (~is_good).any() else _GOOD_ALONE, is_good
                )
        elif isinstance(splits, Mapping) and all(
            isinstance(share, int | float) for share in splits.values()
        ):
            split_images(self.names, splits)  # checks the shares
            return self._share_out_good({split: splits.get(split, 0) for split in SPLITS}, is_good)
        else:
            found = split_images(self.names, splits, seed=self.seed)
        return found | {"train": found["train"][is_good[found["train"]]]}

    def _share_out_good(
        self, shares: Mapping[str, Any], is_good: NDArray[np.bool_]
    ) -> dict[str, Ints]:
        good = self._share_out(np.flatnonzero(is_good), shares)
        scored = {split: shares[split] for split in ("val", "test") if shares[split] > 0}
        if not scored:
            return good
        total = sum(scored.values())
        halves = {split: scored.get(split, 0) / total for split in ("val", "test")}
        others = self._share_out(np.flatnonzero(~is_good), halves)
        return good | {
            split: np.sort(np.concatenate([good[split], others[split]])) for split in others
        }

    def _by_folders(self) -> dict[str, Ints] | None:
        """By folders named after splits, if all images lie in such; where none says val, a part of train."""
        told = [split_of(name) for name in self.names]
        if None in told or len(set(told)) < 2:
            return None
        found = {split: np.flatnonzero([one == split for one in told]) for split in SPLITS}
        if len(found["val"]):
            return found
        val = DEFAULT_SHARES["val"]
        return found | self._share_out(found["train"], {"train": 1 - val, "val": val})

    def _share_out(self, images: Ints, shares: Mapping[str, float]) -> dict[str, Ints]:
        wanted = [split for split, share in shares.items() if share > 0]
        if len(wanted) == 1 or not len(images):
            return dict.fromkeys(shares, images[:0]) | {wanted[0]: images}
        told, groups = self._describe(), self.find_groups(self.names)
        parts = split_stratified(
            [told[n] for n in images.tolist()], groups[images], shares, seed=self.seed
        )
        _warn_of_uneven_splits({split: len(part) for split, part in parts.items()}, shares)
        return {split: images[part] for split, part in parts.items()}

    def _describe(self) -> Sequence[str]:
        """Return the strata of images: kind, classes, and size of the defects to a factor of two."""
        if self.has_mask is None:
            return self.kinds
        counts = self.count_classes()
        shares = 1 - counts[:, 0] / counts.sum(1)
        sizes = np.where(shares > 0, np.log2(np.maximum(shares, 1e-9)) + 40, 0).astype(np.int64)
        present = ["".join(map(str, row.astype(np.int64))) for row in counts[:, 1:] > 0]
        parts = zip(self.kinds, self.has_mask, present, sizes, strict=True)
        return [f"{kind} {has} {classes} {size:02}" for kind, has, classes, size in parts]


def _warn_of_uneven_splits(counts: Mapping[str, int], shares: Mapping[str, float]) -> None:
    """Warn where groups that stay together make a split much larger or smaller than was asked for."""
    total, whole = sum(counts.values()), sum(shares.values())
    uneven = [
        f"{split} has {counts[split]} of {total} images, not {share / whole:.0%}"
        for split, share in shares.items()
        if abs(counts[split] / total - share / whole) > _UNEVEN * share / whole and total >= _FEW
    ]
    if uneven:
        log.warning(
            "%s: images that look alike, or that data.groups joins, stay in one split. Where different places of one "
            "texture only look alike, data.similar=apart spreads them",
            "; ".join(uneven),
        )


def describe_splits(
    split_images: Mapping[str, Ints],
    kinds: Sequence[str],
    is_positive: NDArray[np.bool_] | None = None,
) -> str:
    """Return ``train 354 (Break 59, good 175), val 76 (...)``, or of nameless kinds ``train 354 (179 positive)``."""
    parts = []
    for split, images in split_images.items():
        counts = describe_counts(
            Counter(kinds[number] for number in images.tolist() if kinds[number])
        )
        if not counts and is_positive is not None:
            counts = f"{is_positive[images].sum()} positive"
        parts.append(f"{split} {len(images)}" + (f" ({counts})" if counts else ""))
    return ", ".join(parts)


def find_groups(
    bank: ImageBank,
    names: Sequence[str],
    *,
    pattern: str | None,
    similar: bool,
    folder: Path | None,
) -> Ints:
    """[n] number of the group of each image: equal files, names that match alike, and images that
    show the same.

    Args:
        bank: The images.
        names: Their paths below the root.
        pattern: See `group_by_name`.
        similar: Whether images that show the same belong together, see `group_similar`.
        folder: Where is kept what was found out; `None` keeps nothing.
    """
    groups = [group_equal(bank)]
    if pattern is not None:
        groups.append(group_by_name(names, pattern))
    if similar:
        found = group_similar(bank, folder)
        if (count := len(found) - len(np.unique(found))) > 0:
            log.info(
                "%d images are similar to others, and stay in their split (data.similar=apart: not)",
                count,
            )
        groups.append(found)
    return join_groups(*groups)


def split_stratified(
    kinds: Sequence[str], groups: Ints, shares: Mapping[str, float], *, seed: int
) -> dict[str, Ints]:
    """Share images out so that each kind of defect is in each split, and images of one group in the
    same.

    Args:
        kinds: Of each image.
        groups: [n] number of the group of each image, such as those that are equal to the byte.
        shares: Of train, val and test.
        seed: Chooses the images of each share.

    Returns:
        For each split the ascending numbers of its images.
    """
    firsts = np.unique(groups, return_index=True)[1]
    shuffled = firsts[
        np.argsort(uniform(seed, Stream.SPLIT, firsts, 0, 1)[:, 0], kind="stable")
    ].tolist()
    chosen: dict[str, list[int]] = {split: [] for split in shares}
    # Kind after kind, each image to the split that lags furthest behind its share: so all shares
    # are right together.
    for count, number in enumerate(sorted(shuffled, key=lambda number: kinds[number]), 1):
        lag = {
            split: share * count - len(chosen[split])
            for split, share in shares.items()
            if share > 0
        }
        chosen[max(lag, key=lambda split: lag[split])].append(number)
    return {
        split: np.flatnonzero(np.isin(groups, groups[numbers])) for split, numbers in chosen.items()
    }


def group_by_name(names: Sequence[str], pattern: str) -> Ints:
    """[n] number of the group of each name: what the first group of a regular expression, or all of
    it, matches.

    Args:
        names: Paths below the root, with forward slashes.
        pattern: Is searched in them; each name without it is a group of its own.

    Raises:
        ConfigError: It is no regular expression, is in no name, or may take for ever.
    """
    try:
        parsed, expression = _parser.parse(pattern), re.compile(pattern)
        choices = _count_choices(parsed)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"data.groups={pattern!r} is no regular expression: {error}") from error
    if choices > _CHOICES:
        raise ConfigError(
            f"data.groups={pattern!r} can match one name in so many ways that it may take for ever; do not repeat what "
            f"repeats or has alternatives, as '(a+)+' does, and repeat at most {_CHOICES} parts"
        )
    matches = [expression.search(name) for name in names]
    if not any(matches):
        raise ConfigError(f"data.groups={pattern!r} is found in no name, such as {names[0]!r}")
    keys = [
        f"{name}/" if match is None else match[match.re.groups and 1] or ""
        for name, match in zip(names, matches, strict=True)
    ]
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def _count_choices(parsed: Iterable[Any]) -> float:
    """Choices that a parsed expression makes and may come back to; infinite for those that a repetition multiplies."""
    count = 0.0
    for kind, value in parsed:
        items = value if isinstance(value, tuple) else (value,)
        parts = [part for item in items for part in (item if isinstance(item, list) else (item,))]
        inner = sum(_count_choices(part) for part in parts if isinstance(part, _parser.SubPattern))
        if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            times = value[1] if value[1] <= _TIMES else math.inf
            count += (inner and inner * times) + (value[0] != value[1])
        elif kind not in (_parser.ATOMIC_GROUP, _parser.POSSESSIVE_REPEAT) or inner > _CHOICES:
            count += inner + (kind is _parser.BRANCH)
    return count


def group_equal(bank: ImageBank) -> Ints:
    """[n] number of the group of images whose files are equal to the byte; without a store each is its own."""
    if not isinstance(bank, StoredImages):
        return np.arange(len(bank))
    return np.unique(bank.source_states, axis=0, return_inverse=True)[1].reshape(-1)


def group_similar(bank: ImageBank, folder: Path | None) -> Ints:
    """[n] number of the group of images that show the same: saved anew, scaled, brighter, but not
    moved.

    Images are compared by 32 x 32 means of their pixels, without slow changes and without what all
    have in common, so that lighting and fixtures count for nothing. Where many are alike, what
    these have in common, such as the bands of a fabric, counts for nothing either.

    Args:
        bank: The images; each is read once.
        folder: Where the groups are kept for the next run; None keeps nothing.
    """
    if (
        known := getattr(bank, "similar", None)
    ) is not None:  # of a set of shards it was found out when it was made
        return np.asarray(known, np.int64)
    found = keep_found(
        folder, bank, (), "similar", lambda: {"group": group_details(find_details(bank))}, version=2
    )
    return np.asarray(found["group"], np.int64)


def group_details(small: Array) -> Ints:
    """As `group_similar`, of what `find_details` found of all images."""
    count = len(small) // _SIDE_PX**2
    rows = small.reshape(count, -1)
    common = rows.mean(0)
    parts = [
        slice(begin, begin + BUCKET) for begin in range(0, count, BUCKET)
    ]  # all at once would be gigabytes
    norms = np.concatenate([np.linalg.norm(rows[part] - common, axis=1) for part in parts])
    told = np.flatnonzero(norms > _LEAST * _SIDE_PX)

    def unit(numbers: Ints) -> NDArray[np.float32]:
        details: NDArray[np.float32] = (rows[numbers] - common) / norms[numbers, None]
        return details

    pairs = [np.zeros((0, 2), np.int64)]
    for bucket in _sort_into_buckets(told, unit):
        details = unit(bucket)
        pairs.append(bucket[np.argwhere(np.triu(details @ details.T > SIMILAR, 1))])
    return _part_crowds(_connect(count, np.concatenate(pairs)), unit, norms)


def _part_crowds(
    groups: Ints, unit: Callable[[Ints], NDArray[np.float32]], norms: NDArray[np.float32]
) -> Ints:
    """Groups as they are, but images of a large one stay together only by what not all of it have
    in common.

    Args:
        groups: [n] number of the group of each image.
        unit: Gives the details of some images, each of length 1.
        norms: [n] what they were divided by.
    """
    pairs = [np.stack([np.arange(len(groups)), groups], axis=1)]
    for group in np.flatnonzero(np.bincount(groups) >= _CROWD):
        crowd = np.flatnonzero(groups == group)
        pairs[0][crowd, 1] = crowd
        for part in np.array_split(crowd, -(-len(crowd) // BUCKET)):
            details = unit(part)
            own = details - details.mean(0)
            own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), _LEAST)
            correlation, scale = details @ details.T, norms[part] / _SIDE_PX
            squares = scale**2 + scale[:, None] ** 2 - 2 * scale * scale[:, None] * correlation
            is_frame = (correlation > _SAME) & (squares < _NOISE**2)
            pairs.append(part[np.argwhere(np.triu(is_frame | (own @ own.T > _OWN), 1))])
    return _connect(len(groups), np.concatenate(pairs))


def join_groups(*labels: Ints) -> Ints:
    """[n] number of the group of what any of some groupings puts together."""
    joined = np.arange(len(labels[0]))
    while True:
        before = joined
        for label in labels:
            numbers = np.unique(label, return_inverse=True)[1].reshape(-1)
            least = np.full(len(label), len(label))
            np.minimum.at(least, numbers, joined)
            joined = least[numbers]
        if np.array_equal(before, joined):
            return joined


def _connect(count: int, pairs: Ints) -> Ints:
    """[count] the lowest number that each is connected with by pairs [M, 2]."""
    labels, before = np.arange(count), np.arange(0)
    while not np.array_equal(before, labels):
        before = labels.copy()
        np.minimum.at(labels, pairs, labels[pairs].min(1, initial=count, keepdims=True))
        labels = labels[labels]
    return labels


def find_details(bank: ImageBank) -> Array:
    """Small pictures of the images, without their slow changes: [n * 32 * 32] float32 in grey levels of 255."""
    import cv2

    scale = 255.0 / np.iinfo(bank.dtype.name).max if bank.dtype.kind == "u" else 1.0
    found = np.empty((len(bank), _SIDE_PX, _SIDE_PX), np.float32)
    for number in track(range(len(bank)), "comparing images", len(bank)):
        channels = [np.ascontiguousarray(channel, np.float32) for channel in bank[number]]
        side = (_SIDE_PX, _SIDE_PX)
        grey: Any = np.mean(
            [cv2.resize(one, side, interpolation=cv2.INTER_AREA) for one in channels], axis=0
        )
        found[number] = scale * (grey - cv2.blur(grey, (5, 5)))
    return found.reshape(-1)


def _sort_into_buckets(
    numbers: Ints, unit: Callable[[Ints], NDArray[np.float32]]
) -> Iterator[Ints]:
    """Images that may be alike, at most some thousands together: of equal signs along a few random
    directions.

    Args:
        numbers: Of the images.
        unit: Gives the details of some of them, each of length 1.
    """
    bits = max(0, int(np.ceil(np.log2(max(len(numbers), 1) / BUCKET))))
    if not bits:
        yield numbers
        return
    rng = np.random.default_rng(0)
    directions = np.concatenate(
        [rng.standard_normal((_SIDE_PX**2, bits), np.float32) for _ in range(_BANDS)], axis=1
    )
    parts = np.array_split(numbers, -(-len(numbers) // BUCKET))
    signs = np.concatenate([unit(part) @ directions > 0 for part in parts])
    for band in np.split(signs, _BANDS, axis=1):
        keys = band @ (1 << np.arange(bits))
        order = np.argsort(keys, kind="stable")
        yield from (
            numbers[bucket] for bucket in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
        )
