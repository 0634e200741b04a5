"""Python processes with the imports of this one, without those of their working folder."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping

from lit_data.core.import_path import list_folders


def python_command(*words: str) -> list[str]:
    """Return a command for this Python interpreter."""
    # -P keeps the working folder, which may not be trusted, off the import path.
    return [sys.executable, "-P", *words]


def python_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for `python_command`, with the imports of this process.

    Args:
        changes: Further variables.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(list_folders()), **(changes or {})}


def watch_parent() -> None:
    """End this process within a second after its parent ends.

    A killed parent cannot notify a child, which would wait for tasks forever.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # With a fork server, `is_alive` is not enough: the server lives as long as its children.
    parent, parent_id = multiprocessing.parent_process(), os.getppid()
    while parent and parent.is_alive() and os.getppid() == parent_id:
        parent.join(1)
    os.kill(os.getpid(), signal.SIGKILL)
