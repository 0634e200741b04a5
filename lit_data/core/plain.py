"""Checks of untrusted plain data: first their size, then their types and ranges.

A few bytes of YAML or of a pickle can stand for any number of values (aliases, merged keys, shared
objects), and a number with many digits takes hours to convert. Both are refused before anything is
built from them.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from lit_data.core.errors import DataError, escape

try:  # PyYAML may have been built without it
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Made = TypeVar("Made")

MOST_NODES = 200_000
"""Values, keys and collections, with those of an alias each time that it stands there."""
MOST_LETTERS = 2**24
"""Of all values together, counted in the same way."""
DEEPEST = 60
MOST_DIGITS = 40

_LONGEST_VALUE = 60
_CONTAINERS = (list, tuple, set, frozenset)

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_NUMBER_STARTS = list("-+.0123456789")
_LEFT_AS_TEXT = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_UNKNOWN = [f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set", "timestamp")]

_DECIMAL = re.compile(rf"[-+]?(?:0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})\Z")
_POINT = re.compile(
    r"[-+]?(?:[0-9]{1,40}\.[0-9]{0,40}(?:[eE][-+]?[0-9]{1,5})?|\.[0-9]{1,40}(?:[eE][-+]?[0-9]{1,5})?"
    r"|[0-9]{1,40}[eE][-+]?[0-9]{1,5}|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
)
_INTEGER = re.compile(r"[-+]?(?:0b[01_]++|0x[0-9a-fA-F_]++|[0-9][0-9_]*+)\Z")
_BASE_8 = re.compile(r"[-+]?0[0-7_]++\Z")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*+(?::[0-5]?[0-9])++(?:\.[0-9_]*+)?\Z")
_DURATION = re.compile(r"0[0-9_]*+(?::[0-5]?[0-9])++\Z")
"""Looks like one in base 60, such as 00:01:30, and is a text, as whole numbers begin with no zero."""


@dataclass(slots=True)
class _Extent:
    """Size of what a part of a text stands for, aliases unfolded."""

    nodes: int = 0
    letters: int = 0
    depth: int = 0

    def add(self, part: "_Extent") -> None:
        self.nodes += part.nodes
        self.letters += part.letters
        self.depth = max(self.depth, part.depth)

    def check(self) -> None:
        if self.nodes > MOST_NODES or self.letters > MOST_LETTERS:
            raise DataError(
                f"expands to more than {MOST_NODES} values or {MOST_LETTERS} letters with its "
                "aliases"
            )
        if self.depth > DEEPEST:
            raise DataError(f"is nested more than {DEEPEST} deep")


def check_size(
    content: object, *, most_values: int = MOST_NODES, deepest: int = DEEPEST
) -> list[object]:
    """Refuse dicts and lists that are too large to be traversed.

    A shared object counts each time that it is reached: a few lists of lists can stand for more
    values than fit into memory, and a list that contains itself for infinitely many. Call this
    before anything else reads the content.

    Args:
        content: Dicts, lists, tuples, sets and values, as from pickles and YAML.
        most_values: Most entries of all dicts and lists together.
        deepest: Deepest nesting of dicts and lists.

    Returns:
        All values, dicts and lists in the content; shared ones as often as they are reached.

    Raises:
        ValueError: There are more values, or they are nested more deeply.
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


def read_as(schema: "TypeAdapter[Made]", content: object) -> Made:
    """Convert content to the type of a schema, which checks types and ranges.

    Args:
        schema: Schema of a frozen dataclass, such as `TypeAdapter(Look)`.
        content: Content that has passed `check_size`.

    Raises:
        ValueError: A part does not fit; the error names the first one, its value and what is
            allowed.
    """
    from pydantic import ValidationError  # a training does without

    try:
        return schema.validate_python(content)
    except ValidationError as error:
        raise ValueError(_describe(error)) from error


def _describe(error: "ValidationError") -> str:
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


def parse_yaml(text: str | bytes) -> Any:  # noqa: ANN401 - what YAML may hold
    """Parse YAML to plain data: dicts, lists, texts, decimal numbers, booleans and None.

    Dates and numbers in another base stay text.

    Args:
        text: Text of one file.

    Raises:
        DataError: With aliases expanded, the text has too many values or is nested too deeply; or a
            key repeats, or a tag asks for another type.
        yaml.YAMLError: The text is not YAML.
    """
    for _ in measure_yaml(text):
        pass
    return yaml.load(text, _PlainLoader)


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - what JSON may hold
    """Parse JSON to plain data; integers of more than 40 digits become None.

    Raises:
        DataError: The text is not JSON, or is nested too deeply.
    """
    try:
        content = json.loads(text, parse_int=_read_integer)
    except (ValueError, RecursionError) as error:
        raise DataError(f"damaged JSON: {error}") from error
    try:
        check_size(content, most_values=len(text))  # so that its bytes bound it
    except ValueError as error:
        raise DataError(str(error)) from error
    return content


