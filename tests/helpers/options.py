"""Options out of range: each is refused with its name, its value, and what to give instead."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lit_data.core.errors import ConfigError

CURES = re.compile(
    r"choose|give|must|allowed|leave|set |name at least|is below|or sizes oscillate|every"
)


def assert_refused(make: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Check that the last of some options is refused."""
    name, value = list(options.items())[-1]
    with pytest.raises(ConfigError) as caught:
        make(**options)
    text = str(caught.value)
    assert name in text
    assert str(value) in text
    assert CURES.search(text), text
