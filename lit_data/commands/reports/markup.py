"""HTML and SVG from plain functions: every text is escaped, and every attribute."""

import html
import re
from collections.abc import Iterable, Mapping
from typing import Final

Attributes = Mapping[str, str | float | None]

_VOID: Final = frozenset(("br", "col", "hr", "img", "link", "meta"))
_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, those that turn the direction of what follows, and halves of surrogate pairs."""


class Markup(str):
    """Text that is HTML already, and not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Text as HTML that shows it, in elements and in attributes."""
    return text if isinstance(text, Markup) else Markup(html.escape(_UNPRINTABLE.sub("\ufffd", text)))


def element(name: str, attributes: Attributes | None = None, *children: str) -> Markup:
    """An element.

    Args:
        name: Of the element.
        attributes: Those that are none are left out.
        children: Text, which is escaped, or `Markup`.
    """
    found = [f' {key}="{escape(str(value))}"' for key, value in (attributes or {}).items() if value is not None]
    if name in _VOID:
        return Markup(f"<{name}{''.join(found)}>")
    return Markup(f"<{name}{''.join(found)}>{''.join(map(escape, children))}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after the other, as HTML."""
    return Markup(escape(between).join(map(escape, parts)))


def break_name(name: str) -> Markup:
    """A name that may go on in the next line after its dots, slashes and underscores."""
    return join(re.split(r"(?<=[./_=])", name), Markup("<wbr>"))


def make_table(head: Iterable[str], rows: Iterable[Iterable[str]], attributes: Attributes | None = None) -> Markup:
    """A table whose first column names the rows; wide ones scroll.

    Args:
        head: A title for each column.
        rows: Text or `Markup` for each cell.
        attributes: Of the table.
    """
    titles = join(element("th", {"scope": "col"}, break_name(title)) for title in head)
    body = join(element("tr", None, *(_make_cell(number, text) for number, text in enumerate(cells))) for cells in rows)
    head_row = element("thead", None, element("tr", None, titles)) if titles else Markup()
    table = element("table", attributes, head_row, element("tbody", None, body))
    return element("div", {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": "table"}, table)


def _make_cell(number: int, text: str) -> Markup:
    if text.startswith(("<td", "<th")) and isinstance(text, Markup):
        return text
    return element("td", None, text) if number else element("th", {"scope": "row"}, text)
