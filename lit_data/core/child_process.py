"""Processes of Python that import what this one does, and nothing of the folder they stand in."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping

from lit_data.core.import_path import list_folders


def python_command(*words: str) -> list[str]:
    """Return a command of this Python."""
    # -P keeps the working folder, which may be anybody's, off the import path.
    return [sys.executable, "-P", *words]


def python_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for `python_command`, whose imports are those of this process.

    Args:
        changes: Further variables.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(list_folders()), **(changes or {})}


def watch_parent() -> None:
    """End this process within a second of the death of its parent.

    A parent that is killed cannot say so, and a child that waits for tasks would wait for ever.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Under a fork server, `is_alive` alone is not enough: the server lives as long as its children.
    parent, parent_id = multiprocessing.parent_process(), os.getppid()
    while parent and parent.is_alive() and os.getppid() == parent_id:
        parent.join(1)
    os.kill(os.getpid(), signal.SIGKILL)
