"""Boxes of all images of a dataset in one table, and the checks for every label format."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np

from lit_data.core.errors import ConfigError, DataError, Problems, escape, list_problems
from lit_data.core.names import warn_of_names
from lit_data.core.types import Array, Bools, Doubles, Floats, Ints, PathText, Size
from lit_data.images.header import read_header
from lit_data.images.header_scan import OnBad
from lit_data.images.read_options import ReadOptions
from lit_inspect.counts import counted, inflect

log = logging.getLogger(__name__)


MAX_OUTSIDE = 0.01
"""Largest fraction of the width or height of a box that may be beyond the image; it is cut off."""

_ROUNDING = 2e-6
"""Rounding error of six decimals of center and size, in fractions of the image."""
_SMALLEST = 1e-9  # far below a pixel, but above 0 as float32
_LARGEST = 1e9  # also refuses NaN, infinity and integers that no float can represent
_MOST_DIGITS = 10  # of the side of an image

Stated = tuple[object, object]
"""Height and width of an image as its annotations state them, unchecked."""

UNSTATED: Stated = (None, None)


@dataclass(frozen=True, slots=True, eq=False)
class LabelTable:
    """Boxes of many images.

    Args:
        classes: Names of the classes, each once.
        boxes: [N, 5] float32 = (class, cx, cy, w, h), center and size in fractions of the image,
            ordered by image. Class ``-1 - k`` is a region in which objects of class k are ignored.
        ends: [I] int64, number of boxes of each image and of all images before it.

    Raises:
        ConfigError: The arrays do not fit together, or have invalid boxes.
    """

    classes: tuple[str, ...]
    boxes: Floats
    ends: Ints

    def __post_init__(self) -> None:
        check_classes(self.classes)
        if self.boxes.dtype != np.float32 or self.boxes.ndim != 2 or self.boxes.shape[1] != 5:
            raise ConfigError(
                f"boxes must be float32 [N, 5], found {self.boxes.dtype} {self.boxes.shape}"
            )
        if self.ends.dtype != np.int64 or self.ends.ndim != 1:
            raise ConfigError(f"ends must be int64 [I], found {self.ends.dtype} {self.ends.shape}")
        # Decreasing ends would give an image a negative number of boxes.
        counts = np.diff(self.ends, prepend=0)
        total = int(self.ends[-1]) if self.ends.size else 0
        if (counts < 0).any() or total != len(self.boxes):
            raise ConfigError(
                f"ends must ascend from 0 to the {len(self.boxes)} boxes, found {total} at the end"
            )
        number, shares = self.boxes[:, 0], self.boxes[:, 1:]
        class_number = ignored_class(number)
        is_known = (class_number < len(self.classes)) & (number == np.floor(number))
        if not is_known.all():
            raise ConfigError(
                "boxes hold a class that is not a whole number from 0 to "
                f"{len(self.classes) - 1}, nor -1 minus one"
            )
        if not ((shares >= 0) & (shares <= 1)).all() or not (shares[:, 2:] > 0).all():
            raise ConfigError(
                "boxes must be fractions from 0 to 1 with a width and a height above 0"
            )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.ends)

    @property
    def object_count(self) -> int:
        """Number of boxes that are not ignored regions."""
        return int((self.boxes[:, 0] >= 0).sum())

    def describe(self, splits: Mapping[str, Sequence[int]]) -> str:
        """Describe the objects of each class, and the images of each split with their objects.

        Args:
            splits: Numbers of the images of each split.
        """
        numbers = self.boxes[:, 0]
        classes = []
        for number, name in enumerate(self.classes):
            classes.append(f"{number} {name} {int((numbers == number).sum())}")
        objects_so_far = np.append(0, np.cumsum(numbers >= 0))  # without ignored regions
        objects_of_image = np.diff(objects_so_far[self.ends], prepend=0)
        parts = []
        for split, images in splits.items():
            boxes = int(objects_of_image[np.asarray(images, np.int64)].sum())
            parts.append(f"{split} {len(images)} ({counted(boxes, 'box', 'boxes')})")
        return f"classes: {', '.join(classes) or 'none'}; splits: {', '.join(parts)}"

    @property
    def strata(self) -> list[str]:
        """Classes of each image as a text, by which splits are stratified."""
        return [str(np.unique(self.of(image)[:, 0]).tolist()) for image in range(len(self))]

    def of(self, image: int) -> Floats:
        """Return the boxes of one image.

        Returns:
            [n, 5], a view; n is 0 for an image without boxes.

        Raises:
            IndexError: There is no such image.
        """
        if not 0 <= image < len(self.ends):
            raise IndexError(f"image {image} of {len(self.ends)}")
        start = int(self.ends[image - 1]) if image else 0
        return self.boxes[start : int(self.ends[image])]


def ignored_class(numbers: Array) -> Array:
    """Return the class of each class number of a `LabelTable`, including ignored regions."""
    return np.where(numbers < 0, -1 - numbers, numbers)


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the class names as a tuple, if there are any and none repeats.

    Raises:
        ConfigError: There are no names, or names repeat.
    """
    named = not isinstance(classes, str) and all(isinstance(name, str) and name for name in classes)
    if not named or not classes or len(set(classes)) != len(classes):
        raise ConfigError(f"classes={classes!r} must be one or more names, each only once")
    return tuple(classes)


