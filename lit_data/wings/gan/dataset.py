"""Images for generative models, with labels, and with poses if objects have several views."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, list_problems, show_path
from lit_data.core.files import is_there, natural_key
from lit_data.core.grid import pair_px
from lit_data.core.names import warn_of_names
from lit_data.core.opening import read_within
from lit_data.core.plain import parse_json
from lit_data.core.shared_arrays import share_state
from lit_data.core.types import Array, FieldSpec, Floats, Ints, Size
from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.patch_source import GridPatches, RandomPatches, make_padded_grid
from lit_data.datasets.split_names import find_split_folder
from lit_data.images.bank import ImageBank
from lit_data.images.discovery import check_inside
from lit_inspect.counts import counted, counted_of

Views = Literal["none", "folders", "sheet"]
"""Views: each image is one sample; a folder is an object, and its images are views; an image is a sheet of views."""
Labels = Literal["none", "folders", "views", "objects"]
"""Meaning of a label: nothing, the folder of the image or object, the view, or the object."""

LAYOUT_FILE = "views.json"
_MOST_BYTES = 2**20  # of it

Cut = Literal["whole", "random", "grid"]
"""Samples: whole images or views, patches at random places, or patches on a grid."""

_FIXED = ("bank", "table", "samples", "_patches")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLayout:
    """Layout of the views of a dataset, from `views.json` in its root.

    Args:
        views: See `Views`.
        tiles: Views along each side of a sheet; None if unknown.
        azimuth_deg: Azimuth of the first view, and end of the circle: the k azimuths are start + i
            (end - start) / k.
        elevation_deg: Lowest and highest elevation; the k elevations are evenly spaced, both ends
            included.

    Raises:
        ConfigError: A value is not allowed.
    """

    views: Views = "none"
    tiles: int | None = None
    azimuth_deg: tuple[float, float] = (0.0, 360.0)
    elevation_deg: tuple[float, float] = (0.0, 60.0)

    def __post_init__(self) -> None:
        check_choice("views", self.views, get_args(Views))
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

    def poses(self, side: int) -> Floats:
        """Return azimuth and elevation of the side * side views, rad: [side * side, 2].

        The azimuth changes fastest: view number = number of the elevation * side + number of the
        azimuth.
        """
        first, end = self.azimuth_deg
        # The end of the circle is its beginning, so it is not a separate view.
        azimuths = first + (end - first) * np.arange(side) / side
        elevations = np.linspace(*self.elevation_deg, side)
        pairs = np.stack((np.tile(azimuths, side), np.repeat(elevations, side)), axis=1)
        return np.radians(pairs).astype(np.float32)


def read_layout(folder: Path) -> ViewLayout:
    """Read `views.json` in the root of a dataset.

    Without this file, each image is one sample.

    Raises:
        DataError: The file is invalid, or outside the folder.
    """
    path = folder / LAYOUT_FILE
    if not is_there(path):
        return ViewLayout()
    check_inside(path, folder)
    data = read_within(path, _MOST_BYTES)
    try:
        content = parse_json(data)
        names = [name for name in ViewLayout.__slots__ if name in content]
        return ViewLayout(**{name: content[name] for name in {"views", *names}})
    except (DataError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(
            f"{show_path(path)}: {error}; it must hold views, and may hold tiles and degrees"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """All samples of a dataset, grouped by object.

    Attributes:
        objects: Names of the objects, or of the images if each is one sample.
        images: [N] number of the image in the bank.
        view: [N] number of the view.
        object: [N] number of the object.
        label: [N] int64.
        num_labels: Number of labels; 0 without labels.
        classes: Names of the labels, if they have names.
        tiles: Views along each side of a stored image.
        poses: [V, 2] float32, azimuth and elevation of each view in rad; None if images have no
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
    poses: Floats | None

    def samples_of(self, objects: Ints) -> Ints:
        """Return the ascending numbers of the samples of some objects."""
        return np.flatnonzero(np.isin(self.object, objects))


