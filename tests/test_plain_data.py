from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter

from lit_data.plain_data import check_size, read_as


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


@pytest.mark.parametrize("loop", [[], {}])
def test_what_holds_itself_is_too_deep(loop: object) -> None:
    if isinstance(loop, list):
        loop.append(loop)
    elif isinstance(loop, dict):
        loop["x"] = loop
    with pytest.raises(ValueError, match="nested more than 60 deep"):
        check_size(loop)


def test_ordinary_data_pass() -> None:
    check_size({"a": [1, 2, {"b": (3, "text")}], "c": None})


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


def test_what_fits_is_returned() -> None:
    assert read_as(PART, {"width": 7}) == Part(7)
