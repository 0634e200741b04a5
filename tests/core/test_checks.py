"""What the annotations of a function say of its arguments."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import ArrayLike

from lit_data.core.checks import call_checked, check_types
from lit_data.core.errors import ConfigError


def _take(
    count: int = 0,
    share: float = 0,
    path: str | PathLike[str] | None = None,
    size: int | tuple[int, int] = 1,
    names: Sequence[str] = (),
    stages: Mapping[Literal["train", "val"], bool] | None = None,
    mode: Literal["a", 1] = "a",
    array: ArrayLike = 0,
    later: "Unknown" = None,  # type: ignore[name-defined]  # noqa: F821
    call: Callable[..., Any] | None = None,
    anything: Any = None,
    bare=None,  # type: ignore[no-untyped-def]  # noqa: ANN001
) -> int:
    return count + len(names)


@pytest.mark.parametrize(
    "given",
    [
        {"count": np.int64(3), "share": 1, "path": Path("a"), "size": [1, 2], "names": ["a"]},
        {"mode": 1},
        {"share": np.float32(0.5), "path": None, "size": 3, "names": (), "stages": {"train": True}},
        {"array": [[1.0]], "later": 3, "call": len, "anything": object(), "bare": 1},
    ],
)
def test_what_fits_is_taken(given: dict[str, Any]) -> None:
    check_types(_take, given, "node")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": True}, "'node.count' is True: give a whole number"),
        ({"count": 1.5}, "'node.count' is 1.5: give a whole number"),
        ({"share": "half"}, "'node.share' is 'half': give a number"),
        ({"path": 3}, "'node.path' is 3: give text or a PathLike or null"),
        ({"size": [1, 2, 3]}, "'node.size' is [1, 2, 3]: give a whole number or [a whole number, "),
        ({"names": "abc"}, "'node.names' is 'abc': give a list, each text"),
        ({"names": ["a", 1]}, "'node.names' is ['a', 1]: give a list, each text"),
        ({"stages": {"tests": True}}, "'node.stages' is {'tests': True}: give names with values"),
        ({"stages": {"val": 1}}, "'node.stages' is {'val': 1}: give names with values or null"),
        ({"mode": True}, "'node.mode' is True: give one of a, 1"),
        ({"counts": 1}, "'node' has no 'counts': choose from count, share, path"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_types(_take, given, "node")
    assert str(caught.value).startswith(message)


def test_own_checks_come_first_and_other_errors_last() -> None:
    def check(count: int) -> int:
        if count == 0:
            raise ConfigError("none at all")
        return 1 // (count - 1)

    assert call_checked(check, (), {"count": 2}, "node") == 1
    with pytest.raises(ConfigError, match="none at all"):
        call_checked(check, (), {"count": False}, "node")
    with pytest.raises(ConfigError, match=r"'node\.count' is 'a': give a whole number"):
        call_checked(check, (), {"count": "a"}, "node")
    with pytest.raises(ZeroDivisionError):
        call_checked(check, (), {"count": 1}, "node")
