"""A whole configuration without credentials, seen before anything of it is written anywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from lit_data.errors import ConfigError
from lit_data.io.remote.credentials import WHERE_CREDENTIALS_BELONG, check_no_credentials
from lit_data.io.remote.options import RemoteOptions

_TARGET: Final = "lit_data.io.remote.RemoteOptions"


def check_plain(node: object, key: str = "") -> None:
    """Refuse a configuration that holds credentials in an address, or beside the options of `RemoteOptions`.

    Args:
        node: Resolved plain data.
        key: Where it stands.

    Raises:
        ConfigError: Names the key and never its value.
    """
    if isinstance(node, str):
        check_no_credentials(node, f"'{key}'")
    elif isinstance(node, Mapping):
        if node.get("_target_") == _TARGET:
            _check_names(node, key)
        for name, value in node.items():
            check_plain(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, Sequence):
        for place, value in enumerate(node):
            check_plain(value, f"{key}[{place}]")


def check_words(words: Sequence[str]) -> None:
    """Refuse words of a command line that hold credentials in an address.

    Args:
        words: Such as ``data.root=s3://bucket/folder``.

    Raises:
        ConfigError: Names the key and never its value.
    """
    for word in words:
        key = word.partition("=")[0]
        check_no_credentials(word, "the command line" if ":" in key else f"'{key}'")


def _check_names(node: Mapping[str, object], key: str) -> None:
    known = [field.name for field in fields(RemoteOptions)]
    for name in node:
        if name not in (*known, "_target_"):
            raise ConfigError(f"unknown key '{key}.{name}'; known are {', '.join(known)}; {WHERE_CREDENTIALS_BELONG}")
