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


def test_a_call_under_way_keeps_its_wrappers() -> None:
    counter = Counter()

    def take_off(call: Callable[..., Any], *args: Any) -> Any:
        inner()
        outer()
        return f"outer({call(*args)})"

    inner, outer = wrap(counter, "add", _mark("inner")), wrap(counter, "add", take_off)
    assert counter.add(1) == "outer(inner(1))"
    assert counter.add(1) == "2"


def test_an_attribute_of_the_object_itself_comes_back() -> None:
    counter = Counter()
    own = counter.add = lambda amount: f"own {amount}"  # type: ignore[method-assign, assignment, misc]
    unwraps = [wrap(counter, "add", _mark(text)) for text in "ab"]
    assert counter.add(1) == "b(a(own 1))"
    for unwrap in unwraps:
        unwrap()
    assert vars(counter)["add"] is own


def test_what_was_put_on_top_later_is_left_alone() -> None:
    counter = Counter()
    unwrap, wrapped = wrap(counter, "add", _mark("a")), counter.add
    counter.add = lambda amount: f"top({wrapped(amount)})"  # type: ignore[method-assign, assignment, misc]
    assert counter.add(1) == "top(a(1))"
    unwrap()
    assert counter.add(1) == "top(2)"
