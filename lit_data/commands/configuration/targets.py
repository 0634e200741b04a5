"""Which Python names a configuration may call, and calling them.

A configuration is data: it may come from a colleague or from the web. A ``_target_`` in it is
looked at before anything is imported, the object found is looked at again, and only the command
line can widen the list. Hydra's own ``instantiate`` refuses what is on a list of known dangers
(hydra-ecosystem/hydra#3409 shows how that is bypassed) and reads the strings of a node as
interpolations once more, so objects are built here.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_data.checks import Made, call_checked
from lit_data.commands.configuration.locate import is_below, resolve_target
from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError, LitDataError

ALLOWED = (
    "lit_data",
    "torch.optim",
    "torch.nn",
    "torchmetrics",
    "kornia.augmentation",
    "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.trainer.Trainer",  # the same class under its own name
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.plugins",
    "lightning.fabric.plugins",  # where lightning.pytorch.plugins takes some of its classes from
    "lightning.pytorch.demos.boring_classes",
    "torch.distributed.fsdp.wrap",  # which parts of a model are cut
)
ALLOWED_FOR_HYDRA = ("hydra._internal.core_plugins", "hydra_plugins", "optuna.samplers")
_NAME = re.compile(r"(?!.*__)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
_PRIVATE = re.compile(r"(^|\.)_")
_PACKAGE = re.compile(r"(?!.*__)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_SPECIAL_KEYS = ("_target_", "_args_", "_partial_")

_packages: ContextVar[tuple[str, ...]] = ContextVar("packages", default=())


@contextmanager
def allow_packages(packages: Sequence[str]) -> Iterator[None]:
    """Allow targets of these packages too, as ``--package`` does.

    Raises:
        ConfigError: a name is not that of a package.
    """
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ConfigError(
                f"--package {package!r} is not a package name such as my_project or my_project.models."
            )
    token = _packages.set((*_packages.get(), *packages))
    try:
        yield
    finally:
        _packages.reset(token)


def allowed_names(*, hydra: bool = False) -> tuple[str, ...]:
    """The places a target may lie below: those of the `hydra` node, or those of everything else."""
    return (*(ALLOWED_FOR_HYDRA if hydra else ALLOWED), *_packages.get())


def trusted_names() -> tuple[str, ...]:
    """The packages that the command line allows: their functions and private names may be named too."""
    return _packages.get()


def check_targets(
    cfg: Container | Mapping[str, Any] | Sequence[Any], extra: Sequence[str] = ()
) -> None:
    """Refuse every ``_target_`` that is not below an allowed name; nothing is imported.

    Args:
        cfg: the whole configuration or a part of it; interpolations are followed.
        extra: packages allowed beside `ALLOWED` and those of `allow_packages`.

    Raises:
        ConfigError: names the key and the target.
    """
    with allow_packages(extra):
        for key, target in find_targets(_resolve(cfg)):
            _check_name(target, key, allowed_names(hydra=key.startswith("hydra.")))


def instantiate(
    node: Container | Mapping[str, Any] | Sequence[Any] | None, *args: object, **kwargs: object
) -> Any:  # noqa: ANN401 - whatever the target makes
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
    if node is None:
        return None
    key = node._get_full_key("") if isinstance(node, Container) else ""
    plain = _resolve(node)
    for where, target in find_targets(plain, key):
        _check_name(target, where, allowed_names())
    if isinstance(plain, dict) and "_target_" in plain:
        return _build_object(plain, key, args, kwargs)
    return _build(plain, key)


def read_options(kind: Callable[..., Made], node: Container | Mapping[str, Any], key: str) -> Made:
    """The options of a command from its node.

    Args:
        kind: Their dataclass, which checks its values itself.
        node: Their names and values.
        key: Of the node.

    Raises:
        ConfigError: It is no node, there is no such option, or a value cannot be used.
    """
    plain = _resolve(node)
    if not isinstance(plain, dict):
        raise ConfigError(f"'{key}' is {plain!r}: it must hold names and values")
    _check_arguments(kind, (), plain, key, partial=True)
    return call_checked(kind, (), plain, key)


def find_targets(plain: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Every ``_target_`` of plain data, with its own dotted key, which starts with `key`."""
    if isinstance(plain, Mapping):
        if "_target_" in plain:
            yield join_key(key, "_target_"), plain["_target_"]
        for name, value in plain.items():
            yield from find_targets(value, join_key(key, name))
    elif isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        for place, value in enumerate(plain):
            yield from find_targets(value, f"{key}[{place}]")


