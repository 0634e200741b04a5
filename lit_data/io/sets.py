"""What must hold between the images of one set, told from their headers before anything is decoded."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lit_data.io.problems import Problems, show_path

Name = str | os.PathLike[str]


class SizedHeader(Protocol):
    """An ``ImageHeader`` or a ``SourceHeader``."""

    @property
    def channels(self) -> int:
        """Channels."""

    @property
    def height_px(self) -> int:
        """Rows."""

    @property
    def width_px(self) -> int:
        """Columns."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Of the pixels."""


def check_set(
    headers: Sequence[SizedHeader],
    names: Sequence[Name],
    *,
    same_size: bool = False,
    min_height_px: int = 1,
    min_width_px: int = 1,
) -> Problems:
    """Find what keeps images from being one set.

    Args:
        headers: Of all images.
        names: Their paths, in the same order.
        same_size: Whether all must have the size of the first one.
        min_height_px: Rows that each must have, such as those of a patch.
        min_width_px: Columns that each must have.

    Returns:
        One problem for each other depth or number of channels, with an example of both kinds, and one for each image
        of a wrong size.
    """
    problems = Problems()
    _check_alike(problems, [header.dtype.name for header in headers], names, "dtype", "convert one of them")
    hint = "set gray_to_rgb=True, or choose channels"
    _check_alike(problems, [f"{header.channels} channel(s)" for header in headers], names, "number of channels", hint)
    for header, name in zip(headers, names, strict=True):
        size = header.height_px, header.width_px
        first = headers[0].height_px, headers[0].width_px
        if same_size and size != first:
            problems.add(name, describe_size_mismatch((names[0], name), (first, size)))
        if header.height_px < min_height_px or header.width_px < min_width_px:
            problems.add(
                name,
                f"{size[0]} x {size[1]} pixels, smaller than the patch of {min_height_px} x {min_width_px}; "
                'set edges="pad" or use a smaller patch',
            )
    return problems


def describe_size_mismatch(names: tuple[Name, Name], sizes: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Say how two images differ in size.

    Args:
        names: Their paths.
        sizes: Their (height, width) in pixels.

    Returns:
        One sentence with both paths and sizes; says so if one is only the other turned.
    """
    (first, other), (one, two) = map(show_path, names), sizes
    text = f"{first} is {one[0]} x {one[1]} pixels, {other} is {two[0]} x {two[1]}"
    if one == two[::-1]:
        return f'{text}: only turned, perhaps by an EXIF orientation; set exif="apply" for both, or turn one of them'
    return f"{text}; they must have the same size"


def _check_alike(problems: Problems, values: Sequence[str], names: Sequence[Name], what: str, hint: str) -> None:
    examples = dict(zip(reversed(values), reversed(names), strict=True))  # the first name of each value
    for value, name in examples.items():
        if value != values[0]:
            problems.add(name, f"{value}, but {show_path(names[0])} has {values[0]}; one set has one {what}; {hint}")
