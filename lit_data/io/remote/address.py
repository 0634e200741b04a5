"""Addresses of datasets on servers."""

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from lit_data.errors import ConfigError, escape
from lit_data.io.remote.options import check_no_credentials

WEB: Final = ("http", "https")
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_LOCAL = ("file", "local")
_WRAPPERS = (
    "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache", "generic",
    "libarchive", "reference", "simplecache", "tar", "zip",
)  # fmt: skip
"""File systems of fsspec that read through another one, or hold their content in the address."""


@dataclass(frozen=True, slots=True)
class Address:
    """A folder on a server.

    Args:
        scheme: In small letters.
        place: What follows ``://``, without a slash at its end.
    """

    scheme: str
    place: str

    def __str__(self) -> str:
        return escape(f"{self.scheme}://{self.place}")

    @property
    def url(self) -> str:
        """The address without a slash at its end."""
        return f"{self.scheme}://{self.place}"

    @property
    def slug(self) -> str:
        """The last part of the address, as a name of a local folder."""
        return (
            re.sub(r"[^A-Za-z0-9._-]", "_", self.place.rpartition("/")[2]).strip(".")[:64] or "root"
        )

    def name(self, name: str) -> str:
        """A file of the folder, for messages."""
        return f"{self}/{escape(name)}"


def is_remote(root: str | os.PathLike[str] | None) -> bool:
    """Return True if a root is an address on a server and not a local path."""
    return isinstance(root, str) and _REMOTE.match(root) is not None


def check_root(root: str | None) -> None:
    """Refuse an address that cannot be read, before anything else is done.

    Raises:
        ConfigError: See `parse_address`.
    """
    if root is not None:
        # Also of an address that is mistyped, so that it looks like a path.
        check_no_credentials(root, "data.root")
        if is_remote(root):
            parse_address(root)


def parse_address(root: str) -> Address:
    """Read the address of a folder.

    Raises:
        ConfigError: It holds credentials, which are not repeated, or it is none that can be read.
    """
    check_no_credentials(root, "data.root")
    scheme, _, folder = root.partition("://")
    scheme, folder = scheme.lower(), folder.rstrip("/")
    address = escape(root)
    if "::" in scheme or scheme in _WRAPPERS:
        raise ConfigError(
            f"data.root={address}: addresses that read through another one are not supported; "
            "unpack it"
        )
    if scheme in _LOCAL:
        raise ConfigError(f"data.root={address}: give a local folder as a plain path")
    if "?" in folder or (scheme in WEB and "#" in folder):
        raise ConfigError(
            f"data.root={address.partition('?')[0]}: a root has nothing behind a '?' or '#'"
        )
    if ".." in folder.split("/"):
        raise ConfigError(f"data.root={address}: write it without '..'")
    if not folder or (scheme in WEB and not urlsplit(f"{scheme}://{folder}").hostname):
        raise ConfigError(f"data.root={address} names no folder: write {scheme}://PLACE/FOLDER")
    return Address(scheme, folder)
