"""Objects of a configuration: names are checked and found first, then Hydra calls what they stand for.

Hydra alone would take any name that is not on its list of known dangers (hydra-ecosystem/hydra#3409
shows how that is bypassed). It gets no names here, but objects that are allowed.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.errors import HydraException, InstantiationException
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_data.app.configuration.names import join_key, resolve_target, resolve_targets, to_plain
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.app.configuration.words import find_typed, list_typed
from lit_data.core.checks import Made, call_checked, read_arguments
from lit_data.core.errors import ConfigError, LitDataError, first_line

log = logging.getLogger(__name__)

OF_CHECKPOINT = "of_checkpoint"
"""Flag of a node that comes from a checkpoint, so all that it says is for its class."""
_SPECIAL_KEYS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_CHECKED = ("torch", "torchmetrics", "kornia", "lightning", "albumentations", "torchvision")
"""Packages whose constructors refuse wrong options with errors of many kinds."""
_BROUGHT_ALONG = ("synthesis", "augment")  # groups that put themselves below `data`

Node = Container | Mapping[str, Any] | Sequence[Any]


# No dataclasses, which OmegaConf takes for nodes.
class _Target:
    """A class or function that may be called; what is wrong with its arguments names their node."""

    def __init__(self, call: Callable[..., Any], key: str) -> None:
        self._call = call
        self._key = key

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever it makes
        _check_names(self._call, kwargs, self._key)  # also of arguments that replace the node's
        _check_missing(self._call, args, kwargs, self._key)
        return _call(self._call, args, kwargs, self._key)


class _Text:
    """A text that looks like a reference, which is not followed once more."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self) -> str:
        return self._text


