"""Problems are collected into one message that prints anywhere."""

import os
from pathlib import Path

import pytest

from lit_data.errors import DataError, Problems, show_path


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


def test_no_problem_is_no_error() -> None:
    problems = Problems()
    problems.raise_if_any("images are bad")
    assert len(problems) == 0
    assert problems.report() == ""


def test_problems_are_listed_under_one_heading() -> None:
    problems = Problems()
    problems.add("a\n.png", "0 bytes")
    problems.add(Path("b.png"), "b.png: truncated")  # the reader has named it already
    with pytest.raises(DataError) as caught:
        problems.raise_if_any("2 of 9 images are bad")
    assert str(caught.value) == "2 of 9 images are bad:\n  a\\n.png: 0 bytes\n  b.png: truncated"
    assert problems.report() == "a\\n.png: 0 bytes\nb.png: truncated"


def test_only_the_first_hundred_are_listed() -> None:
    problems = Problems()
    for number in range(103):
        problems.add(f"{number}.png", "0 bytes")
    with pytest.raises(DataError) as caught:
        problems.raise_if_any("images are bad")
    lines = str(caught.value).splitlines()
    assert lines[1] == "  0.png: 0 bytes"
    assert lines[100:] == ["  99.png: 0 bytes", "  ... and 3 more"]
    assert len(problems.report().splitlines()) == 103


def test_skipped_paths_are_listed_once() -> None:
    problems = Problems()
    problems.add("b.png", "one")
    problems.add("a.png", "two")
    problems.add("b.png", "three")
    assert problems.skipped == ("b.png", "a.png")
