"""Wings: packages of lit_data, and installed ones, that list what they add to the core."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

import lit_data.wings
from lit_data.core.errors import ConfigError, escape
from lit_data.core.import_path import find_left_folder

GROUP = "lit_data.wings"
_Read = TypeVar("_Read")


def list_wings() -> Iterator[ModuleType]:
    """Yield the packages of all wings, each of which imports the rest of its wing only when used.

    Those of lit_data come first. Others are named by installed packages in
    ``[project.entry-points."lit_data.wings"]``, and are imported when the iteration reaches them. One
    that cannot be used is named on stderr and skipped.
    """
    yield from _list_own()
    for _, wing in _list_installed():
        yield wing


def find_tool(command: str) -> str:
    """Return the dotted name of the module of a command that an installed package brings.

    Raises:
        ConfigError: There is no such module.
    """
    for entry, wing in _list_installed():
        if command not in getattr(wing, "TOOLS", {}):
            continue
        name = f"{wing.__name__}.{command.replace('-', '_')}"
        module: str = getattr(wing, "MODULES", {}).get(command, name)
        if guard(entry, partial(find_spec, module)) is None:
            fault = f"lists '{command}', but has no module {escape(module)}"
            raise ConfigError(_blame(entry, fault))
        return module
    raise ConfigError(f"unknown command '{command}'")


def _list_installed() -> Iterator[tuple[EntryPoint, ModuleType]]:
    for entry in list_entries(GROUP):
        wing = guard(entry, partial(import_module, entry.value))
        if wing is None:
            continue
        faults = [name for name in ("TOOLS", "MODULES") if not _maps_text(getattr(wing, name, {}))]
        if faults:
            report(entry, f"needs a dict of texts as {' and '.join(faults)}")
        else:
            yield entry, wing


def _maps_text(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(text, str) for pair in value.items() for text in pair)


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
    for wing in _list_own():
        if hasattr(wing, "recognize"):
            yield from wing.recognize(folder, has_images=has_images)
    for entry, wing in _list_installed():
        if hasattr(wing, "recognize"):
            ask = partial(_list_recognized, wing, folder, has_images=has_images)
            yield from guard(entry, ask) or ()


def _list_recognized(wing: ModuleType, folder: Path, *, has_images: bool) -> list[str]:
    return list(wing.recognize(folder, has_images=has_images))


def list_entries(group: str) -> list[EntryPoint]:
    """List the entry points of installed packages in a group, sorted by name."""
    entries = sorted(_read_entries(group), key=lambda entry: entry.name)
    return [entry for entry in entries if not _lies_here(entry.dist)]


def _read_entries(group: str) -> list[EntryPoint]:
    try:
        return list(entry_points(group=group))
    except Exception:
        return [entry for dist in distributions() for entry in _read_own_entries(dist, group)]


def _read_own_entries(dist: Distribution, group: str) -> list[EntryPoint]:
    try:
        return list(dist.entry_points.select(group=group))
    except Exception as error:
        owner = _name_owner(dist)
        print_once(
            f"entry_points.txt of {owner} cannot be read ({error}): install {owner} again, or "
            "uninstall it. It is skipped."
        )
        return []


def _lies_here(dist: Distribution | None) -> bool:
    """Return True for files of a package in a folder that may not be trusted.

    This is the current folder, or the one that the command was started in.
    """
    here = {Path.cwd(), Path(find_left_folder() or "").resolve()}
    return dist is None or Path(str(dist.locate_file(""))).resolve() in here


def guard(entry: EntryPoint, read: Callable[[], _Read]) -> _Read | None:
    """Return what code of an installed package gives; None if it fails, which is reported.

    What it prints goes to stderr, as stdout belongs to the command.
    """
    try:
        with redirect_stdout(sys.stderr):
            return read()
    except (Exception, SystemExit) as error:
        report(entry, f"fails ({type(error).__name__}: {error})")
        return None


def report(entry: EntryPoint, fault: str) -> None:
    """Name the owner of an entry point that is skipped on stderr, once.

    Args:
        entry: The entry point.
        fault: Problem of the module that it names, as a verb with its object.
    """
    print_once(f"{_blame(entry, fault)}. It is skipped.")


def _blame(entry: EntryPoint, fault: str) -> str:
    owner = _name_owner(entry.dist)
    return (
        f"{escape(entry.value)} of the installed package {owner} (entry point {entry.group}) "
        f"{fault}: install {owner} again, or uninstall it"
    )


def _name_owner(dist: Distribution | None) -> str:
    name = None
    with suppress(Exception):  # what is left of a removed package has no name
        name = dist and dist.name
    return escape(name or Path(getattr(dist, "_path", "a package")).name)


@lru_cache(maxsize=64)
def print_once(line: str) -> None:
    """Print a line on stderr unless this process has done so."""
    print(f"lit_data: {line}", file=sys.stderr)
