"""Splits of images for training, validation and test: always whole images, so that no patch leaks."""

import csv
import io
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from re import _parser  # type: ignore[attr-defined] # that of `sre_parse`, which Python took out of sight
from typing import Any, Final

import numpy as np

from lit_data.errors import ConfigError, DataError, show_path
from lit_data.files import is_there
from lit_data.io.source import decode_text, open_source, read_whole
from lit_data.rng import Stream, uniform
from lit_data.types import Ints

Splits = str | Mapping[str, float | str | Sequence[str]]
"""`folders`, `auto`, shares that add up to 1, for each split a list of names (or a text file with
one a line), or a CSV file with the columns `image` and `split`, as a run writes it."""

SPLITS: Final = ("train", "val", "test")
DEFAULT_SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}
_CHOICES = 10  # of an expression for names
_WAYS = 2**32  # to divide a name: 20 s
LONGEST_S = 60  # for all names
_TIMES = 4  # that an expression may repeat choices


def split_images(
    names: Sequence[str], splits: Splits = "auto", *, seed: int = 0
) -> dict[str, Ints]:
    """Share images out over train, val and test.

    Args:
        names: Each image's path relative to the root, with forward slashes.
        splits: `folders`: by the first folder of the path, which must be train, val or test.
            `auto`: `folders` where each image lies in such a folder, otherwise 70 / 15 / 15 %. A
            mapping gives shares, or lists of names; a path that ends in ``.csv`` a table of
            ``image`` and ``split``, such as the ``splits.csv`` of a run.
        seed: Chooses the images of a share; each image's place depends on the seed and on how many
            images there are.

    Returns:
        For each of train, val, test the ascending numbers of its images.

    Raises:
        ConfigError: Shares do not add up to 1, a share is left without an image, or a split is
            unknown.
        DataError: A listed image does not exist or is listed twice, or a folder is none of the
            three.
    """
    if splits == "auto":
        first_folders = {_first_folder(name) for name in names}
        splits = "folders" if first_folders <= set(SPLITS) else DEFAULT_SHARES
    if splits == "folders":
        return _split_by_folder(names)
    if isinstance(splits, str) and splits.lower().endswith(".csv"):
        return _split_by_list(names, _read_table(Path(splits)))
    if not isinstance(splits, Mapping) or not set(splits) <= set(SPLITS):
        raise ConfigError(
            f"splits={splits!r} is unknown: choose folders, auto, a file that ends in .csv, or a mapping of "
            f"{', '.join(SPLITS)}"
        )
    if all(isinstance(share, int | float) for share in splits.values()):
        fractions = {name: float(splits.get(name, 0)) for name in SPLITS}  # type: ignore[arg-type]
        return _split_by_share(len(names), fractions, seed)
    return _split_by_list(names, {name: _read_list(splits.get(name, ())) for name in SPLITS})


def _first_folder(name: str) -> str:
    return name.split("/", 1)[0] if "/" in name else ""


def _split_by_folder(names: Sequence[str]) -> dict[str, Ints]:
    folders = np.array([_first_folder(name) for name in names])
    others = sorted(set(folders.tolist()) - set(SPLITS))
    if others:
        raise DataError(
            f"splits=folders expects only {', '.join(SPLITS)} below the root, "
            f"found: {', '.join(others)}"
        )
    return {split: np.flatnonzero(folders == split) for split in SPLITS}


def _split_by_share(count: int, shares: Mapping[str, float], seed: int) -> dict[str, Ints]:
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise ConfigError(f"splits={dict(shares)} must be shares of at least 0 that add up to 1")
    filled_splits = [split for split in SPLITS if shares[split] > 0]
    if count < len(filled_splits):
        raise ConfigError(
            f"{count} images cannot be split into {', '.join(filled_splits)}: "
            "give one image or more to each"
        )
    sizes = dict.fromkeys(SPLITS, 0)
    for split in filled_splits:
        sizes[split] = max(round(shares[split] * count), 1)
    # The largest takes what rounding leaves over.
    largest = max(sizes, key=sizes.__getitem__)
    sizes[largest] += count - sum(sizes.values())
    # Sorted by a number of their own, images keep their order when the fractions change.
    draws = uniform(seed, Stream.SPLIT, np.arange(count), 0, 1)[:, 0]
    order = np.argsort(draws, kind="stable")
    ends = np.cumsum(list(sizes.values()))
    parts = np.split(order, ends[:-1])
    return {split: np.sort(part) for split, part in zip(SPLITS, parts, strict=True)}


