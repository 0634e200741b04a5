"""`Inspector`: verdicts of images by an ``.inspect`` file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_inspect.board import NET, Board, read_board
from lit_inspect.boxes import Box
from lit_inspect.counts import counted
from lit_inspect.drift import describe
from lit_inspect.errors import BoardError, ImageError, UsageError, describe_error
from lit_inspect.images import list_images
from lit_inspect.layouts import Group, group_files, open_files, take_arrays
from lit_inspect.marks import measure_marked
from lit_inspect.net import Limits, Net
from lit_inspect.overlay import Shown
from lit_inspect.references import MEASURED_PX, describe_misfits
from lit_inspect.regions import (
    Defect,
    count_top_px,
    find_defects,
    mean_highest,
    round_score,
    slabs,
)
from lit_inspect.rows import ArrayRows, MapFile
from lit_inspect.settings import Settings, read_settings
from lit_inspect.tiles import Rows, cut, read_middle, stitch
from lit_inspect.verdicts import GOOD, score_labels

Floats = NDArray[np.float32]

TOLERANCE = 1e-4
"""Largest difference between a golden answer and the answer of this machine, as at the export."""

_LIMITS = Limits()
_MOST_GOLDEN = 2**20  # most values of a golden input


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one image.

    Attributes:
        verdict: ``good``, ``defect``, ``review`` or ``unsure``; ``marked`` or ``clean`` of
            watermarks; the name of the class where no class is good.
        score: Score of the image. For maps, the mean of the highest probabilities; for watermarks,
            that of their pixels; for labels, the probability of all classes that are not good, or
            that of the class if none is good; for boxes, the highest score, whatever the threshold.
        defects: Regions of the map, the highest score first; a ``good`` image has none.
        probability: [H, W] for the pixels of a map, or [classes]; empty for boxes.
        kinds: [H, W] class numbers, from 1, of the pixels that reach the threshold; None if there
            are no classes.
        boxes: Objects that a detector finds, the highest score first.
        label: Name of the class of an image.
        marked_share: Fraction of the pixels that a watermark covers.
        references: References that do not fit, and why. Such an image is for review and has no
            defects, because the differences may not be defects.
        shown: The image, for `overlay`.
    """

    verdict: str
    score: float
    defects: tuple[Defect, ...]
    probability: Floats
    kinds: NDArray[np.uint8] | None = None
    boxes: tuple[Box, ...] = ()
    marked_share: float = 0.0
    references: str = ""
    label: str = ""
    shown: Shown | None = field(default=None, repr=False, compare=False)

    def overlay(self) -> NDArray[np.uint8]:
        """Draw what was found over the image: [H, W, 3], R, G, B.

        Defects get a red outline, objects a frame with class and score, and marks are tinted. If
        nothing was found, the image is returned unchanged.

        Raises:
            UsageError: The image is not available, because the verdict was made from a map.
        """
        if self.shown is None:
            raise UsageError("only a verdict of `inspect` has its image: call the inspector itself")
        if self.boxes:
            return self.shown.frame(self.boxes)
        if self.marked_share:
            return self.shown.tint(self.probability)
        return self.shown.outline(self.probability) if self.defects else self.shown.paint()


class Answers(Protocol):
    """Interface of the net of an inspector."""

    @property
    def input_shape(self) -> list[int | str]:
        """Length of each axis of a batch; a free axis has a name."""

    def run(self, images: Floats) -> Floats:
        """Return the answers for a batch [B, C, h, w] in 0..1."""


