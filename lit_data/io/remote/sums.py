"""Lists of files with their SHA-256 sums, as ``sha256sum`` writes them; or of names alone."""

import re
from typing import Final

from lit_data.errors import DataError, escape

SUMS_NAME: Final = "SHA256SUMS"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")


def parse_list(content: bytes, what: str) -> dict[str, str | None]:
    """Read a list: each line is a name, or a SHA-256 sum and a name; empty lines and those with ``#`` are left out.

    Args:
        content: UTF-8 text.
        what: Address of the list, for messages.

    Returns:
        For each name its sum in small letters, or none.

    Raises:
        DataError: It is no such text, is empty, or states two sums for one name.
    """
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: is no text in UTF-8") from error
    found: dict[str, str | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.lstrip().startswith("<"):
            raise DataError(f"{what}, line {number}: is HTML and no list of files: {escape(line[:80])}")
        match = _LINE.fullmatch(line)
        stated, name = (match[1].lower(), match[2]) if match else (None, line.strip())
        name = name.removeprefix("./")
        if found.setdefault(name, stated) != stated:
            raise DataError(f"{what}, line {number}: {escape(name)} is there twice, with other sums")
    if not found:
        raise DataError(f"{what}: names no file")
    return found
