"""Files that are replaced as a whole; lit_data writes its files this way too, without NumPy."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing_by_path(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` at the end; after an error it is removed.

    Links are not followed, and the file is not synchronized to disk.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".lit_data-{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, path)  # noqa: PTH105 - of a path that may hold any bytes
    finally:
        with suppress(OSError):  # it was renamed, or another error is raised
            part.unlink(missing_ok=True)
