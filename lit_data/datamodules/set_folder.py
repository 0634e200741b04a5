"""`SetFolder`: where the files of a set lie, on a disk, on a server, or made on first use."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_data.errors import ConfigError
from lit_data.io.remote import RemoteOptions, Root, Scope, check_root


@dataclass(frozen=True, kw_only=True)
class SetFolder:
    """A root or its mirror; without one, a drawn set. A subclass names the set, and the wanted files of a server.

    Args:
        root: A folder or an address; none makes the drawn set.
        cache_dir: Where mirrors and drawn sets lie.
        samples: Arguments of the drawn set.
        remote: How a server is read.

    Raises:
        ConfigError: The root is empty, or an address that cannot be read.
    """

    root: str | None
    cache_dir: str | None
    samples: Mapping[str, Any]
    remote: RemoteOptions

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        if self.root is not None and not str(self.root).strip():
            raise ConfigError(
                "root is empty: is it a shell variable that is not set? Name a folder, or leave root out for the drawn "
                "set"
            )
        if not isinstance(self.samples, Mapping):
            raise ConfigError(
                f"samples={self.samples!r} must hold names and values: in a shell, quote the braces, "
                "'data.samples={count: 16}'"
            )
        check_root(self.root)

    @cached_property
    def folder(self) -> Path:
        """The root or its mirror; without one, the drawn set; the first call makes what is not there."""
        return self._root.folder if self.root else self._make_samples(self._cache / "samples")

    def refresh(self) -> None:
        """Bring the mirror of a root on a server up to date."""
        if self.root:
            self._root.refresh()

    @abstractmethod
    def _make_samples(self, folder: Path) -> Path:
        """Make the drawn set in a folder of its own below, if it is not there, and say which."""

    @property
    def _scope(self) -> Scope | None:
        """The wanted files of a server; none for all."""
        return None

    @property
    def _cache(self) -> Path:
        return cache_folder(self.cache_dir)

    @cached_property
    def _root(self) -> Root:
        return Root(self.root or "", self._cache / "remote", self.remote, self._scope)


def cache_folder(cache_dir: str | None) -> Path:
    """Where lit_data keeps what it can make again: `cache_dir`, else LIT_DATA_CACHE, else ~/.cache/lit_data."""
    return Path(cache_dir or os.environ.get("LIT_DATA_CACHE") or Path.home() / ".cache" / "lit_data").expanduser()
