"""Files of a remote folder that a dataset needs, and names that the local disk cannot have."""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from lit_data.core.addresses import Address
from lit_data.core.errors import DataError, Problems, escape
from lit_data.images.discovery import compile_patterns, is_hidden
from lit_data.images.header import EXTENSIONS
from lit_inspect.counts import counted

_ALL = ("**/*",)
_LONGEST_PART_BYTES = 255
_LONGEST_NAME_BYTES = 3000
"""Most bytes of a path; Linux takes 4096, including the folders above and the final zero."""

SUMS_NAME = "SHA256SUMS"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True)
class Scope:
    """Files that a dataset or a command reads, except hidden ones.

    Args:
        patterns: Globs below the root, as for `lit_data.images.discovery.find_images`.
        extensions: Extensions in lower case with their dot; empty for all.
        also: Names that are wanted in any folder, regardless of patterns and extensions.
        beside: Extensions of files that are wanted regardless of patterns.
        unhidden: Names of hidden folders whose files are included.

    Raises:
        ConfigError: A pattern leaves the folder or has a wrong syntax.
    """

    patterns: tuple[str, ...] = _ALL
    extensions: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    unhidden: tuple[str, ...] = ()

    @classmethod
    def of_images(
        cls,
        patterns: Sequence[str],
        *,
        masks: str | None = None,
        also: tuple[str, ...] = (),
        beside: tuple[str, ...] = (),
    ) -> Self:
        """Make the scope of images by patterns, all masks of a folder below the root, and other files."""
        # Masks elsewhere on this machine are not on the server.
        below = (
            ()
            if masks is None or Path(masks).is_absolute()
            else (f"{Path(masks).as_posix()}/**/*",)
        )
        return cls((*patterns, *below), tuple(EXTENSIONS), also, beside)

    def __post_init__(self) -> None:
        compile_patterns(self.patterns)

    @property
    def key(self) -> str:
        """Key of the scope; two scopes with the same key want the same files."""
        extensions = "*" if self.extensions is None else " ".join(sorted(self.extensions))
        beside = [f"beside {' '.join(sorted(self.beside))}"] if self.beside else []
        unhidden = [f"unhidden {name}" for name in sorted(self.unhidden)]
        names = sorted({*self.patterns, *self.also})
        return " | ".join([extensions, *names, *beside, *unhidden])

    def wants(self, name: str) -> bool:
        """Return True if the dataset needs a file.

        Args:
            name: Path of the file below the root.
        """
        # Names with empty parts must be reported, not left out.
        parts = [part for part in name.split("/") if part]
        if any(is_hidden(part) and part not in (".", "..", *self.unhidden) for part in parts):
            return False
        if f"/{name}".endswith(self._also) or name.lower().endswith(self.beside):
            return True
        if self.extensions is not None and not name.lower().endswith(self.extensions):
            return False
        return self._pattern.fullmatch("/".join(parts)) is not None

    @cached_property
    def _also(self) -> tuple[str, ...]:
        return tuple(f"/{name}" for name in self.also)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return compile_patterns(self.patterns)


def find_fault(name: str) -> str | None:
    """Return why a name from a server is not allowed below a local folder, or None if it is."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "has a part without a name"
    try:
        encoded = [os.fsencode(part) for part in parts]
    except UnicodeEncodeError:
        return "is not valid text"
    if any(b"\0" in part for part in encoded):
        return "holds a zero byte"
    if (
        max(map(len, encoded)) > _LONGEST_PART_BYTES
        or sum(map(len, encoded)) + len(parts) > _LONGEST_NAME_BYTES
    ):
        return f"is longer than a local file system allows ({_LONGEST_PART_BYTES} bytes a part)"
    return None


def check_names(names: Iterable[str], address: Address) -> None:
    """Refuse names that cannot be in one local folder together.

    Raises:
        DataError: Names lead outside, differ only in case or accents, or are both a file and a
            folder; all are listed.
    """
    problems, folders, seen = Problems(), dict[str, str](), dict[str, str]()
    names = sorted(names)
    for name in names:
        if fault := find_fault(name):
            problems.add(address.name(name), f"the name {fault}")
            continue
        # Some local file systems treat names that differ only in case or accent forms as equal.
        first = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if first != name:
            problems.add(
                address.name(name), f"differs from {first!a} in case or accents only; rename one"
            )
        # Every folder above a file; if one is known, all of its parents are known.
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = name
            folder = folder.rpartition("/")[0]
    for name in names:
        if name in folders:
            problems.add(
                address.name(name), f"is a file, and the folder of {folders[name]!a}; rename one"
            )
    problems.raise_if_any(f"{counted(len(problems), 'bad name')} in {address}")


def parse_list(content: bytes, what: str) -> dict[str, str | None]:
    """Parse a list of files, with or without their SHA-256 sums.

    Each line is a name, or a sum and a name; empty lines and those with ``#`` are skipped.

    Args:
        content: UTF-8 text.
        what: Address of the list, for messages.

    Returns:
        The sum of each name in lower case, or None.

    Raises:
        DataError: The list is not such a text, is empty, or states two sums for one name.
    """
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: is not UTF-8 text") from error
    sums: dict[str, str | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.lstrip().startswith("<"):
            raise DataError(
                f"{what}, line {number}: is HTML, not a list of files: {escape(line[:80])}"
            )
        # Format of `sha256sum`: a sum, two spaces or a space and an asterisk, and the name.
        match = _LINE.fullmatch(line)
        stated, name = (match[1].lower(), match[2]) if match else (None, line.strip())
        name = name.removeprefix("./")
        if sums.setdefault(name, stated) != stated:
            raise DataError(
                f"{what}, line {number}: {escape(name)} appears twice, with different sums"
            )
    if not sums:
        raise DataError(f"{what}: names no file")
    return sums
