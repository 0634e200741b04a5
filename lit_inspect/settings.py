"""`Settings`: the values of ``inspect.json``, validated before use."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lit_inspect.board import FORMAT
from lit_inspect.bounds import (
    MOST_CHANNELS,
    MOST_VALUES,
    STRICT,
    Fraction,
    Name,
    PixelCount,
    Text,
    Value,
    describe_problem,
)
from lit_inspect.boxes import BoxRules
from lit_inspect.drift import Guarantee
from lit_inspect.errors import BoardError
from lit_inspect.images import ReadOptions
from lit_inspect.layouts import Layout
from lit_inspect.scaling import Scaling
from lit_inspect.tiles import Tiling
from lit_inspect.verdicts import Judge

_MOST_KINDS = 255  # most classes that maps can contain


def _require_all(values: object) -> object:
    """Refuse options for reading if one is missing, although all have defaults."""
    missing = {field.name for field in fields(ReadOptions)}
    if isinstance(values, dict) and (missing := missing - values.keys()):
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of ``inspect.json``; a new key requires a new format number.

    Attributes:
        format: Number of the format.
        sha256: SHA-256 of each part.
        task: Kind of results of the net.
        read: Options for reading images.
        channels: Number of channels of an image.
        dtype: Dtype of pixels.
        value_range: Range that is scaled to 0..1; None for the range of the dtype.
        scaling: Size to which images are scaled.
        classes: Names of the classes.
        good: Numbers of the classes of good parts, which determine verdicts of labels.
        golden: Number of golden inputs.
        tiling: Rules for cutting images into tiles and stitching maps.
        threshold: Least probability of a pixel, or score of a box.
        image_threshold: Least score of an image with a defect.
        top_fraction: Fraction of the pixels whose mean is the score of an image.
        min_area_px: Smallest area of a defect or box.
        large_px: Maps of images with more pixels are stored in a file.
        doubt: Reason why verdicts are unsure, if any.
        review: Lowest and highest score for review; none if the first one is higher.
        guarantee: Bounds of verdicts.
        boxes: Rules for finding objects.
        versions: Releases of the packages that exported the file.
        layout: Files of target and references; None if an image is one file.
        reference_limits: Limits of references that fit, see `lit_inspect.references`; None if they
            are unknown.
        shows: Content of a map.
        expand: Number of the stored channel for each channel that a module of lit_data gets.
        precision: ``int8``, or None for float32.
        trained: Description of the training by lit_data.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format: Literal[1] = FORMAT
    sha256: Annotated[dict[str, str], Field(default_factory=dict)]
    task: Literal["maps", "labels", "boxes"]
    read: Annotated[ReadOptions, BeforeValidator(_require_all)]
    channels: Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
    dtype: Literal["uint8", "uint16", "int16", "float32"]
    value_range: tuple[Value, Value] | None
    scaling: Scaling | None
    classes: Annotated[tuple[Name, ...], Field(max_length=2**16)]
    golden: Annotated[int, Field(ge=0, le=100)]
    tiling: Tiling | None
    threshold: Fraction
    image_threshold: Fraction | None
    top_fraction: Fraction
    min_area_px: PixelCount
    large_px: PixelCount
    doubt: Text | None
    review: tuple[Fraction, Fraction] | None
    guarantee: Guarantee | None
    boxes: BoxRules | None
    versions: dict[Name, Text]
    layout: Layout | None = None
    reference_limits: tuple[Value, Value] | None = None
    shows: Literal["defects", "marks"] = "defects"
    expand: Annotated[tuple[int, ...], Field(max_length=MOST_CHANNELS)] | None = None
    precision: Literal["int8"] | None = None
    trained: dict[str, Any] | None = None
    good: Annotated[tuple[int, ...], Field(max_length=2**16)] = ()

    @property
    def judge(self) -> Judge:
        """Return the rule for verdicts."""
        return Judge(threshold=self.image_threshold, review=self.review, is_unsure=bool(self.doubt))

    def __post_init__(self) -> None:
        """Check that the values are consistent."""
        self._check_task()
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("two classes have the same name")
        if self.guarantee is not None and self.review is None:
            raise ValueError("a guarantee needs review, which is missing")
        if self.value_range is not None and not _has_width(*self.value_range):
            raise ValueError(f"value_range {self.value_range} does not ascend")
        if self.expand and not set(self.expand) <= set(range(self.channels)):
            raise ValueError(f"expand {self.expand} names more than {self.channels} channels")
        if self.layout is not None and len(self.layout.roles) != self.channels:
            raise ValueError(
                f"layout has {len(self.layout.roles)} images for {self.channels} channels"
            )
        if self.reference_limits is not None and self.layout is None:
            raise ValueError("reference_limits are for a layout of references, which is missing")
        if not self._fits_fill():
            raise ValueError(f"fill is not a value of {self.dtype}")
        if self._count_values() > MOST_VALUES:
            raise ValueError(f"the net gets more than {MOST_VALUES} values at a time")

    def _check_task(self) -> None:
        """Check that all values that the task needs are present, and no others."""
        is_map, is_box = self.task == "maps", self.task == "boxes"
        if (self.tiling is not None) != is_map:
            raise ValueError(f"tiling is only for maps, and task is {self.task}")
        if (self.boxes is not None) != is_box:
            raise ValueError(f"boxes is only for boxes, and task is {self.task}")
        if not is_map and (self.scaling is None) != is_box:
            raise ValueError(f"labels need scaling, and boxes have none; task is {self.task}")
        if self.shows == "marks" and not self._fits_marks():
            raise ValueError("marks are those of maps of three channels of uint8, without classes")
        if not is_map and not self.classes:
            raise ValueError(f"{self.task} need classes")
        self._check_good()
        if is_map and len(self.classes) > _MOST_KINDS:
            raise ValueError(f"{len(self.classes)} classes, but maps hold at most {_MOST_KINDS}")

    def _check_good(self) -> None:
        if self.good and (self.task != "labels" or not self._fits_good()):
            raise ValueError(f"good {self.good} must be numbers of some of the classes of labels")
        has_limits = self.review is not None or self.image_threshold is not None
        if self.task == "labels" and has_limits and not self.good:
            raise ValueError("labels without a good class have no verdicts to review")

    def _fits_good(self) -> bool:
        return set(self.good) < set(range(len(self.classes)))

    def _fits_marks(self) -> bool:
        is_colour = (self.channels, self.dtype) == (3, "uint8")
        return self.task == "maps" and is_colour and not self.classes and self.scaling is None

    def _fits_fill(self) -> bool:
        if self.boxes is None or self.dtype == "float32":
            return True
        limits = np.iinfo(self.dtype)
        return int(limits.min) <= self.boxes.fill <= int(limits.max)

    def _count_values(self) -> int:
        """Return channels x height x width of an input of the net."""
        sides_px = [(1, 1)]
        if self.tiling is not None:
            sides_px.append(self.tiling.tile_px)
        if self.boxes is not None:
            sides_px.append(self.boxes.sample_px)
        if self.scaling is not None and self.scaling.size_px is not None:
            sides_px.append(self.scaling.size_px)
        return self.channels * max(map(math.prod, sides_px))


def _has_width(low: float, high: float) -> bool:
    with np.errstate(over="ignore"):
        width = np.float32(high - low)
    return bool(width > 0 and np.isfinite(width))


_SCHEMA = TypeAdapter(Settings)


def read_settings(manifest: Mapping[str, Any]) -> Settings:
    """Return the settings of a manifest.

    Raises:
        BoardError: A value is missing, of another type or out of its range, or a key is unknown.
    """
    try:
        # JSON has lists instead of tuples.
        return _SCHEMA.validate_json(json.dumps(manifest))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise BoardError(f"inspect.json: {describe_problem(problem)}") from error
    except (ValueError, RecursionError) as error:
        raise BoardError(f"inspect.json: {error}") from error
