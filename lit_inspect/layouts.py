"""Files of a target and its references: how to group and stack them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lit_inspect.bounds import MOST_CHANNELS
from lit_inspect.counts import counted
from lit_inspect.errors import ImageError, UsageError
from lit_inspect.images import ReadOptions, finish, open_image
from lit_inspect.rows import ArrayRows
from lit_inspect.tiles import Rows

ROLES = ("target", "ref1", "ref2")
_LETTER = re.compile(r"\[!?\]?[^\]/]*\]|.", re.DOTALL)  # an element of a glob
_LETTERS = {"*": "([^/]*)", "?": "[^/]"}

Channel = Annotated[int, Field(ge=0, lt=MOST_CHANNELS)]
Glob = Annotated[str, Field(min_length=1, max_length=1000)]


class Group(NamedTuple):
    """Files of one image.

    Attributes:
        name: Name of the image, which is that of its target.
        files: Files in the order of their roles, relative to the folder of the images.
        fault: Reason why they are not an image; empty if they are.
    """

    name: str
    files: tuple[str, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of files with target and references.

    Attributes:
        channels: Numbers of the channels of one file that are target, ref1 and ref2.
        files: A glob with one star for each role, instead of `channels`; files belong together if
            their stars match the same text.
    """

    channels: tuple[Channel, Channel, Channel] | None
    files: Annotated[tuple[Glob, ...], Field(min_length=2, max_length=len(ROLES))] | None

    def __post_init__(self) -> None:
        """Check that exactly one of both is given, and that globs have one star."""
        if (self.channels is None) == (self.files is None):
            raise ValueError("channels or files must be set, and not both")
        if any(pattern.count("*") != 1 for pattern in self.files or ()):
            raise ValueError("each of files must hold one *")
        for pattern in self.files or ():
            try:
                compile_star(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} cannot be understood ({error})") from error

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the channels of an image."""
        return ROLES if self.files is None else ROLES[: len(self.files)]


def group_files(names: Sequence[str], layout: Layout | None) -> list[Group]:
    """Return the files of each image.

    Args:
        names: Names of all files, with forward slashes.
        layout: Layout of target and references; None if an image is one file.
    """
    if layout is None or layout.files is None:
        return [Group(name, (name,)) for name in names]
    files_of_roles = [find_role(pattern, names) for pattern in layout.files]
    stars = sorted(set().union(*files_of_roles))
    groups = [_join_roles(layout, files_of_roles, star) for star in stars]
    return sorted(groups)


def find_role(pattern: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files that match a glob with one ``*``, by the text that the star matches."""
    fit = compile_star(pattern).fullmatch
    files: dict[str, list[str]] = {}
    for name in names:
        match = fit(name)
        if match is not None:
            files.setdefault(match[1], []).append(name)
    return files


def compile_star(pattern: str) -> re.Pattern[str]:
    """Compile a glob with one ``*`` to an expression with a group for the text of the star.

    Raises:
        re.error: A character range ends before it begins.
    """
    return re.compile("".join(map(_translate, _LETTER.findall(pattern))), re.DOTALL)


def _translate(letter: str) -> str:
    if len(letter) == 1:
        return _LETTERS.get(letter) or re.escape(letter)
    is_negated = letter[1] == "!"
    members = re.escape(letter[1 + is_negated : -1]).replace("\\-", "-")
    return f"[^/{members}]" if is_negated else f"[{members}]"


def _join_roles(
    layout: Layout, files_of_roles: Sequence[Mapping[str, Sequence[str]]], star: str
) -> Group:
    assert layout.files is not None
    files: list[str] = []
    faults = []
    for role, pattern, files_of in zip(layout.roles, layout.files, files_of_roles, strict=True):
        candidates = files_of.get(star, ())
        files += candidates[:1]
        if not candidates:
            faults.append(f"{role} is missing: {pattern.replace('*', star)}")
        elif len(candidates) > 1:
            faults.append(f"{role} may be {' or '.join(candidates[:2])}")
    return Group(files[0], tuple(files), "; ".join(faults))