def _read_integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= MOST_DIGITS else None


def measure_yaml(text: str | bytes) -> Iterator[yaml.Event]:
    """Yield the events of YAML while the size of their values is within limits.

    The text keeps its meaning for the loader that reads it next.

    Args:
        text: Text of one file.

    Raises:
        DataError: With aliases expanded, the text has too many values or is nested too deeply.
        yaml.YAMLError: The text is not YAML.
    """
    anchors: dict[str, _Extent] = {}
    opened: list[tuple[str | None, _Extent]] = [(None, _Extent())]
    for event in yaml.parse(text, SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(opened) > DEEPEST:
                raise DataError(f"is nested more than {DEEPEST} deep")
            opened.append((event.anchor, _Extent(1)))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, extent = opened.pop()
            extent.depth += 1
            _close(anchor, extent, anchors, opened[-1][1])
        elif isinstance(event, yaml.ScalarEvent):
            _close(event.anchor, _Extent(1, len(event.value)), anchors, opened[-1][1])
        elif isinstance(event, yaml.AliasEvent):
            copied = anchors.get(str(event.anchor))
            if copied is None:
                name = escape(str(event.anchor))[:80]
                raise DataError(f"the alias *{name} refers to itself, or to nothing")
            _close(None, copied, anchors, opened[-1][1])
        yield event


def _close(
    anchor: str | None, extent: _Extent, anchors: dict[str, _Extent], parent: _Extent
) -> None:
    """Add the extent of a complete part to its parent."""
    if anchor is not None:
        anchors[anchor] = extent
    parent.add(extent)
    parent.check()


def check_number(event: yaml.ScalarEvent) -> None:
    """Refuse a number that takes long to parse, or that YAML reads as another number than it seems.

    Raises:
        DataError: The number has more than 40 digits, or would be read in base 8 or 60.
    """
    if not (event.implicit[0] or event.tag in (_INT, _FLOAT)):
        return
    text = event.value
    if len(text) > MOST_DIGITS and (_INTEGER.match(text) or _BASE_60.match(text)):
        raise DataError(
            f"the number {text[:20]}... has more than {MOST_DIGITS} digits; write a text in quotes"
        )
    is_text = event.implicit[0] and _DURATION.match(text)
    if _BASE_60.match(text) and not is_text:
        raise DataError(
            f"{text} would be a number in base 60 (1:30 is 90); write the number, or '{text}' in "
            "quotes for a text"
        )
    if _BASE_8.match(text):
        raise DataError(
            f"{text} would be a number in base 8 (010 is 8); write it without leading zeros, or "
            f"'{text}' in quotes for a text"
        )


def _refuse_twice(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (key.tag, key.value) in seen:
            raise DataError(f"the key {escape(key.value)[:80]!r} appears twice")
        seen.add((key.tag, key.value))


class _PlainLoader(SafeLoader):
    """Loader with decimal numbers only, and without dates and other types."""

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._compared: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse repeated keys, before others are merged between them."""
        if id(node) not in self._compared:
            self._compared.add(id(node))
            _refuse_twice(node)
        super().flatten_mapping(node)

    def refuse_tag(self, node: yaml.Node) -> None:
        """Refuse a type that is not plain data."""
        raise DataError(f"the tag {escape(node.tag)[:80]} is not allowed")

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Return a whole number."""
        if not _DECIMAL.match(node.value):
            raise DataError(f"{escape(node.value)[:40]!r} is not a whole number of up to 40 digits")
        return int(node.value)

    def construct_point(self, node: yaml.ScalarNode) -> float:
        """Return a float."""
        if not (_POINT.match(node.value) or _DECIMAL.match(node.value)):
            raise DataError(f"{escape(node.value)[:40]!r} is not a number")
        return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _list_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    plain_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for letter, resolvers in SafeLoader.yaml_implicit_resolvers.items():
        plain_resolvers[letter] = [entry for entry in resolvers if entry[0] not in _LEFT_AS_TEXT]
    return plain_resolvers


_PlainLoader.yaml_implicit_resolvers = _list_resolvers()
_PlainLoader.add_implicit_resolver(_INT, _DECIMAL, _NUMBER_STARTS)
_PlainLoader.add_implicit_resolver(_FLOAT, _POINT, _NUMBER_STARTS)
_PlainLoader.add_constructor(_INT, _PlainLoader.construct_decimal)
_PlainLoader.add_constructor(_FLOAT, _PlainLoader.construct_point)
for _tag in _UNKNOWN:
    _PlainLoader.add_constructor(_tag, _PlainLoader.refuse_tag)
