"""YAML and JSON of strangers: bounded by what they stand for, and read as they look."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field, TypeAdapter

from lit_data.core.errors import DataError
from lit_data.core.plain import (
    check_number,
    check_size,
    measure_yaml,
    parse_json,
    parse_yaml,
    read_as,
)

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "base: &L0 {k: v}\n" + "".join(
    f"L{n}: &L{n} {{<<: [*L{n - 1}, *L{n - 1}], k{n}: v}}\n" for n in range(1, 30)
)
TABLES = (
    "".join(f"a{n}: &a{n} {{k{n}: 1}}\n" for n in range(400))
    + f"all: &all [{','.join(f'*a{n}' for n in range(400))}]\n"
    + "".join(f"t{n}: {{<<: *all}}\n" for n in range(4000))
)
LONG_TEXTS = f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 100)}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "expands to more than"),
        (MERGES, "expands to more than"),
        (TABLES, "expands to more than"),
        (LONG_TEXTS, "expands to more than"),
        ("[" * 70 + "]" * 70, "nested"),
        ("a: &x [*x]", "refers to itself"),
        ("a: 1\na: 2", "'a' appears twice"),
        ("a: !!int 1:30", "not a whole number"),
        ("a: !!float 1:30.5", "not a number"),
    ],
)
def test_yaml_is_bounded(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_yaml(text)


@pytest.mark.parametrize(
    "tag", ["binary aGk=", "set {a}", "timestamp 2026-01-01", "python/name:os"]
)
def test_other_types_are_refused(tag: str) -> None:
    with pytest.raises((DataError, yaml.YAMLError), match="the tag"):
        parse_yaml(f"a: !!{tag}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1:30", "1:30"),
        ("1" + ":0" * 1_000_000, "1" + ":0" * 1_000_000),
        ("010", "010"),
        ("0x10", "0x10"),
        ("0x" + "f" * 5000, "0x" + "f" * 5000),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("9" * 41, "9" * 41),
        ("-12", -12),
        ("1e-05", 1e-05),
        ("1.5", 1.5),
        ("-.inf", float("-inf")),
        ("yes", True),
        ("~", None),
        ("'5'", "5"),
    ],
)
def test_numbers_are_decimal_and_all_else_is_text(text: str, found: Any) -> None:
    assert parse_yaml(f"a: {text}") == {"a": found}


def test_aliases_and_merged_keys_are_read() -> None:
    text = "a: &x {q: 1, r: &y [2]}\nb: {<<: *x, q: 3, s: *y}"
    assert parse_yaml(text)["b"] == {"q": 3, "r": [2], "s": [2]}
    text = "d: [{<<: &w {<<: &v {a: 1}, b: 2}, c: 1}]\ne: *w"
    assert parse_yaml(text) == {"d": [{"a": 1, "b": 2, "c": 1}], "e": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("1:30", "base 60"),
        ("-1:30.5", "base 60"),
        ("010", "base 8"),
        ("1" + ":0" * 100_000, "more than 40 digits"),
        ("0x" + "f" * 5000, "more than 40 digits"),
        ("0b" + "1" * 5000, "more than 40 digits"),
        ("9" * 5000, "more than 40 digits"),
        ("!!int '1:30'", "base 60"),
        ("!!int '00:30'", "base 60"),
        ("00:30.5", "base 60"),
    ],
)
def test_numbers_for_other_loaders(number: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _check_all(f"a: {number}")


@pytest.mark.parametrize(
    "value", ["'1:30'", "00:00:01:00", "0x1F", "12", "1.5", "a:1", "1:75", "0", "2026-01-01"]
)
def test_what_reads_as_it_looks_passes(value: str) -> None:
    _check_all(f"a: {value}")


def _check_all(text: str) -> None:
    for event in measure_yaml(text):
        if isinstance(event, yaml.ScalarEvent):
            check_number(event)


@pytest.mark.parametrize(
    ("text", "found"), [("9" * 41, None), ("9" * 40, int("9" * 40)), ('{"a": [1]}', {"a": [1]})]
)
def test_json_is_read(text: str, found: Any) -> None:
    assert parse_json(text) == found


@pytest.mark.parametrize("text", ["[" * 70 + "]" * 70, "[" * 200_000, "{", '{"a": 1'])
def test_json_is_bounded(text: str) -> None:
    with pytest.raises(DataError, match=r"nested|damaged JSON"):
        parse_json(text)


@dataclass(frozen=True)
class Part:
    width: Annotated[int, Field(ge=1, le=100)]
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5


PART = TypeAdapter(Part)


def test_shared_lists_count_each_time_they_are_reached() -> None:
    unfolding: list[object] = [1]
    for _ in range(30):
        unfolding = [unfolding] * 10
    with pytest.raises(ValueError, match="holds more than 200000 values"):
        check_size({"x": unfolding})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"width": 0}, "width=0: input should be greater than or equal to 1"),
        ({"width": 10**400}, "width=a number of 1329 bits"),
        ({"width": 5, "share": float("nan")}, "share=nan: input should be a finite number"),
        ({"width": [5] * 10**6}, "width=a list of 1000000"),
        ({"share": 0.5}, "width is missing"),
        ({"width": "\x1b[2J"}, r"width='\\x1b\[2J'"),
    ],
)
def test_the_first_fault_is_named_in_a_short_line(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_as(PART, content)
    assert len(str(raised.value)) < 300
