"""The root of a data set, wherever it lies."""

from pathlib import Path

from lit_data.io.remote.address import is_remote, parse_address
from lit_data.io.remote.mirror import Mirror
from lit_data.io.remote.options import RemoteOptions
from lit_data.io.remote.scope import Scope


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

    def __init__(self, root: str, mirrors: Path, options: RemoteOptions, scope: Scope | None = None) -> None:
        self._local = None if is_remote(root) else Path(root)
        self._mirror = Mirror(parse_address(root), mirrors, options, scope or Scope()) if is_remote(root) else None

    @property
    def folder(self) -> Path:
        """The local folder; of a server one that is complete, without asking whether something has changed.

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
