"""Wings: packages of lit_data, and installed ones, that list what they add to the core."""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import lit_data.wings
from lit_data.core.errors import ConfigError, escape
from lit_data.core.import_path import find_left_folder

GROUP = "lit_data.wings"


def list_wings() -> Iterator[ModuleType]:
    """Yield the packages of all wings, each of which imports the rest of its wing only when used.

    Those of lit_data come first. Others are named by installed packages in
    ``[project.entry-points."lit_data.wings"]``, and are imported when the iteration reaches them.

    Raises:
        ConfigError: A wing of an installed package cannot be imported.
    """
    yield from _list_own()
    for entry in list_entries(GROUP):
        try:
            yield import_module(entry.value)
        except Exception as error:
            raise refuse_entry(entry, "commands", f"cannot be imported ({error})") from error


def _list_own() -> Iterator[ModuleType]:
    # by their place: a checkout that is not installed has no entry points
    for module in iter_modules(lit_data.wings.__path__):
        yield import_module(f"{lit_data.wings.__name__}.{module.name}")


def list_brought(attribute: str) -> dict[str, str]:
    """Return the entries of the wings of lit_data under one attribute, such as commands."""
    brought: dict[str, str] = {}
    for wing in _list_own():
        brought |= getattr(wing, attribute, {})
    return brought


def find_part(attribute: str, name: str) -> Any:  # noqa: ANN401 - a class or function
    """Import an object of a wing, whose dotted name is under `name` in `attribute` of its package."""
    module, _, part = list_brought(attribute)[name].rpartition(".")
    return getattr(import_module(module), part)


def recognize(folder: Path, *, has_images: bool) -> Iterator[str]:
    """Yield the experiments of wings that a folder may be for.

    Args:
        folder: Folder of a dataset.
        has_images: True if images were found in it that are not volumes.
    """
    for wing in list_wings():
        if hasattr(wing, "recognize"):
            yield from wing.recognize(folder, has_images=has_images)


def list_entries(group: str) -> list[EntryPoint]:
    """List the entry points of installed packages in a group, sorted by name."""
    entries = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return [entry for entry in entries if not _lies_here(entry.dist)]


def _lies_here(dist: Distribution | None) -> bool:
    """Return True for files of a package in a folder that may not be trusted.

    This is the current folder, or the one that the command was started in.
    """
    here = {Path.cwd(), Path(find_left_folder() or "").resolve()}
    return dist is None or Path(str(dist.locate_file(""))).resolve() in here


def refuse_entry(entry: EntryPoint, what: str, fault: str) -> ConfigError:
    """Make an error that names the owner of an entry point.

    Args:
        entry: The entry point.
        what: Thing that its owner names by it.
        fault: Problem of the entry point.
    """
    owner = escape(entry.dist.name if entry.dist else "a package")
    return ConfigError(
        f"{owner} names its {what} as {escape(entry.value)} (entry point {entry.group}), which "
        f"{fault}: install {owner} again, or uninstall it"
    )
