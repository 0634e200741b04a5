"""Types and ranges of a calibration file, which may come from an untrusted source.

Uses pydantic, which is imported only if there is a calibration.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Conditions = Annotated[dict[str, Any], Field(max_length=200)]
Features = Annotated[list[tuple[Number, Number, Number]], Field(min_length=1)]


@with_config(ConfigDict(extra="forbid"))
class _Content(TypedDict):
    """Parts of a `Calibration`."""

    version: Literal[2]
    good_below: Number
    defect_above: Number
    miss: Share
    false_alarms: Share
    confidence: Share
    unit: Literal["image", "lot"]
    checkpoint_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    conditions: Conditions
    features: Features
    defects: NotRequired[Literal["real", "synthetic"]]


CONTENT = TypeAdapter(_Content)
