import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lit_data.callbacks.wrapping import wrap


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int, *, times: int = 1) -> str:
        self.value += amount * times
        return f"{self.value}"


def _mark(text: str) -> Callable[..., Any]:
    return lambda call, *args, **kwargs: f"{text}({call(*args, **kwargs)})"


def test_a_wrapper_runs_in_place_of_the_method() -> None:
    counter, other = Counter(), Counter()
    unwrap = wrap(counter, "add", lambda call, amount, times: call(amount + 1, times=times) + "!")
    assert counter.add(2, times=3) == "9!"
    assert other.add(2, times=3) == "6"
    unwrap()
    assert counter.add(1) == "10"
    assert "add" not in vars(counter)


def test_the_last_wrapper_is_outermost() -> None:
    counter = Counter()
    for text in "abc":
        wrap(counter, "add", _mark(text))
    assert counter.add(1) == "c(b(a(1)))"


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_wrappers_come_off_in_any_order(order: tuple[str, ...]) -> None:
    counter = Counter()
    unwraps = {text: wrap(counter, "add", _mark(text)) for text in "abc"}
    left = ["a", "b", "c"]
    for text in order:
        unwraps[text]()
        left.remove(text)
        expected = "0"
        for outer in left:
            expected = f"{outer}({expected})"
        assert counter.add(0) == expected
    assert "add" not in vars(counter)


def test_taking_a_wrapper_off_twice_leaves_the_others() -> None:
    counter = Counter()
    first, _ = wrap(counter, "add", _mark("a")), wrap(counter, "add", _mark("b"))
    first()
    first()
    assert counter.add(1) == "b(1)"


def test_the_same_wrapper_twice_runs_twice() -> None:
    counter, around = Counter(), _mark("a")
    first, second = wrap(counter, "add", around), wrap(counter, "add", around)
    assert counter.add(1) == "a(a(1))"
    first()
    assert counter.add(1) == "a(2)"
    second()
    assert counter.add(1) == "3"


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


def test_an_optimizer_keeps_what_its_schedule_put_there() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    unwrap = wrap(
        optimizer, "step", lambda call, *args, **kwargs: (calls.append(1), call(*args, **kwargs))
    )
    for _ in range(2):
        parameter.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
        unwrap()
    assert calls == [1]
    assert schedule.get_last_lr() == [pytest.approx(0.001)]


def test_a_torch_module_keeps_its_keys() -> None:
    module = nn.Linear(2, 2)
    keys = list(module.state_dict())
    unwrap = wrap(module, "forward", lambda call, inputs: call(inputs) + 1)
    inputs = torch.ones(1, 2)
    assert torch.equal(module(inputs), nn.functional.linear(inputs, module.weight, module.bias) + 1)
    assert list(module.state_dict()) == keys
    unwrap()
    assert vars(module).keys() == vars(nn.Linear(2, 2)).keys()
