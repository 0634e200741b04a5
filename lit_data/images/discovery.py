"""Search for the images of a dataset: in a folder, by a list, and in pairs with their masks."""

import logging
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lit_data.core.errors import ConfigError, DataError, Problems, escape, list_problems, show_path
from lit_data.core.files import check_kind
from lit_data.core.leftovers import Leftovers
from lit_data.core.opening import describe_missing, nearest_existing
from lit_data.core.types import PathText
from lit_data.images.header import EXTENSIONS
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

MATLAB = "of MATLAB (.mat)"
MATLAB_CURE = "they are not read: save each mask as PNG, with the code in docs/masks.md"
_FOREIGN = {".parquet", ".arrow", ".tar", ".bin", "state.json", "dataset_dict.json", "samples.json"}
_FOREIGN |= {"dataset_info.json", "index.json"}
"""Names and suffixes of files in sets of other libraries."""
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
_GLOB = re.compile(r"\*\*/|\*\*$|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)
_ANY = ("*", "**/")  # twice in a row they are as once
_STARS = (*_ANY, "**")
_MOST_FOLDERS = 4  # each multiplies the time for a deep folder
_WITHIN = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class _ListedFolder(NamedTuple):
    path: str
    prefix: str  # of the names under it, relative to the root
    links: tuple[str, ...]  # real paths of the links that led here


class FolderWalk:
    """A walk that looks at no file beyond what listing its folder tells, links excepted.

    Args:
        root: The folder.
        patterns: Which files to keep, relative to the folder.
        exclude: Which of these, or of their folders, to leave out.

    Attributes:
        ignored: How many files were left out, by reason.
        excluded: Those that `exclude` names, relative to the folder.
        unread: Files that have no image's name, by their extension.
        outside: Images that no pattern fits.
        problems: Links that lead nowhere, in a circle or outside, and things with an image's name
            that are no file.

    Raises:
        ConfigError: a pattern leaves the folder.
    """

    def __init__(
        self,
        root: Path,
        patterns: Sequence[str],
        exclude: Sequence[str] = (),
    ) -> None:
        self.excluded: list[str] = []
        self.ignored: Counter[str] = Counter()
        self.unread: dict[str, list[str]] = {}
        self.outside: list[str] = []
        self.problems = Problems()
        self._matches = compile_patterns(patterns).fullmatch
        self._root = root
        self._patterns = patterns
        self._exclude = exclude
        self._excludes = compile_exclusion(exclude).fullmatch
        self._real_root = os.path.realpath(root)
        self._open = [_ListedFolder(os.fspath(root), "", ())]

    def run(self) -> Iterator[str]:
        """Yield the paths of the images relative to the folder, in no order."""
        while self._open:
            folder = self._open.pop()
            try:
                with os.scandir(folder.path) as entries:
                    for entry in entries:
                        yield from self._visit(entry, folder)
            except OSError as error:
                self.problems.add(folder.path, describe_missing(folder.path, error))

    def finish(self, names: Sequence[str], leftovers: Leftovers | None) -> None:
        """Log what was left out by `exclude`, and hand over what is of another type.

        Args:
            names: Of the images.
            leftovers: Takes files of other types.

        Raises:
            DataError: Names are bad, or there is no image.
        """
        self._log_excluded()
        if self._exclude:
            for paths in (self.outside, *self.unread.values()):
                paths[:] = [path for path in paths if not self._excludes(path)]
        leftovers = leftovers or Leftovers()
        leftovers.outside = sorted(self.outside)
        leftovers.take(self._root, self.unread, EXTENSIONS)
        self.problems.raise_if_any(
            f"{counted(len(self.problems), 'bad name')} under {show_path(self._root)}"
        )
        if not names:
            raise DataError(self._describe_lack(leftovers))

    def _describe_lack(self, leftovers: Leftovers) -> str:
        """Return the message for a folder without an image: what is there, and what would be read."""
        counts = [f"{count} {reason}" for reason, count in self.ignored.items()]
        listed = ", ".join(counts) or "nothing"
        if self.ignored[MATLAB]:
            listed += f"; {MATLAB_CURE}"
        patterns = ", ".join(map(repr, self._patterns))
        return (
            f"{show_path(self._root)}: no image matches {patterns}; found {listed}; "
            f"{', '.join(EXTENSIONS)} are read{leftovers.quote()}"
        )

    def _log_excluded(self) -> None:
        if self.excluded:
            files = counted(len(self.excluded), "file is", "files are")
            log.info("%s: %s skipped by data.exclude", show_path(self._root), files)
        for pattern in self._exclude:
            if not any(map(compile_exclusion([pattern]).fullmatch, self.excluded)):
                text = "data.exclude: '%s' matches no image below %s"
                log.warning(text, escape(pattern), show_path(self._root))

    def _visit(self, entry: os.DirEntry[str], folder: _ListedFolder) -> Iterator[str]:
        relative = folder.prefix + entry.name
        if is_hidden(entry.name):
            self.ignored["hidden"] += 1
        elif entry.is_symlink():
            yield from self._follow(entry, relative, folder)
        elif entry.is_dir():
            self._enter(entry.path, relative, folder.links)
        elif self._is_wanted(entry.name, relative):
            if entry.is_file():
                yield relative
            else:
                self._refuse(entry.path, entry.stat().st_mode)

    def _follow(
        self, link: os.DirEntry[str], relative: str, folder: _ListedFolder
    ) -> Iterator[str]:
        # A folder that is excluded is not looked into, wherever it leads.
        if _extension(link.name) not in EXTENSIONS and self._excludes(relative):
            self.excluded.append(relative)
            return
        try:
            mode = link.stat().st_mode
        except OSError as error:
            # Where it leads is gone: without a dot in its name it was a folder.
            if "." not in link.name or self._is_wanted(link.name, relative):
                self.problems.add(link.path, describe_missing(link.path, error))
            return
        if not stat.S_ISDIR(mode) and not self._is_wanted(link.name, relative):
            return
        target = os.path.realpath(link.path)
        if not is_inside(target, self._real_root):
            self.problems.add(link.path, describe_outside(target))
        elif stat.S_ISREG(mode):
            yield relative
        elif not stat.S_ISDIR(mode):
            self._refuse(link.path, mode)
        elif target in folder.links or is_inside(os.path.realpath(folder.path), target):
            self.problems.add(link.path, f"a circular link to {show_path(target)}")
        else:
            self._enter(link.path, relative, (*folder.links, target))

    def _refuse(self, path: str, mode: int) -> None:
        try:
            check_kind(mode)
        except DataError as error:
            self.problems.add(path, str(error))

    def _enter(self, path: str, relative: str, links: tuple[str, ...]) -> None:
        if _extension(relative) in EXTENSIONS and self._matches(relative):
            self.problems.add(path, "not a regular file (a folder)")
        else:
            self._open.append(_ListedFolder(path, f"{relative}/", links))

    def _is_wanted(self, name: str, relative: str) -> bool:
        extension = _extension(name)
        if name.lower() in _SYSTEM_FILES:
            reason = "system files"
        elif extension == ".mat":
            reason = MATLAB
        elif extension not in EXTENSIONS:
            reason = "of another type"
            self.unread.setdefault(extension, []).append(relative)
        elif not self._matches(relative):
            reason = "outside the patterns"
            self.outside.append(relative)
        elif self._excludes(relative):
            self.excluded.append(relative)
            reason = "skipped by data.exclude"
        else:
            return True
        self.ignored[reason] += 1
        return False


def is_hidden(name: str) -> bool:
    """Return True for names that hold no data: ``.git``, or ``__MACOSX`` of an archive made on a Mac."""
    return name.startswith(".") or name == "__MACOSX"


def list_shown(folder: Path, pattern: str) -> list[Path]:
    """List what lies anywhere below a folder and matches a glob of names, in order; nothing hidden."""
    paths = sorted(folder.rglob(pattern))
    return [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]


def compile_exclusion(patterns: Sequence[str]) -> re.Pattern[str]:
    """Make one expression as `compile_patterns`; a pattern of a folder means all in it, none fits nothing."""
    if isinstance(patterns, str):
        return compile_patterns(patterns, "exclude")  # which refuses it
    if not patterns:
        return re.compile("(?!)")
    names = [pattern.rstrip("/") or pattern for pattern in patterns]
    below = [f"{name}/**" for name in names]
    return compile_patterns(names + below, "exclude")


def compile_patterns(patterns: Sequence[str], option: str = "patterns") -> re.Pattern[str]:
    """Make one expression of glob patterns.

    Args:
        patterns: ``*`` and ``?`` within a name, ``[...]``, ``**/`` for any number of folders.
        option: What they were given as, for messages.

    Raises:
        ConfigError: none given, one that leaves the folder, or one that cannot be understood.
    """
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"{option}={patterns!r} must be a list of at least one pattern")
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            what = "pattern" if option == "patterns" else f"data.{option}: pattern"
            raise ConfigError(
                f"{what} {pattern!r} leaves the folder; patterns are relative to it and without "
                "'..'"
            )
        if len(re.findall(r"\*\*/(?!\*\*/)", pattern)) > _MOST_FOLDERS:  # runs of it count once
            raise ConfigError(
                f"pattern {pattern[:80]!r} holds '**/' more than {_MOST_FOLDERS} times; remove some"
            )
    try:
        return re.compile("|".join(map(_translate, patterns)), re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{option}={patterns!r} cannot be understood: {error}") from error


def name_below(folder: Path, path: str | Path) -> str | None:
    """Return the path of a file relative to a folder, if it is written as one below it."""
    # A fifth of the time of `relative_to`: there may be a million.
    inside = _prefix(folder)
    name = str(path)
    is_below = name.startswith(inside) and name.startswith("/") == folder.is_absolute()
    return name[len(inside) :] if is_below else None


@lru_cache(maxsize=16)
def _prefix(folder: Path) -> str:
    return str(folder / "x")[:-1]  # nothing for the working folder


def is_inside(real_path: str, real_folder: str) -> bool:
    """Return True if a path is a folder or lies in it, both without links."""
    return real_path == real_folder or real_path.startswith(real_folder.rstrip(os.sep) + os.sep)


def check_inside(path: Path, root: Path) -> None:
    """Refuse a file that a link takes out of the data folder.

    What it holds would be shown in messages.

    Raises:
        DataError: It lies elsewhere.
    """
    target = os.path.realpath(path)
    if not is_inside(target, os.path.realpath(root)):
        raise DataError(f"{show_path(path)}: {describe_outside(target)}")


def describe_outside(target: str) -> str:
    """Say that a path leads out of the data folder."""
    return (
        f"leads out of the data folder, to {show_path(target)}; copy it into the folder, or set "
        "data.root to a folder that holds both"
    )


def _translate(pattern: str) -> str:
    """Make an expression of a pattern.

    What stands between two ``*`` is taken where it is found first: going on from a later place
    finds no more, and trying all of them takes for ever.
    """
    parts: list[str] = []
    for part in _GLOB.findall(pattern):
        if part not in _ANY or parts[-1:] != [part]:
            parts.append(part)
    stars = [index for index, part in enumerate(parts) if part in _STARS]
    texts = [_WITHIN.get(part) or _translate_part(part) for part in parts]
    for star, next_star in pairwise(stars):
        if parts[star] == parts[next_star] == "*":
            # An atomic group from one star up to the next one: it is not tried again.
            texts[star] = f"{texts[star].removesuffix('[^/]*')}(?>[^/]*?"
            texts[next_star] = f"){texts[next_star]}"
    return "".join(texts)


def _translate_part(part: str) -> str:
    if len(part) == 1:
        return re.escape(part)
    negated = part[1] == "!"
    members = re.escape(part[1 + negated : -1]).replace("\\-", "-")
    return f"[^/{members}]" if negated else f"[{members}]"


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - half a million names


@dataclass(frozen=True, slots=True)
class Listing:
    """The images of a folder.

    Attributes:
        paths: Sorted by their path under the folder, so the order does not depend on where the
            folder is.
        ignored: How many files were left out, by reason.
        excluded: Those that were excluded, in order.
    """

    paths: tuple[Path, ...]
    ignored: Mapping[str, int]
    excluded: tuple[Path, ...] = ()


def find_images(
    root: PathText,
    *,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> Listing:
    """List the image files of a folder and its subfolders.

    Hidden files and folders, ``__MACOSX``, ``Thumbs.db`` and files without an image's extension are
    ignored and counted.

    Args:
        root: The folder.
        patterns: Which files, relative to the folder: ``*`` and ``?`` within a name, ``[...]``,
            ``**/`` for any number of folders.
        exclude: Which of these to leave out; the name of a folder stands for all in it.
        leftovers: Takes files of other types.

    Raises:
        ConfigError: a pattern leaves the folder.
        DataError: no such folder, no image, two files of one name in a folder, a link that leads
            nowhere or outside, or something with an image's name that is no file.
    """
    root = Path(root)
    if not root.is_dir():
        reason = "not a folder"
        if not root.exists():
            reason = f"no such folder; {show_path(nearest_existing(root))} exists"
        raise DataError(f"{show_path(root)}: {reason}")
    walk = FolderWalk(root, patterns, exclude)
    names = sorted(walk.run())
    _check_stems(walk.problems, root, names)
    walk.finish(names, leftovers)
    excluded = tuple(root / name for name in sorted(walk.excluded))
    return Listing(tuple(root / name for name in names), dict(walk.ignored), excluded)


def match_by_stem(images: Iterable[PathText], masks: Iterable[PathText]) -> list[tuple[Path, Path]]:
    """Pair images and masks whose names agree up to the extension.

    Accents may be composed in any way.

    Args:
        images: Paths, in any folders.
        masks: Paths, in any folders.

    Returns:
        Each image with its mask, in the order of the images.

    Raises:
        DataError: two images or two masks of one name, or one without the other; lists all.
    """
    problems = Problems()
    image_of = _index_stems(images, problems)
    mask_of = _index_stems(masks, problems)
    problems.raise_if_any(counted(len(problems), "name is", "names are") + " used more than once")
    no_mask = [path for stem, path in image_of.items() if stem not in mask_of]
    no_image = [path for stem, path in mask_of.items() if stem not in image_of]
    if no_mask or no_image:
        counts = (
            f"{counted(len(no_mask), 'image')} without a mask, "
            f"{counted(len(no_image), 'mask')} without an image"
        )
        alone = [(str(path), "an image without a mask") for path in no_mask]
        alone += [(str(path), "a mask without an image") for path in no_image]
        raise list_problems(alone).make_error(counts)
    return [(path, mask_of[stem]) for stem, path in image_of.items()]


def _check_stems(problems: Problems, root: Path, names: Sequence[str]) -> None:
    """Add names that differ in extension or case alone, as ``a.png``, ``a.jpg`` and ``A.PNG`` do."""
    # Which of them is meant, nobody can tell.
    seen: dict[str, str] = {}
    for name in names:
        stem = _normalize(os.path.splitext(name)[0]).casefold()  # noqa: PTH122 - half a million names
        first = seen.setdefault(stem, name)
        if first is not name:
            problems.add(root / name, f"the same name as {show_path(root / first)}")


def _index_stems(paths: Iterable[PathText], problems: Problems) -> dict[str, Path]:
    index: dict[str, Path] = {}
    for path in map(Path, paths):
        first = index.setdefault(_normalize(path.stem), path)
        if first is not path:
            problems.add(path, f"the same name as {show_path(first)}")
    return index


def _normalize(name: str) -> str:
    # Accents are one character or two, as the system has it that a file was copied from.
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def may_be_imported(root: str) -> bool:
    """Return True where a set of another library may lie, by the names of some files alone.

    Args:
        root: A folder, a file, or a pattern with braces.
    """
    if not os.path.isdir(root):  # noqa: PTH112 - also of names that no path can have
        return "{" in root or Path(root).suffix in _FOREIGN
    with suppress(OSError), os.scandir(root) as entries:  # said where the folder is read
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir():  # of a split
                path = next(path.iterdir(), path)
            if {path.name, path.suffix} & _FOREIGN:
                return True
    return False
