"""Names that a package offers, whose modules are imported when a name is asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offer(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its dotted name.
        modules: For each name that it offers the module below it that has it.
    """

    def find(name: str) -> Any:  # noqa: ANN401 - whatever the module has
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find, lambda: sorted(modules)
