"""One walk over a folder that keeps the image files, counts the rest and collects what is wrong."""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lit_data.errors import ConfigError, DataError, Problems, show_path
from lit_data.io.header import EXTENSIONS
from lit_data.io.source import describe_missing

_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
_GLOB = re.compile(r"\*\*/|\*\*$|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)
_WITHIN = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class _Folder(NamedTuple):
    path: str
    prefix: str  # of the names under it, relative to the root
    links: tuple[str, ...]  # real paths of the links that led here


class FolderWalk:
    """A walk that looks at no file beyond what listing its folder tells, links excepted.

    Args:
        root: The folder.
        patterns: Which files to keep, relative to the folder.
        allow_outside: Follow links that lead out of the folder.

    Attributes:
        ignored: How many files were left out, by reason.
        problems: Links that lead nowhere, in a circle or outside, and things with an image's name that are no file.

    Raises:
        ConfigError: a pattern leaves the folder.
    """

    def __init__(self, root: Path, patterns: Sequence[str], *, allow_outside: bool) -> None:
        self.ignored: Counter[str] = Counter()
        self.problems = Problems()
        self._matches = compile_patterns(patterns).fullmatch
        self._allow_outside = allow_outside
        self._real_root = os.path.realpath(root)
        self._open = [_Folder(os.fspath(root), "", ())]

    def run(self) -> Iterator[str]:
        """Paths of the images relative to the folder, in no order."""
        while self._open:
            folder = self._open.pop()
            try:
                with os.scandir(folder.path) as entries:
                    for entry in entries:
                        yield from self._visit(entry, folder)
            except OSError as error:
                self.problems.add(folder.path, describe_missing(folder.path, error))

    def _visit(self, entry: os.DirEntry[str], folder: _Folder) -> Iterator[str]:
        relative = folder.prefix + entry.name
        if entry.name.startswith("."):
            self.ignored["hidden"] += 1
        elif entry.is_symlink():
            yield from self._follow(entry, relative, folder)
        elif entry.is_dir():
            self._enter(entry.path, relative, folder.links)
        elif self._is_wanted(entry.name, relative):
            if entry.is_file():
                yield relative
            else:
                self.problems.add(entry.path, "not a regular file")

    def _follow(self, link: os.DirEntry[str], relative: str, folder: _Folder) -> Iterator[str]:
        try:
            mode = link.stat().st_mode
        except OSError as error:
            if "." not in link.name or self._is_wanted(link.name, relative):  # without a dot it was a folder
                self.problems.add(link.path, describe_missing(link.path, error))
            return
        if not stat.S_ISDIR(mode) and not self._is_wanted(link.name, relative):
            return
        target = os.path.realpath(link.path)
        if not self._allow_outside and not is_inside(target, self._real_root):
            self.problems.add(link.path, describe_outside(target))
        elif stat.S_ISREG(mode):
            yield relative
        elif not stat.S_ISDIR(mode):
            self.problems.add(link.path, "not a regular file")
        elif target in folder.links or is_inside(os.path.realpath(folder.path), target):
            self.problems.add(link.path, f"a link that leads in a circle, to {show_path(target)}")
        else:
            self._enter(link.path, relative, (*folder.links, target))

    def _enter(self, path: str, relative: str, links: tuple[str, ...]) -> None:
        if _extension(relative) in EXTENSIONS and self._matches(relative):
            self.problems.add(path, "not a regular file (a folder)")
        else:
            self._open.append(_Folder(path, f"{relative}/", links))

    def _is_wanted(self, name: str, relative: str) -> bool:
        if name.lower() in _SYSTEM_FILES:
            reason = "system files"
        elif _extension(name) not in EXTENSIONS:
            reason = "of another type"
        elif not self._matches(relative):
            reason = "outside the patterns"
        else:
            return True
        self.ignored[reason] += 1
        return False


def compile_patterns(patterns: Sequence[str]) -> re.Pattern[str]:
    """Make one expression of glob patterns.

    Args:
        patterns: ``*`` and ``?`` within a name, ``[...]``, ``**/`` for any number of folders.

    Raises:
        ConfigError: none given, one that leaves the folder, or one that cannot be understood.
    """
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"patterns={patterns!r} must be a list of at least one pattern")
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ConfigError(f"pattern {pattern!r} leaves the folder; patterns are relative to it and without '..'")
    try:
        return re.compile("|".join(map(_translate, patterns)), re.DOTALL)
    except re.error as error:
        raise ConfigError(f"patterns={patterns!r} cannot be understood: {error}") from error


def is_inside(real_path: str, real_folder: str) -> bool:
    """Whether a path is a folder or lies in it, both without links."""
    return real_path == real_folder or real_path.startswith(real_folder.rstrip(os.sep) + os.sep)


def check_inside(path: Path, root: Path) -> None:
    """Refuse a file that a link takes out of the data folder: what it holds would be shown in messages.

    Raises:
        DataError: It lies elsewhere.
    """
    if not is_inside(target := os.path.realpath(path), os.path.realpath(root)):
        raise DataError(f"{show_path(path)}: {describe_outside(target)}")


def describe_outside(target: str) -> str:
    """Say that a path leads out of the data folder."""
    return f"leads out of the data folder, to {show_path(target)}; set allow_outside=True if that is meant"


def _translate(pattern: str) -> str:
    return "".join(_WITHIN.get(part) or _translate_part(part) for part in _GLOB.findall(pattern))


def _translate_part(part: str) -> str:
    if len(part) == 1:
        return re.escape(part)
    negated = part[1] == "!"
    members = re.escape(part[1 + negated : -1]).replace("\\-", "-")
    return f"[^/{members}]" if negated else f"[{members}]"


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - half a million names