def tabulate(
    names: Sequence[str],
    layout: ViewLayout,
    labels: Labels,
    *,
    skipped: Sequence[str] = (),
    in_splits: bool = False,
) -> SampleTable:
    """List the samples of a dataset.

    Args:
        names: Path of each image of the bank relative to the root, with forward slashes.
        layout: Layout of the views. For sheets, it has the number of tiles.
        labels: Meaning of the labels.
        skipped: Paths of bad images that the bank does not have; an object with a missing view is
            skipped.
        in_splits: True if a folder of each path is that of its split, and not part of a class.

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
    # Bad images are numbered after the good ones: an object with one of them is incomplete.
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
        warn_of_names(kinds)
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

    The views of a folder are sorted by name, 2 before 10.
    """
    if views != "folders":
        return {name: [number] for number, name in enumerate(names)}
    groups: dict[str, list[int]] = {}
    for number in sorted(range(len(names)), key=lambda number: natural_key(names[number])):
        groups.setdefault(PurePosixPath(names[number]).parent.as_posix(), []).append(number)
    return groups


def check_views(counts: Mapping[str, int]) -> int:
    """Return the k of the k * k views that each object has.

    Raises:
        DataError: Numbers of views differ or are not square; each is listed with the nearest
            squares.
    """
    # The most frequent number of views; a square number takes precedence over any other.
    often = Counter(counts.values())
    usual = max(often, key=lambda count: (_is_square(count), often[count]))
    wrong = [name for name, count in counts.items() if count != usual or not _is_square(count)]
    if not wrong:
        return math.isqrt(usual)
    problems = list_problems([(name, _describe_count(counts[name])) for name in wrong])
    needed = "the same square number of views"
    if _is_square(usual):
        needed = f"{counted(usual, 'view')} like the others"
    do_not = counted_of(len(wrong), len(counts), "object", "does not", "do not")
    raise problems.make_error(f"{do_not} have {needed}")


def find_classes(objects: Sequence[str], *, in_splits: bool) -> list[str]:
    """Return the class of each object: its folders, without that of its split.

    Raises:
        DataError: Some objects are in no folder.
    """
    classes, outside = [], []
    for name in objects:
        folders = list(PurePosixPath(name).parts[:-1])
        if in_splits:
            folders.remove(find_split_folder(name) or "")
        classes.append("/".join(folders))
        if not folders:
            outside.append((name, "is not in a folder"))
    if outside:
        raise list_problems(outside).make_error(
            f"data.labels=folders needs a folder for each class; "
            f"{counted(len(outside), 'is', 'are')} not in any"
        )
    return classes


def lie_in_splits(names: Sequence[str], splits: object) -> bool:
    """Return True if a folder of each path names its split."""
    return splits in ("auto", "folders") and all(map(find_split_folder, names))


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _describe_count(count: int) -> str:
    if _is_square(count):
        return counted(count, "view")
    root = max(1, math.isqrt(count))
    return f"{counted(count, 'view')}; the nearest squares are {root**2} and {(root + 1) ** 2}"