def join_key(key: str, name: object) -> str:
    """The dotted key of an entry of the node at `key`, which is empty for the root."""
    return f"{key}.{name}" if key else str(name)


def _resolve(cfg: Container | Mapping[str, Any] | Sequence[Any]) -> Any:  # noqa: ANN401 - YAML data
    if not isinstance(cfg, Container):
        return cfg
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _check_name(target: object, key: str, allowed: Sequence[str]) -> None:
    if isinstance(target, str) and _NAME.fullmatch(target) and is_below(target, allowed):
        shown = target.removeprefix(
            "hydra._internal."
        )  # where Hydra has its own launcher and sweeper
        if is_below(target, trusted_names()) or not _PRIVATE.search(shown):
            return
    raise ConfigError(
        f"'{key}' is {target!a}, which is not allowed. Allowed is what lies below {', '.join(allowed)}; "
        "name a package of your own on the command line: --package NAME."
    )


def _build(plain: Any, key: str) -> Any:  # noqa: ANN401 - YAML data becomes objects
    if isinstance(plain, Mapping):
        if "_target_" in plain:
            return _build_object(plain, key)
        return {name: _build(value, join_key(key, name)) for name, value in plain.items()}
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        return [_build(value, f"{key}[{place}]") for place, value in enumerate(plain)]
    return plain


def _build_object(
    plain: Mapping[str, Any],
    key: str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Any:  # noqa: ANN401 - whatever the target makes
    target = resolve_target(
        plain["_target_"], join_key(key, "_target_"), allowed_names(), trusted_names()
    )
    positional, partial = _read_special(plain, key)
    positional = (*args, *positional)
    given = {
        name: _build(value, join_key(key, name))
        for name, value in plain.items()
        if name not in _SPECIAL_KEYS
    }
    given.update(kwargs or {})
    _check_arguments(target, positional, given, key, partial=partial)
    return (
        functools.partial(target, *positional, **given)
        if partial
        else _call(target, positional, given, key)
    )


def _read_special(plain: Mapping[str, Any], key: str) -> tuple[tuple[object, ...], bool]:
    args, partial = plain.get("_args_", []), plain.get("_partial_", False)
    if not isinstance(args, list | tuple):
        raise ConfigError(f"'{key}._args_' is {args!r}; it must be a list.")
    if not isinstance(partial, bool):
        raise ConfigError(f"'{key}._partial_' is {partial!r}; it must be true or false.")
    for name in ("_convert_", "_recursive_"):
        if name in plain:
            raise ConfigError(
                f"'{key}.{name}' is not known: nested nodes are built, the rest arrives as plain data."
            )
    return tuple(
        _build(value, f"{key}._args_[{place}]") for place, value in enumerate(args)
    ), partial


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
        (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        names = [
            name
            for name, spec in signature.parameters.items()
            if spec.kind is not spec.VAR_POSITIONAL
        ]
        open_ended = any(spec.kind is spec.VAR_KEYWORD for spec in signature.parameters.values())
        unknown = None if open_ended else next((name for name in kwargs if name not in names), None)
        if unknown is None:
            raise ConfigError(f"'{key}': {target.__qualname__}: {error}.") from error
        near = nearest(unknown, names)
        raise ConfigError(
            f"unknown key '{key}.{unknown}': {target.__qualname__} has no such argument."
            + did_you_mean(near and f"{key}.{near}")
        ) from error


def _call(
    target: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], key: str
) -> Any:  # noqa: ANN401 - whatever the target makes
    try:
        if is_below(target.__module__, ("lit_data",)):
            return call_checked(target, args, kwargs, key)
        return target(*args, **kwargs)
    except LitDataError:
        raise
    except Exception as error:
        if not is_below(target.__module__, ("torch", "torchmetrics", "kornia", "lightning")):
            raise
        what = (
            "needs a package" if isinstance(error, ModuleNotFoundError) else "refuses its arguments"
        )
        raise ConfigError(f"'{key}': {target.__qualname__} {what}: {error}") from error
