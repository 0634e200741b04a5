"""Marks of a mask: outlines, and runs of pixels in the forms of COCO and of CSV files."""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_data.annotations.coco import quote
from lit_data.core.errors import DataError, escape
from lit_data.core.types import Bools, Bytes, Doubles, Ints, Size
from lit_data.images.header import parse_header
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import decode
from lit_inspect.counts import counted

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_SLACK_PX = 1.0  # largest distance of points of outlines outside their image
_COORDINATES = 2  # of a point
_LARGEST_PX = 1e9  # also refuses NaN, infinity and integers that no float can represent
_SPECK_PX = 4
"""Largest speck, in pixels, that programs simplify to an outline of two points, which marks a line."""

_CIRCLE_POINTS = 256
_OUTLINED = ("polygon", "rectangle", "rotation", "oriented_rectangle")
_WITHOUT_AREA = ("line", "linestrip", "point", "points")
_CUT_READ = ReadOptions(palette="index", alpha="drop", equal_channels="brightest")

CVAT_SIDES = ("xtl", "ytl", "xbr", "ybr")
CVAT_ELLIPSE = ("cx", "cy", "rx", "ry")
CVAT_MASK = ("left", "top", "width", "height")

CROSSINGS = 2**20  # of edges and rows, at once
MOST_COVERS = 256
"""Most times that the bounding boxes of all shapes together may cover an image."""
MOST_DRAWN_PX = 2**28
"""Pixels that shapes of a small image may cover in any case."""
_AREA_ERROR = 0.01  # of the stated area of runs
_GROUPS = 7  # of five bits in a number of COCO's text: more than any image has pixels

Mask = Bytes


class Patch(NamedTuple):
    """Marked pixels, in the part of a mask that contains them.

    Attributes:
        top: First row, px.
        left: First column, px.
        marked: [h, w] bool.
        crossings: Crossings of edges and rows that were computed for it.
    """

    top: int
    left: int
    marked: Bools
    crossings: int = 0

    def of(self, mask: Any) -> Any:  # noqa: ANN401 - arrays of any dtype
        """Return a view of this part of a mask [H, W]."""
        height, width = self.marked.shape
        return mask[self.top : self.top + height, self.left : self.left + width]


Draw = Callable[[tuple[int, int]], Patch]
"""Function that marks pixels of an image of (height, width) px, and raises `DataError` for bad marks."""


