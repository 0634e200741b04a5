"""Search for the images of a dataset in a folder, and for pairs of images and masks."""

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
from itertools import chain, pairwise
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
MATLAB_CURE = "MATLAB files are not read: save each mask as PNG, with the code in docs/masks.md"
_FOREIGN = {".parquet", ".arrow", ".tar", ".bin", "state.json", "dataset_dict.json", "samples.json"}
_FOREIGN |= {"dataset_info.json", "index.json"}
"""Names and suffixes of files in datasets of other libraries."""
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
_GLOB = re.compile(r"\*\*/|\*\*$|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)
_ANY = ("*", "**/")  # two in a row match the same as one
_STARS = (*_ANY, "**")
_MOST_FOLDERS = 4  # each multiplies the time for a deep folder
_WITHIN = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class _ListedFolder(NamedTuple):
    path: str
    prefix: str  # of the names under it, relative to the root
    links: tuple[str, ...]  # real paths of the links that led here


class FolderWalk:
    """A walk that lists folders without a look at the files in them, except for links.

    Args:
        root: The folder.
        patterns: Patterns of the files to keep, relative to the folder.
        exclude: Patterns of files and folders to leave out.

    Attributes:
        ignored: Number of files that were left out, by reason.
        excluded: Files that match `exclude`, relative to the folder.
        unread: Files without the extension of an image, by their extension.
        outside: Images that match no pattern.
        problems: Links that lead nowhere, in a circle or outside, and entries with the name of an
            image that are not files.

    Raises:
        ConfigError: A pattern leaves the folder.
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
        """Yield the paths of the images relative to the folder, in no particular order."""
        while self._open:
            folder = self._open.pop()
            try:
                with os.scandir(folder.path) as entries:
                    for entry in entries:
                        yield from self._visit(entry, folder)
            except OSError as error:
                self.problems.add(folder.path, describe_missing(folder.path, error))

    def finish(self, names: Sequence[str], leftovers: Leftovers | None) -> None:
        """Log the files that `exclude` left out, and hand over files of other types.

        Args:
            names: Names of the images.
            leftovers: Receives files of other types.

        Raises:
            DataError: Names are bad, or there are no images.
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
        """Return the message for a folder without images: what it has, and what can be read."""
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
            count = counted(len(self.excluded), "file is", "files are")
            log.info("%s: %s skipped by data.exclude", show_path(self._root), count)
        files = [*self.excluded, *chain.from_iterable(self.unread.values())]  # such as labels
        for pattern in self._exclude:
            if not any(map(compile_exclusion([pattern]).fullmatch, files)):
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
        # An excluded folder is not searched, wherever it leads.
        if _extension(link.name) not in EXTENSIONS and self._excludes(relative):
            self.excluded.append(relative)
            return
        try:
            mode = link.stat().st_mode
        except OSError as error:
            # The target is gone: if its name has no dot, it was a folder.
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
    """Return True for names without data: ``.git``, or ``__MACOSX`` of an archive made on a Mac."""
    return name.startswith(".") or name == "__MACOSX"


def list_shown(folder: Path, pattern: str) -> list[Path]:
    """List the paths anywhere below a folder that match a glob of names, sorted, without hidden ones."""
    paths = sorted(folder.rglob(pattern))
    return [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]


def compile_exclusion(patterns: Sequence[str]) -> re.Pattern[str]:
    """Compile patterns to exclude: a folder stands for all its files, and no pattern matches nothing."""
    if isinstance(patterns, str):
        return compile_patterns(patterns, "exclude")  # which refuses it
    if not patterns:
        return re.compile("(?!)")
    names = [pattern.rstrip("/") or pattern for pattern in patterns]
    below = [f"{name}/**" for name in names]
    return compile_patterns(names + below, "exclude")


def compile_patterns(patterns: Sequence[str], option: str = "patterns") -> re.Pattern[str]:
    """Compile glob patterns into one regular expression.

    Args:
        patterns: ``*`` and ``?`` within a name, ``[...]``, ``**/`` for any number of folders.
        option: Name of the option that has them, for messages.

    Raises:
        ConfigError: There are no patterns, or one leaves the folder or has a wrong syntax.
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
    """Return the path of a file relative to a folder, or None if it does not begin with the folder."""
    # Takes a fifth of the time of `relative_to`, which matters for a million files.
    inside = _prefix(folder)
    name = str(path)
    is_below = name.startswith(inside) and name.startswith("/") == folder.is_absolute()
    return name[len(inside) :] if is_below else None


@lru_cache(maxsize=16)
def _prefix(folder: Path) -> str:
    return str(folder / "x")[:-1]  # nothing for the working folder


def is_inside(real_path: str, real_folder: str) -> bool:
    """Return True if a path is a folder or is inside it; both have their links resolved."""
    return real_path == real_folder or real_path.startswith(real_folder.rstrip(os.sep) + os.sep)


def check_inside(path: Path, root: Path) -> None:
    """Refuse a file that a link leads to outside of the data folder.

    Messages would show its content.

    Raises:
        DataError: The file is outside.
    """
    target = os.path.realpath(path)
    if not is_inside(target, os.path.realpath(root)):
        raise DataError(f"{show_path(path)}: {describe_outside(target)}")


def describe_outside(target: str) -> str:
    """Return the message about a path that leads out of the data folder."""
    return (
        f"leads out of the data folder, to {show_path(target)}; copy it into the folder, or set "
        "data.root to a folder that holds both"
    )


def _translate(pattern: str) -> str:
    """Translate a pattern into a regular expression.

    The text between two ``*`` matches at its first occurrence only: later ones would find nothing
    more, and to try all of them takes forever.
    """
    parts: list[str] = []
    for part in _GLOB.findall(pattern):
        if part not in _ANY or parts[-1:] != [part]:
            parts.append(part)
    stars = [index for index, part in enumerate(parts) if part in _STARS]
    texts = [_WITHIN.get(part) or _translate_part(part) for part in parts]
    for star, next_star in pairwise(stars):
        if parts[star] == parts[next_star] == "*":
            # An atomic group from one star to the next one, without backtracking.
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
    """Images of a folder.

    Attributes:
        paths: Images, sorted by their path under the folder, so that the order does not depend on
            where the folder is.
        ignored: Number of files that were left out, by reason.
        excluded: Files that were excluded, in order.
    """

    paths: tuple[Path, ...]
    ignored: Mapping[str, int]
    excluded: tuple[Path, ...] = ()


def check_root(root: Path) -> None:
    """Refuse a path that is not the folder of a dataset.

    Raises:
        DataError: There is no such folder.
    """
    if not root.is_dir():
        reason = "not a folder"
        if not root.exists():
            reason = f"no such folder; {show_path(nearest_existing(root))} exists"
        raise DataError(f"{show_path(root)}: {reason}; check data.root")


def find_images(
    root: PathText,
    *,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> Listing:
    """List the image files of a folder and its subfolders.

    Hidden files and folders, ``__MACOSX``, ``Thumbs.db`` and files without the extension of an
    image are ignored and counted.

    Args:
        root: The folder.
        patterns: Patterns of the files, relative to the folder: ``*`` and ``?`` within a name,
            ``[...]``, ``**/`` for any number of folders.
        exclude: Patterns of files to leave out; the name of a folder stands for all its files.
        leftovers: Receives files of other types.

    Raises:
        ConfigError: A pattern leaves the folder.
        DataError: The folder does not exist or has no images, two files in a folder have the same
            name, a link leads nowhere or outside, or an entry with the name of an image is not a
            file.
    """
    root = Path(root)
    check_root(root)
    walk = FolderWalk(root, patterns, exclude)
    names = sorted(walk.run())
    _check_stems(walk.problems, root, names)
    walk.finish(names, leftovers)
    excluded = tuple(root / name for name in sorted(walk.excluded))
    return Listing(tuple(root / name for name in names), dict(walk.ignored), excluded)


def match_by_stem(images: Iterable[PathText], masks: Iterable[PathText]) -> list[tuple[Path, Path]]:
    """Pair images and masks whose names agree except for the extension.

    Composed and decomposed accents are equal.

    Args:
        images: Paths, in any folders.
        masks: Paths, in any folders.

    Returns:
        Each image with its mask, in the order of the images.

    Raises:
        DataError: Two images or masks have the same name, or one has no partner; all are listed.
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
    """Add names that differ only in extension or case, as ``a.png``, ``a.jpg`` and ``A.PNG`` do."""
    # Nobody can tell which of them is meant.
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
    # An accent is one character or two, depending on the system that a file was copied from.
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def may_be_imported(root: str) -> bool:
    """Return True if a root may have a dataset of another library, judged by the names of files.

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
