"""Counts in sentences agree with what follows them."""

import pytest

from lit_inspect.counts import counted, counted_of, inflect


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (2, ("image",), "2 images"),
        (1, ("box", "boxes"), "1 box"),
        (3, ("box", "boxes"), "3 boxes"),
        (1, ("entry is", "entries are"), "1 entry is"),
        (0, ("entry is", "entries are"), "0 entries are"),
    ],
)
def test_one_of_a_kind_is_singular(count: int, words: tuple[str, ...], expected: str) -> None:
    assert counted(count, *words) == expected


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [
        (1, 1, "1 of 1 image is bad"),
        (1, 10, "1 of 10 images is bad"),
        (3, 10, "3 of 10 images are bad"),
        (0, 1, "0 of 1 image are bad"),
    ],
)
def test_the_verb_goes_with_the_count_and_the_noun_with_the_total(
    count: int, total: int, expected: str
) -> None:
    assert counted_of(count, total, "image", "is bad", "are bad") == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "images have no mask; they are skipped [a|b|c] [x]"),
        (1, "image has no mask; it is skipped [a|b|c] [x]"),
        (2, "images have no mask; they are skipped [a|b|c] [x]"),
    ],
)
def test_pairs_of_words_fit_the_count_and_other_brackets_stay(count: int, expected: str) -> None:
    text = "[image has|images have] no mask; [it is|they are] skipped [a|b|c] [x]"
    assert inflect(text, count) == expected
