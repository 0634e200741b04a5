"""Keys of a configuration with values and comments, put together from the text of its files.

As Hydra puts them together, for ``--help`` and a shell, which do not wait for its import.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CONF = Path(__file__).parents[2] / "conf"
_LINE = re.compile(
    r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>[^ #].*?))?(?:  # (?P<comment>.*))?$"
)
_PARENT = re.compile(r"^  - (?!_self_)(\w+)(?: +#.*)?$", re.MULTILINE)
_CHOICE = re.compile(r"^  - (?:override /)?(\w+): (\w+)", re.MULTILINE)
_PACKAGE = re.compile(r"# @package (\S+)")
OF_FILES = ("defaults", "command")
"""Keys that tell how files belong together."""


class Row(NamedTuple):
    """A key with its value, as a file writes it, and what a file says of it."""

    key: str
    value: str
    comment: str


class Files:
    """Files of groups, ours and those of a user's folder.

    Args:
        folders: Of configurations; the first that has a file counts.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def find(self, group: str, option: str) -> Path | None:
        """Return the file of an option; None if there is none."""
        for folder in self._folders:
            path = folder / group / f"{option}.yaml"
            if path.is_file():
                return path
        return None

    def choose(self, words: Sequence[str]) -> dict[str, str]:
        """Return the option of each group that words choose, their experiment, or base.yaml."""
        typed = read_words(words)
        choices = dict(_CHOICE.findall(_read(CONF / "base.yaml")))
        del choices["hydra"]  # whose keys no command reads
        for path in self.list_parts("experiment", typed.get("experiment", "")):
            choices |= dict(_CHOICE.findall(_read(path)))
        for group in choices:
            if group in typed and self.find(group, typed[group]) is not None:
                choices[group] = typed[group]
        return choices

    def list_parts(self, group: str, option: str) -> list[Path]:
        """Return the files that an option builds on, and its own behind them."""
        path = self.find(group, option)
        if path is None:
            return []
        parts: list[Path] = []
        for parent in _PARENT.findall(_read(path)):
            if parent != option:
                parts += self.list_parts(group, parent)
        return [*parts, path]

    def read(self, group: str, option: str) -> Iterator[Row]:
        """Yield the keys of an option, under their whole names, as often as its files have them."""
        for path in self.list_parts(group, option):
            match = _PACKAGE.match(_read(path))
            package = "" if group in ("", "experiment") else group
            if match:
                package = match[1].replace("_global_", "")
            for row in read_keys(path):
                if row.key.partition(".")[0] not in OF_FILES:
                    yield row._replace(key=f"{package}.{row.key}".lstrip("."))

    def compose(self, command: str, words: Sequence[str]) -> dict[str, Row]:
        """Return all keys of a command's configuration.

        Args:
            command: The word on the command line.
            words: Overrides.
        """
        typed = read_words(words)
        rows: dict[str, Row] = {}
        for group, option in self.choose(words).items():
            _put(rows, self.read(group, option))
        _put(rows, self.read("", "base"))
        _put(rows, self.read("", command))
        _put(rows, self.read("experiment", typed.get("experiment", "")))
        _put(rows, (Row(key, value, "") for key, value in typed.items() if key in rows))
        return rows


def read_words(words: Sequence[str]) -> dict[str, str]:
    """Return the values of overrides by their keys, without a leading +; a name alone is an experiment."""
    typed = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            typed[key.lstrip("+")] = value
        elif word[:1].isalpha():
            typed.setdefault("experiment", word)
    return typed


def _put(rows: dict[str, Row], layer: Iterator[Row]) -> None:
    """Lay keys over others: what a key replaces is left out, but for its comment; a mapping adds to it."""
    for row in layer:
        inner = [key for key in rows if key.startswith(f"{row.key}.")]
        outer = [key for key in rows if row.key.startswith(f"{key}.")]
        comment = row.comment
        if not comment and row.key in rows:
            comment = rows[row.key].comment
        replaced = outer if row.value.startswith("{") else [*inner, *outer]
        for key in replaced:
            del rows[key]
        rows[row.key] = row._replace(comment=comment)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_keys(path: Path) -> Iterator[Row]:
    """Yield dotted key, value and comment of each line of a file of ``conf`` that has a value.

    A comment may stand above its line.
    """
    parents: list[tuple[int, str]] = []  # indentation and key
    comment_above = ""
    for line in _read(path).splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            text = line.strip()
            # Comments before the first key are about the file.
            is_comment = text.startswith("# ") and parents
            comment_above = text.removeprefix("# ") if is_comment else ""
            continue
        depth = len(match["indent"])
        while parents and parents[-1][0] >= depth:
            parents.pop()
        parents.append((depth, match["key"]))
        if match["value"] is not None:
            key = ".".join(name for _, name in parents)
            yield Row(key, match["value"], match["comment"] or comment_above)
        comment_above = ""


def read_first_comment(path: Path) -> str:
    """Return what a file of ``conf`` says of itself in its first line."""
    for line in _read(path).splitlines():
        comment = line.removeprefix("#").strip()
        if line.startswith("#") and not comment.startswith("@package"):
            return comment
    return ""
