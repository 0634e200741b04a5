"""Wings as the core sees them, by what their packages say."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import lit_data.wings


def list_wings() -> Iterator[ModuleType]:
    """Yield the packages of all wings, each of which imports the rest of its wing only when it is used."""
    for module in iter_modules(lit_data.wings.__path__):
        yield import_module(f"{lit_data.wings.__name__}.{module.name}")


def list_brought(attribute: str) -> dict[str, str]:
    """Return what all wings say under one name: commands, and what is known of each."""
    brought: dict[str, str] = {}
    for wing in list_wings():
        brought |= getattr(wing, attribute, {})
    return brought


def find_part(attribute: str, name: str) -> Any:  # noqa: ANN401 - a class or function
    """Import what a wing brings: `attribute` of its package has its dotted name under this name."""
    module, _, part = list_brought(attribute)[name].rpartition(".")
    return getattr(import_module(module), part)


def recognise(folder: Path, *, has_images: bool) -> Iterator[str]:
    """Yield the experiments of wings that a folder may be for.

    Args:
        folder: Of a dataset.
        has_images: Images were found in it, and are no volumes.
    """
    for wing in list_wings():
        if hasattr(wing, "recognise"):
            yield from wing.recognise(folder, has_images=has_images)
