"""Files of a run folder that may be anybody's: texts and data of bounded size, without secrets."""

import csv
import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lit_data.core.errors import DataError, first_line
from lit_data.core.files import open_regular
from lit_data.core.secrets import (
    MASK,
    cut_secrets,
    ends_in_secret,
    find_other_halves,
    holds_key_id,
    names_secret,
)

_LEAST_KNOWN = 6  # a shorter secret would be found inside of ordinary words

_MOST_BYTES = 2**24


class Masker:
    """Takes secrets out of configurations and texts.

    Values found under the key of a secret are taken out of all later texts too, wherever they
    stand.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._has_key_id = False

    def mask_tree(self, tree: Any) -> Any:  # noqa: ANN401 - what YAML or JSON may hold
        """Return a copy of dicts and lists without secrets.

        All that lies below the key of a secret is one. A number is a secret only where the key ends
        in the word, so ``max_tokens: 512`` stays. Where the public half of an AWS key stands
        anywhere, what looks like the secret half is taken out everywhere.
        """
        texts = list(_list_texts(tree))
        self._has_key_id |= any(map(holds_key_id, texts))
        for text in texts:
            self._learn_halves(text)
        return self._mask_node(tree)

    def mask_text(self, text: str) -> str:
        """Return a text without known secrets, and without those that `cut_secrets` sees."""
        self._has_key_id |= holds_key_id(text)
        self._learn_halves(text)
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return cut_secrets(text)

    def _learn_halves(self, text: str) -> None:
        if self._has_key_id:
            self._known.update(find_other_halves(text))

    def _mask_node(self, node: Any) -> Any:  # noqa: ANN401
        if isinstance(node, dict):
            masked = {}
            for key, value in node.items():
                masked[self.mask_text(str(key))] = self._mask_entry(str(key), value)
            return masked
        if isinstance(node, list):
            return [self._mask_node(value) for value in node]
        return self.mask_text(node) if isinstance(node, str) else node

    def _mask_entry(self, key: str, value: Any) -> Any:  # noqa: ANN401
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number:
            is_secret = ends_in_secret(key)
        else:
            is_secret = isinstance(value, str | dict | list) and names_secret(key)
        if not is_secret:
            return self._mask_node(value)
        self._learn(value)
        return MASK if value not in ("", {}, []) else value

    def _learn(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._learn(part)
        elif isinstance(value, str) and len(value) >= _LEAST_KNOWN and not value.startswith("${"):
            self._known.add(value)


def _list_texts(tree: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield all texts of dicts and lists."""
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _list_texts(part)
    elif isinstance(tree, str):
        yield tree


def open_inside(folder: Path, path: Path, *, most_bytes: int = _MOST_BYTES) -> BinaryIO:
    """Open a file of a folder for reading.

    Args:
        folder: Of a run or a sweep; it may itself be a link.
        path: The file; nothing below the folder may be a link.
        most_bytes: Its largest size.

    Raises:
        OSError: It is missing, a link, no regular file, or too large.
    """
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, "it is behind a link", str(path))
    try:
        file = open_regular(path, links=False)
    except DataError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if os.fstat(file.fileno()).st_size > most_bytes:
        file.close()
        raise OSError(errno.EINVAL, "it is too large", str(path))
    return file


def read_text(folder: Path, path: Path) -> str:
    """Return the text of a file of a folder; see `open_inside`."""
    with open_inside(folder, path) as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace")


def load(folder: Path, name: str, parse: Callable[[str], Any], notes: list[str]) -> Any | None:  # noqa: ANN401 - what a file may hold
    """Return what a file of a folder holds; None where it is missing or cannot be read.

    Args:
        folder: Of a run or a sweep.
        name: Of the file below it.
        parse: Makes data of its text.
        notes: Gets a sentence if there is a file that cannot be read.
    """
    try:
        return parse(read_text(folder, folder / name))
    except FileNotFoundError:
        return None
    except (OSError, DataError, csv.Error, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {first_line(error)}")
        return None


def parse_csv(text: str) -> list[dict[str, str]]:
    """Return the rows of a table.

    Raises:
        csv.Error: It is none.
    """
    return list(csv.DictReader(io.StringIO(text, newline="")))


def as_dict(node: Any) -> dict[str, Any]:  # noqa: ANN401 - a part of plain data
    """Return a node of YAML or JSON that is a mapping; an empty one for any other."""
    return node if isinstance(node, dict) else {}


def find_config_dir(hydra: Mapping[str, Any]) -> list[str]:
    """Return the options of the command line that name the user's own folders of configurations."""
    sources = as_dict(hydra.get("runtime")).get("config_sources")
    options: list[str] = []
    for source in sources if isinstance(sources, list) else ():
        entry = as_dict(source)
        if entry.get("schema") == "file" and entry.get("path"):
            options += ["--config-dir", str(entry["path"])]
    return options
