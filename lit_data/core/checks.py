"""Checks of options, with messages that state what is allowed."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from lit_data.core.errors import ConfigError, LitDataError

Made = TypeVar("Made")

_IN_YAML = {"None": "null", "True": "true", "False": "false"}
_KINDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}
_MAPPINGS = (dict, Mapping)
_LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices; 1 is not True.

    Args:
        name: Name of the option.
        value: Value of the option.
        choices: Allowed values, as from `typing.get_args` of a Literal.

    Raises:
        ConfigError: The value is not one of the choices.
    """
    if not _is_choice(value, choices):
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {_list_choices(choices)}")


def _is_choice(value: object, choices: Sequence[object]) -> bool:
    return any(value == choice and type(value) is type(choice) for choice in choices)


def _list_choices(choices: Sequence[object]) -> str:
    """Return values in YAML notation, in one line."""
    names = map(str, choices)
    return ", ".join(_IN_YAML.get(name, name) for name in names)


def check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse a value that is not an integer from `least` to `most`, which may be None.

    Raises:
        ConfigError: The value is refused.
    """
    if not is_count(value, least, most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={value!r} is not usable: choose a whole number {allowed}")


def check_counts(**counts: object) -> None:
    """Refuse values that are not integers of at least 1; keywords are the names of the options.

    Raises:
        ConfigError: A value is refused.
    """
    for name, value in counts.items():
        check_count(name, value, 1)


def is_count(value: object, least: int, most: int | None = None) -> TypeGuard[int]:
    """Return True for an integer between two bounds; a bool does not count."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value and (most is None or value <= most)


def check_saved_counts(owner: str, state: Mapping[str, object], names: Iterable[str]) -> None:
    """Refuse entries of a saved state that are not counts, before they cause other errors.

    Args:
        owner: Owner of the state, for the message.
        state: State from a checkpoint.
        names: Names of the entries, which must exist.

    Raises:
        ValueError: An entry is not an integer of at least 0.
    """
    for name in names:
        count = state[name]
        if type(count) is not int or count < 0:
            raise ValueError(f"the state of {owner} holds {name}={count!r:.80}")


def check_share(name: str, value: float) -> None:
    """Refuse a value that is not a fraction above 0 and up to 1.

    Raises:
        ConfigError: The value is refused.
    """
    if not 0 < value <= 1:
        raise ConfigError(f"{name}={value} must be a fraction: give a number above 0 and up to 1")


def check_fraction(name: str, value: object, largest: float = 1) -> None:
    """Refuse a value that is not a number from 0 to `largest`.

    Raises:
        ConfigError: The value is refused.
    """
    if not isinstance(value, Real) or not 0 <= float(value) <= largest:
        raise ConfigError(f"{name}={value!r} must be between 0 and {largest:g}")


def check_outside_root(folder: Path, root: object, key: str) -> None:
    """Refuse to write into the data folder, since the files would be images of the next run.

    Args:
        folder: Folder to write to.
        root: Folder or address of the data; None for a synthetic dataset.
        key: Key of the option with the folder.

    Raises:
        ConfigError: The folder is `root` or below it.
    """
    if not root or "://" in str(root):
        return
    if folder.resolve().is_relative_to(Path(str(root)).expanduser().resolve()):
        raise ConfigError(
            f"{key}={folder} is inside data.root={root}, where it would be read as data: choose "
            "another"
        )


def call_checked(
    target: Callable[..., Made], args: Sequence[object], options: Mapping[str, object], key: str
) -> Made:
    """Call a function or class that checks its arguments itself, then check their types.

    The types are also checked if the call fails: a wrong type is a clearer error than its effect.

    Args:
        target: Function or class to call.
        args: Arguments that are not checked.
        options: Arguments that are checked.
        key: Key of the node with the arguments, for messages.

    Raises:
        ConfigError: See `check_types`.
    """
    try:
        result = target(*args, **options)
    except LitDataError:
        raise
    except Exception:
        check_types(target, options, key)
        raise
    check_types(target, options, key)
    return result