def open_files(paths: Sequence[Path], options: ReadOptions, layout: Layout | None) -> Rows:
    """Open the files of an image.

    Args:
        paths: One file, or one for each role.
        options: Options for reading each file.
        layout: Layout of target and references, if any.

    Raises:
        UsageError: There are more or fewer files than the layout has.
        ImageError: A file is bad, or the files do not fit each other.
    """
    if layout is None or layout.files is None:
        if len(paths) != 1:
            raise UsageError(f"{len(paths)} files, but an image is one file here")
        image = open_image(paths[0], options)
        return image if layout is None else _pick(image, layout)
    _check_count(len(paths), "files", layout)
    of_one = _of_one_channel(options)
    return _stack([open_image(path, of_one) for path in paths], list(map(str, paths)))


def take_arrays(
    arrays: Sequence[NDArray[Any]], options: ReadOptions, layout: Layout | None
) -> Rows:
    """Return an image from arrays, such as those of a camera.

    Args:
        arrays: One array with the content of a file, or one for each role.
        options: Options for reading files.
        layout: Layout of target and references, if any.

    Raises:
        UsageError: There are more or fewer arrays than the layout has, or an array has another
            shape.
        ImageError: An array differs from the training images, or the arrays do not fit each other.
    """
    if layout is None and len(arrays) != 1:
        raise UsageError(f"{len(arrays)} arrays, but the model was trained with single images")
    if layout is None or (len(arrays) == 1 and layout.files is None):
        image = ArrayRows(finish(_to_planes(arrays[0]), options))
        return image if layout is None else _pick(image, layout)
    _check_count(len(arrays), "arrays", layout)
    of_one = _of_one_channel(options)
    images = [ArrayRows(finish(_to_planes(array), of_one)) for array in arrays]
    return _stack(images, layout.roles)


def _to_planes(array: NDArray[Any]) -> NDArray[Any]:
    planes = np.moveaxis(array, -1, 0) if array.ndim == 3 else array[None]
    if planes.ndim != 3 or not all(planes.shape):
        raise UsageError(f"an array {list(array.shape)}: give [H, W] or [H, W, C]")
    return planes


def _check_count(count: int, what: str, layout: Layout) -> None:
    if count != len(layout.roles):
        stacked = "" if layout.channels is None else ", or one array [H, W, C] as in a file"
        raise UsageError(
            f"{count} {what}, but the model was trained with {len(layout.roles)}: give "
            f"{', '.join(layout.roles)}{stacked}"
        )


def _of_one_channel(options: ReadOptions) -> ReadOptions:
    """Return options for the file of a role, which has one channel, or several equal ones."""
    return replace(options, equal_channels="collapse")


def _pick(image: Rows, layout: Layout) -> Rows:
    """Return target and references from the channels of a file."""
    assert layout.channels is not None
    needed = max(layout.channels) + 1
    if needed > image.shape[0]:
        raise ImageError(
            f"{counted(image.shape[0], 'channel')}, but target, ref1 and ref2 are channels "
            f"{', '.join(map(str, layout.channels))} of a file, counted from 0"
        )
    if layout.channels == tuple(range(image.shape[0])):
        return image
    return StackedRows([image], layout.channels)


def _stack(images: Sequence[Rows], names: Sequence[str]) -> Rows:
    """Return images as the channels of one image.

    Raises:
        ImageError: The images differ in size or dtype.
    """
    size_px, dtype = images[0].shape[1:], images[0].read(0, 1).dtype
    for image, name in zip(images[1:], names[1:], strict=True):
        if image.shape[1:] != size_px:
            sizes = [f"{height} x {width} px" for height, width in (size_px, image.shape[1:])]
            raise ImageError(f"{names[0]} is {sizes[0]}, {name} is {sizes[1]}")
        if image.read(0, 1).dtype != dtype:
            raise ImageError(f"{names[0]} is {dtype}, {name} is {image.read(0, 1).dtype}")
    return StackedRows(images, range(len(images)))


class StackedRows:
    """Channels of several images, which are read on demand.

    Args:
        images: Images of one size.
        channels: Numbers of the channels to return, among those of all images.
    """

    def __init__(self, images: Sequence[Rows], channels: Sequence[int]) -> None:
        self._images = images
        self._channels = list(channels)
        self.shape = (len(channels), *images[0].shape[1:])

    def read(self, top: int, bottom: int) -> NDArray[Any]:
        """Return rows [C, bottom - top, W]."""
        rows = [image.read(top, bottom) for image in self._images]
        stacked = rows[0] if len(rows) == 1 else np.concatenate(rows)
        is_all = self._channels == list(range(len(stacked)))
        return stacked if is_all else stacked[self._channels]
