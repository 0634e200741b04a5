"""Marks of images from files of any format, and their masks and boxes.

`lit_data.annotations.mark_files` reads them. The checks for marks of all formats are here: the
frame of their image, their position, and the classes of a pixel.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from lit_data.annotations.labels import UNSTATED, Frame, Stated
from lit_data.annotations.marks import Draw, DrawnPixels, Mask, Patch
from lit_data.annotations.name_index import NameIndex
from lit_data.core.errors import DataError, Problems, show_path
from lit_data.core.types import IGNORED, Bools, Ints, Size
from lit_data.datasets.layouts import Layout
from lit_data.images.read_options import ReadOptions

Effect = Literal["object", "hole", "ignored"]
"""Effect of a mark on its pixels: its class, background, or excluded from training and scores."""

_INSIDE = 0.95  # fraction of the pixels of an outline that was drawn inside another one


class Mark(NamedTuple):
    """Mark in an image.

    Attributes:
        where: Source of the mark: the file and the place in it.
        category: Category of the defect; empty if unknown.
        draw: Draws the mark.
        effect: See `Effect`.
        instance: Key that parts of one object share; None if the mark is an object of its own.
    """

    where: str
    category: str
    draw: Draw
    effect: Effect = "object"
    instance: Hashable = None


class DrawnImage(NamedTuple):
    """Mask and boxes from the marks of an image.

    Attributes:
        number: Number of the image.
        mask: [H, W] class of each pixel from 1, 0 for the background, 255 for ignored pixels.
        boxes_px: [n, 5] int64 (class from 1 or 255, left, top, right, bottom), one per object.
    """

    number: int
    mask: Mask
    boxes_px: Ints


@dataclass
class Annotated:
    """Marks and problems of annotation files.

    Attributes:
        layout: `coco`, `csv`, `yolo`, `labelme` or `cvat`.
        folder: Folder of the dataset.
        index: Index that finds images by their names.
        files: Files with any content, including names of classes.
        marks: Marks of each named image, by its number.
        problems: Problems of the files.
        bad: Numbers of the images with problems.
        sizes: Source of the size of each image, and its (height, width), unchecked.
        owners: Label file of each image, in formats with one for each.
        clashes: Image of the name of a label file, and another one that the file names.
    """

    layout: Layout
    folder: Path
    index: NameIndex
    files: list[Path] = field(default_factory=list)
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    bad: set[int] = field(default_factory=set)
    sizes: dict[int, tuple[str, Stated]] = field(default_factory=dict)
    owners: dict[int, Path] = field(default_factory=dict)
    clashes: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def note_file(self, path: Path) -> None:
        """Note a file with any content; files are read one after the other."""
        if self.files[-1:] != [path]:
            self.files.append(path)

    def claim(self, number: int, path: Path) -> int | None:
        """Return the number of the image of a label file, and mark it as named.

        Return None for an excluded image, and note a problem if another label file has the image.
        """
        self.note_file(path)
        if number >= self.index.count:
            return None
        self.marks.setdefault(number, [])
        first = self.owners.setdefault(number, path)
        if first == path:
            return number
        self.reject(
            number,
            str(path),
            f"labels the same image as {show_path(first)}: join them, or skip one with data.exclude",
        )
        return None

    def find(
        self, names: Sequence[str], path: Path, *, split: str | None = None, where: str = ""
    ) -> int | None:
        """Return the number of the image of the first known name, and mark it as named.

        Return None for an excluded image. If no name is known, return None and note a problem.

        Args:
            names: Possible names of the image.
            path: File with the names.
            split: Split of the file, if its path tells it.
            where: Place in the file, for the problem.
        """
        for name in names:
            with suppress(DataError):
                number = self.index.find(name, split, path)
                self.note_file(path)
                if number >= self.index.count:
                    return None
                self.marks.setdefault(number, [])
                return number
        try:
            self.index.find(names[-1], split, path)
        except DataError as error:
            self.problems.add(where or path, str(error))
        return None

    def add(
        self,
        number: int | None,
        where: str,
        category: object,
        draw: Draw,
        effect: Effect = "object",
        instance: Hashable = None,
    ) -> None:
        """Add a mark of an image."""
        if number is not None:
            mark = Mark(where, str(category).strip(), draw, effect, instance)
            self.marks[number].append(mark)

    def state_size(self, number: int | None, where: str, height: object, width: object) -> None:
        """Note the size of an image that a file states."""
        if number is not None:
            self.sizes[number] = where, (height, width)

    def reject(self, number: int | None, where: str, message: str) -> None:
        """Note a problem of an image."""
        self.problems.add(where, message)
        if number is not None:
            self.bad.add(number)

    def count_categories(self) -> "Counter[str]":
        """Count the marked objects of each category."""
        return Counter(mark.category for mark in self._list("object"))

    def count_ignored(self) -> int:
        """Count the marks of ignored pixels.

        Raises:
            DataError: There are no other marks.
        """
        ignored = self._list("ignored")
        if ignored and not self._list("object"):
            raise DataError(
                f"{ignored[0].where}: this mark and all others are ignored (iscrowd, ignore, "
                "difficult or __ignore__), so there is nothing to learn; set iscrowd to 0 in "
                "the files, or remove the other flags"
            )
        return len(ignored)

    def _list(self, effect: Effect) -> list[Mark]:
        return [mark for marks in self.marks.values() for mark in marks if mark.effect == effect]

    def draw(
        self, images: Sequence[Path], read: ReadOptions, classes: Sequence[str] | None = None
    ) -> Iterator[DrawnImage]:
        """Yield the mask and boxes of each named image, and note marks that do not fit.

        Args:
            images: All images.
            read: Options for reading them, which affect their size.
            classes: Categories that get numbers from 1, while all others get 0; None gives 1 to
                every category.
        """
        for number, marks in sorted(self.marks.items()):
            try:
                frame = Frame.read(images[number], read)
            except DataError:
                continue  # the image itself is bad, which the reader of images reports
            first = marks[0].where if marks else ""
            where, stated = self.sizes.get(number, (first, UNSTATED))
            fault = frame.find_fault(stated, is_marked=bool(marks))
            canvas = _Canvas(frame.size_px, classes)
            if fault:
                self.reject(number, where, f"{show_path(images[number])}: {fault}")
            else:
                self._paint(canvas, number, images[number])
            yield DrawnImage(number, canvas.mask, canvas.list_boxes())

    def _paint(self, canvas: "_Canvas", number: int, image: Path) -> None:
        """Paint the marks of an image, one over another."""
        marks = self.marks[number]
        drawn = DrawnPixels(canvas.mask.shape)
        for mark in marks:
            if drawn.are_too_many:
                message = (
                    f"{len(marks)} shapes that cover it more than {drawn.most_covers} times "
                    "over; remove shapes that cover most of the image, or skip the image with "
                    "data.exclude"
                )
                self.reject(number, mark.where, f"{show_path(image)}: {message}")
                break
            try:
                patch = mark.draw(canvas.mask.shape)
                drawn.add(patch)
                canvas.paint(patch, mark)
            except DataError as error:
                self.reject(number, mark.where, f"{show_path(image)}: {error}")


class _Canvas:
    """Mask of an image; each mark changes only its own part, as there may be 100,000 of them.

    Args:
        size_px: (height, width) of the image.
        classes: Names of the classes from 1; None for a single class.
    """

    def __init__(self, size_px: Size, classes: Sequence[str] | None) -> None:
        self.mask: Mask = np.zeros(size_px, np.uint8)
        self._classes = classes
        self._has_classes = classes is not None
        # For each pixel its object, from 1; for each object its class and its pixels.
        self._objects = np.zeros(size_px if self._has_classes else (0, 0), np.int32)
        self._numbers = [0]
        self._visible_px = [0]
        self._areas_px = np.zeros(256, np.int64)  # of each class
        self._boxes_px: dict[Hashable, list[int]] = {}

    def paint(self, patch: Patch, mark: Mark) -> None:
        """Paint a mark over earlier ones; a mark inside another one stays on top.

        Raises:
            DataError: The mark overlaps other classes.
        """
        number = self._choose_number(mark)
        if number is None or not patch.marked.any():
            return
        if number:
            self._note_box(patch, mark, number)
        marked = patch.marked
        if self._has_classes:
            marked = self._claim(patch, number, mark.category)
        patch.of(self.mask)[marked] = number

    def list_boxes(self) -> Ints:
        """Return the boxes of the objects by class, from top to bottom, as `DrawnImage` has them."""
        rows_px = np.array([*self._boxes_px.values()], np.int64).reshape(-1, 7)
        # OpenCV numbers connected parts in this order: by the first square of 2 x 2 px they touch.
        return rows_px[np.lexsort((rows_px[:, 6], rows_px[:, 5], rows_px[:, 0])), :5]

    def _choose_number(self, mark: Mark) -> int | None:
        """Return the number that a mark paints, or None if its category is not one of the classes."""
        if mark.effect != "object":
            return IGNORED if mark.effect == "ignored" else 0
        if self._classes is None:
            return 1
        return self._classes.index(mark.category) + 1 if mark.category in self._classes else None

    def _note_box(self, patch: Patch, mark: Mark, number: int) -> None:
        rows = np.flatnonzero(patch.marked.any(1)) + patch.top
        columns = np.flatnonzero(patch.marked.any(0)) + patch.left
        corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        first_rows = patch.marked[: (rows[0] | 1) + 1 - patch.top]
        first_column = np.flatnonzero(first_rows.any(0))[0] + patch.left
        square = [rows[0] // 2, first_column // 2]
        key = len(self._boxes_px) if mark.instance is None else (mark.instance, number)
        box = self._boxes_px.setdefault(key, [number, *corners, *square])
        box[1:5] = [*map(min, box[1:3], corners[:2]), *map(max, box[3:5], corners[2:])]
        box[5:] = min(box[5:], square)

    def _claim(self, patch: Patch, number: int, category: str) -> Bools:
        """Return the pixels that a new mark gets; objects of other classes inside it keep theirs."""
        objects = patch.of(self._objects)
        marked = patch.marked
        counts_px = np.bincount(objects[marked])
        marked_px = int(counts_px.sum())
        overlap_px = 0
        on_top = np.zeros(len(counts_px), np.bool_)  # of the earlier objects
        for earlier in np.flatnonzero(counts_px).tolist():
            if number in (0, IGNORED) or self._numbers[earlier] in (0, number):
                continue
            count_px = int(counts_px[earlier])
            is_inside = count_px >= _INSIDE * marked_px
            holds_it = count_px >= _INSIDE * self._visible_px[earlier]
            if is_inside == holds_it:  # neither is inside the other, or they are the same
                overlap_px += count_px
            else:
                on_top[earlier] = holds_it
        others_px = int(self._areas_px.sum() - self._areas_px[number])
        # More than half of the smaller one: neighbours that only touch at edges are not a fault.
        if 2 * overlap_px > min(marked_px, others_px):
            raise DataError(
                f"{category!r} overlaps other classes in {overlap_px} px; a pixel has one class"
            )
        if on_top.any():
            marked = marked.copy()
            marked[marked] = ~on_top[objects[marked]]
        self._take(objects, marked, number)
        return marked

    def _take(self, objects: Ints, marked: Bools, number: int) -> None:
        """Assign pixels to a new object, and remove them from earlier objects."""
        taken_px = np.bincount(objects[marked])
        for earlier in np.flatnonzero(taken_px).tolist():
            self._visible_px[earlier] -= int(taken_px[earlier])
            self._areas_px[self._numbers[earlier]] -= int(taken_px[earlier])
        is_object = number not in (0, IGNORED)
        objects[marked] = len(self._numbers) if is_object else 0
        if is_object:
            self._numbers.append(number)
            self._visible_px.append(int(taken_px.sum()))
            self._areas_px[number] += int(taken_px.sum())
        self._areas_px[0] = 0  # what was background is none of an object
