"""Files of a run folder that may be anybody's: regular files inside of it only, of bounded size and depth."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

_MOST_BYTES: Final = 2**24
_MOST_NODES: Final = 200_000
_DEEPEST: Final = 60
_MOST_DIGITS: Final = 40
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C where PyYAML was built with it


def open_inside(folder: Path, path: Path, *, most_bytes: int = _MOST_BYTES) -> BinaryIO:
    """Open a file of a folder for reading.

    Args:
        folder: Of a run or a sweep; it may itself be a link.
        path: The file; nothing below the folder may be a link.
        most_bytes: Its largest size.

    Raises:
        OSError: It is missing, a link, no regular file (a FIFO would wait for ever), or too large.
    """
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, "it lies behind a link", str(path))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
        os.close(fd)
        what = "it is too large" if stat.S_ISREG(status.st_mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return os.fdopen(fd, "rb")


def read_text(folder: Path, path: Path, *, most_bytes: int = _MOST_BYTES) -> str:
    """The text of a file of a folder; see `open_inside`."""
    with open_inside(folder, path, most_bytes=most_bytes) as file:
        return file.read(most_bytes).decode("utf-8", "replace")


def parse_yaml(text: str) -> Any:  # noqa: ANN401 - what YAML may hold
    """Plain data of YAML without aliases, which a few bytes can turn into any number of nodes.

    Raises:
        ValueError: It has aliases, too many nodes, or is nested too deeply.
        yaml.YAMLError: It is no YAML.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, _LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")
        if count > _MOST_NODES or depth > _DEEPEST:
            raise ValueError("it has too many nodes, or is nested too deeply")
    return yaml.load(text, _LOADER)


def parse_json(text: str) -> Any:  # noqa: ANN401 - what JSON may hold
    """Plain data of JSON; whole numbers of more than 40 digits become null.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
        RecursionError: It is nested far too deeply.
    """
    found = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else None)
    level = [found]
    for _ in range(_DEEPEST):
        level = [part for node in level if isinstance(node, dict | list) for part in _parts(node)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def _parts(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node
