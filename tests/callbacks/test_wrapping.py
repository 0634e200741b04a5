import itertools
from collections.abc import Callable
from typing import Any

import pytest

from lit_data.callbacks.wrapping import wrap


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> str:
        self.value += amount
        return f"{self.value}"


def _mark(text: str) -> Callable[..., Any]:
    return lambda call, *args, **kwargs: f"{text}({call(*args, **kwargs)})"


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_wrappers_come_off_in_any_order(order: tuple[str, ...]) -> None:
    counter, other = Counter(), Counter()
    unwraps = {text: wrap(counter, "add", _mark(text)) for text in "abc"}
    assert counter.add(0) == "c(b(a(0)))"
    left = ["a", "b", "c"]
    for text in order:
        unwraps[text]()
        unwraps[text]()  # a second time leaves the others
        left.remove(text)
        expected = "0"
        for outer in left:
            expected = f"{outer}({expected})"
        assert counter.add(0) == expected
        assert other.add(0) == "0"
    assert "add" not in vars(counter)
