"""Checks between the images of a dataset, by their headers and before anything is decoded."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lit_data.errors import Problems, show_path

Name = str | os.PathLike[str]


class SetHeader(Protocol):
    """An ``ImageHeader`` or a ``SourceHeader``."""

    @property
    def channels(self) -> int:
        """Channels."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Of the pixels."""


def check_set(headers: Sequence[SetHeader], names: Sequence[Name]) -> Problems:
    """Find what keeps images from being one set.

    Args:
        headers: Of all images.
        names: Their paths, in the same order.

    Returns:
        One problem for each other depth or number of channels, with an example of both kinds.
    """
    problems = Problems()
    _check_alike(
        problems, [header.dtype.name for header in headers], names, "dtype", "convert one of them"
    )
    hint = "set data.read.gray_to_rgb=true, or choose data.channels"
    _check_alike(
        problems,
        [f"{header.channels} channel(s)" for header in headers],
        names,
        "number of channels",
        hint,
    )
    return problems


def describe_size_mismatch(
    names: tuple[Name, Name], sizes: tuple[tuple[int, int], tuple[int, int]]
) -> str:
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
        cure = "set data.read.exif=apply and data.mask_read.exif=apply, or turn one of them"
        return f"{text}: only turned, perhaps by an EXIF orientation; {cure}"
    return f"{text}; they must have the same size"


def _check_alike(
    problems: Problems, values: Sequence[str], names: Sequence[Name], what: str, hint: str
) -> None:
    # The first name of each value.
    examples = dict(zip(reversed(values), reversed(names), strict=True))
    for value, name in examples.items():
        if value != values[0]:
            problems.add(
                name,
                f"{value}, but {show_path(names[0])} has {values[0]}; one set has one {what}; "
                f"{hint}",
            )