class Faults:
    """Faults from the steps of reading a dataset, which are raised together.

    Args:
        root: Folder of the dataset.
        on_bad: ``skip`` warns of files that can be left out.
    """

    def __init__(self, root: PathText, on_bad: OnBad) -> None:
        self.on_bad = on_bad
        self._root = root
        self._errors: list[DataError] = []

    def add(self, problems: Problems, heading: str) -> None:
        """Add faults of files that can be left out."""
        if self.on_bad == "skip":
            skipped = inflect("[it is|they are] skipped", len(problems))
            problems.warn_if_any(log, f"{heading}; {skipped}")
        elif len(problems):
            self.take(problems.make_error(heading))

    def take(self, error: DataError) -> None:
        """Add an error that ends the reading once the rest has been checked."""
        self._errors.append(error)

    def raise_if_any(self) -> None:
        """Raise one error for all of them.

        Raises:
            DataError: There are faults.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        problems = Problems()
        headings = []
        others = 0
        for error in self._errors:
            problems.extend(list_problems(error.problems or ((os.fspath(self._root), str(error)),)))
            if error.problems:
                headings.append(error.headline.removesuffix(":"))
            else:
                others += 1
        if others:
            headings.append(counted(others, "other fault" if headings else "fault"))
        problems.raise_if_any("; ".join(headings))


class Frame(NamedTuple):
    """Frame of an image, which must contain annotations of all formats.

    Attributes:
        size_px: (height, width) of the image as read.
        orientation: Orientation of its EXIF or TIFF tag; 1 is upright.
        exif: Treatment of the orientation, as in `ReadOptions`.
    """

    size_px: Size
    orientation: int = 1
    exif: Literal["ignore", "apply"] = "ignore"

    @classmethod
    def read(cls, path: PathText, options: ReadOptions) -> Self:
        """Read the frame of an image from its header.

        Raises:
            DataError: The image has no valid header.
        """
        header = read_header(path, options)
        return cls((header.height_px, header.width_px), header.stored.orientation, options.exif)

    def find_fault(self, stated: Stated, *, is_marked: bool) -> str:
        """Return why annotations do not fit the image, or "" if they do.

        Labeling tools are assumed to show the upright image, unless the stated size differs.

        Args:
            stated: Size that the annotations are for; 0 or None if unknown.
            is_marked: True if something is marked in the image.
        """
        height, width = map(_read_side, stated)
        is_stated = bool(height and width)
        turned_px = self.size_px[::-1] if self.orientation >= 5 else self.size_px  # a quarter turn
        is_turned = turned_px != self.size_px
        if is_stated and (height, width) != self.size_px:
            if self.orientation != 1 and (height, width) == turned_px:
                other = "ignore" if self.exif == "apply" else "apply"
                return self._ask_for(other)
            return self._describe_mismatch((height, width))
        if self.orientation == 1 or self.exif == "apply" or not is_marked:
            return ""
        return "" if is_stated and is_turned else self._ask_for("apply")

    def _ask_for(self, exif: str) -> str:
        seen = "upright" if exif == "apply" else "as it is stored"
        return (
            f"the image is rotated by EXIF (orientation {self.orientation}), and its annotations "
            f"mark it {seen}; set data.read.exif={exif}, or save such images rotated, without "
            "the tag"
        )

    def _describe_mismatch(self, stated: Stated) -> str:
        names = [escape(str(side)[:40]) for side in stated]
        height_px, width_px = self.size_px
        text = (
            f"its annotations are for {names[0]} x {names[1]} px (height x width), the image has "
            f"{height_px} x {width_px}"
        )
        if stated == (width_px, height_px):
            return f"{text}: it was rotated; annotate it as it is, or rotate it back"
        return f"{text}: scale it back to the size that was annotated, or annotate it again"


def describe_turn(degrees: object) -> str:
    """Return why a rotated box is refused, or "" if its angle is 0 or not stated."""
    try:
        is_turned = float(str(degrees or 0)) != 0
    except ValueError:
        is_turned = True
    if not is_turned:
        return ""
    return (
        f"a box rotated by {escape(str(degrees)[:40])} degrees, which its sides do not show; "
        "export polygons, or 'CVAT for images 1.1' for data.boxes_from=masks"
    )


def _read_side(side: object) -> object:
    """Return a side of an image as a number, even from text; return other values unchanged."""
    text = side.strip() if isinstance(side, str) else side
    if isinstance(text, str) and text.isdecimal() and len(text) < _MOST_DIGITS:
        return int(text)
    return text


@dataclass(frozen=True, slots=True)
class BoxForm:
    """Form of a box in a label format.

    Args:
        name: Name of the format.
        place: Description of the place of a box in its file, with ``{}`` for a number.
        units: Unit of the four numbers, and the unit that is used by mistake.
        is_mistaken: Returns [N] True for numbers [N, 4] in the other unit.
        to_corners: Returns (x1, y1, x2, y2) in fractions [N, 4], from the numbers [N, 4] and
            (width, height) px [N, 2].
    """

    name: str
    place: str
    units: tuple[str, str]
    is_mistaken: Callable[[Doubles], Bools]
    to_corners: Callable[[Doubles, Doubles], Doubles]


def is_share_box(boxes: Doubles) -> Bools:
    """Mark rows of [N, 4] pixel numbers that are fractions: all from 0 to 1, and not all integers."""
    return np.asarray(((boxes >= 0) & (boxes <= 1)).all(1) & (boxes != np.floor(boxes)).any(1))


class BoxCollector:
    """Collector of the boxes of many files, which raises one error for all faults.

    Args:
        form: Form of the boxes.
        frames: Frames of the images.
        on_bad: ``skip`` skips bad boxes and lists them.

    Attributes:
        problems: Problems of whole files, which are never skipped.
        bad: Problems of boxes and other single entries, which ``skip`` skips.
    """

    def __init__(self, form: BoxForm, frames: Sequence[Frame], *, on_bad: OnBad) -> None:
        self.problems = Problems()
        self.bad = Problems()
        self._form = form
        self._frames = frames
        sizes_px = [frame.size_px for frame in frames]
        self._sizes_px = np.array(sizes_px, np.int64).reshape(-1, 2)
        self._stated: dict[int, tuple[int, str, Stated]] = {}  # file, place in it, size
        self._on_bad = on_bad
        self._cure = ""
        if on_bad == "error":
            self._cure = "; correct it, or set data.on_bad=skip to skip such boxes"
        self._paths: list[PathText] = []
        # For each box: image, file, place in the file, class, and its four numbers.
        self._rows: list[tuple[float, ...]] = []

    def start_file(self, path: PathText) -> None:
        """Attribute the following boxes to this file."""
        self._paths.append(path)

    def state_size(self, image: int, height: object, width: object, where: str = "") -> None:
        """Note the size of an image that the file states, with the place in the file."""
        self._stated[image] = len(self._paths) - 1, where, (height, width)

    def reject(self, place: int, message: str) -> None:
        """Note an invalid box."""
        text = f"{self._form.place.format(place)}: {message}{self._cure}"
        self.bad.add(self._paths[-1], text)

    def reject_entries(self, entries: Problems) -> None:
        """Note entries without an image."""
        for path, message in entries.entries:
            self.bad.add(path, f"{message}{self._cure}")

    def add(
        self,
        image: int,
        place: int,
        number: int,
        box: Sequence[float],
        *,
        is_ignored: bool = False,
    ) -> None:
        """Add a box of class `number`, or an ignored region of that class, as written in the file."""
        if is_ignored:
            number = -1 - number
        if all(abs(value) < _LARGEST for value in box):
            self._rows.append((image, len(self._paths) - 1, place, number, *box))
        else:
            self.reject(
                place,
                f"box {str(list(box))[:80]} holds a value that is not a number of a sensible size",
            )

    def renumber(self, order: Mapping[int, int], explain: Callable[[int], str]) -> None:
        """Replace the classes of all added boxes.

        Args:
            order: New number of each class.
            explain: Returns why a class is not allowed, whose boxes are rejected.
        """
        rows = []
        for row in self._rows:
            image, file, row_in_file, number, *box = row
            if number in order:
                rows.append((image, file, row_in_file, order[int(number)], *box))
            else:
                text = f"{self._form.place.format(int(row_in_file))}: {explain(int(number))}"
                self.bad.add(self._paths[int(file)], text)
        self._rows = rows

    def finish(self, classes: Sequence[str]) -> LabelTable:
        """Check all boxes and make the table.

        Raises:
            DataError: Files are bad, or boxes are bad under ``error``; everything is listed.
        """
        warn_of_names(classes)
        rows = self._check_units(np.array(self._rows, np.float64).reshape(-1, 8))
        images = rows[:, 0].astype(np.int64)
        self._check_frames(rows)
        sizes_px = self._sizes_px[images, ::-1].astype(np.float64)  # (width, height)
        corners = self._form.to_corners(rows[:, 4:], sizes_px)
        good, clipped = self._check_places(rows, corners)
        self._raise_or_report()
        rows, images, corners = rows[good], images[good], corners[good].clip(0, 1)
        self._warn_duplicates(rows)
        if clipped:
            log.info(
                "%s up to 1 %% of the size, or a pixel, beyond the image and got clipped",
                counted(clipped, "box reached", "boxes reached"),
            )
        centres = (corners[:, :2] + corners[:, 2:]) / 2
        sides = corners[:, 2:] - corners[:, :2]
        # Ordered by image, and within an image by the order in its file.
        order = np.argsort(images, kind="stable")
        boxes = np.hstack([rows[:, 3:4], centres, sides])[order].astype(np.float32)
        ends = np.cumsum(np.bincount(images, minlength=len(self._sizes_px)), dtype=np.int64)
        return LabelTable(tuple(classes), boxes, ends)

    def _check_units(self, rows: Doubles) -> Doubles:
        """Report the first box of each file that is in the other unit, with the first one that is not."""
        mistaken = self._form.is_mistaken(rows[:, 4:])
        right, wrong = self._form.units
        proper = np.flatnonzero(~mistaken)
        beside = ""
        if proper.size:
            beside = f"; {self._describe(rows[proper[0]], whole=True)} is in {right}"
        bad = rows[mistaken]
        for first in np.unique(bad[:, 1], return_index=True)[1]:
            count = int((bad[:, 1] == bad[first, 1]).sum())
            self.problems.add(
                self._paths[int(bad[first, 1])],
                f"{self._describe(bad[first])} is in {wrong}, with {count - 1} more of this file"
                f"{beside}; {self._form.name} holds {right}: convert all boxes to that",
            )
        return rows[~mistaken]

    def _check_frames(self, rows: Doubles) -> None:
        """Note images whose annotations do not fit."""
        images, firsts = np.unique(rows[:, 0], return_index=True)  # those with boxes
        files = rows[firsts, 1]
        file_of = dict(zip(map(int, images), map(int, files), strict=True))
        turned = [image for image in file_of if self._frames[image].orientation != 1]
        for image in sorted({*self._stated, *turned}):
            unstated = file_of.get(image, 0), "", UNSTATED
            file, where, stated = self._stated.get(image, unstated)
            fault = self._frames[image].find_fault(stated, is_marked=image in file_of)
            if fault:
                self.problems.add(self._paths[file], f"{where}{fault}")

    def _check_places(self, rows: Doubles, corners: Doubles) -> tuple[Bools, int]:
        """Mark boxes with an area inside their image, and count those that extend beyond it."""
        sides = corners[:, 2:] - corners[:, :2]
        empty = ~(sides > _SMALLEST).all(1)
        for row in rows[empty]:
            self._note(row, "has no area (zero or negative width or height)")
        # Excess of each box beyond the image, on the left or on the right: one of them is 0.
        beyond = (-corners[:, :2]).clip(min=0) + (corners[:, 2:] - 1).clip(min=0)
        # Programs that crop and rotate images leave boxes a fraction of a pixel beyond the edge.
        pixel = 1 / self._sizes_px[rows[:, 0].astype(np.int64), ::-1]
        allowed = np.maximum(MAX_OUTSIDE * sides, np.minimum(pixel, sides / 2)) + 1e-9
        outside = ~empty & (beyond > allowed).any(1)
        fractions = (beyond[outside] / sides[outside]).max(1, initial=0)
        for row, fraction in zip(rows[outside], fractions, strict=True):
            height, width = self._sizes_px[int(row[0])]
            how = "is outside" if fraction >= 1 else f"is {100 * fraction:.3g} % outside"
            image = f"its image of {height} x {width} pixels (height x width)"
            self._note(row, f"{how} {image}; 1 %, or one pixel, is allowed")
        good = ~empty & ~outside
        return good, int((good & (beyond > _ROUNDING).any(1)).sum())

    def _warn_duplicates(self, rows: Doubles) -> None:
        keys = rows[:, [0, 3, 4, 5, 6, 7]]
        order = np.lexsort(keys.T)  # stable: the first of equal rows stays first
        again = order[1:][(np.diff(keys[order], axis=0) == 0).all(1)]
        if again.size:
            first = self._describe(rows[again.min()], whole=True)
            log.warning(
                "%s another box of the image, and all are used; the first: %s",
                counted(len(again), "box duplicates", "boxes duplicate"),
                first,
            )

    def _raise_or_report(self) -> None:
        if self._on_bad == "error":
            self.problems.extend(self.bad)
        self.problems.raise_if_any(f"{counted(len(self.problems), 'problem')} with labels")
        skipped = counted(len(self.bad), "bad box or entry is", "bad boxes or entries are")
        self.bad.warn_if_any(log, f"{skipped} skipped")

    def _note(self, row: Doubles, message: str) -> None:
        self.bad.add(self._paths[int(row[1])], f"{self._describe(row)} {message}{self._cure}")

    def _describe(self, row: Doubles, *, whole: bool = False) -> str:
        """Return the place and the numbers of a box, with its file if `whole` is True."""
        numbers = ", ".join(f"{value:.6g}" for value in row[4:].tolist())
        text = f"{self._form.place.format(int(row[2]))}: box ({numbers})"
        return f"{escape(os.fspath(self._paths[int(row[1])]))}, {text}" if whole else text
