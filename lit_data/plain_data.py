"""Plain data of files that may be anybody's: how large they are first, then their kinds and ranges."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from lit_data.errors import escape

Made = TypeVar("Made")

_LONGEST_VALUE = 60
_CONTAINERS = (list, tuple, set, frozenset)


def check_size(content: object, *, most_values: int = 200_000, deepest: int = 60) -> list[object]:
    """Refuse dicts and lists that are too large to be walked through.

    What is shared counts each time that it is reached: a few lists of lists can stand for more
    values than there is memory, and one that holds itself for any number. Call it before anything
    else looks at the content.

    Args:
        content: Dicts, lists, tuples, sets and values, as pickles and YAML may hold them.
        most_values: Entries of all dicts and lists together.
        deepest: Dicts and lists within each other.

    Returns:
        All that they hold, dicts and lists too, and what is shared as often as it is reached.

    Raises:
        ValueError: They are more, or deeper.
    """
    values = [content]
    level = [content]
    for _ in range(deepest):
        below: list[object] = []
        for node in level:
            parts = _list_parts(node)
            if len(values) + len(below) + len(parts) > most_values:
                raise ValueError(f"it holds more than {most_values} values")
            below += parts
        if not below:
            return values
        values += below
        level = below
    raise ValueError(f"it is nested more than {deepest} deep")


def _list_parts(node: object) -> Collection[object]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, _CONTAINERS) else ()


def read_as(schema: TypeAdapter[Made], content: object) -> Made:
    """Return content as the type of a schema, which gives kinds and ranges.

    Args:
        schema: Of a frozen dataclass, such as `TypeAdapter(Look)`.
        content: That `check_size` has passed.

    Raises:
        ValueError: Names the first part that does not fit, its value, and what is allowed.
    """
    try:
        return schema.validate_python(content)
    except ValidationError as error:
        raise ValueError(_describe(error)) from error


def _describe(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part)[:_LONGEST_VALUE] for part in fault["loc"])
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    if fault["type"] == "missing":
        return escape(f"{key} is missing")
    return escape(f"{key}={_shorten(fault['input'])}: {reason}")


def _shorten(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:  # digits of more take long to find
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.{_LONGEST_VALUE}}"
