"""Configurations and commands of installed packages, by the entry points ``lit_data.conf`` and ``lit_data.wings``."""

from functools import lru_cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from lit_data.core.errors import ConfigError, escape
from lit_data.core.import_path import find_left_folder

GROUP = "lit_data.conf"
WINGS = "lit_data.wings"


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
    return tuple(ConfPackage(entry.value, _find_folder(entry)) for entry in _list_entries(GROUP))


@lru_cache(maxsize=1)
def list_wings() -> tuple[ModuleType, ...]:
    """Import the packages that installed ones name below ``[project.entry-points."lit_data.wings"]``.

    Each says its commands as a wing of lit_data does, see `lit_data.app`.

    Raises:
        ConfigError: One cannot be imported.
    """
    wings = []
    for entry in _list_entries(WINGS):
        try:
            wings.append(import_module(entry.value))
        except Exception as error:
            raise _refuse(entry, WINGS, f"cannot be imported ({error})") from error
    return tuple(wings)


def _list_entries(group: str) -> list[EntryPoint]:
    entries = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return [entry for entry in entries if not _lies_here(entry.dist)]


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
        raise _refuse(entry, GROUP, "is not an installed package")
    return Path(folders[0])


def _refuse(entry: EntryPoint, group: str, fault: str) -> ConfigError:
    owner = escape(entry.dist.name if entry.dist else "a package")
    what = "configurations" if group == GROUP else "commands"
    return ConfigError(
        f"{owner} names its {what} as {escape(entry.value)} (entry point {group}), which {fault}: "
        f"install {owner} again, or uninstall it"
    )
