"""Files that take the place of others as a whole; lit_data writes its own so too, without NumPy."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing_by_path(path: Path) -> Iterator[Path]:
    """Give the path of a new file that takes the place of `path` at the end, or leaves nothing behind.

    No link is followed there, and nothing is brought to the disk.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".lit_data-{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, path)  # noqa: PTH105 - of a path that may hold any bytes
    finally:
        with suppress(OSError):  # it has its name; or there is worse to tell
            part.unlink(missing_ok=True)
