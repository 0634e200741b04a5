"""Files of a run folder that may be anybody's, of bounded size and depth, without secrets."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

MASK: Final = "•••"

_WORDS: Final = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "cookie",
        "credential",
        "credentials",
        "key",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
        "sig",
        "signature",
        "token",
    )
)
"""Words in the names of keys whose values are secrets."""
_SPLIT: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ANY_WORD: Final = "|".join(sorted(_WORDS, key=len, reverse=True))
_NAME: Final = rf"[\w.+-]{{0,64}}(?:{_ANY_WORD})[\w-]{{0,64}}"
_NO_SECRETS: Final = ("null", "None", "true", "false", "True", "False", MASK)
_ASSIGNED: Final = re.compile(
    rf"(?i)(?<![\w.+-])(?P<key>{_NAME})(?P<to>['\"]?\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;&}}\]]+)"
)
_URL_LOGIN: Final = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE)
_BEARER: Final = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+[\w.~+/=-]{8,}")
_ISSUED: Final = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bhf_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bsk-[\w-]{20,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
)
"""The looks of AWS, GitHub, Hugging Face, GitLab, Slack and OpenAI keys, and of JSON web tokens."""

_LEAST_KNOWN: Final = 6  # a shorter secret would be found inside of ordinary words


class Masker:
    """Takes secrets out of configurations and texts.

    Values found under the key of a secret are taken out of all later texts too, wherever they
    stand.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def mask_tree(self, tree: Any) -> Any:  # noqa: ANN401 - what YAML or JSON may hold
        """Return a copy of dicts and lists without secrets.

        All that lies below the key of a secret is one. A number is a secret only where the key ends
        in the word, so ``max_tokens: 512`` stays.
        """
        if isinstance(tree, dict):
            masked = {}
            for key, value in tree.items():
                masked[self.mask_text(str(key))] = self._mask_entry(str(key), value)
            return masked
        if isinstance(tree, list):
            return [self.mask_tree(value) for value in tree]
        return self.mask_text(tree) if isinstance(tree, str) else tree

    def mask_text(self, text: str) -> str:
        """Return a text without secrets.

        Secrets are known ones, assignments to such names, logins in URLs, and what looks like keys.
        """
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        text = _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)
        text = _BEARER.sub(rf"\g<kind> {MASK}", text)
        text = _ISSUED.sub(MASK, text)
        return _ASSIGNED.sub(_mask_assignment, text)

    def _mask_entry(self, key: str, value: Any) -> Any:  # noqa: ANN401
        words = _split_key(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number:
            is_secret = bool(words) and words[-1] in _WORDS
        else:
            is_secret = isinstance(value, str | dict | list) and not _WORDS.isdisjoint(words)
        if not is_secret:
            return self.mask_tree(value)
        self._learn(value)
        return MASK if value not in ("", {}, []) else value

    def _learn(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._learn(part)
        elif isinstance(value, str) and len(value) >= _LEAST_KNOWN and not value.startswith("${"):
            self._known.add(value)


def _mask_assignment(match: re.Match[str]) -> str:
    if _WORDS.isdisjoint(_split_key(match["key"])) or match["value"] in _NO_SECRETS:
        return match[0]
    return f"{match['key']}{match['to']}{MASK}"


def _split_key(key: str) -> list[str]:
    """Return the words of a key in lower case: of ``apiToken`` api and token."""
    words = filter(None, _SPLIT.split(key))
    return [word.lower() for word in words]


_MOST_BYTES: Final = 2**24
_MOST_NODES: Final = 200_000
_DEEPEST: Final = 60
_MOST_DIGITS: Final = 40
# The loader in C is there if PyYAML was built with it.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_size > most_bytes:
        reason = "it is too large"
    if reason:
        os.close(fd)
        raise OSError(errno.EINVAL, reason, str(path))
    return os.fdopen(fd, "rb")


def read_text(folder: Path, path: Path, *, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a file of a folder; see `open_inside`."""
    with open_inside(folder, path, most_bytes=most_bytes) as file:
        return file.read(most_bytes).decode("utf-8", "replace")


def parse_yaml(text: str) -> Any:  # noqa: ANN401 - what YAML may hold
    """Return plain data of YAML without aliases, which turn a few bytes into any number of nodes.

    Raises:
        ValueError: It has aliases, too many nodes, or is nested too deeply.
        yaml.YAMLError: It is no YAML.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, _LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases")
        if count > _MOST_NODES or depth > _DEEPEST:
            raise ValueError("it has too many nodes, or is nested too deeply")
    return yaml.load(text, _LOADER)


def parse_json(text: str) -> Any:  # noqa: ANN401 - what JSON may hold
    """Return plain data of JSON; whole numbers of more than 40 digits become null.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
        RecursionError: It is nested far too deeply.
    """
    content = json.loads(text, parse_int=_read_integer)
    level = [content]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.values()
            elif isinstance(node, list):
                below += node
        if not below:
            return content
        level = below
    raise ValueError("it is nested too deeply")


def _read_integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MOST_DIGITS else None