class GANDataset(BankDataset):
    """Map-style images of one split; writes many samples at once.

    A sample is a dict:

    - ``image`` [C, h, w]: stored pixels;
    - ``label`` int64: class, view or object, 0 without labels;
    - ``view``, ``object`` int64 and ``pose`` [2] float32, azimuth and elevation in rad: only if
      objects have views;
    - ``index`` int64: number of the sample among those of *all* images, which seeds its random
      stream;
    - ``image_index`` int64: number of the image in the bank;
    - ``epoch`` int64: the epoch it was read for.

    Args:
        bank: Decoded images [C, h, w], each of `image_px`, or sheets of `table.tiles` times
            `table.tiles` of them. Images that patches are cut from may have any size; smaller ones
            are reflect-padded.
        table: Samples of the bank.
        samples: Numbers of this split's samples in the table; all of them by default.
        image_px: Size of a sample, one number or (height, width).
        cut: See `Cut`.
        samples_per_image: Patches of each image in an epoch, for ``cut="random"``.
        seed: Seed of the places of patches.

    Raises:
        ConfigError: Patches are requested of images with views, or a number is not allowed.
        DataError: Images have another size.
    """

    def __init__(
        self,
        bank: ImageBank,
        table: SampleTable,
        *,
        samples: Ints | None = None,
        image_px: int | Size = 64,
        cut: Cut = "whole",
        samples_per_image: int = 16,
        seed: int = 0,
    ) -> None:
        self.bank = bank
        self.table = table
        self.image_px = pair_px("image_px", image_px)
        if samples is None:
            samples = np.arange(len(table.images))
        self.samples = np.ascontiguousarray(samples, np.int64)
        self._patches: RandomPatches | GridPatches | None = None
        self._check(cut)
        if cut == "random":
            images = table.images[self.samples]
            self._patches = RandomPatches(bank, images, samples_per_image, self.image_px, seed)
        elif cut == "grid":
            grid = make_padded_grid(bank, self.image_px, self.image_px)
            self._patches = GridPatches(grid, table.images[self.samples])
        self.fields = self._describe()

    def __len__(self) -> int:
        return len(self.samples if self._patches is None else self._patches)

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        samples = self._write_pixels(rows, indices, epoch)
        rows["image_index"][:] = self.table.images[samples]
        rows["epoch"][:] = epoch
        rows["label"][:] = self.table.label[samples]
        if self.table.poses is not None:
            view = self.table.view[samples]
            rows["view"][:] = view
            rows["object"][:] = self.table.object[samples]
            rows["pose"][:] = self.table.poses[view]

    def views_of(self, number: int) -> Array:
        """Return all stored views of one object: [V, C, h, w]."""
        samples = np.flatnonzero(self.table.object == number)
        return np.stack([self._whole(sample) for sample in samples.tolist()])

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file and place."""
        if self._patches is None:
            sample = int(self.samples[index])
            view = f", view {self.table.view[sample]}" if self.table.poses is not None else ""
            return show_path(self.bank.name(int(self.table.images[sample]))) + view
        places = self._patches.locate(np.array([index]), self.epoch)
        y, x = places.position[0].tolist()
        return f"{show_path(self.bank.name(int(places.image[0])))}, patch at (y {y}, x {x}) px"

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        if self._patches is not None:
            return self._patches.images_of(indices, epoch)
        return self.table.images[self.samples[indices]]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, _FIXED)

    def _write_pixels(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> Ints:
        """Write images and their numbers, and return the rows of the table that they belong to."""
        if self._patches is None:
            samples = self.samples[indices]
            rows["index"][:] = samples
            for sample, row in zip(samples.tolist(), rows["image"], strict=True):
                row[...] = self._whole(sample)
            return samples
        places = self._patches.locate(indices, epoch)
        rows["index"][:] = places.index  # of the patch: each has a random stream of its own
        y, x = places.position.T
        self.bank.cut_into(places.image, y, x, rows["image"])
        return self.samples[places.split_image]

    def _whole(self, sample: int) -> Array:
        """Return a view of the pixels of one row of the table: [C, h, w]."""
        image = self.bank[int(self.table.images[sample])]
        height, width = self.image_px
        row, column = 0, 0
        if self.table.tiles > 1:  # views are row by row on a sheet
            row, column = divmod(int(self.table.view[sample]), self.table.tiles)
        return image[:, row * height : (row + 1) * height, column * width : (column + 1) * width]

    def _describe(self) -> dict[str, FieldSpec]:
        fields = {"image": FieldSpec((self.bank.channels, *self.image_px), self.bank.dtype.name)}
        names = ["label", "index", "image_index", "epoch"]
        if self.table.poses is not None:
            names += ["view", "object"]
            fields["pose"] = FieldSpec((2,), "float32")
        return fields | {name: FieldSpec((), "int64") for name in names}

    def _check(self, cut: Cut) -> None:
        check_choice("cut", cut, get_args(Cut))
        if cut == "whole":
            self._check_sizes()
        elif self.table.poses is not None:
            raise ConfigError(
                "patches of images with views would have no pose: remove the views or the patches"
            )

    def _check_sizes(self) -> None:
        """Refuse images that do not have the size of a sample, or of a sheet of samples."""
        sizes_px = np.stack((self.bank.heights_px, self.bank.widths_px), axis=1)
        expected_px = np.array(self.image_px) * self.table.tiles
        problems = []
        for number in np.flatnonzero((sizes_px != expected_px).any(1)).tolist():
            height, width = sizes_px[number]
            problems.append((self.bank.name(number), f"{height} x {width} px"))
        if problems:
            raise list_problems(problems).make_error(
                counted(len(problems), "image is", "images are")
                + f" not of {list(self.image_px)} px for each view"
            )
