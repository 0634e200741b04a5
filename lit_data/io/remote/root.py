"""The root of a data set, wherever it lies."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from lit_data.errors import ConfigError
from lit_data.io.remote.address import is_remote, parse_address
from lit_data.io.remote.mirror import Mirror
from lit_data.io.remote.options import WHERE_CREDENTIALS_BELONG, RemoteOptions, check_no_credentials
from lit_data.io.remote.scope import Scope

_TARGET: Final = "lit_data.io.remote.RemoteOptions"


def check_plain(node: object, key: str = "") -> None:
    """Refuse credentials in addresses and beside the options of `RemoteOptions`.

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
        for index, value in enumerate(node):
            check_plain(value, f"{key}[{index}]")


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
            raise ConfigError(
                f"unknown key '{key}.{name}'; known are {', '.join(known)}; "
                f"{WHERE_CREDENTIALS_BELONG}"
            )


class Root:
    """A local folder, or the mirror of a folder on a server, which its first use fills.

    Args:
        root: A local path, or an address such as ``s3://bucket/folder`` or ``https://host/folder``.
        mirrors: Where mirrors lie.
        options: How a server is read.
        scope: The wanted files; by default all.

    Raises:
        ConfigError: The address holds credentials, or cannot be read.
    """

    def __init__(
        self, root: str, mirrors: Path, options: RemoteOptions, scope: Scope | None = None
    ) -> None:
        self._local = None if is_remote(root) else Path(root)
        self._mirror = (
            Mirror(parse_address(root), mirrors, options, scope or Scope())
            if is_remote(root)
            else None
        )

    @property
    def folder(self) -> Path:
        """Return the local folder of a root.

        For a server it is a complete copy; whether something has changed is not asked.

        Raises:
            ConfigError: The files are more than allowed.
            DataError: The server cannot be reached, or files are missing, forbidden or damaged.
            StoreError: The mirror cannot be written.
        """
        return self._find(refresh=False)

    def refresh(self) -> None:
        """Ask a server for changes, once: what was opened before must not change under its readers.

        Raises:
            LitDataError: As `folder`.
        """
        self._find(refresh=True)

    def _find(self, *, refresh: bool) -> Path:
        if self._local is None and self._mirror is not None:
            self._local = self._mirror.open(refresh=refresh)
        assert self._local is not None
        return self._local
