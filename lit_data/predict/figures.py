"""Building blocks of all pictures: a grid of cells, whole images with their predictions, a legend."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

from lit_data.core.errors import escape
from lit_data.core.files import explaining, replacing
from lit_data.core.types import IGNORED, Array, Batch, Bools, Bytes, Size
from lit_data.datasets.occupancy import is_defect
from lit_data.predict.defects import find_defects
from lit_inspect.regions import Defect

log = logging.getLogger(__name__)

TRUE_COLOUR = "#ff3b30"
DISTRACTOR_COLOUR = "#34aadc"
FOUND_COLOUR = "#2bd66a"
FALSE_COLOUR = "#ffb000"
OTHER_COLOUR = "#bf5af2"
CELL_INCHES = 2.1
_TOGETHER = 2
_STEP = 4  # px between those that say how dark and bright an image is
_LONGEST_SHAPE = 2.0  # long side by short side: longer images are cropped
_MOST_CENTRES = 50  # defects around which a part of a strip is looked for
_LONGEST_NAME = 24  # characters that fit over a cell
SHOWN_PX = 480  # longest side of an image in a cell
_OVERLAY_PX = 720  # longest side of an image in a file of its own
_CAPTION_PX, _CAPTION_WIDTH_PX = 24, 240
_QUALITY = 88  # of a JPEG
_HEAT = 0.7  # opacity of a probability from the threshold on
_HOTTEST = 235  # of 255 colours, whose last ones are dark
_FILL = 0.4  # opacity of labels
_LINE_PX = 2
_INSET_PX = 3  # of the lines of what touches an edge of its picture
_FOUND, _OTHER, _MISSED, _FALSE = 1, 2, 3, 4
_OUTCOMES = {
    _FOUND: ("found", FOUND_COLOUR),
    _OTHER: ("of another class", OTHER_COLOUR),
    _MISSED: ("missed", TRUE_COLOUR),
    _FALSE: ("false alarm", FALSE_COLOUR),
}
"""What becomes of a region, in all pictures: its word, and its color."""
PERCENTILES = (0.5, 99.5)  # of the grey values that become black and white
ShowSample = Callable[[Sequence[Axes], Batch, int], None]
"""Fills one cell for each column with a sample of a batch."""


def open_figure(
    rows: int, titles: Sequence[str], cell_inches: float = CELL_INCHES
) -> tuple[Figure, NDArray[np.object_]]:
    """Return a grid of cells with a title over each column."""
    width_inches = cell_inches * len(titles)
    height_inches = cell_inches * rows + 0.7
    figure, axes = new_axes(rows, len(titles), height_inches, width_inches=width_inches)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    return figure, axes


def new_axes(
    rows: int, columns: int, height_inches: float, *, width_inches: float | None = None
) -> tuple[Figure, NDArray[np.object_]]:
    """Return a grid of empty cells without ticks."""
    size_inches = (width_inches or CELL_INCHES * columns, height_inches)
    figure = Figure(figsize=size_inches, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself; pyplot's global state stays untouched
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure, axes


def stretch(pixels: Array) -> Bytes:
    """Return stored pixels [C, H, W] as bytes [3, H, W], stretched from the darkest to the brightest.

    Three channels of bytes stay unchanged. Without three channels, the first one is shown in gray.
    """
    if len(pixels) == 3 and pixels.dtype == np.uint8:
        return pixels
    planes = pixels if len(pixels) == 3 else pixels[:1]
    low, high = np.percentile(planes[:, ::_STEP, ::_STEP], PERCENTILES)
    scaled = (planes.astype(np.float32) - low) * (255 / max(high - low, 1e-6))
    stretched: Bytes = scaled.clip(0, 255).astype(np.uint8)
    return np.repeat(stretched, 3 // len(planes), axis=0)


def crop_strip(shape: Size, defects: Sequence[Defect]) -> tuple[slice, slice]:
    """Return the rows and columns of an image to draw: all of them, or a part of a long strip.

    The part is twice as long as the strip is wide, and shows as many defects as possible.

    Args:
        shape: (height, width) of the image, px.
        defects: Defects in the image; without any, the part is in the middle.
    """
    height, width = shape
    longest = round(_LONGEST_SHAPE * min(shape))
    surest = sorted(defects, key=lambda defect: -defect.score)[:_MOST_CENTRES]
    centres = [(defect.y, defect.x) for defect in surest] or [(height / 2, width / 2)]
    parts = []
    for y, x in centres:
        parts.append((_cut_around(y, height, longest), _cut_around(x, width, longest)))
    return max(parts, key=lambda part: _count_inside(part, defects))  # the surest of equal ones


def _count_inside(part: tuple[slice, slice], defects: Sequence[Defect]) -> int:
    rows, columns = part
    count = 0
    for defect in defects:
        is_inside = rows.start <= defect.y < rows.stop and columns.start <= defect.x < columns.stop
        count += is_inside
    return count


def _cut_around(centre: float, length: int, longest: int) -> slice:
    """Return up to `longest` pixels around a center, moved inwards where they reach beyond."""
    size = min(length, longest)
    start = min(max(round(centre - size / 2), 0), length - size)
    return slice(start, start + size)


def shorten_name(name: str) -> str:
    """Return the path of an image, shortened to fit above a cell: the end of the name of a long path."""
    if len(name) <= _LONGEST_NAME:
        return name
    file = Path(name).name
    return file if len(file) <= _LONGEST_NAME else f"…{file[1 - _LONGEST_NAME :]}"


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return the paths of images, shortened to fit above cells, without the folders that all share."""
    paths = [name.split("/") for name in names]
    while min(map(len, paths)) > 1 and len({path[0] for path in paths}) == 1:
        paths = [path[1:] for path in paths]
    return [shorten_name("/".join(path)) for path in paths]


