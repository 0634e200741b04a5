"""Finding the images of a data set: in a folder, by a list, and in pairs with their masks."""

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_data.errors import SHOWN, DataError, Problems, show_path
from lit_data.io.source import check_regular, nearest_existing
from lit_data.io.walk import FolderWalk, describe_outside, is_inside

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Listing:
    """The images of a folder.

    Attributes:
        paths: Sorted by their path under the folder, so the order does not depend on where the folder is.
        ignored: How many files were left out, by reason.
    """

    paths: tuple[Path, ...]
    ignored: Mapping[str, int]


def find_images(root: AnyPath, *, patterns: Sequence[str] = ("**/*",), allow_outside: bool = False) -> Listing:
    """List the image files of a folder and its subfolders.

    Hidden files and folders, ``Thumbs.db`` and files without an image's extension are ignored and counted.

    Args:
        root: The folder.
        patterns: Which files, relative to the folder: ``*`` and ``?`` within a name, ``[...]``, ``**/`` for any number
            of folders.
        allow_outside: Follow links that lead out of the folder.

    Raises:
        ConfigError: a pattern leaves the folder.
        DataError: no such folder, no image, two files of one name in a folder, a link that leads nowhere or outside, or
            something with an image's name that is no file.
    """
    root = Path(root)
    if not root.is_dir():
        found = "not a folder" if root.exists() else f"no such folder; {show_path(nearest_existing(root))} exists"
        raise DataError(f"{show_path(root)}: {found}")
    walk = FolderWalk(root, patterns, allow_outside=allow_outside)
    names = sorted(walk.run())
    _check_stems(walk.problems, root, names)
    walk.problems.raise_if_any(f"{len(walk.problems)} bad names under {show_path(root)}")
    if not names:
        ignored = ", ".join(f"{count} {reason}" for reason, count in walk.ignored.items()) or "nothing"
        raise DataError(f"{show_path(root)}: no image matches {', '.join(map(repr, patterns))}; found {ignored}")
    return Listing(tuple(root / name for name in names), dict(walk.ignored))


def resolve_listed(
    root: AnyPath, names: Sequence[str], *, allow_outside: bool = False, first_row: int = 1
) -> tuple[Path, ...]:
    """Find the files that a list names.

    Args:
        root: The folder that the names are relative to.
        names: One for each row of the list.
        allow_outside: Allow absolute names, ``..`` and links that lead out of the folder.
        first_row: Number of the first row, for messages.

    Returns:
        A path for each name, in order.

    Raises:
        DataError: lists every row whose file is missing, outside, or not a regular file.
    """
    problems, real_root = Problems(), os.path.realpath(root)
    paths = tuple(Path(root) / name for name in names)
    for row, (name, path) in enumerate(zip(names, paths, strict=True), first_row):
        try:
            if not allow_outside:
                _check_inside(name, path, real_root)
            check_regular(path)
        except (DataError, ValueError) as error:  # ValueError: a name with a zero byte
            problems.add(path, f"row {row}: {error}")
    problems.raise_if_any(f"{len(problems)} of {len(names)} listed files are bad")
    return paths


def match_by_stem(images: Iterable[AnyPath], masks: Iterable[AnyPath]) -> list[tuple[Path, Path]]:
    """Pair images and masks whose names agree up to the extension, however their accents are composed.

    Args:
        images: Paths, in any folders.
        masks: Paths, in any folders.

    Returns:
        Each image with its mask, in the order of the images.

    Raises:
        DataError: two images or two masks of one name, or one without the other; lists all.
    """
    problems = Problems()
    image_of, mask_of = _index_stems(images, problems), _index_stems(masks, problems)
    problems.raise_if_any(f"{len(problems)} names clash")
    no_mask = [path for stem, path in image_of.items() if stem not in mask_of]
    no_image = [path for stem, path in mask_of.items() if stem not in image_of]
    if no_mask or no_image:
        raise DataError(f"{_list('images without a mask', no_mask)}\n{_list('masks without an image', no_image)}")
    return [(path, mask_of[stem]) for stem, path in image_of.items()]


def _check_stems(problems: Problems, root: Path, names: Sequence[str]) -> None:
    """``a.png`` and ``a.jpg`` or ``A.PNG`` in one folder: which one is meant, nobody can tell."""
    seen: dict[str, str] = {}
    for name in names:
        stem = _normalize(os.path.splitext(name)[0]).casefold()  # noqa: PTH122 - half a million names
        first = seen.setdefault(stem, name)
        if first is not name:
            problems.add(root / name, f"the same name as {show_path(root / first)}")


def _check_inside(name: str, path: Path, real_root: str) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(describe_outside(name))
    if not is_inside(target := os.path.realpath(path), real_root):
        raise DataError(describe_outside(target))


def _index_stems(paths: Iterable[AnyPath], problems: Problems) -> dict[str, Path]:
    index: dict[str, Path] = {}
    for path in map(Path, paths):
        first = index.setdefault(_normalize(path.stem), path)
        if first is not path:
            problems.add(path, f"the same name as {show_path(first)}")
    return index


def _normalize(name: str) -> str:
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _list(what: str, paths: Sequence[Path]) -> str:
    more = f"\n  ... and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return "\n  ".join([f"{len(paths)} {what}:", *map(show_path, paths[:SHOWN])]) + more
