"""Samples of a GAN dataset: the views of its objects, their poses and their labels."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lit_data.checks import check_choice
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, DataError, list_problems, show_path
from lit_data.io.discovery import check_inside

Ints = NDArray[np.int64]
Views = Literal["none", "folders", "sheet"]
"""Each image is a sample by itself; a folder is an object, and its images are views; an image is a sheet of views."""
Labels = Literal["none", "folders", "views", "objects"]
"""What a label is: nothing, the folder of the image or the object, the view, or the object."""

LAYOUT_FILE: Final = "views.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLayout:
    """Layout of the views of a dataset, from `views.json` in its root.

    Args:
        views: See `Views`.
        tiles: Views along each side of a sheet; none where that is not known.
        azimuth_deg: Of the first view, and where the circle ends: the k azimuths are start + i (end
            - start) / k.
        elevation_deg: Lowest and highest; the k elevations lie evenly between them, both included.

    Raises:
        ConfigError: A value is not allowed.
    """

    views: Views = "none"
    tiles: int | None = None
    azimuth_deg: tuple[float, float] = (0.0, 360.0)
    elevation_deg: tuple[float, float] = (0.0, 60.0)

    def __post_init__(self) -> None:
        check_choice("views", self.views, ("none", "folders", "sheet"))
        if self.tiles is not None and (
            self.views != "sheet" or not isinstance(self.tiles, int) or self.tiles < 1
        ):
            raise ConfigError(
                f"tiles={self.tiles} with views={self.views}: give the views along a side of a sheet"
            )
        for name in ("azimuth_deg", "elevation_deg"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 2 or not all(map(math.isfinite, values)):
                raise ConfigError(f"{name}={list(values)} must be [first, last] in degrees")
            object.__setattr__(self, name, values)

    def poses(self, side: int) -> NDArray[np.float32]:
        """Azimuth and elevation of the side * side views, rad: [side * side, 2].

        The azimuth changes fastest: view number = number of the elevation * side + number of the
        azimuth.
        """
        first, end = self.azimuth_deg
        # The end of the circle is its beginning, and no view of its own.
        azimuths = first + (end - first) * np.arange(side) / side
        elevations = np.linspace(*self.elevation_deg, side)
        pairs = np.stack((np.tile(azimuths, side), np.repeat(elevations, side)), axis=1)
        return np.radians(pairs).astype(np.float32)


def read_layout(folder: Path) -> ViewLayout:
    """Read `views.json` in the root of a dataset.

    Without such a file each image is a sample by itself.

    Raises:
        DataError: The file is not what it must be, or lies elsewhere.
    """
    path = folder / LAYOUT_FILE
    if not path.is_file():
        return ViewLayout()
    check_inside(path, folder)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        names = [name for name in ViewLayout.__slots__ if name in content]
        return ViewLayout(**{name: content[name] for name in {"views", *names}})
    except (ValueError, TypeError, KeyError, OverflowError, ConfigError) as error:
        raise DataError(
            f"{show_path(path)}: {error}; it must hold views, and may hold tiles and degrees"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """All samples of a set, those of one object together.

    Attributes:
        objects: Names of the objects; of the images where each is a sample by itself.
        images: [N] number of the image in the bank.
        view: [N] number of the view.
        object: [N] number of the object.
        label: [N] int64.
        num_labels: Labels that there are; 0 without labels.
        classes: Names of the labels where they have any.
        tiles: Views along each side of a stored image.
        poses: [V, 2] float32, azimuth and elevation of each view in rad; none where images have no
            views.
    """

    objects: tuple[str, ...]
    images: Ints
    view: Ints
    object: Ints
    label: Ints
    num_labels: int
    classes: tuple[str, ...]
    tiles: int
    poses: NDArray[np.float32] | None

    def samples_of(self, objects: Ints) -> Ints:
        """Ascending numbers of the samples of some objects."""
        return np.flatnonzero(np.isin(self.object, objects))


def tabulate(
    names: Sequence[str],
    layout: ViewLayout,
    labels: Labels,
    *,
    skipped: Sequence[str] = (),
    in_splits: bool = False,
) -> SampleTable:
    """List the samples of a set.

    Args:
        names: Path of each image of the bank relative to the root, with forward slashes.
        layout: How they are views. A sheet has its number of tiles.
        labels: What their labels are.
        skipped: Paths of bad images that the bank does not have: an object that lacks a view is
            left out.
        in_splits: The first folder of each path is a split, and no part of a class.

    Raises:
        DataError: Objects do not all have the same square number of views, or an image has no
            class.
        ConfigError: The labels need views.
    """
    has_views = layout.views != "none"
    if labels in ("views", "objects") and not has_views:
        raise ConfigError(
            f"labels={labels} needs objects with views: set data.views=folders or sheet, or other "
            "labels"
        )
    groups = group_views([*names, *skipped], layout.views)
    side = tiles = 1
    if layout.views == "sheet":
        side = tiles = layout.tiles or 1
    elif layout.views == "folders":
        side = check_views({name: len(group) for name, group in groups.items()})
    # Bad images are numbered behind the good ones: an object with one of them is not complete.
    complete = {name: group for name, group in groups.items() if max(group) < len(names)}
    objects = tuple(complete)
    group_images = np.array([number for group in complete.values() for number in group], np.int64)
    images = np.repeat(group_images, tiles**2)  # a sheet is the image of all of its views
    view = np.tile(np.arange(side**2), len(objects))
    number = np.repeat(np.arange(len(objects)), side**2)
    kinds: tuple[str, ...] = ()
    if labels == "folders":
        classes = find_classes(objects, in_splits=in_splits)
        kinds = tuple(sorted(set(classes)))
        class_numbers = np.array([kinds.index(name) for name in classes], np.int64)
        label, num_labels = class_numbers[number], len(kinds)
    elif labels == "views":
        label, num_labels = view, side**2
    elif labels == "objects":
        label, num_labels = number, len(objects)
    else:
        label, num_labels = np.zeros_like(number), 0
    poses = layout.poses(side) if has_views else None
    return SampleTable(objects, images, view, number, label, num_labels, kinds, tiles, poses)


def group_views(names: Sequence[str], views: Views) -> dict[str, list[int]]:
    """Return the numbers of the images of each object.

    The views of a folder lie in the order of their names, 2 before 10.
    """
    if views != "folders":
        return {name: [number] for number, name in enumerate(names)}
    groups: dict[str, list[int]] = {}
    for name, number in sorted(
        zip(names, range(len(names)), strict=True), key=lambda pair: _natural_key(pair[0])
    ):
        groups.setdefault(PurePosixPath(name).parent.as_posix(), []).append(number)
    return groups


def check_views(counts: Mapping[str, int]) -> int:
    """The k of k * k views that each object has.

    Raises:
        DataError: Objects have other numbers of views; each is listed with the squares next to its
            number.
    """
    # The number that most objects have; a square one goes before any that is none.
    often = Counter(counts.values())
    usual = max(often, key=lambda count: (_is_square(count), often[count]))
    wrong = [name for name, count in counts.items() if count != usual or not _is_square(count)]
    if not wrong:
        return math.isqrt(usual)
    problems = list_problems([(name, _describe_count(counts[name])) for name in wrong])
    needed = "the same square number of views"
    if _is_square(usual):
        needed = f"{usual} views as the others have"
    raise problems.make_error(f"{len(wrong)} of {len(counts)} objects do not have {needed}")


def find_classes(objects: Sequence[str], *, in_splits: bool) -> list[str]:
    """The class of each object: the folder it lies in, below that of its split.

    Raises:
        DataError: Some lie in no folder.
    """
    classes, outside = [], []
    for name in objects:
        folders = PurePosixPath(name).parts[int(in_splits) : -1]
        classes.append("/".join(folders))
        if not folders:
            outside.append((name, "lies in no folder"))
    if outside:
        raise list_problems(outside).make_error(
            f"data.labels=folders needs a folder for each class; {len(outside)} lie in none"
        )
    return classes


def lie_in_splits(names: Sequence[str], splits: object) -> bool:
    """Return True if the first folder of each path names its split."""
    firsts = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    return splits in ("auto", "folders") and firsts <= set(SPLITS)


def _natural_key(name: str) -> list[tuple[str, int, str]]:
    """Sorts numbers in names by their value."""
    return [(text, int(digits or -1), digits) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _describe_count(count: int) -> str:
    if _is_square(count):
        return f"{count} views"
    root = max(1, math.isqrt(count))
    return f"{count} views; the nearest squares are {root**2} and {(root + 1) ** 2}"
