"""Groups and experiments that installed packages bring, by the entry point ``lit_data.conf``."""

from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lit_data.core.errors import ConfigError, escape
from lit_data.core.import_path import find_left_folder

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
    packages = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if not _lies_here(entry.dist):
            packages.append(ConfPackage(entry.value, _find_folder(entry)))
    return tuple(packages)


def _lies_here(dist: Distribution | None) -> bool:
    """Return True for files of a package in a folder that may be a stranger's.

    That is the current one, or the one that the command was started in, where it goes elsewhere.
    """
    here = {Path.cwd(), Path(find_left_folder() or "").resolve()}
    return dist is None or Path(str(dist.locate_file(""))).resolve() in here


def _find_folder(entry: EntryPoint) -> Path:
    try:
        spec = find_spec(entry.value)
    except (ImportError, ValueError):
        spec = None
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        owner = entry.dist.name if entry.dist else "a package"
        raise ConfigError(
            f"{escape(owner)} names its configurations as {escape(entry.value)} (entry point "
            f"{GROUP}), which is no package that is installed: install {escape(owner)} again, or "
            "uninstall it"
        )
    return Path(folders[0])
