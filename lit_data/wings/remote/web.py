"""Folders of web servers, listed by a file in them, or otherwise by their index pages."""

import os
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from typing_extensions import override

from lit_data.core.errors import DataError
from lit_data.core.hosts import open_socket
from lit_data.images.scope import SUMS_NAME, Scope, find_fault, parse_list
from lit_data.wings.remote.connection import MAX_LIST_BYTES, Connection, RemoteFile, call_each
from lit_data.wings.remote.faults import UnreachableError

_DEEPEST = 32
_MOST_PAGES = 100_000
_NO_HEAD = (405, 501)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the link of an anchor."""
        target = dict(attrs).get("href") if tag == "a" else None
        if target:
            self.targets.append(target)


def read_index(page: str, url: str) -> tuple[list[str], list[str]]:
    """List the files and folders of an index page.

    Links to other places, and those that only sort the page, are skipped.

    Args:
        page: HTML.
        url: Address of the page, with a slash at its end.

    Returns:
        Names of files and of folders in that page, unescaped; folders without a slash.
    """
    parser = _Links()
    parser.feed(page)
    here = urlsplit(url)
    files, folders = dict[str, None](), dict[str, None]()  # sets that keep the order
    for link in parser.targets:
        try:
            there = urlsplit(urljoin(url, link.strip()))
        except ValueError:
            continue
        if there.query or (there.scheme, there.netloc) != (here.scheme, here.netloc):
            continue
        if not there.path.startswith(here.path) or there.path == here.path:
            continue
        name = unquote(there.path[len(here.path) :], errors="surrogateescape")
        (folders if name.endswith("/") else files)[name.rstrip("/")] = None
    return [name for name in files if name], [name for name in folders if name]


def join_url(root: str, name: str) -> str:
    """Return the escaped address of a file in a folder."""
    return f"{root}/{quote(os.fsencode(name))}"


async def _open_session(**settings: Any) -> Any:  # noqa: ANN401 - of aiohttp
    """Open a session that never contacts a link-local address, even through names or redirects."""
    import aiohttp

    connector = aiohttp.TCPConnector(socket_factory=open_socket)
    return aiohttp.ClientSession(connector=connector, **settings)


class WebConnection(Connection):
    """A folder of a web server."""

    @override
    def _choose_settings(self, conf: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        self._refuse_s3_options()
        client = dict(conf.get("client_kwargs") or {})
        # Files as stored: servers announce .nii.gz as compressed transfer, which clients would
        # decompress.
        headers = dict(client.pop("headers", {})) | {"Accept-Encoding": "identity"}
        timeout_s = self.options.timeout_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        settings = {
            "trust_env": True,
            "auto_decompress": False,
            "timeout": timeout,
            "headers": headers,
        }
        return {"client_kwargs": client | settings, "get_client": _open_session}

    @override
    async def list_files(self, scope: Scope) -> Sequence[RemoteFile]:
        sums = await self._read_list()
        if sums is None:
            sums = dict.fromkeys(await self._read_pages())
        files, good_names = [], []
        for name in filter(scope.wants, sums):
            if find_fault(name):
                # `check_names` reports it: no such address is requested.
                files.append(RemoteFile(name, 0, "", 0))
            else:
                good_names.append(name)
        look = partial(self._look, sums)
        return files + await call_each(look, good_names, self.options.connections)

    @override
    def full_path(self, name: str) -> str:
        return join_url(self.address.url, name)

    async def _read_list(self) -> Mapping[str, str | None] | None:
        """Return the list of files in the folder; None if there is none."""
        name = self.options.file_list or SUMS_NAME
        try:
            return parse_list(await self.read(name), self.address.name(name))
        except UnreachableError:
            raise
        except DataError:
            if self.options.file_list is not None:
                raise
            return None

    async def _read_pages(self) -> list[str]:
        """Return the names of all files, from the index pages of the folder and its subfolders."""
        names: list[str] = []
        level = [""]  # folders of one depth, with a slash at their ends
        pages = 0
        for _ in range(_DEEPEST):
            pages += len(level)
            if not level:
                return names
            if pages > _MOST_PAGES:
                break
            contents = await call_each(self._read_page, level, self.options.connections)
            next_level: list[str] = []
            for folder, (files, folders) in zip(level, contents, strict=True):
                names += [folder + name for name in files]
                next_level += [f"{folder}{name}/" for name in folders if not name.startswith(".")]
            level = next_level
        raise DataError(
            f"{self.address}: its index pages never end (more than {_DEEPEST} levels or "
            f"{_MOST_PAGES} pages)"
        )

    async def _read_page(self, folder: str) -> tuple[list[str], list[str]]:
        url = self.full_path(folder) if folder else f"{self.address.url}/"
        page, kind, final_url = await self.insist(lambda: self._get(url), folder)
        if "html" not in kind:
            raise DataError(
                f"{self.address.name(folder)}: not an index page but {kind or 'something else'}; "
                f"let the server list folders, or store a list of its files there ({SUMS_NAME}, "
                "see docs/remote.md)"
            )
        if not final_url.endswith("/"):
            raise DataError(
                f"{self.address.name(folder)}: leads to a page that is not a folder; check "
                "data.root"
            )
        return read_index(page.decode("utf-8", "replace"), final_url)

    async def _get(self, url: str) -> tuple[bytes, str, str]:
        session = await self._fs.set_session()
        async with session.get(self._fs.encode_url(url)) as response:
            response.raise_for_status()
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > MAX_LIST_BYTES:
                    raise DataError(
                        f"{self.address}: an index page of more than {MAX_LIST_BYTES} bytes"
                    )
            return bytes(page), response.headers.get("Content-Type", ""), str(response.url)

    async def _look(self, sums: Mapping[str, str | None], name: str) -> RemoteFile:
        """Request size and version of a file."""
        headers = await self.insist(lambda: self._head(self.full_path(name)), name)
        if not headers.get("Content-Length", "").isdigit():
            raise DataError(
                f"{self.address.name(name)}: the server states no size (Content-Length)"
            )
        size_bytes = int(headers["Content-Length"])
        changed = headers.get("Last-Modified", "")
        version = sums[name] or headers.get("ETag", "") or changed
        return RemoteFile(name, size_bytes, version, _read_seconds(changed), sha256=sums[name])

    async def _head(self, url: str) -> Mapping[str, str]:
        """Return the headers of a file; some servers send them only with its content."""
        session = await self._fs.set_session()
        address = self._fs.encode_url(url)
        async with session.head(address, allow_redirects=True) as response:
            if response.status not in _NO_HEAD:
                response.raise_for_status()
                return response.headers  # type: ignore[no-any-return]
        async with session.get(address) as response:
            response.raise_for_status()
            return response.headers  # type: ignore[no-any-return]


def _read_seconds(text: str) -> int:
    try:
        return max(0, int(parsedate_to_datetime(text).timestamp()))
    except (TypeError, ValueError, OverflowError):
        return 0