class Inspector:
    """Verdicts of images by an ``.inspect`` file.

    It checks all digests, and compares the golden answers of the file with those of this machine.

    Args:
        path: The file.
        threads: Number of threads for the net; by default one for each core of this process.
        limits: Limits of the time and memory of the net.

    Attributes:
        settings: Settings of the file.

    Raises:
        UsageError: There is no such file, or onnxruntime is not installed.
        BoardError: The file is damaged, has a newer format or exceeds the limits, or this machine
            gives other answers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        limits: Limits = _LIMITS,
    ) -> None:
        board = read_board(path)
        try:
            self.settings = read_settings(board.manifest)
            self._judge = self.settings.judge
            net = Net(board.parts.get(NET, b""), threads, limits)
            self._net: Answers = net
        except BoardError as error:
            raise BoardError(
                f"{path}: not a usable .inspect file ({error}): export the run again, with the "
                "release of lit_data that this lit_inspect belongs to"
            ) from error
        try:
            with net.hurrying():
                self._check_golden(board)
        except BoardError as error:
            raise BoardError(f"{path}: {error}") from error

    @classmethod
    def of(cls, settings: Settings, net: Answers) -> "Inspector":
        """Return an inspector for a given net, such as one of torch."""
        inspector = cls.__new__(cls)
        inspector.settings, inspector._judge, inspector._net = settings, settings.judge, net
        return inspector

    def __call__(self, *images: NDArray[Any] | str | os.PathLike[str]) -> Verdict:
        """Inspect an image: arrays of a camera, see `take`, or files, see `open`.

        Raises:
            UsageError: As in `take` and `open`, or the images are neither all arrays nor all paths.
            ImageError: As in `take` and `open`.
        """
        arrays = [image for image in images if isinstance(image, np.ndarray)]
        paths = [image for image in images if isinstance(image, str | os.PathLike)]
        if max(len(arrays), len(paths)) < len(images):
            kinds = ", ".join(type(image).__name__ for image in images)
            raise UsageError(
                f"an image of {kinds}: give paths, or NumPy arrays, such as numpy.asarray(image)"
            )
        return self.inspect(self.open(*paths) if paths else self.take(*arrays))

    def take(self, *arrays: NDArray[Any]) -> Rows:
        """Return an image from arrays, such as those of a camera, for `inspect` and `describe`.

        Args:
            arrays: [H, W] or [H, W, C], with pixels and channels as in the files with which the model
                was trained: R, G, B unless they were read differently. Target and references are
                one array each, or a single array if one file contains all.

        Raises:
            UsageError: An array has another shape, or there are too many or too few of them.
            ImageError: The arrays differ in size or dtype.
        """
        return take_arrays(arrays, self.settings.read, self.settings.layout)

    def open(self, *paths: str | os.PathLike[str]) -> Rows:
        """Open the file of an image, or those of target and references, for `inspect`.

        Raises:
            UsageError: There are more or fewer files than an image has.
            ImageError: A file is bad, or its channels or dtype differ from those of the training.
        """
        return open_files(list(map(Path, paths)), self.settings.read, self.settings.layout)

    def list_groups(self, path: Path) -> list[Group]:
        """Return the files of each image below a folder, or of a single image, for `open_group`.

        Raises:
            UsageError: There are no images, or the folder cannot be read.
        """
        layout = self.settings.layout
        globs = () if layout is None else layout.files or ()
        if path.is_file() and globs:
            raise UsageError(
                f"{path}: an image has {len(globs)} files here ({', '.join(globs)}): name the "
                "folder above them"
            )
        names = [path.name] if path.is_file() else list_images(path)
        if not names:
            raise UsageError(f"{path}: no images")
        groups = group_files(names, layout)
        if not groups:
            raise UsageError(
                f"{path}: no file is one of {', '.join(globs)}, as the model was trained with: "
                "name the folder above them"
            )
        return groups

    def open_group(self, folder: Path, group: Group) -> Rows:
        """Open the files of an image below a folder, see `open`.

        Raises:
            ImageError: As in `open`, or a file is missing.
        """
        if group.fault:
            raise ImageError(f"{folder / group.name}: {group.fault}")
        return self.open(*(folder / name for name in group.files))

    def inspect(self, image: Rows) -> Verdict:
        """Inspect an image that fits into memory.

        Raises:
            UsageError: Its channels or dtype differ from those of the training images.
        """
        channels: tuple[int, ...] = (0,)
        if image.shape[0] == 3 and self.settings.layout is None:
            channels = (2, 1, 0) if self.settings.read.cv2_order else (0, 1, 2)
        shown = Shown(image, channels, self.settings.threshold)
        return replace(self._inspect(image), shown=shown)

    def _inspect(self, image: Rows) -> Verdict:
        if self.settings.task == "labels":
            return self._classify(image)
        if self.settings.task == "boxes":
            return self._find_boxes(image)
        shape = (len(self.settings.classes) + 1, *image.shape[1:])
        values = ArrayRows(self.predict(image, shape))
        return self.judge(values, self.find_misfits(image))

    def find_misfits(self, image: Rows) -> str:
        """Return the references of an image that do not fit its target; empty if all fit."""
        limits, layout = self.settings.reference_limits, self.settings.layout
        if limits is None or layout is None:
            return ""
        return describe_misfits(read_middle(image, MEASURED_PX), layout.roles, limits)

    def describe(self, image: Rows) -> NDArray[np.float64]:
        """Return the features for the detection of drift, [3]; see `Guarantee.find_drift`."""
        scaling, boxes = self.settings.scaling, self.settings.boxes
        if scaling is not None:
            image = ArrayRows(scaling.scale(image.read(0, image.shape[1])))
        elif boxes is not None and boxes.stride_px is None:
            image = ArrayRows(boxes.fit(image))
        return describe(image)

    def predict(self, image: Rows, shape: tuple[int, int, int]) -> Floats:
        """Return the probability of each pixel, [K, H, W]."""
        source, settings = image, self.settings
        if settings.scaling is not None:
            source = ArrayRows(settings.scaling.scale(image.read(0, image.shape[1])))
        values: Floats | None = None
        for top, rows in self.stream(source):
            if values is None:
                values = np.empty((len(rows), *source.shape[1:]), np.float32)
            values[:, top : top + rows.shape[1]] = rows
        assert values is not None
        if settings.scaling is not None:
            values = settings.scaling.restore(values, shape[1:])
        return values

    def stream(self, image: Rows) -> Iterator[tuple[int, Floats]]:
        """Yield (first row, values [K, n, W]) of an image that is not scaled."""
        assert self.settings.tiling is not None
        self._check(image)
        rows, columns = self.settings.tiling.plan(*image.shape[1:])
        planes = len(self.settings.classes) + 1
        tiles = cut(image, rows, columns)
        values = (self._ask(tile, planes, *tile.shape[1:]) for tile in tiles)
        return stitch(values, rows, columns)

    def judge(self, values: ArrayRows | MapFile, references: str = "") -> Verdict:
        """Return the verdict of a map; the verdict does not contain a map that is in a file.

        Args:
            values: The map.
            references: Result of `find_misfits`.
        """
        settings = self.settings
        if settings.shows == "marks":
            return self._judge_marks(values)
        height, width = values.shape[1:]
        is_large = isinstance(values, MapFile)
        parts = list(slabs(height, width))
        highest = mean_highest(
            (_to_unit(values.read(part.start, part.stop)[0]) for part in parts),
            count_top_px(height * width, settings.top_fraction),
        )
        score = round_score(highest)
        pairs = (
            self.read_pair(values, part) for part in (parts if is_large else [slice(0, height)])
        )
        defects = find_defects(
            pairs,
            threshold=settings.threshold,
            min_area_px=settings.min_area_px,
            classes=len(settings.classes),
        )
        verdict = self._judge(score, is_found=bool(defects), fits=not references)
        if verdict == GOOD or references:  # consistent with the tables
            defects = []
        probability, kinds = np.zeros((0, 0), np.float32), None
        if not is_large:
            probability, kinds = self.read_pair(values, slice(0, height))
        return Verdict(verdict, score, tuple(defects), probability, kinds, references=references)

    def _judge_marks(self, values: ArrayRows | MapFile) -> Verdict:
        height, width = values.shape[1:]
        parts = (_to_unit(values.read(part.start, part.stop)[0]) for part in slabs(height, width))
        count, score = measure_marked(parts, self.settings.threshold)
        verdict = "marked" if count else "clean"
        probability = np.zeros((0, 0), np.float32)
        if not isinstance(values, MapFile):
            probability, _ = self.read_pair(values, slice(0, height))
        return Verdict(verdict, score, (), probability, marked_share=count / (height * width))

    def read_pair(
        self, values: ArrayRows | MapFile, part: slice
    ) -> tuple[Floats, NDArray[np.uint8] | None]:
        """Return rows of a map, [n, W] in 0..1, and the class numbers of their pixels, if any."""
        rows = values.read(part.start, part.stop)
        probability = _to_unit(rows[0])
        if len(rows) == 1:
            return probability, None
        numbers = (1 + rows[1:].argmax(0)).astype(np.uint8)
        return probability, np.where(probability >= self.settings.threshold, numbers, np.uint8(0))

    def _classify(self, image: Rows) -> Verdict:
        self._check(image)
        assert self.settings.scaling is not None
        pixels = self.settings.scaling.scale(image.read(0, image.shape[1]))
        probabilities = self._ask(pixels, len(self.settings.classes))
        best = int(probabilities.argmax())
        label, good = self.settings.classes[best], self.settings.good
        if not good:
            return Verdict(label, float(probabilities[best]), (), probabilities, label=label)
        score = round_score(score_labels(probabilities, good))
        verdict = self._judge(score, is_found=best not in good)
        return Verdict(verdict, score, (), probabilities, label=label)

    def _find_boxes(self, image: Rows) -> Verdict:
        self._check(image)
        settings = self.settings
        assert settings.boxes is not None
        objects, highest = settings.boxes.find(
            image,
            self._find_places,
            threshold=settings.threshold,
            min_area_px=settings.min_area_px,
        )
        columns = [column.tolist() for column in objects]
        boxes = []
        for (left, top, right, bottom), kind, score in zip(*columns, strict=True):
            boxes.append(Box(left, top, right, bottom, kind, settings.classes[kind], score))
        score = round_score(highest)
        verdict = self._judge(score, is_found=bool(boxes))
        return Verdict(verdict, score, (), np.zeros(0, np.float32), boxes=tuple(boxes))

    def _find_places(self, pixels: NDArray[Any]) -> Floats:
        """Return the answer [P, 4 + classes] for a sample, see `lit_inspect.boxes.find_objects`."""
        return self._ask(pixels, None, 4 + len(self.settings.classes))

    def _check(self, image: Rows) -> None:
        dtype = image.read(0, 1).dtype.name
        if (image.shape[0], dtype) != (self.settings.channels, self.settings.dtype):
            raise UsageError(
                f"{counted(image.shape[0], 'channel')} of {dtype}, but the model was trained with "
                f"{self.settings.channels} of {self.settings.dtype}"
            )

    def _ask(self, tile: NDArray[Any], *form: int | None) -> Floats:
        """Return the answer of the net for a tile of stored pixels.

        Args:
            tile: [C, h, w].
            form: Lengths of the axes of the answer; None for any length.

        Raises:
            BoardError: The answer has another shape.
        """
        images = tile.astype(np.float32)[None]
        if self.settings.value_range is not None:
            low, high = self.settings.value_range
            images = ((images - np.float32(low)) / np.float32(high - low)).clip(0, 1)
        elif tile.dtype.kind in "iu":
            images /= np.float32(np.iinfo(tile.dtype).max)
        answers = self.run(images)
        lengths = zip(answers.shape[1:], form, strict=False)
        is_expected = answers.ndim == len(form) + 1 and len(answers) == 1
        if not is_expected or any(allowed not in (None, length) for length, allowed in lengths):
            raise BoardError(f"the net gives {list(answers.shape)}, but {[1, *form]} is needed")
        answer: Floats = answers[0]
        return answer

    def run(self, images: Floats) -> Floats:
        """Return the answers of the net for a batch [B, C, h, w] in 0..1, see `Net.run`."""
        return self._net.run(images)

    @property
    def input_shape(self) -> list[int | str]:
        """Length of each axis of a batch; a free axis has a name."""
        return self._net.input_shape

    def _check_golden(self, board: Board) -> None:
        """Compare the golden answers with those of this machine.

        Raises:
            BoardError: An answer differs, or cannot be computed within the limits.
        """
        for number in range(self.settings.golden):
            try:
                pixels = board.load_array(f"golden/{number}.npy")
                if pixels.size > _MOST_GOLDEN:
                    raise UsageError(
                        f"{pixels.size} pixels, more than the maximum of {_MOST_GOLDEN}"
                    )
                expected = board.load_array(f"golden/{number}_answer.npy")
                answer = self.answer(ArrayRows(pixels))
                is_equal_form = answer.shape == expected.shape
                difference = np.abs(answer - expected).max() if is_equal_form else np.inf
            except Exception as error:  # an invalid input can cause any error
                raise BoardError(
                    f"golden input {number} cannot be inspected ({describe_error(error)})"
                ) from error
            if not difference <= TOLERANCE:  # this form also refuses NaN
                raise BoardError(
                    f"the answer to golden input {number} differs by {difference:.2g} on this "
                    f"machine, but only {TOLERANCE:g} is allowed: export it again, or use "
                    "another release of onnxruntime"
                )

    def answer(self, image: Rows) -> Floats:
        """Return the content of a golden answer: the whole map [K, H, W], [classes], or some boxes."""
        if self.settings.task == "labels":
            return self._classify(image).probability
        if self.settings.task == "boxes":
            assert self.settings.boxes is not None
            first = next(self.settings.boxes.sample(image))
            return self.settings.boxes.thin(self._find_places(first.pixels))
        return self.predict(image, (0, *image.shape[1:]))


def _to_unit(rows: NDArray[Any]) -> Floats:
    if rows.dtype == np.float32:
        return rows
    unit: Floats = np.divide(rows, np.float32(65535), dtype=np.float32)
    return unit