@dataclass(frozen=True)
class ShownImage:
    """An image with the prediction of a model.

    Attributes:
        name: Of the image.
        text: Verdict and score.
        pixels: [C, H, W] as stored.
        probability: [H, W] in 0..1.
        predicted: [H, W] uint8 predicted class numbers; 1 if there are no classes, 0 for
            background.
        truth: [H, W] uint8 class numbers of the mask, 255 for ignored pixels; None: not known.
        least: Lowest probability of a marked pixel.
        is_wrong: The verdict differs from the truth.
    """

    name: str
    text: str
    pixels: Array
    probability: Array
    predicted: Bytes
    truth: Bytes | None
    least: float
    is_wrong: bool = False

    def crop(self) -> "ShownImage":
        """Return the part of a long strip that shows the most defects; other images stay unchanged."""
        marks = self.predicted > 0
        if self.truth is not None:
            marks |= is_defect(self.truth)
        part = crop_strip(self.probability.shape, find_defects(marks.astype(np.float32)))
        if self.probability[part].shape == self.probability.shape:
            return self
        rows, columns = part
        return replace(
            self,
            text=f"{self.text}, from y {rows.start}, x {columns.start}",
            pixels=self.pixels[:, *part],
            probability=self.probability[part],
            predicted=self.predicted[part],
            truth=None if self.truth is None else self.truth[part],
        )


def paint(image: ShownImage, side_px: int) -> tuple[Bytes, Bytes, Bytes]:
    """Paint an image three times: plain, with its probability, and with what is found, missed or false.

    Predictions are outlined, and labels filled. Without labels, all predictions count as found.

    Args:
        image: Of any size.
        side_px: Longest side of the pictures.

    Returns:
        [h, w, 3] uint8 each.
    """
    import cv2

    factor = side_px / max(image.probability.shape)
    if factor > 1:
        factor = round(factor)  # pixels stay squares
    size = tuple(max(1, round(factor * side)) for side in image.probability.shape[::-1])
    way = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST

    def scale(values: Array) -> Array:
        scaled: Array = cv2.resize(np.ascontiguousarray(values), size, interpolation=way)
        return scaled

    plain = scale(np.moveaxis(stretch(image.pixels), 0, -1))
    heat = _lay_heat(plain, scale(image.probability.astype(np.float32)), image.least)
    result = plain.copy()
    lines, fills = sort_regions(image.predicted, image.truth)
    for outcome, (_, colour) in _OUTCOMES.items():
        paint_rgb = np.array(to_rgb(colour)) * 255
        # What is false has no label, and its line may lie around all of the image.
        filled = (lines if outcome == _FALSE else fills) == outcome
        outlined = lines == outcome if outcome != _MISSED else filled
        if not (filled.any() or outlined.any()):
            continue
        is_filled = scale(filled.astype(np.float32)) > 0
        result[is_filled] = (1 - _FILL) * result[is_filled] + _FILL * paint_rgb
        marks = scale(outlined.astype(np.float32)) > 0
        _paint_outlines(result, marks.astype(np.uint8), paint_rgb.tolist())
    return plain, heat, result


