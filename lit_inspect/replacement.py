"""Files that replace others as a whole; lit_data writes its files this way too, without NumPy."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing_by_path(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` at the end; after an error it is removed.

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
