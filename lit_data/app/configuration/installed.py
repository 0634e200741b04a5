"""Configurations of installed packages, by the entry point ``lit_data.conf``."""

from functools import lru_cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lit_data.core.wings import guard, list_entries, report

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

    One that cannot be used is named on stderr and skipped.
    """
    packages = []
    for entry in list_entries(GROUP):
        folder = _find_folder(entry)
        if folder is not None:
            packages.append(ConfPackage(entry.value, folder))
    return tuple(packages)


def _find_folder(entry: EntryPoint) -> Path | None:
    # `find_spec` imports the packages above it
    spec = guard(entry, lambda: (find_spec(entry.value),))
    if spec is None:
        return None
    folders = spec[0].submodule_search_locations if spec[0] else None
    if not folders:
        report(entry, "is not an installed package")
        return None
    return Path(folders[0])
