"""Find an object by its dotted name, and know whether it is one a configuration may name."""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from lit_data.commands.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError

_REFUSED = ("lit_data.cli", "lit_data.commands")  # they run commands and build objects themselves


def is_below(name: str, places: Sequence[str]) -> bool:
    """Whether a dotted name is one of `places` or lies below one, and not in the command line itself."""
    dotted = f"{name}."
    refused = any(dotted.startswith(f"{place}.") for place in _REFUSED)
    return not refused and any(dotted.startswith(f"{place}.") for place in places)


def resolve_target(target: str, key: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """Import what a checked target names, and check what was found under its own name.

    Raises:
        ConfigError: nothing is found, or it is not a class or a module's function at an allowed place.
    """
    found = _locate(target, key)
    if not isinstance(found, type) and not (isinstance(found, FunctionType) and "." not in found.__qualname__):
        raise ConfigError(f"'{key}' is '{target}', which is neither a class nor a function of a module.")
    own_name = f"{found.__module__}.{found.__qualname__}"
    if not is_below(own_name, allowed):
        raise ConfigError(f"'{key}' is '{target}', which is really '{own_name}' and not allowed.")
    return found


def _locate(target: str, key: str) -> object:
    path, _, rest = target.partition(".")
    found: object = _import(path, target, key)
    for part in rest.split("."):
        path = f"{path}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = _import(path, target, key, parent=found)
        else:
            found = getattr(found, part, None)
        if isinstance(found, ModuleType) and found.__name__ != path:
            raise ConfigError(f"'{key}' is '{target}': '{path}' is another name of '{found.__name__}'.")
    return found


def _import(path: str, target: str, key: str, *, parent: ModuleType | None = None) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise ConfigError(f"'{key}' is '{target}', which needs the package '{error.name}'.") from error
        hint = did_you_mean(nearest(path.rpartition(".")[2], dir(parent))) if parent else " Is it installed?"
        raise ConfigError(f"'{key}' is '{target}', but there is no '{path}'.{hint}") from error
