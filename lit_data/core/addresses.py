"""Options and addresses of folders on servers, neither of which may contain credentials."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args
from urllib.parse import urlsplit

from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError, escape
from lit_data.core.hosts import check_host
from lit_data.core.secrets import WHERE_CREDENTIALS_BELONG, check_no_credentials
from lit_data.core.types import PathText

Offline = Literal["warn", "error", "always"]

_MOST_CONNECTIONS = 256  # more would only wait: one event loop moves the bytes
_MOST_RETRIES = 100

WEB = ("http", "https")
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
SHARDS_SUFFIX = ".shards"
_LOCAL = ("file", "local")
_WRAPPERS = (
    "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache", "generic",
    "libarchive", "reference", "simplecache", "tar", "zip",
)  # fmt: skip
"""File systems of fsspec that read through another one, or have their content in the address."""

_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")
"""Schemes of stores that replace files atomically."""

_TARGET = "lit_data.core.addresses.RemoteOptions"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """Options for reading a folder on a server, without credentials, which belong to the machine.

    Args:
        connections: Number of files that are read at a time.
        retries: Number of retries of a read after a timeout, a broken connection or an overloaded
            server.
        backoff_s: Longest wait before the first retry; each further one may wait twice as long, up
            to 30 s.
        timeout_s: Longest time without receiving a byte.
        max_bytes: Most bytes of all wanted files together; more are refused before anything is
            read. None for no limit.
        checksums: Compare with the checksums that the server states; sizes are always compared.
        file_list: File below the root that lists the files, with or without SHA-256 sums. None for
            ``SHA256SUMS``, if it exists.
        offline: Behavior if the server cannot be reached: `warn` continues with a complete mirror,
            `error` fails. `always` never contacts the server.
        endpoint_url: URL of an S3-compatible server.
        region: Region of S3.
        anon: Read a public S3 bucket without credentials.

    Raises:
        ConfigError: A value is not allowed.
    """

    connections: int = 16
    retries: int = 5
    backoff_s: float = 0.5
    timeout_s: float = 60.0
    max_bytes: int | None = 100 * 2**30
    checksums: bool = True
    file_list: str | None = None
    offline: Offline = "warn"
    endpoint_url: str | None = None
    region: str | None = None
    anon: bool = False

    def __post_init__(self) -> None:
        check_count("remote.connections", self.connections, 1)
        check_count("remote.retries", self.retries, 0)
        for name, most in (("connections", _MOST_CONNECTIONS), ("retries", _MOST_RETRIES)):
            value = getattr(self, name)
            if value > most:
                raise ConfigError(f"remote.{name}={value} is not allowed: the maximum is {most}")
        for name in ("backoff_s", "timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ConfigError(f"remote.{name}={value!r} is not allowed: give seconds above 0")
        if self.max_bytes is not None:
            check_count("remote.max_bytes", self.max_bytes, 1)
        check_choice("remote.checksums", self.checksums, (True, False))
        check_choice("remote.anon", self.anon, (True, False))
        check_choice("remote.offline", self.offline, get_args(Offline))
        check_no_credentials(self.endpoint_url, "remote.endpoint_url")
        if self.endpoint_url and not self.endpoint_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"remote.endpoint_url={self.endpoint_url!r} must begin with http:// or https://"
            )
        if self.endpoint_url:
            check_host(self.endpoint_url, "remote.endpoint_url")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a folder on a server.

    Args:
        scheme: Scheme in lower case.
        place: Part after ``://``, without a trailing slash.
        key: Key of the option with the address, for messages.
    """

    scheme: str
    place: str
    key: str = "data.root"

    def __str__(self) -> str:
        return escape(f"{self.scheme}://{self.place}")

    @property
    def url(self) -> str:
        """Address without a trailing slash."""
        return f"{self.scheme}://{self.place}"

    @property
    def slug(self) -> str:
        """Last part of the address, as the name of a local folder."""
        return (
            re.sub(r"[^A-Za-z0-9._-]", "_", self.place.rpartition("/")[2]).strip(".")[:64] or "root"
        )

    def name(self, name: str) -> str:
        """Return the address of a file in the folder, for messages."""
        return f"{self}/{escape(name)}"


def is_remote(root: PathText | None) -> bool:
    """Return True if a root is an address on a server instead of a local path."""
    return isinstance(root, str) and _REMOTE.match(root) is not None


def is_sharded(root: PathText | None) -> bool:
    """Return True if a root has the name of a sharded dataset."""
    return root is not None and str(root).rstrip("/").endswith(SHARDS_SUFFIX)


def check_root(root: str | None) -> None:
    """Refuse an address that cannot be read, before anything else is done.

    Raises:
        ConfigError: See `parse_address`.
    """
    if root is not None:
        # Also check a mistyped address, which looks like a path.
        check_no_credentials(root, "data.root")
        if is_remote(root):
            parse_address(root)


def parse_address(root: str, key: str = "data.root") -> Address:
    """Parse the address of a folder.

    Args:
        root: The address.
        key: Key of the option with the address.

    Raises:
        ConfigError: The address contains credentials, which the error does not repeat, or is not
            supported.
    """
    check_no_credentials(root, key)
    scheme, _, folder = root.partition("://")
    scheme, folder = scheme.lower(), folder.rstrip("/")
    address = escape(root)
    if "::" in scheme or scheme in _WRAPPERS:
        raise ConfigError(
            f"{key}={address}: addresses that read through another one are not supported; unpack it"
        )
    if scheme in _LOCAL:
        raise ConfigError(f"{key}={address}: give a local folder as a plain path")
    if "?" in folder or (scheme in WEB and "#" in folder):
        raise ConfigError(
            f"{key}={address.partition('?')[0]}: an address must not contain '?' or '#'"
        )
    if ".." in folder.split("/"):
        raise ConfigError(f"{key}={address}: write it without '..'")
    if not folder or (scheme in WEB and not urlsplit(f"{scheme}://{folder}").hostname):
        raise ConfigError(f"{key}={address} does not name a folder: write {scheme}://PLACE/FOLDER")
    if scheme not in _STORES:  # what follows is a host, not the name of a bucket
        check_host(f"{scheme}://{folder}", key)
    return Address(scheme, folder, key)


def parse_store(address: str, key: str) -> Address:
    """Parse the address of a folder of results.

    Args:
        address: The address as typed.
        key: Key of the option with the address.

    Raises:
        ConfigError: The address is not supported, or partly written files would be visible there.
    """
    parsed = parse_address(address, key)
    if parsed.scheme not in _STORES:
        raise ConfigError(
            f"{key}={parsed}: results need an object store (s3://, gs://, abfs://), where no "
            f"file is ever half-written, which {parsed.scheme}:// does not guarantee; mount it "
            "and name the folder"
        )
    return parsed


def check_plain(node: object, key: str = "") -> None:
    """Refuse credentials in addresses and beside the options of `RemoteOptions`.

    Args:
        node: Resolved plain data.
        key: Key of the node.

    Raises:
        ConfigError: There are credentials; the error names the key but never its value.
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
    """Refuse words of a command line with credentials in an address.

    Args:
        words: Words such as ``data.root=s3://bucket/folder``.

    Raises:
        ConfigError: There are credentials; the error names the key but never its value.
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