def _paint_outlines(picture: Bytes, marks: Bytes, paint_rgb: list[float]) -> None:
    """Draw lines around the marks of a picture, outside of them so that nothing of them is hidden."""
    import cv2

    around = cv2.dilate(marks, np.ones((5, 5), np.uint8))
    contours, _ = cv2.findContours(around, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    height, width = marks.shape
    # The frame of a cell would hide a line along the edge of the picture.
    last = np.maximum((width - 1 - _INSET_PX, height - 1 - _INSET_PX), 0).astype(np.int32)
    inside = [np.minimum(np.maximum(contour, _INSET_PX), last) for contour in contours]
    cv2.drawContours(picture, inside, -1, paint_rgb, _LINE_PX, cv2.LINE_AA)


def _lay_heat(plain: Bytes, probability: Array, least: float) -> Bytes:
    """Lay a probability [h, w] over an image [h, w, 3], opaque from the threshold on."""
    import cv2

    levels = np.rint(_HOTTEST * probability.clip(0, 1)).astype(np.uint8)
    colours = cv2.cvtColor(cv2.applyColorMap(levels, cv2.COLORMAP_TURBO), cv2.COLOR_BGR2RGB)
    opacity = _HEAT * (probability / max(least, 1e-6)).clip(0, 1)
    weight = cv2.merge((opacity,) * 3)  # NumPy is slow where one number goes with three
    laid: Bytes = ((1 - weight) * plain + weight * colours).astype(np.uint8)
    return laid


def sort_regions(predicted: Bytes, truth: Bytes | None) -> tuple[Bytes, Bytes]:
    """Sort the predicted regions and the true regions by their outcome.

    A region is found if one of its pixels is right, has another class if both overlap without a
    right pixel, and otherwise is missed or a false alarm.

    Args:
        predicted: [H, W] numbers of classes, 0 for none.
        truth: The same, 255 where pixels are ignored; None: all that is predicted is found.

    Returns:
        The outcome of each predicted region, and of each true one, [H, W] uint8; 0 elsewhere.
    """
    if truth is None:
        return np.where(predicted > 0, _FOUND, 0).astype(np.uint8), np.zeros_like(predicted)
    is_known = truth != IGNORED
    predicted, truth = predicted * is_known, truth * is_known
    meets = (predicted > 0) & (truth > 0)
    is_right = meets & (predicted == truth)
    return _sort(predicted, meets, is_right, _FALSE), _sort(truth, meets, is_right, _MISSED)


def _sort(classes: Bytes, meets: Bools, is_right: Bools, alone: int) -> Bytes:
    import cv2

    outcomes = np.zeros_like(classes)
    for number in np.unique(classes[classes > 0]):
        marks = (classes == number).astype(np.uint8)
        count, regions = cv2.connectedComponents(marks, connectivity=8)
        outcome_of = np.full(count, alone, np.uint8)
        outcome_of[regions[meets]] = _OTHER
        outcome_of[regions[is_right]] = _FOUND
        outcome_of[0] = 0
        outcomes += outcome_of[regions]
    return outcomes


def write_overlay(image: ShownImage, path: Path) -> None:
    """Write a JPEG of an image with its probability, what is found in it, and its verdict.

    Raises:
        StoreError: It cannot be written.
    """
    import cv2

    _, heat, result = paint(image, _OVERLAY_PX)
    height, width = heat.shape[:2]
    axis = 1 if width <= 2 * height else 0  # wide ones below each other
    picture = np.concatenate((heat, result), axis)
    caption = np.full((_CAPTION_PX, max(picture.shape[1], _CAPTION_WIDTH_PX), 3), 255, np.uint8)
    # OpenCV has no letters beyond ASCII.
    text = image.text.encode("ascii", "replace").decode()
    colour = np.array(to_rgb(TRUE_COLOUR if image.is_wrong else "black")) * 255
    font = cv2.FONT_HERSHEY_SIMPLEX
    cv2.putText(caption, text, (4, _CAPTION_PX - 7), font, 0.5, colour.tolist(), 1, cv2.LINE_AA)
    right = caption.shape[1] - picture.shape[1]
    picture = np.pad(picture, ((0, 0), (0, right), (0, 0)), constant_values=255)
    write_jpeg(np.concatenate((caption, picture)), path)


def write_jpeg(picture: Bytes, path: Path) -> None:
    """Write a picture [H, W, 3] as JPEG; its folder is made.

    Raises:
        StoreError: It cannot be written.
    """
    import cv2

    bgr = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
    _, encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:
            file.write(encoded.tobytes())


def draw_whole_images(images: Sequence[ShownImage], path: Path, title: str) -> None:
    """Draw images next to their probability and to what is found, missed or false in them.

    Long strips show the part with the most defects. Wrong verdicts are red.

    Args:
        images: At least one.
        path: The PNG to write.
        title: Of the picture.
    """
    painted = [paint(image.crop(), SHOWN_PX) for image in images]
    shapes = np.array([plain.shape[:2] for plain, _, _ in painted])
    height, width = shapes.max(0)
    # Three cells of an image side by side, and beside them those of another one unless it is wide.
    together = min(len(images), _TOGETHER if height > width / 2 else 1)
    rows = -(-len(images) // together)
    row_inches = CELL_INCHES * min(height / width, _LONGEST_SHAPE) + 0.45
    figure, axes = new_axes(rows, 3 * together, row_inches * rows + 0.7)
    triples = axes.reshape(rows * together, 3)
    names = shorten_names([image.name for image in images])
    for image, name, pictures, cells in zip(images, names, painted, triples, strict=False):
        for cell, picture in zip(cells, pictures, strict=True):
            cell.imshow(picture)
        cells[0].set_title(
            f"{name}\n{image.text}",
            fontsize=8,
            loc="left",
            color="crimson" if image.is_wrong else "black",
        )
    for cells in triples[len(images) :]:
        for cell in cells:
            cell.set_axis_off()
    words, colours = list_outcomes(
        knows_truth=any(image.truth is not None for image in images),
        has_classes=any(image.predicted.max(initial=0) > 1 for image in images),
    )
    save_figure(figure, path, title, words, colours)


def list_outcomes(
    *, knows_truth: bool = True, has_classes: bool = False
) -> tuple[list[str], list[str]]:
    """Return the legend of pictures: the words and colors of the outcomes of regions."""
    if not knows_truth:
        return ["predicted"], [FOUND_COLOUR]
    pairs = [pair for outcome, pair in _OUTCOMES.items() if outcome != _OTHER or has_classes]
    return [word for word, _ in pairs], [colour for _, colour in pairs]


def save_figure(
    figure: Figure,
    path: Path,
    title: str,
    legend: Sequence[str],
    colours: Sequence[str] = (TRUE_COLOUR, DISTRACTOR_COLOUR),
) -> None:
    """Write a figure with its title, and a legend of colored rings if there are any."""
    handles = []
    for colour, label in zip(colours, legend, strict=False):
        handles.append(Line2D([], [], color=colour, label=label, marker="o", mfc="none", ls=""))
    _leave_out_empty(figure)
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    _show_as_written(figure)
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:  # nobody sees half of a picture
            figure.savefig(file, format=path.suffix.removeprefix(".") or "png")
    log.info("picture: %s", path)


def _leave_out_empty(figure: Figure) -> None:
    """Take edges without ticks and labels out of the layout, where they cost a third of the time."""
    for cell in figure.axes:
        for edge in (cell.xaxis, cell.yaxis):
            edge.set_visible(bool(edge.get_label_text() or len(edge.get_majorticklocs())))


def _show_as_written(figure: Figure) -> None:
    """Draw all texts as they are: names of files hold dollar signs, control characters, or bytes that are not text."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text("\n".join(map(escape, text.get_text().split("\n"))))
