"""Configurations of installed packages, by the entry point ``lit_data.conf``."""

from functools import lru_cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lit_data.core.wings import list_entries, refuse_entry

GROUP = "lit_data.conf"


class ConfPackage(NamedTuple):
    """A package of configuration files.

    Attributes:
        package: Its dotted name, such as ``my_project.conf``.
        folder: Its files, laid out like ``lit_data/conf``.
    """

    package: str
    folder: Path

    @property
    def trusted(self) -> str:
        """Top-level package, whose classes and functions configurations may name."""
        return self.package.partition(".")[0]


@lru_cache(maxsize=1)
def list_conf_packages() -> tuple[ConfPackage, ...]:
    """List what installed packages name below ``[project.entry-points."lit_data.conf"]``.

    Raises:
        ConfigError: A named package cannot be found.
    """
    return tuple(ConfPackage(entry.value, _find_folder(entry)) for entry in list_entries(GROUP))


def _find_folder(entry: EntryPoint) -> Path:
    try:
        spec = find_spec(entry.value)  # imports the packages above it
    except Exception as error:
        fault = f"cannot be imported ({error})"
        raise refuse_entry(entry, "configurations", fault) from error
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise refuse_entry(entry, "configurations", "is not an installed package")
    return Path(folders[0])
