"""Objects of a configuration: names are checked and found first, and then called.

Hydra's own ``instantiate`` refuses what is on a list of known dangers (hydra-ecosystem/hydra#3409
shows how that is bypassed) and reads the strings of a node as interpolations once more, so objects
are built here.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf

from lit_data.checks import Made, call_checked
from lit_data.commands.configuration.hydra_node import find_typed
from lit_data.commands.configuration.names import (
    join_key,
    resolve_target,
    resolve_targets,
    to_plain,
)
from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError, LitDataError

log = logging.getLogger(__name__)

_SPECIAL_KEYS = ("_target_", "_args_", "_partial_")
_CHECKED = ("torch", "torchmetrics", "kornia", "lightning")
"""Packages whose constructors refuse wrong options with errors of many kinds."""
_BROUGHT_ALONG = ("synthesis", "augment")  # groups that put themselves below `data`

Node = Container | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Recipe:
    """Objects to build, whose names are checked and found; the configuration is not needed again.

    Attributes:
        plain: Dicts, lists and values.
        key: Where they stand, for messages.
        targets: Classes and functions by the names in ``_target_``.
    """

    plain: Any
    key: str
    targets: Mapping[str, Callable[..., Any]]

    def build(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the target makes
        """Build new objects; for arguments and errors see `instantiate`."""
        if isinstance(self.plain, dict) and "_target_" in self.plain:
            return self._build_object(self.plain, self.key, args, kwargs)
        return self._build(self.plain, self.key)

    def _build(self, plain: Any, key: str) -> Any:  # noqa: ANN401 - YAML data becomes objects
        if isinstance(plain, Mapping):
            if "_target_" in plain:
                return self._build_object(plain, key)
            return {name: self._build(value, join_key(key, name)) for name, value in plain.items()}
        if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
            return [self._build(value, f"{key}[{index}]") for index, value in enumerate(plain)]
        return plain

    def _build_object(
        self,
        plain: Mapping[str, Any],
        key: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the target makes
        target = self.targets[plain["_target_"]]
        _check_special(plain, key)
        positional = (*args, *self._build(plain.get("_args_", []), f"{key}._args_"))
        named = {}
        for name, value in plain.items():
            if name not in _SPECIAL_KEYS:
                named[name] = self._build(value, join_key(key, name))
        named |= kwargs or {}
        is_partial = plain.get("_partial_", False)
        _check_arguments(target, positional, named, key, partial=is_partial)
        if is_partial:
            return functools.partial(target, *positional, **named)
        return _call(target, positional, named, key)


def read_recipe(node: Node) -> Recipe:
    """Resolve a node, check all names in it and import what they stand for; nothing is called.

    Raises:
        ConfigError: a target is refused or not found, or an interpolation leads nowhere.
    """
    key = node._get_full_key("") if isinstance(node, Container) else ""
    plain = to_plain(node)
    return Recipe(plain, key, resolve_targets(plain, key))


def instantiate(node: Node | None, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the target makes
    """Build the object a node describes; nested nodes become objects too.

    Constructors receive plain dicts and lists. ``_partial_: true`` gives the callable with the
    node's arguments bound, ``_args_`` holds positional arguments.

    Args:
        node: a node with ``_target_``, or a dict or list of such nodes, or None.
        args: positional arguments put before those of the node.
        kwargs: arguments that replace or complete those of the node.

    Returns:
        The object; a dict or list of objects for a node without ``_target_``; None for None.

    Raises:
        ConfigError: a target is refused or not found, an argument is unknown or missing, or a class
            of another library refuses its arguments. Errors of lit_data's own classes pass through
            as they are.
    """
    return None if node is None else read_recipe(node).build(*args, **kwargs)


def leave_out_unknown(node: DictConfig, key: str) -> DictConfig:
    """Return the node without what files say for another class.

    So ``model._target_=mine.Net`` is enough. Where the target was typed and its class is none of
    lit_data and derives from none, all keys that were not typed are left out, and logged; of a
    class of lit_data those that it has no argument for. `synthesis` and `augment`, which every
    configuration brings along, are left out of data that take none. A typed key stays, so one that
    is wrong is an error still.

    Args:
        node: The node with a ``_target_``.
        key: Its name.
    """
    typed = find_typed()
    target = resolve_target(node._target_, key)
    arguments = _list_arguments(target)
    names = [str(name) for name in node]
    doubtful: set[str] = set()
    if f"{key}._target_" in typed:
        doubtful = {*names} - {*_SPECIAL_KEYS}
        arguments = arguments if _is_ours(target) else set()
    elif key == "data":
        doubtful = {*_BROUGHT_ALONG} - typed
    typed_here = {name.split(".")[1] for name in typed if name.startswith(f"{key}.")}
    doubtful -= typed_here | arguments
    left_out = [name for name in names if name in doubtful]
    if left_out:
        log.info("%s: %s takes no %s, left out", key, node._target_, ", ".join(left_out))
    remaining = OmegaConf.masked_copy(node, [name for name in names if name not in doubtful])
    remaining._set_parent(node._get_parent())  # interpolations look there
    remaining._set_key(key)  # errors name it
    return remaining


def _is_ours(target: Callable[..., object]) -> bool:
    parents = target.__mro__ if isinstance(target, type) else (target,)
    return any(parent.__module__.startswith("lit_data.") for parent in parents)


def _list_arguments(target: Callable[..., object]) -> set[str]:
    """Names of all arguments.

    Of a class whose ``__init__`` passes ``**kwargs`` on, those of the classes above too.
    """
    names: set[str] = set()
    for function in _list_initialisers(target):
        parameters = inspect.signature(function).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _list_initialisers(target: Callable[..., object]) -> list[Callable[..., object]]:
    if not isinstance(target, type):
        return [target]
    parents = target.__mro__[:-1]
    return [vars(parent)["__init__"] for parent in parents if "__init__" in vars(parent)]


def read_options(kind: Callable[..., Made], node: Container | Mapping[str, Any], key: str) -> Made:
    """Return the options of a command from its node.

    Args:
        kind: Their dataclass, which checks its values itself.
        node: Their names and values.
        key: Of the node.

    Raises:
        ConfigError: It is no node, there is no such option, or a value cannot be used.
    """
    plain = to_plain(node)
    if not isinstance(plain, dict):
        raise ConfigError(f"'{key}' is {plain!r}: it must hold names and values")
    _check_arguments(kind, (), plain, key, partial=True)
    return call_checked(kind, (), plain, key)


def _check_special(plain: Mapping[str, Any], key: str) -> None:
    """Refuse special keys that hold nothing usable, and those that Hydra alone has."""
    args, is_partial = plain.get("_args_", []), plain.get("_partial_", False)
    if not isinstance(args, list | tuple):
        raise ConfigError(f"'{key}._args_' is {args!r}; it must be a list.")
    if not isinstance(is_partial, bool):
        raise ConfigError(f"'{key}._partial_' is {is_partial!r}; it must be true or false.")
    for name in ("_convert_", "_recursive_"):
        if name in plain:
            raise ConfigError(
                f"'{key}.{name}' is not known: nested nodes are built, the rest arrives as plain "
                "data."
            )


def _check_arguments(
    target: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    key: str,
    *,
    partial: bool,
) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:  # written in C without a signature; the call itself will complain
        return
    try:
        bind = signature.bind_partial if partial else signature.bind
        bind(*args, **kwargs)
    except TypeError as error:
        unknown, names = _find_unknown(signature, kwargs)
        if unknown is None:
            raise ConfigError(f"'{key}': {target.__qualname__}: {error}.") from error
        near = nearest(unknown, names)
        raise ConfigError(
            f"unknown key '{key}.{unknown}': {target.__qualname__} has no such argument."
            + did_you_mean(near and f"{key}.{near}")
        ) from error


def _find_unknown(
    signature: inspect.Signature, kwargs: Mapping[str, object]
) -> tuple[str | None, list[str]]:
    """Return the first argument that a signature does not have, and the names that it has."""
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None, []
        if parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(name)
    return next((name for name in kwargs if name not in names), None), names


def _call(
    target: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], key: str
) -> Any:  # noqa: ANN401 - whatever the target makes
    package = target.__module__.partition(".")[0]
    try:
        if package == "lit_data":
            return call_checked(target, args, kwargs, key)
        return target(*args, **kwargs)
    except LitDataError:
        raise
    except Exception as error:
        if package not in _CHECKED:
            raise
        refusal = "refuses its arguments"
        if isinstance(error, ModuleNotFoundError):
            refusal = "needs a package"
        raise ConfigError(f"'{key}': {target.__qualname__} {refusal}: {error}") from error
