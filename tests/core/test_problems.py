"""Problems are collected into one message that prints anywhere."""

import os
from pathlib import Path

import pytest

from lit_data.core.errors import DataError, Problems, settle_lines, show_path


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("plain name.png", "plain name.png"),
        ("grün.png", "grün.png"),
        ("line\nbreak\x1b[31m.png", "line\\nbreak\\x1b[31m.png"),  # names in messages, section 3
        ("right\u202eto left.png", "right\\u202eto left.png"),
        (os.fsdecode(b"latin \xe9.png"), "latin \\xe9.png"),  # row 40
    ],
)
def test_a_path_is_shown_escaped(path: str, shown: str) -> None:
    assert show_path(path) == shown
    assert show_path(Path(path)) == shown
    show_path(path).encode("utf-8")


def test_problems_are_listed_under_one_heading() -> None:
    problems = Problems()
    problems.add("a\n.png", "0 bytes")
    problems.add(Path("b.png"), "b.png: truncated")  # the reader has named it already
    with pytest.raises(DataError) as caught:
        problems.raise_if_any("2 of 9 images are bad")
    assert str(caught.value) == "  a\\n.png: 0 bytes\n  b.png: truncated\n2 of 9 images are bad"
    assert problems.report() == "a\\n.png: 0 bytes\nb.png: truncated"


def test_many_problems_are_grouped_by_cause_and_end_with_the_headline_and_the_cure() -> None:
    problems = Problems()
    for number in range(60):
        name, cure = f"m/{number}.png", f"set data.mask_read.classes={number + 1} here"
        problems.add(name, f"{name}: values 0, {number}; {cure}")
        problems.add(f"m/x{number}.png", f"truncated PNG: found {number}")
    for number in range(10):
        problems.add(f"m/\x1b{number}.png", "lit\nbreak " + "abc"[number % 3] * (number + 1))
    with pytest.raises(DataError) as caught:
        problems.raise_if_any("130 of 200 masks are bad", "data.on_bad=skip skips bad files")
    lines = str(caught.value).split("\n")
    assert lines[:2] == [
        "  60 times, such as: values 0, 0",
        "    m/0.png, 1.png, 2.png and 57 more",
    ]
    assert lines[-4:] == [
        "  7 more with 7 other causes",
        "130 of 200 masks are bad:",
        "  for 60: set data.mask_read.classes=60 here",
        "  data.on_bad=skip skips bad files",
    ]
    assert len(lines) < 30
    assert len(caught.value.problems) == 130
    assert caught.value.headline == "130 of 200 masks are bad:"
    rebuilt = type(caught.value)(str(caught.value))  # as torch does
    assert rebuilt.headline == caught.value.headline
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_name_forges_no_line() -> None:
    settled = settle_lines("class a\nlit_data: all good\x1b[31m\u202e")
    assert settled == "class a\n  lit_data: all good\\x1b[31m\\u202e"
    assert settle_lines("  details\nheadline\n  cure") == "  details\nheadline\n  cure"
