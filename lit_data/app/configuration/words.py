"""Words of the command line that give a text to a key, in Hydra's grammar, and those of this run."""

import re
import shlex
from collections.abc import Iterable, Sequence
from functools import cache

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lit_data.core.files import flatten

PATHS = frozenset(
    (
        "ckpt",
        "run",
        "resume",
        "data.root",
        "data.masks",
        "data.splits",
        "paths.cache",
        "paths.run",
        "paths.runs",
        "hydra.run.dir",
        "hydra.sweep.dir",
        "predict.folder",
        "prepare.export",
        "prepare.shards",
        "sweep.resume",
    )
)
"""Keys whose text is a path: what cannot be read as anything else is one."""
_REFERENCE = re.compile(r"(\\*)\$\{")
_PLAIN_PATH = re.compile(r"[\w.:@+-]*/[\w./:@+-]*", re.ASCII)
_MARK = "'"
_SHELL_MARK = '"'  # which a shell takes between its own marks
_NO_TEXT = ("'", '"', "[", "{")
"""Beginnings of values that are meant as something else than a text without quotation marks."""


def quote(value: object, mark: str = _MARK) -> str:
    """Return a text in quotation marks, as Hydra reads it back, whatever stands in it.

    Args:
        value: The text, or what `str` makes one of.
        mark: The quotation mark.
    """
    return _enclose(escape_references(str(value)), mark)


def _enclose(text: str, mark: str) -> str:
    # Backslashes count where a mark follows them, as behind the last one.
    escaped = re.sub(rf"(\\*){mark}", rf"\1\1\\{mark}", text)
    return mark + re.sub(r"(\\+)\Z", r"\1\1", escaped) + mark


def escape_references(text: str) -> str:
    """Return a text in which OmegaConf sees no reference."""
    return _REFERENCE.sub(r"\1\1\\${", text)


def write_override(key: str, value: object) -> str:
    """Return the word that gives a text to a key."""
    return f"{key}={quote(value)}"


def show_override(key: str, value: object) -> str:
    """Return the word that gives a text or a truth to a key, as one types it into a shell."""
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    text = str(value)
    if _PLAIN_PATH.fullmatch(text):
        return f"{key}={text}"
    return shlex.quote(f"{key}={quote(text, _SHELL_MARK)}")


def read_override(word: str) -> str | None:
    """Return the text that a word gives to its key; None if it gives something else.

    That is a list, several values, a reference to another key, or what cannot be read.
    """
    try:
        value = parse_word(_make_parser(), word).value()
    except (HydraException, ValueError, RecursionError):
        return None
    if isinstance(value, int | float):  # a folder such as 2026_01
        return word.partition("=")[2]
    if not isinstance(value, str):
        return None
    if any(len(backslashes) % 2 == 0 for backslashes in _REFERENCE.findall(value)):
        return None
    return str(OmegaConf.create({"text": value}).text)


def parse_word(parser: OverridesParser, word: str) -> Override:
    """Parse a word; a text may stand without quotation marks that Hydra asks for.

    That is what cannot be read as anything else: a path, or what holds a letter beyond ASCII.

    Args:
        parser: Of the configuration.
        word: As typed.

    Raises:
        HydraException: It cannot be read, as may be said by a ValueError or RecursionError.
    """
    try:
        return parser.parse_overrides([word])[0]
    except (HydraException, ValueError):
        key, _, value = word.partition("=")
        is_path = key.lstrip("+") in PATHS
        is_text = value and "," not in value and not value.startswith(_NO_TEXT)
        if not (is_text and (is_path or not value.isascii())):
            raise
        return parser.parse_overrides([f"{key}={_enclose(value, _MARK)}"])[0]


@cache
def _make_parser() -> OverridesParser:
    return OverridesParser.create()


def read_key(word: str) -> str:
    """Return the key of a word such as ``+model=unet``."""
    return word.lstrip("+").partition("=")[0]


def find_typed() -> set[str]:
    """Return the keys of this run's command line; none outside a run.

    A dict stands for the keys in it, which are set beside those that are there.
    """
    if not HydraConfig.initialized():
        return set()
    overrides: Sequence[str] = HydraConfig.get().overrides.task
    keys: set[str] = set()
    for word in overrides:
        key = read_key(word)
        keys.add(key)
        if f"{key}={{" in word and (node := parse_word(_make_parser(), word).value()):
            keys.remove(key)
            keys |= flatten({key: node}).keys()
    return keys


def list_typed(typed: Iterable[str], key: str) -> set[str]:
    """Return the names of the options of a node that were typed, as a whole or in part.

    Args:
        typed: From `find_typed`.
        key: Of the node.
    """
    names = set()
    for word in typed:
        if word.startswith(f"{key}."):
            names.add(word.removeprefix(f"{key}.").partition(".")[0])
    return names


def find_choice(group: str) -> str | None:
    """Return the option of a group that this run has; None without one."""
    if not HydraConfig.initialized():
        return None
    choice: str | None = HydraConfig.get().runtime.choices.get(group)
    return choice


def find_choices(group: str) -> list[str]:
    """Return the options of a group that may have several, as those of a list that is typed."""
    choice = find_choice(group)
    if choice is None and HydraConfig.initialized():  # which notes no list
        typed = [word.lstrip("+").partition("=") for word in HydraConfig.get().overrides.task]
        choice = next((value for key, _, value in typed if key == group), None)
    return re.findall(r"\w+", choice or "")