class DrawnPixels:
    """Count of the pixels of the shapes of one image, which limits the time to draw them.

    Args:
        shape: (height, width) of the image, px.
    """

    def __init__(self, shape: Size) -> None:
        image_px = shape[0] * shape[1]
        self.most_covers = max(MOST_COVERS, MOST_DRAWN_PX // image_px)
        self.most_px = self.most_covers * image_px
        self.drawn_px = 0

    @property
    def are_too_many(self) -> bool:
        """Return True if no more shapes may be drawn."""
        return self.drawn_px >= self.most_px

    def add(self, patch: Patch) -> None:
        """Count a shape by its bounding box, or by its crossings if these are more."""
        self.drawn_px += max(patch.marked.size, patch.crossings)


def outline(points: Any, *, scaled: bool = False, is_cut: bool = False) -> Draw:  # noqa: ANN401 - numbers as a file gives them
    """Return a function that fills an outline.

    Args:
        points: x, y, x, y, ... in px, or in fractions of the image.
        scaled: True if the points are fractions.
        is_cut: Cut off parts beyond the image, as for rotated shapes.
    """

    def draw(shape: Size) -> Patch:
        try:
            corners = np.asarray(points, np.float64).reshape(-1, 2)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError("an outline that is not a list of points") from error
        size = np.array(shape[::-1])
        corners = corners * size if scaled else corners
        is_speck = len(corners) == 2 and np.ptp(corners, axis=0).max() <= _SPECK_PX
        if len(corners) < 3 and not is_speck:
            raise DataError(
                f"an outline of {counted(len(corners), 'point')}; at least three are needed"
            )
        is_near = (corners >= -_SLACK_PX) & (corners <= size + _SLACK_PX)
        is_seen = (corners.max(axis=0) > 0) & (corners.min(axis=0) < size)
        if not (is_cut and is_seen.all()) and not is_near.all():
            raise DataError(f"an outline that leaves the image of {shape[0]} x {shape[1]} px")
        if is_speck:
            return _fill(shape, np.linspace(corners[0], corners[1], num=_SPECK_PX + 1))
        return _fill(shape, corners)

    return draw


def box_corners(left: float, top: float, right: float, bottom: float) -> list[float]:
    """Return the outline of a box, px: x, y, x, y, ..."""
    return [left, top, right, top, right, bottom, left, bottom]


def ellipse_corners(x: float, y: float, radius_x: float, radius_y: float) -> list[float]:
    """Return the outline of an ellipse around a point, px: x, y, x, y, ..."""
    angles = np.linspace(0, 2 * np.pi, _CIRCLE_POINTS, endpoint=False)
    corners = np.stack([x + radius_x * np.cos(angles), y + radius_y * np.sin(angles)], axis=1)
    return corners.reshape(-1).tolist()


def turn(corners: list[float], degrees: float) -> list[float]:
    """Rotate an outline clockwise on the screen, around the mean of its corners."""
    if not degrees:
        return corners
    points = np.array(corners).reshape(-1, 2)
    middle = points.mean(axis=0)
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turned: Doubles = (points - middle) @ np.array([[cosine, sine], [-sine, cosine]]) + middle
    return turned.reshape(-1).tolist()


def labelme_shape(shape: Mapping[str, Any]) -> Draw:
    """Return a function that marks a shape of LabelMe.

    Raises:
        DataError: The shape is of a kind that marks no pixels, or that is unknown.
    """
    kind = shape.get("shape_type", "polygon")
    points = _list_coordinates(shape.get("points", []))
    if kind == "mask":
        return cut_mask(points, shape.get("mask"))
    if kind == "rectangle" and len(points) == 4:
        return outline(box_corners(*points))
    if kind == "circle" and len(points) == 4:
        radius_px = math.hypot(points[2] - points[0], points[3] - points[1])
        return outline(ellipse_corners(points[0], points[1], radius_px, radius_px))
    if kind in _OUTLINED:
        return outline(points)
    if kind in _WITHOUT_AREA:
        raise DataError(f"a {quote(kind)} has no area: draw a polygon around it, or delete it")
    raise DataError(f"a {quote(kind)}: polygons, rectangles, circles and masks are read")


def cvat_shape(shape: "Element") -> Draw:
    """Return a function that marks a shape of CVAT.

    Raises:
        DataError: The shape is of a kind that marks no pixels, or that is unknown.
    """
    degrees = float(shape.get("rotation") or 0)
    if shape.tag == "box":
        corners = box_corners(*_read_floats(shape, CVAT_SIDES))
        return outline(turn(corners, degrees), is_cut=bool(degrees))
    if shape.tag == "ellipse":
        corners = ellipse_corners(*_read_floats(shape, CVAT_ELLIPSE))
        return outline(turn(corners, degrees), is_cut=True)
    if degrees:
        raise DataError(f"a {shape.tag} with a rotation; only boxes and ellipses may be rotated")
    if shape.tag == "polygon":
        return outline(str(shape.get("points", "")).replace(";", ",").split(","))
    if shape.tag == "mask":
        return cut_runs(_read_floats(shape, CVAT_MASK), shape.get("rle", ""))
    raise DataError(f"a {shape.tag}: polygons, boxes, ellipses and masks are read")


def _read_floats(shape: "Element", names: Sequence[str]) -> list[float]:
    return [float(shape.get(name, "nan")) for name in names]


def _list_coordinates(points: object) -> list[float]:
    """Return x, y, x, y, ... of a list of points.

    Raises:
        DataError: The value is not a list of points, or a number is not finite.
    """
    coordinates: list[float] = []
    for point in points if isinstance(points, list) else [points]:
        numbers = point if isinstance(point, list) else []
        if len(numbers) != _COORDINATES or not all(map(_is_coordinate, numbers)):
            raise DataError(f"the point {quote(point)} is not x and y in pixels")
        coordinates += numbers
    return coordinates


def _is_coordinate(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST_PX


def cut_mask(points: Any, text: Any) -> Draw:  # noqa: ANN401 - as a file gives them
    """Return a function that marks the pixels of a small mask that are not 0.

    Args:
        points: Left, top, right and bottom pixel of its box, as in LabelMe; at the edge of an
            image, the last ones may be one pixel outside.
        text: The mask as an image file in base64.
    """

    def draw(shape: Size) -> Patch:
        try:
            left, top, right, bottom = (int(value) for value in points)
            data = base64.b64decode(text, validate=True)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError("a mask that is not an image in a box of two points") from error
        stream = BytesIO(data)
        header = parse_header(stream, ".png", _CUT_READ)
        height, width = header.height_px, header.width_px
        # Before anything is decoded, so that it takes no more memory than the image.
        is_box = 0 <= bottom - top + 1 - height <= 1 and 0 <= right - left + 1 - width <= 1
        fits = 0 <= top <= shape[0] - height and 0 <= left <= shape[1] - width
        if not is_box or not fits:
            raise DataError(
                f"a mask of {height} x {width} px at row {top}, column {left} to row {bottom}, "
                f"column {right} of an image of {shape[0]} x {shape[1]} px"
            )
        return Patch(top, left, decode(stream, header, _CUT_READ)[0] != 0)

    return draw


def cut_runs(box: Sequence[float], text: str) -> Draw:
    """Return a function that marks runs of pixels in a box, row by row, with unmarked ones first.

    Args:
        box: Left, top, width and height of the box, px.
        text: Lengths of the runs, as CVAT writes them.
    """

    def draw(shape: Size) -> Patch:
        try:
            left, top, width, height = map(int, box)
            lengths = np.array(text.replace(",", " ").split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError("a mask that is not run lengths in a box") from error
        fits = 0 <= top <= shape[0] - height and 0 <= left <= shape[1] - width
        is_sound = lengths.size and lengths.min() >= 0 and lengths.max() <= width * height
        if not fits or not is_sound or lengths.sum() > width * height:
            raise DataError(
                f"a mask of {height} x {width} px at row {top}, column {left} of an image of "
                f"{shape[0]} x {shape[1]} px, whose runs do not fit"
            )
        marked = np.zeros(height * width, np.bool_)
        marked[: lengths.sum()] = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        return Patch(top, left, marked.reshape(height, width))

    return draw


def _fill(shape: Size, corners: Doubles) -> Patch:
    """Mark the pixels whose center is inside an outline.

    If an outline contains no center, the pixels of its corners are marked.
    """
    places = np.clip(np.floor(corners), 0, np.array(shape)[::-1] - 1).astype(np.int64)
    (left, top), (right, bottom) = places.min(0).tolist(), places.max(0).tolist()
    # A pixel is inside if the number of edges to its left in its row is odd: one bit of each count
    # is enough, and a byte may overflow.
    turns = np.zeros((bottom - top + 1, right - left + 2), np.uint8)
    crossings = 0
    for row, crossing in _cross(corners, top, turns.shape[0], shape[0] * shape[1]):
        column = np.clip(np.ceil(crossing - 0.5) - left, 0, turns.shape[1] - 1).astype(np.int64)
        np.add.at(turns, (row, column), 1)
        crossings += len(row)
    np.cumsum(turns, axis=1, dtype=np.uint8, out=turns)
    inside = (turns[:, :-1] & 1).astype(np.bool_)
    if not inside.any():
        inside[places[:, 1] - top, places[:, 0] - left] = True
    return Patch(top, left, inside, crossings)


def _cross(corners: Doubles, top: int, height: int, pixels: int) -> Iterator[tuple[Ints, Doubles]]:
    """Yield the rows from `top` whose centers are crossed by edges, and the x of each crossing, in parts."""
    (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, axis=0).T
    # Rows from `first` to before `end` have their centers between the ends of an edge.
    lower, upper = np.minimum(y, next_y), np.maximum(y, next_y)
    first = np.clip(np.ceil(lower - 0.5) - top, 0, height).astype(np.int64)
    end = np.clip(np.ceil(upper - 0.5) - top, 0, height).astype(np.int64)
    ends = np.cumsum(end - first)
    run, rise = next_x - x, next_y - y
    total = int(ends[-1])
    if total > max(4 * pixels, CROSSINGS):
        raise DataError(
            f"an outline of {len(corners)} points that crosses the rows of its image {total} times"
        )
    parts = np.searchsorted(ends, np.arange(CROSSINGS, total, CROSSINGS))
    for edges in np.split(np.arange(len(corners)), parts):
        counts = (end - first)[edges]
        edge = np.repeat(edges, counts)
        row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
        middle = row + (top + 0.5)
        yield row, x[edge] + (middle - y[edge]) * run[edge] / rise[edge]


def runs(text: str) -> Draw:
    """Return a function that marks runs: alternating start and length, column by column, counted from 1."""

    def draw(shape: Size) -> Patch:
        try:
            numbers = np.array(text.split(), np.int64)
        except (ValueError, OverflowError) as error:
            raise DataError(f"runs that are not whole numbers: {text[:40]!r}") from error
        if len(numbers) % 2 or (len(numbers) and numbers.min() < 1):
            raise DataError(
                f"runs of {counted(len(numbers), 'number')}: alternating starts (from 1) and lengths are "
                "expected"
            )
        return _mark_runs(shape, numbers[::2] - 1, numbers[1::2])

    return draw


def counts(segmentation: Any, area: object = None, bbox: object = None) -> Draw:  # noqa: ANN401 - as a file gives it
    """Return a function that marks the runs of COCO.

    ``counts`` is a list or a text of runs by columns, with unmarked ones first, and comes with
    ``size``. Some tools leave out the last run, which is not marked. Then the area or the box must
    show that no other run is missing.
    """

    def draw(shape: Size) -> Patch:
        size, stated = segmentation.get("size"), segmentation.get("counts")
        if size != list(shape):
            raise DataError(f"runs of an image of {escape(repr(size)[:80])}, found {list(shape)}")
        try:
            lengths = _unpack(stated) if isinstance(stated, str) else np.array(stated, np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError("runs that cannot be read") from error
        if lengths.ndim != 1 or (len(lengths) and lengths.min() < 0):
            raise DataError("runs that cannot be read")
        _check_end(shape, int(lengths.max(initial=0)))  # so that their sum is in range
        ends = np.cumsum(lengths)
        end = int(lengths.sum())
        is_early = end < shape[0] * shape[1]
        if is_early and (len(lengths) % 2 or not _is_whole(lengths, shape[0], area, bbox)):
            raise DataError(
                f"runs that end at pixel {end} of an image of {shape[0] * shape[1]}: they are cut off"
            )
        return _mark_runs(shape, (ends - lengths)[1::2], lengths[1::2])

    return draw


def _is_whole(lengths: Ints, height: int, area: object, bbox: object) -> bool:
    """Return True if an even number of runs has the area that is stated, or else the width."""
    sides = bbox if isinstance(bbox, list) else []
    is_box = len(sides) == 4 and all(type(side) in (int, float) for side in sides)
    left, _, width, box_height = sides if is_box else (0, 0, 0, 0)
    # Some scripts state the area of the box.
    if isinstance(area, int | float) and area > 0 and area != width * box_height:
        return abs(int(lengths[1::2].sum()) - area) <= _AREA_ERROR * area
    return width > 0 and abs(-(-int(lengths.sum()) // height) - (left + width)) <= 1


def run_lengths(mask: Bools) -> list[int]:
    """Return the lengths of the runs of a mask by columns, background first, as in `counts`."""
    # COCO counts down the columns.
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist()
    if flat.size and flat[0]:  # the first run of background is empty
        return [0, *lengths]
    return lengths


def _check_end(shape: Size, end: int) -> None:
    if end > shape[0] * shape[1]:
        raise DataError(f"runs up to pixel {end} of an image of {shape[0] * shape[1]}")


def _mark_runs(shape: Size, begins: Ints, lengths: Ints) -> Patch:
    height = shape[0]
    if not len(begins):
        return Patch(0, 0, np.zeros((0, 0), np.bool_))
    _check_end(shape, max(int(begins.max()), int(lengths.max())))  # so that their sum is in range
    ends = begins + lengths
    _check_end(shape, int(ends.max()))
    left, right = int(begins.min()) // height, -(-int(ends.max()) // height)
    # Add 1 at the start of a run and subtract 1 at its end: the sum counts the runs of a pixel.
    steps = np.zeros((right - left) * height + 1, np.int32)
    np.add.at(steps, begins - left * height, 1)
    np.add.at(steps, ends - left * height, -1)
    np.cumsum(steps, dtype=np.int32, out=steps)
    return Patch(0, left, (steps[:-1] > 0).reshape(-1, height).T)


def _unpack(text: str) -> Ints:
    """Decode the numbers in the text form of COCO.

    Each number is written in groups of six bits, offset by 48, with one bit that says that more
    follow; from the fourth on, numbers are differences from the last but one.
    """
    bits = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    last = np.flatnonzero(bits & 32 == 0)
    first = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    sizes = last + 1 - first
    if not len(bits):
        return bits
    is_whole = bits.size == sizes.sum() and sizes.max() <= _GROUPS
    if not is_whole or bits.min() < 0 or bits.max() > 63:
        raise ValueError("truncated, or not such a text")
    shifts = 5 * (np.arange(len(bits)) - np.repeat(first, sizes))
    values = np.add.reduceat((bits & 31) << shifts, first)
    # The sign is that of the last group, as in two's complement.
    values -= np.where(bits[last] & 16, np.int64(1) << 5 * sizes, 0)
    values[1::2], values[2::2] = np.cumsum(values[1::2]), np.cumsum(values[2::2])
    return values
