"""How processes of Python are started that import what this one does, and nothing of the folder they stand in."""

import os
import sys
from collections.abc import Mapping, Sequence


def python_command(*words: str) -> list[str]:
    """Return a command of this Python; ``-P`` keeps the working folder, which may be anybody's, off the import path."""
    return [sys.executable, "-P", *words]


def python_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for `python_command`, in which all that this process can import is
    found.

    Args:
        changes: Further variables.
    """
    places: Sequence[str] = [
        place for place in sys.path if place
    ]  # the empty one stands for the working folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **(changes or {})}