def _split_by_list(names: Sequence[str], lists: Mapping[str, Sequence[str]]) -> dict[str, Ints]:
    number_of = {name: number for number, name in enumerate(names)}
    # All faults are listed, not the first alone.
    counts = Counter(name for split in SPLITS for name in lists[split])
    missing = sorted(set(counts) - set(number_of))
    if missing:
        raise DataError(
            f"{len(missing)} listed images do not exist below the root: {', '.join(missing[:100])}"
        )
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise DataError(f"{len(twice)} images are listed more than once: {', '.join(twice[:100])}")
    by_split = {}
    for split in SPLITS:
        numbers = [number_of[name] for name in lists[split]]
        by_split[split] = np.sort(np.array(numbers, dtype=np.int64))
    return by_split


def _read_table(path: Path) -> Mapping[str, Sequence[str]]:
    if not is_there(path):
        raise DataError(f"the table of splits does not exist: {show_path(path)}")
    lists: dict[str, list[str]] = {split: [] for split in SPLITS}
    with open_source(path) as stream:
        rows = list(csv.DictReader(io.StringIO(decode_text(read_whole(stream)), newline="")))
    for number, row in enumerate(rows, 2):
        if row.get("split") not in lists or not row.get("image"):
            raise DataError(
                f"{show_path(path)}, line {number}: "
                f"needs an image and as its split one of {', '.join(SPLITS)}"
            )
        lists[row["split"]].append(row["image"])
    return lists


def _read_list(entry: float | str | Sequence[str]) -> Sequence[str]:
    if isinstance(entry, int | float):
        raise ConfigError("splits mixes shares and lists: give shares for all, or lists for all")
    if not isinstance(entry, str):
        return list(entry)
    if not is_there(entry):
        raise DataError(f"the list of a split does not exist: {show_path(entry)}")
    with open_source(entry) as stream:
        lines = [line.strip() for line in decode_text(read_whole(stream)).splitlines()]
    return [line for line in lines if line]


def group_by_name(names: Sequence[str], pattern: str, option: str = "data.groups") -> Ints:
    """[n] number of the group of each name: by what a regular expression, or its group, matches.

    Args:
        names: Paths below the root, with forward slashes.
        pattern: Is searched in them; each name without it is a group of its own.
        option: Its key, for messages.

    Raises:
        ConfigError: It is no regular expression, is in no name, or may take for ever.
    """
    try:
        expression = re.compile(pattern)
        choices = _count_choices(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{option}={pattern!r} is no regular expression: {error}") from error
    if choices > _CHOICES:
        raise ConfigError(
            f"{option}={pattern!r} can match one name in so many ways that it may take for "
            "ever; do not repeat what repeats or has alternatives, as '(a+)+' does, and repeat at "
            f"most {_CHOICES} parts"
        )
    most_characters = max(map(len, names))
    # At each start the choices divide the rest of a name among them.
    if math.comb(most_characters + int(choices) + 1, int(choices) + 1) > _WAYS:
        raise ConfigError(
            f"{option}={pattern!r} can divide names of {most_characters} characters in more than "
            f"{_WAYS} ways: repeat fewer parts"
        )
    matches = _search(expression, names)
    if not any(matches):
        raise ConfigError(f"{option}={pattern!r} is found in no name, such as {names[0]!r}")
    number = 1 if expression.groups else 0  # the first group, else all that was matched
    keys = []
    for name, match in zip(names, matches, strict=True):
        if match is None:
            keys.append(f"{name}/")  # no match ends like this: a group of its own
        else:
            keys.append(match[number] or "")
    return np.unique(keys, return_inverse=True)[1].reshape(-1)


def _search(expression: "re.Pattern[str]", names: Sequence[str]) -> list["re.Match[str] | None"]:
    deadline = time.monotonic() + LONGEST_S
    matches = []
    for number, name in enumerate(names):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"data.groups={expression.pattern!r} took {LONGEST_S} s for {number} of "
                f"{len(names)} names: repeat fewer parts"
            )
        matches.append(expression.search(name))
    return matches


def _count_choices(parsed: Iterable[Any]) -> float:
    """Choices that a parsed expression makes and may come back to; infinite for those that a repetition multiplies."""
    count = 0.0
    for kind, value in parsed:
        items = value if isinstance(value, tuple) else (value,)
        parts = [part for item in items for part in (item if isinstance(item, list) else (item,))]
        inner = sum(_count_choices(part) for part in parts if isinstance(part, _parser.SubPattern))
        # A repetition multiplies what it repeats, and one of a fixed number chooses nothing itself.
        if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            times = value[1] if value[1] <= _TIMES else math.inf
            count += (inner and inner * times) + (value[0] != value[1])
        elif kind not in (_parser.ATOMIC_GROUP, _parser.POSSESSIVE_REPEAT) or inner > _CHOICES:
            count += inner + (kind is _parser.BRANCH)
    return count
