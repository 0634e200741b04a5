"""Cells of CSV files: no text is a formula of a spreadsheet or a control code of a terminal."""

import re
from typing import Any

_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4}))")
_BYTES = 0xDC00  # os.fsdecode adds it to a byte that is not UTF-8


def plain_cell(value: Any) -> Any:  # noqa: ANN401 - a cell of any type
    """Return a cell without formulas, control characters and bytes that are not UTF-8.

    A quotation mark begins a text that is written in another way, see `restore_cell`. Names of files and messages may
    not be trusted.
    """
    if not isinstance(value, str):
        return value
    text = _CONTROL.sub(_escape_character, value)
    return f"'{text}" if text != value or _is_marked(value) else value


def restore_cell(cell: Any) -> Any:  # noqa: ANN401 - a cell of any type
    """Return the value of a cell that `plain_cell` made."""
    if not isinstance(cell, str) or not _is_marked(cell):
        return cell
    return _ESCAPED.sub(_read_character, cell[1:])


def _is_marked(text: str) -> bool:
    """Return True for a formula, and for a text that `plain_cell` might have made."""
    rest = text.lstrip("'")
    return rest.startswith(_FORMULA_SIGNS) or (rest != text and bool(_ESCAPED.search(text)))


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    if _BYTES + 0x80 <= code < _BYTES + 0x100:
        return f"\\x{code - _BYTES:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"


def _read_character(match: re.Match[str]) -> str:
    if match[2]:
        return chr(int(match[2], 16))
    code = int(match[1], 16)
    return chr(code if code < 0x80 else code + _BYTES)
