"""Types and ranges of the numbers and strings in a file, and the rules for reading them."""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field

from lit_inspect.errors import escape

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Strings are not converted to numbers, and unknown keys are refused."""

MOST_CHANNELS = 16
MOST_VALUES = 2**26
"""Most values in an input of the net: channels x height x width."""

MOST_VIEWS = 16
"""Most tiles or windows along an axis that may overlap at a pixel."""

_LARGEST = float(np.finfo(np.float32).max)

Side = Annotated[int, Field(ge=1, le=2**15)]
Sides = tuple[Side, Side]
Distance = Annotated[int, Field(ge=0, le=2**15)]
PixelCount = Annotated[int, Field(ge=0, le=2**32)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Value = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]  # which float32 holds
Text = Annotated[str, Field(max_length=1000), AfterValidator(escape)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(escape)]


def describe_problem(problem: Mapping[str, Any]) -> str:
    """Return an error of pydantic as ``tiling.overlap_px: Input should be ..., and is -5``."""
    name = ".".join(map(str, problem["loc"]))
    text = f"{name}: {problem['msg']}".removeprefix(": ").replace("Value error, ", "")[:200]
    is_value = problem["type"] not in ("missing", "value_error")
    return f"{text}, but is {problem['input']!r:.60}" if is_value else text
