"""Names of a package whose modules are imported on first access."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offer(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Dotted name of the package.
        modules: Module below the package that defines each name.
    """

    def find(name: str) -> Any:  # noqa: ANN401 - whatever the module has
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find, lambda: sorted(modules)
