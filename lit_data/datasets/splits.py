"""Splits of whole images for training, validation and test, so that no patch leaks."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from re import _parser  # type: ignore[attr-defined] # that of `sre_parse`, which Python took out of sight
from typing import Any, NamedTuple

import numpy as np

from lit_data.annotations.name_index import NameIndex
from lit_data.annotations.yolo import read_lines
from lit_data.core.errors import ConfigError, DataError, list_first, show_path
from lit_data.core.files import is_there
from lit_data.core.leftovers import Leftovers
from lit_data.core.rng import Stream, uniform
from lit_data.core.types import Ints
from lit_data.datasets.split_lists import (
    TO_SHARE,
    SplitList,
    find_coco_lists,
    find_lists,
    match_lists,
    read_split_table,
)
from lit_data.datasets.split_names import SPLITS, find_split_folder, split_of
from lit_inspect.counts import counted

Splits = str | Mapping[str, float | str | Sequence[str]]
"""`folders`, `auto`, fractions that add up to 1, a list of names for each split (or a text file
with one per line), a CSV file with the columns `image` and `split`, as a run writes it, or
`UNDIVIDED`."""

UNDIVIDED = "none"
"""Option that puts all images into train, as for images that are only predicted."""

DEFAULT_SHARES: Mapping[str, float] = {"train": 0.7, "val": 0.15, "test": 0.15}
OF_TRAIN: Mapping[str, float] = {"train": 0.85, "val": 0.15}
"""Fractions that divide the images of train if nothing names those of val."""
_CHOICES = 10  # most choices of an expression for names
_WAYS = 2**32  # to divide a name: 20 s
LONGEST_S = 60  # longest time for all names
_TIMES = 4  # most repetitions of choices in an expression


class NamedSplits(NamedTuple):
    """Splits that folders or lists of a dataset name.

    Attributes:
        numbers: Ascending numbers of the images of each of train, val and test.
        left_out: Numbers of the images that are in no split.
        rule: Reason why they are in no split, for messages.
        fractions: Fractions that divide the images of train, if nothing names val.
    """

    numbers: Mapping[str, Ints]
    left_out: Ints
    rule: str
    fractions: Mapping[str, float] | None

    @property
    def names_train_alone(self) -> bool:
        """True if all splits are parts of train."""
        return self.fractions is DEFAULT_SHARES

    def add_left_out(self, leftovers: Leftovers, names: Sequence[str]) -> None:
        """Report the images in no split as not used."""
        left_out = [names[number] for number in self.left_out.tolist()]
        leftovers.add(f"[image is|images are] {self.rule}", left_out, f"{TO_SHARE} uses all")


def find_named_splits(
    names: Sequence[str],
    splits: Splits = "auto",
    *,
    root: Path | None = None,
    others: Sequence[str] = (),
    list_folders: Sequence[str] = (),
) -> NamedSplits | None:
    """Find the splits that lists or folders name.

    Args:
        names: As in `split_images`.
        splits: As in `split_images`.
        root: As in `split_images`.
        others: As in `split_images`.
        list_folders: Folders of lists that come first, see `find_lists`.

    Returns:
        The splits; None if fractions divide the images.

    Raises:
        ConfigError: Splits are unknown, or only one folder is named after a split and other
            folders have images.
        DataError: Lists cannot be read or do not fit the images, or with `folders`, an image is in
            no folder of a split.
    """
    if splits == "folders":
        return _find_by_folder(names, is_complete=True)
    if splits == "auto":
        lists = [] if root is None else find_lists(root, names, list_folders)
        rule = "not in the list of any split"
    elif read_fractions(splits) is not None:
        return None
    else:
        lists = _read_lists(splits, root)
        rule = "not in any list of data.splits"
    if not lists and splits == "auto":
        by_folder = _find_by_folder(names, is_complete=False)
        lists = find_coco_lists(root) if root is not None and by_folder is None else []
        if not lists:
            return by_folder
    folder = root or Path()
    index = NameIndex([folder / name for name in names], [folder / name for name in others])
    is_table = splits != "auto" and isinstance(splits, str)  # such as that of an earlier run
    numbers = match_lists(lists, names, index, may_be_older=is_table)
    return complete_splits(numbers, len(names), rule, is_open=splits == "auto")


def _find_by_folder(names: Sequence[str], *, is_complete: bool) -> NamedSplits | None:
    """Find the splits that folders name, or None if no folder does and `is_complete` is False."""
    folders = [name.rpartition("/")[0] for name in names]
    # There are few folders, but perhaps a million images.
    code_of = {}
    for folder in set(folders):
        split = split_of(f"{folder}/")
        code_of[folder] = -1 if split is None else SPLITS.index(split)
    codes = np.array([code_of[folder] for folder in folders], np.int64)
    if not is_complete and (codes < 0).all():
        return None
    outside = [names[number] for number in np.flatnonzero(codes < 0).tolist()]
    if is_complete and outside:
        raise DataError(
            f"splits=folders, but {counted(len(outside), 'image is', 'images are')} not in a folder "
            f"named after one of {', '.join(SPLITS)}: {list_first(outside)}"
        )
    named = np.unique(codes[codes >= 0]).tolist()
    if len(named) == 1 and outside:
        first = names[int(np.argmax(codes >= 0))]
        _refuse_other_folders(find_split_folder(first), SPLITS[named[0]], outside)
    numbers = {split: np.flatnonzero(codes == code) for code, split in enumerate(SPLITS)}
    rule = "not in a folder of a split"
    return complete_splits(numbers, len(names), rule, is_open=not is_complete)


def _refuse_other_folders(folder: str | None, split: str, outside: Sequence[str]) -> None:
    """Refuse a single folder with the name of a split among others, which may be a kind such as ``valid``."""
    others = sorted({name.partition("/")[0] for name in outside if "/" in name})
    if others:
        raise ConfigError(
            f"only the folder {folder!r} is named after a split ({split}), and "
            f"{counted(len(outside), 'image is', 'images are')} in others ({list_first(others)}): "
            f"name the folders of the other splits, skip some with data.exclude, or split all images with {TO_SHARE}"
        )


def complete_splits(
    numbers: Mapping[str, Sequence[int] | Ints], count: int, rule: str, *, is_open: bool
) -> NamedSplits:
    """Complete splits with the images that are in none of them.

    Args:
        numbers: Numbers of the images of each split; those from `count` on are dropped.
        count: Number of images.
        rule: See `NamedSplits`.
        is_open: True takes val from train if nothing names it.
    """
    by_split = {}
    for split in SPLITS:
        of_split = np.sort(np.array(numbers.get(split, ()), np.int64))
        by_split[split] = of_split[of_split < count]
    is_left_out = np.ones(count, np.bool_)
    is_left_out[np.concatenate(list(by_split.values()))] = False
    fractions = None
    if is_open and len(by_split["train"]) and not len(by_split["val"]):
        fractions = OF_TRAIN if len(by_split["test"]) else DEFAULT_SHARES
    return NamedSplits(by_split, np.flatnonzero(is_left_out), rule, fractions)


def split_images(
    names: Sequence[str],
    splits: Splits = "auto",
    *,
    seed: int = 0,
    root: Path | None = None,
    others: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> dict[str, Ints]:
    """Split images into train, val and test.

    Args:
        names: Path of each image relative to the root, with forward slashes.
        splits: `folders` splits by the folders of the path, one of which is named after a split.
            `auto` follows lists or folders of the dataset, with a part of train for missing splits,
            or else divides 70 / 15 / 15 %. A mapping has fractions, or lists of names. A path that
            ends in ``.csv`` is a table of ``image`` and ``split``, such as the ``splits.csv`` of a
            run. `none` puts all images into train.
        seed: Seed of the choice of images; the split of an image depends on the seed and on the
            number of images.
        root: Folder of the dataset, with its own lists and the files that `splits` names.
        others: Images that lists may name too, such as bad ones that are skipped.
        leftovers: Receives the images that lists or folders leave out.

    Returns:
        The ascending numbers of the images of each of train, val and test. With `auto`, all images
        train if there are fewer images than splits.

    Raises:
        ConfigError: Fractions do not add up to 1, a split has no images, or a split is unknown.
        DataError: A listed image does not exist or is listed twice, or an image is in no folder of
            a split.
    """
    everyone = np.arange(len(names))
    if splits == UNDIVIDED:
        return leave_undivided(len(names))
    named = find_named_splits(names, splits, root=root, others=others)
    if named is None:
        typed = read_fractions(splits)
        if typed is None:
            return share_out(everyone, DEFAULT_SHARES, seed)
        return _split_by_share(len(names), typed, seed)
    if leftovers is not None:
        named.add_left_out(leftovers, names)
    if named.fractions is None:
        return dict(named.numbers)
    return {**named.numbers, **share_out(named.numbers["train"], named.fractions, seed)}


def leave_undivided(count: int) -> dict[str, Ints]:
    """Return splits with all `count` images in train."""
    return dict.fromkeys(SPLITS, np.zeros(0, np.int64)) | {"train": np.arange(count)}


def check_image_count(count: int, splits: Splits) -> None:
    """Refuse to train on one or two images, or on undivided images, without explicit splits.

    Args:
        count: Number of images of a dataset without validation; 0 if unknown.
        splits: Splits as typed.

    Raises:
        ConfigError: Splits are needed; the error says what to type.
    """
    if splits == UNDIVIDED:
        # Undivided images are for predictions: defective ones would train a model of good ones.
        raise ConfigError(
            "data.splits=none is only for predictions: to train on all images without validation, "
            "set 'data.splits={train: 1.0}'"
        )
    if splits == "auto" and 0 < count < len(SPLITS):
        raise ConfigError(
            f"{counted(count, 'image')} cannot be split into train, val, test: add images, or say how with "
            "'data.splits={train: 0.5, val: 0.5}', of one image with 'data.splits={train: 1.0}'"
        )


def read_fractions(splits: Splits) -> dict[str, float] | None:
    """Return the fraction of each split, 0 if it is not named, or None if `splits` has no fractions."""
    if not isinstance(splits, Mapping) or not set(splits) <= set(SPLITS):
        return None
    fractions = dict.fromkeys(SPLITS, 0.0)
    for split, fraction in splits.items():
        if not isinstance(fraction, int | float):
            return None
        fractions[split] = fraction
    return fractions


def share_out(images: Ints, shares: Mapping[str, float], seed: int) -> dict[str, Ints]:
    """Divide images by fractions; if there are fewer images than splits, all train."""
    if len(images) < len(shares):
        return dict.fromkeys(shares, images[:0]) | {"train": images}
    parts = _split_by_share(len(images), {**dict.fromkeys(SPLITS, 0.0), **shares}, seed)
    return {split: images[parts[split]] for split in shares}


def _split_by_share(count: int, shares: Mapping[str, float], seed: int) -> dict[str, Ints]:
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise ConfigError(f"splits={dict(shares)} must be fractions of at least 0 that add up to 1")
    filled_splits = [split for split in SPLITS if shares[split] > 0]
    if count < len(filled_splits):
        raise ConfigError(
            f"{counted(count, 'image')} cannot be split into {', '.join(filled_splits)}: give one "
            "image or more to each, as 'data.splits={train: 0.5, val: 0.5}' does with two"
        )
    sizes = dict.fromkeys(SPLITS, 0)
    for split in filled_splits:
        sizes[split] = max(round(shares[split] * count), 1)
    # The largest split takes the remainder of the rounding.
    largest = max(sizes, key=sizes.__getitem__)
    sizes[largest] += count - sum(sizes.values())
    # Sorted by a random number of their own, images keep their order if the fractions change.
    draws = uniform(seed, Stream.SPLIT, np.arange(count), 0, 1)[:, 0]
    order = np.argsort(draws, kind="stable")
    ends = np.cumsum(list(sizes.values()))
    parts = np.split(order, ends[:-1])
    return {split: np.sort(part) for split, part in zip(SPLITS, parts, strict=True)}


def _read_lists(splits: Splits, root: Path | None) -> list[SplitList]:
    if isinstance(splits, str) and splits.lower().endswith(".csv"):
        return read_split_table(_locate(splits, root, "table of splits"))
    if not isinstance(splits, Mapping) or not set(splits) <= set(SPLITS):
        raise ConfigError(
            f"splits={splits!r} is unknown: choose folders, auto, a file that ends in .csv, or a mapping of "
            f"{', '.join(SPLITS)}"
        )
    lists = []
    for split, entry in splits.items():
        if isinstance(entry, int | float):
            raise ConfigError(
                "splits mixes fractions and lists: give fractions for all, or lists for all"
            )
        if isinstance(entry, str):
            path = _locate(entry, root, "list of a split")
            lists.append(SplitList(split, show_path(path), read_lines(path)))
        elif len(entry):
            lists.append(SplitList(split, f"data.splits.{split}", entry))
    return lists


def _locate(entry: str, root: Path | None, what: str) -> Path:
    """Return the path of a file that is given relative to the root, or to the working folder."""
    places = [Path(entry)] if root is None else [root / entry, Path(entry)]
    for path in places:
        if is_there(path):
            return path
    listed = ", nor ".join(dict.fromkeys(show_path(path.absolute()) for path in places))
    raise DataError(f"the {what} does not exist: {show_path(entry)} (there is no {listed})")


def group_by_name(names: Sequence[str], pattern: str, option: str = "data.groups") -> Ints:
    """Return [n] group numbers of names, by the match of a regular expression or of its group.

    Args:
        names: Paths below the root, with forward slashes.
        pattern: Expression to search for; each name without a match is a group of its own.
        option: Key of the expression, for messages.

    Raises:
        ConfigError: As `search_names`.
    """
    keys = []
    for name, match in zip(names, search_names(names, pattern, option), strict=True):
        # No match ends like this, so that the name is a group of its own.
        keys.append(f"{name}/" if match is None else match)
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def search_names(names: Sequence[str], pattern: str, option: str) -> list[str | None]:
    """Return the match of a regular expression, or of its first group, in each name, or None.

    Args:
        names: Paths below the root, with forward slashes.
        pattern: Expression to search for.
        option: Key of the expression, for messages.

    Raises:
        ConfigError: The pattern is not a regular expression, matches no name, or may take forever.
    """
    try:
        expression = re.compile(pattern)
        choices = _count_choices(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{option}={pattern!r} is not a regular expression: {error}") from error
    if choices > _CHOICES:
        raise ConfigError(
            f"{option}={pattern!r} can match one name in so many ways that it may take forever; "
            "do not repeat what repeats or has alternatives, as '(a+)+' does, and repeat at "
            f"most {_CHOICES} parts"
        )
    most_characters = max(map(len, names))
    # At each start, the choices divide the rest of a name among them.
    if math.comb(most_characters + int(choices) + 1, int(choices) + 1) > _WAYS:
        raise ConfigError(
            f"{option}={pattern!r} can divide names of {most_characters} characters in more than "
            f"{_WAYS} ways: repeat fewer parts"
        )
    group = 1 if expression.groups else 0  # the first group, or else the whole match
    deadline = time.monotonic() + LONGEST_S
    matches: list[str | None] = []
    for number, name in enumerate(names):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{option}={pattern!r} took {LONGEST_S} s for {number} of {len(names)} names: "
                "repeat fewer parts"
            )
        match = expression.search(name)
        matches.append(None if match is None else match[group] or "")
    if set(matches) == {None}:
        raise ConfigError(f"{option}={pattern!r} matches none of the names, such as {names[0]!r}")
    return matches


def _count_choices(parsed: Iterable[Any]) -> float:
    """Count the choices to which a parsed expression may backtrack; infinite if a repetition multiplies them."""
    count = 0.0
    for kind, value in parsed:
        items = value if isinstance(value, tuple) else (value,)
        parts = [part for item in items for part in (item if isinstance(item, list) else (item,))]
        inner = sum(_count_choices(part) for part in parts if isinstance(part, _parser.SubPattern))
        # A repetition multiplies what it repeats, and one with a fixed number adds no choice.
        if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            times = value[1] if value[1] <= _TIMES else math.inf
            count += (inner and inner * times) + (value[0] != value[1])
        elif kind not in (_parser.ATOMIC_GROUP, _parser.POSSESSIVE_REPEAT) or inner > _CHOICES:
            count += inner + (kind is _parser.BRANCH)
    return count