def check_types(target: Callable[..., Any], options: Mapping[str, object], key: str = "") -> None:
    """Refuse arguments that a function or class does not have, or whose type is not as annotated.

    A list may stand for a tuple and an integer for a float, as in YAML; text is not a list of
    letters. Annotations that cannot be checked, such as a name in quotes or a protocol, pass.

    Args:
        target: Function or class to call.
        options: Arguments by their names.
        key: Key of the node with the arguments, for messages.

    Raises:
        ConfigError: An argument is refused; the error names the key, the value and what is allowed.
    """
    arguments = read_arguments(target)
    unknown = sorted(options.keys() - arguments.hints.keys())
    # With **kwargs any name may be right; the function that uses it checks it.
    if unknown and not arguments.takes_any:
        choices = ", ".join(arguments.hints)
        raise ConfigError(f"'{key}' has no '{unknown[0]}': choose from {choices}")
    for name, value in options.items():
        hint = arguments.hints.get(name, Any)
        if hint is not inspect.Parameter.empty and not _fits(value, hint):
            full_key = f"{key}.{name}".lstrip(".")
            raise ConfigError(f"'{full_key}' is {value!r}: give {_describe(hint)}")


class Arguments(NamedTuple):
    """Arguments of a function or class that may be passed by name.

    Attributes:
        hints: Annotations of the arguments, by name.
        takes_any: True with ``**kwargs`` without names.
        roles: Metadata in ``Annotated`` besides the type, by name.
    """

    hints: dict[str, Any]
    takes_any: bool
    roles: dict[str, tuple[Any, ...]]


def read_arguments(target: Callable[..., Any]) -> Arguments:
    """Read the arguments that a function or class takes.

    ``**options: Unpack[Keywords]`` stands for the keys of that dict.

    Raises:
        ValueError: The target is written in C without a signature.
    """
    hints: dict[str, Any] = {}
    takes_any = False
    for name, parameter in inspect.signature(target).parameters.items():
        hint = parameter.annotation
        if get_origin(hint) is Unpack:
            (keywords,) = get_args(hint)
            hints |= get_type_hints(keywords, include_extras=True)
        elif parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            hints[name] = hint
    roles: dict[str, tuple[Any, ...]] = {}
    for name, hint in hints.items():
        if get_origin(hint) is Annotated:
            hints[name], *notes = get_args(hint)
            roles[name] = tuple(notes)
    return Arguments(hints, takes_any, roles)


def list_options(kind: type, role: object) -> set[str]:
    """Return the options of a class with a role, including those of its base classes."""
    names: set[str] = set()
    for owner in kind.__mro__:
        if "__init__" in vars(owner) and owner is not object:
            roles = read_arguments(owner).roles
            names |= {name for name, notes in roles.items() if role in notes}
    arguments = read_arguments(kind)
    return names if arguments.takes_any else names & arguments.hints.keys()


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - any annotation
    """Return True if a value fits an annotation, or if that cannot be checked."""
    kind, inner = get_origin(hint) or hint, list(get_args(hint))
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Literal:
        return _is_choice(value, inner)
    if not inspect.isclass(kind) or kind in (Any, object):
        return True
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if kind in _MAPPINGS:
        if not isinstance(value, Mapping):
            return False
        pair = inner or [Any, Any]
        return all(_all_fit(item, pair) for item in value.items())
    if kind in _LISTS:
        if isinstance(value, str | Mapping) or not isinstance(value, Collection):
            return False
        has_own_kinds = kind is tuple or not inner  # all entries of a list have the same type
        return _all_fit([*value], inner if has_own_kinds else [*inner, ...])
    return getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _all_fit(values: Sequence[object], hints: Sequence[Any]) -> bool:
    if not hints:
        return True
    if hints[-1] is ...:
        return all(_fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_fits, values, hints))


def _describe(hint: Any) -> str:  # noqa: ANN401 - any annotation
    """Describe an annotation in words."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_describe, inner)))
    if kind is Literal:
        return f"one of {_list_choices(inner)}"
    if kind is tuple and ... not in inner:
        return f"[{', '.join(map(_describe, inner))}]"
    if kind in _MAPPINGS:
        return "names with values"
    if kind in _LISTS:
        return f"a list, each {_describe(inner[0])}" if inner else "a list"
    return _KINDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
