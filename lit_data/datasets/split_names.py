"""Names of folders, files and table entries for train, val and test."""

import re
from collections.abc import Sequence, Set
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Final

SPLITS: Final = ("train", "val", "test")
_NAMES = {
    "train": "train training trn tr trainset trainingset trainval",
    "val": "val valid validate validation valset validationset minival dev devel development eval "
    "evaluation",
    "test": "test tests testing tst ts testset testingset testdata holdout",
}
_SPLIT_OF = {word: split for split, words in _NAMES.items() for word in words.split()}
_LISTS = """
    file files filename filenames id ids image images img imgs list lists name names set sets split
    splits
"""
_FOLDERS = """
    annot annotation annotations bbox bboxes box boxes clean data dataset full gt hard jpegimages
    label labels mask masks mini new obj org original patches photo photos picture pictures private
    public raw sample samples seg small tiles unseen
"""
_OF_LISTS = frozenset(_LISTS.split())
_OF_FOLDERS = _OF_LISTS.union(_FOLDERS.split())
"""Words that may follow the name of a split, as in ``train_images`` but not in ``test_bench``."""
_NEGATIONS = frozenset(("no", "non", "not", "post", "pre", "un"))
_BETWEEN_WORDS = re.compile(
    r"[\W\d_]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z]{2})(?=(?:train|val|test)(?![a-z]*[A-Z]))"
)


@lru_cache(maxsize=4096)
def find_split(name: str) -> str | None:
    """Return the split that a folder, or an entry of a table, is named after, if any.

    One word of the name tells the split: ``Training``, ``train2017``, ``seg_train``, ``testA``. It
    must be the last word, or be followed only by words such as ``images`` and by single letters, so
    that ``test_bench_1`` has no split. Train and val together count as train, val and test together
    as test; train and test together have no split.

    Args:
        name: Name without an extension.
    """
    words = _divide(name)
    is_last = bool(words) and words[-1] in _SPLIT_OF
    if not is_last and not _are_split_words(words, _OF_FOLDERS):
        return None
    return None if _NEGATIONS.intersection(words) else _choose(words)


def find_listed_split(stem: str) -> str | None:
    """Return the split whose images a file lists, by its name: ``train``, ``val_ids``, not ``bus_train``.

    Args:
        stem: Name of the file without an extension.
    """
    words = _divide(stem)
    return _choose(words) if _are_split_words(words, _OF_LISTS) else None


def find_split_folder(path: str) -> str | None:
    """Return the innermost folder of a path that is named after a split, if any.

    Args:
        path: Path of a file, with forward slashes.
    """
    return _find_split_folder(path.rpartition("/")[0])


def split_of(path: str) -> str | None:
    """Return the split of a file, by its innermost folder that is named after a split.

    Args:
        path: Path of the file, with forward slashes.
    """
    folder = find_split_folder(path)
    return None if folder is None else find_split(folder)


def split_of_annotations(path: str) -> str | None:
    """Return the split of a file of annotations, by its own name or else by its folder.

    Args:
        path: Path with forward slashes, such as ``annotations/instances_val2017.json``; any word of
            the name counts.
    """
    return _choose(_divide(PurePosixPath(path).stem)) or split_of(path)


@lru_cache(maxsize=4096)  # of many images in few folders
def _find_split_folder(folder: str) -> str | None:
    for part in reversed(folder.split("/")):
        if find_split(part):
            return part
    return None


def _divide(name: str) -> list[str]:
    return [word.casefold() for word in _BETWEEN_WORDS.split(name) if word]


def _are_split_words(words: Sequence[str], others: Set[str]) -> bool:
    return all(word in _SPLIT_OF or word in others or len(word) == 1 for word in words)


def _choose(words: Sequence[str]) -> str | None:
    named = {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}
    if len(named) < 2:
        return next(iter(named), None)
    if "test" in named:
        return None if "train" in named else "test"
    return "train"
