"""The page by which a web server lists a folder."""

import os
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the link of an anchor."""
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def read_index(page: str, url: str) -> tuple[list[str], list[str]]:
    """Find what an index page lists; links to anywhere else, and those that only sort the page, are left out.

    Args:
        page: HTML.
        url: Of the page, with a slash at its end.

    Returns:
        Names of files and of folders below that page, not escaped; those of folders without a slash.
    """
    parser = _Links()
    parser.feed(page)
    here = urlsplit(url)
    files, folders = dict[str, None](), dict[str, None]()  # sets that keep the order
    for link in parser.found:
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
    """The address of a file below a folder, escaped."""
    return f"{root}/{quote(os.fsencode(name))}"
