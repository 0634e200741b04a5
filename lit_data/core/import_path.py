"""Import path: the environment, and the folder of a command only on request."""

import os
import sys
from collections.abc import Sequence

_STARTED_IN = "LIT_DATA_STARTED_IN"
"""Environment variable with the folder that a command was started in, also for child processes."""
_admitted: list[str] = []


def leave_current_folder() -> None:
    """Remove the current folder, which may not be trusted, from the import path.

    ``python -m`` puts it first. A file ``torch.py`` in it, or the metadata of a seemingly installed
    package, would be enough to run code. Python processes that this one starts do the same. The
    folder stays if ``PYTHONPATH`` names it, or if this package is in it.
    """
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return
    os.environ.setdefault(_STARTED_IN, folder)
    os.environ["PYTHONSAFEPATH"] = "1"
    typed = os.environ.get("PYTHONPATH", "")
    entries = typed.split(os.pathsep) if typed else []
    # Relative entries would mean other folders in a child with another working folder.
    named = [os.path.abspath(entry) for entry in entries if entry]
    if typed:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    if folder in named or _holds_this_package(folder):
        return
    if _is_same(sys.path[0], folder):
        del sys.path[0]
    if "" in entries:  # from PYTHONPATH=$PYTHONPATH:lib, also the current folder
        _remove_first(folder)


def _holds_this_package(folder: str) -> bool:
    root = os.path.abspath(__file__)
    for _ in range(3):
        root = os.path.dirname(root)
    return root == folder


def _is_same(entry: str, folder: str) -> bool:
    return os.path.abspath(entry) == folder


def _remove_first(folder: str) -> None:
    for number, entry in enumerate(sys.path):
        if _is_same(entry, folder):
            del sys.path[number]
            return


def find_left_folder() -> str | None:
    """Return the folder that the command of this process was started in, or None without a command."""
    return os.environ.get(_STARTED_IN)


def admit_packages(packages: Sequence[str]) -> None:
    """Allow imports of packages from the folder that the command was started in, after all others.

    Args:
        packages: Names that the user typed; packages that are found elsewhere change nothing.
    """
    from importlib.util import find_spec

    folder = find_left_folder()
    for package in packages:
        name = package.partition(".")[0]
        if folder is None or folder in sys.path or find_spec(name) is not None:
            continue
        path = os.path.join(folder, name)
        if os.path.isdir(path) or os.path.isfile(f"{path}.py"):
            sys.path.append(folder)
            _admitted.append(folder)


def list_folders() -> list[str]:
    """Return the import path for a child, which admits packages by itself."""
    return [entry for entry in sys.path if os.path.isabs(entry) and entry not in _admitted]
