"""Refused hosts: link-local addresses, where clouds give credentials to any client."""

import asyncio
import ipaddress
import re
import socket
from typing import Any
from urllib.parse import urlsplit

from lit_data.core.errors import ConfigError, escape

_METADATA = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"))
)
"""Services of AWS and Google by IPv6, of Alibaba and Oracle, outside the link-local ranges."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LAST_32 = 2**32 - 1
_NUMBERS = re.compile(r"[0-9a-fA-FxX.]+")

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_host(url: str, key: str) -> None:
    """Refuse an address whose host is a link-local address in any notation.

    Args:
        url: The address, with its scheme.
        key: Key of the option with the address.

    Raises:
        ConfigError: The host is link-local, or cannot be parsed.
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError as error:
        raise ConfigError(f"{key}={escape(url)[:200]}: {error}") from error
    address = _parse(host)
    if address is not None and _is_refused(address):
        raise ConfigError(f"{key}={escape(url)[:200]}: {_describe(host)}")


async def check_resolved(url: str, key: str) -> None:
    """Refuse an address whose host name resolves to a link-local address; unknown names pass.

    Args:
        url: The address, with its scheme.
        key: Key of the option with the address.

    Raises:
        ConfigError: The name resolves to a link-local address.
    """
    host = urlsplit(url).hostname or ""
    try:
        targets = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return  # the code that connects reports this, and tries again
    for *_, target in targets:
        address = _parse(str(target[0]))
        if address is not None and _is_refused(address):
            raise ConfigError(f"{key}={escape(url)[:200]}: {_describe(str(target[0]))}")


def open_socket(info: tuple[Any, ...]) -> socket.socket:
    """Return a socket for the resolved address of a name, even after a redirection.

    Args:
        info: Entry from `socket.getaddrinfo`.

    Raises:
        ConfigError: The address is link-local.
    """
    family, kind, protocol, _, target = info
    address = _parse(str(target[0]))
    if address is not None and _is_refused(address):
        raise ConfigError(_describe(str(target[0])))
    return socket.socket(family=family, type=kind, proto=protocol)


def _describe(host: str) -> str:
    return (
        f"{escape(host)[:80]} is a link-local address, where clouds serve credentials; no "
        "request is sent there. Name the server that holds the files"
    )


def _parse(host: str) -> Ip | None:
    """Return the address that a host denotes, also for 2852039166 or 0xa9fea9fe, or None for a name."""
    host = host.strip("[]").partition("%")[0].rstrip(".")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if not _NUMBERS.fullmatch(host):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _is_refused(address: Ip) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & _LAST_32)
        if inner is not None and _is_refused(inner):
            return True
    return address.is_link_local or address in _METADATA