@dataclass(frozen=True)
class Recipe:
    """Objects to build, whose names are checked and found; the configuration is not needed again.

    Attributes:
        plain: Dicts, lists and values.
        targets: Classes and functions by the names in ``_target_``.
        prepared: `plain` with classes and functions in the place of their names.
    """

    plain: Any
    targets: Mapping[str, Callable[..., Any]]
    prepared: Any

    def build(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the target makes
        """Build new objects; for arguments and errors see `instantiate`."""
        with _as_raised():
            if not isinstance(self.prepared, dict):
                return hydra.utils.instantiate(self.prepared, _convert_="all")
            node = {"_convert_": "all", **self.prepared}
            if not (args or kwargs):
                return hydra.utils.instantiate(node)
            # Hydra would copy the arguments.
            call = hydra.utils.instantiate({**node, "_partial_": True})
            if node.get("_partial_"):
                return functools.partial(call, *args, **kwargs)
            return call(*args, **kwargs)


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raise what a constructor raised, which Hydra wraps."""
    try:
        yield
    except InstantiationException as error:
        if error.__cause__ is None:
            raise ConfigError(first_line(error)) from error
        raise error.__cause__ from error.__cause__.__cause__
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(first_line(error)) from error


def _prepare(plain: Any, key: str, targets: Mapping[str, Callable[..., Any]]) -> Any:  # noqa: ANN401 - YAML data
    """Put classes and functions in the place of their names, and check that they have the arguments."""
    if isinstance(plain, str) and "${" in plain:
        return {"_target_": _Text(plain)}
    if isinstance(plain, Mapping):
        node: dict[Any, Any] = {}
        for name, value in plain.items():
            if name != "_target_":
                node[name] = _prepare(value, join_key(key, name), targets)
        if "_target_" in plain:
            target = targets[plain["_target_"]]
            _check_special(plain, key)
            _check_names(target, plain, key)
            # Of a partial object it is read what it calls.
            node["_target_"] = target if plain.get("_partial_") else _Target(target, key)
        return node
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        return [_prepare(value, f"{key}[{index}]", targets) for index, value in enumerate(plain)]
    return plain


def read_recipe(node: Node) -> Recipe:
    """Resolve a node, check all names in it and import what they stand for; nothing is called.

    Raises:
        ConfigError: a target is refused or not found, has no such argument, or an interpolation
            leads nowhere.
    """
    key = node._get_full_key("") if isinstance(node, Container) else ""
    plain = to_plain(node)
    targets = resolve_targets(plain, key)
    return Recipe(plain, targets, _prepare(plain, key, targets))


def instantiate(node: Node | None, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the target makes
    """Build the object a node describes as `hydra.utils.instantiate` does, of allowed names.

    Constructors receive plain dicts and lists, unless ``_convert_`` says otherwise.

    Args:
        node: a node with ``_target_``, or a dict or list of such nodes, or None.
        args: positional arguments in place of those of the node.
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

    So ``model._target_=mine.Net`` is enough, and so is ``model.net._target_=mine.Net``. Where the
    target was typed and its class is none of lit_data and derives from none, all keys that were not
    typed are left out, and logged; of a class of lit_data, of a partial object and of a node of a
    checkpoint those that it has no argument for. `synthesis` and `augment`, which every
    configuration brings along, are left out of data that take none. A typed key stays, so one that
    is wrong is an error still.

    Args:
        node: The node with a ``_target_``.
        key: Its full name.
    """
    typed = find_typed()
    target = resolve_target(node._target_, key)
    arguments = _list_arguments(target)
    names = [str(name) for name in node]
    doubtful: set[str] = set()
    if f"{key}._target_" in typed:
        doubtful = {*names} - {*_SPECIAL_KEYS}
        if node._get_flag(OF_CHECKPOINT):
            arguments |= doubtful if _takes_any(target) else set()
        elif not (_is_ours(target) or node.get("_partial_")):
            arguments = set()
    elif key == "data":
        doubtful = {*_BROUGHT_ALONG} - typed
    doubtful -= list_typed(typed, key) | arguments
    left_out = [name for name in names if name in doubtful]
    if left_out:
        log.info("%s: %s has no argument %s: ignored", key, node._target_, ", ".join(left_out))
    remaining = OmegaConf.masked_copy(node, [name for name in names if name not in doubtful])
    remaining._set_parent(node._get_parent())  # interpolations look there
    remaining._set_key(node._key())  # errors name it
    remaining._set_flag(OF_CHECKPOINT, node._get_flag(OF_CHECKPOINT))
    for name in map(str, remaining):
        part = remaining._get_node(name)
        if isinstance(part, DictConfig) and f"{key}.{name}._target_" in typed:
            remaining[name] = leave_out_unknown(part, f"{key}.{name}")
    return remaining


def _is_ours(target: Callable[..., object]) -> bool:
    parents = target.__mro__ if isinstance(target, type) else (target,)
    return any(parent.__module__.startswith("lit_data.") for parent in parents)


def _takes_any(target: Callable[..., object]) -> bool:
    try:
        return read_arguments(target).takes_any
    except ValueError:  # written in C
        return True


def _list_arguments(target: Callable[..., object]) -> set[str]:
    """Names of all arguments.

    Of a class whose ``__init__`` passes ``**kwargs`` on, those of the classes above too.
    """
    names: set[str] = set()
    for function in _list_initialisers(target):
        arguments = read_arguments(function)
        names |= arguments.hints.keys()
        if not arguments.takes_any:
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
    _check_names(kind, plain, key)
    return call_checked(kind, (), plain, key)


def _check_special(plain: Mapping[str, Any], key: str) -> None:
    """Refuse special keys that hold nothing usable."""
    if not isinstance(plain.get("_args_", []), list | tuple):
        raise ConfigError(f"'{key}._args_' is {plain['_args_']!r}; it must be a list.")
    for name in ("_partial_", "_recursive_"):
        if not isinstance(plain.get(name, False), bool):
            raise ConfigError(f"'{key}.{name}' is {plain[name]!r}; it must be true or false.")


def _check_names(target: Callable[..., Any], options: Iterable[str], key: str) -> None:
    """Refuse an argument that a class or function does not have, with the nearest that it has."""
    try:
        arguments = read_arguments(target)
    except ValueError:  # written in C; the call itself will complain
        return
    names = [*arguments.hints]
    for name in options:
        if name not in names and name not in _SPECIAL_KEYS and not arguments.takes_any:
            near = nearest(name, names)
            raise ConfigError(
                f"unknown key '{key}.{name}': {target.__qualname__} has no such argument."
                + did_you_mean(near and f"{key}.{near}")
            )


def _check_missing(
    target: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], key: str
) -> None:
    try:
        inspect.signature(target).bind(*args, **kwargs)
    except ValueError:
        return
    except TypeError as error:
        raise ConfigError(f"'{key}': {target.__qualname__}: {error}.") from error


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
        refusal = "rejects its arguments"
        if isinstance(error, ModuleNotFoundError):
            refusal = "needs a package"
        raise ConfigError(f"'{key}': {target.__qualname__} {refusal}: {error}") from error
