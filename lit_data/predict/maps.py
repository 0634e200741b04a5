"""Maps of the probability of each pixel of whole images, and how they are written."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from lit_data.annotations.writing import ImageLabels, Labelled
from lit_data.core.errors import list_problems
from lit_data.core.types import IGNORED, Array, Bytes, Floats, Size
from lit_data.images.bank import ImageBank
from lit_data.images.readers import read_image
from lit_data.images.scaling import OriginalSizes
from lit_data.images.store.store import StoredImages
from lit_data.images.writing import write_png_parts
from lit_data.predict.defects import drop_small, find_defects
from lit_data.predict.figures import (
    ShownImage,
    draw_whole_images,
    list_outcomes,
    paint,
    write_overlay,
)
from lit_data.predict.journal import Entry
from lit_data.predict.label_files import find_regions
from lit_data.predict.options import PredictOptions, PredictRun
from lit_data.predict.tiles import ImagePixels
from lit_data.predict.verdict_table import (
    COUNTED_COLUMNS,
    Row,
    VerdictTable,
    describe_row,
    is_wrong,
)
from lit_data.predict.verdicts import KnowsTruth
from lit_data.predict.worst_images import draw_worst
from lit_data.predict.writer import BankWriter, Written
from lit_inspect.counts import counted
from lit_inspect.files import fit_name
from lit_inspect.regions import Defect, count_top_px, mean_highest, round_score, slabs
from lit_inspect.verdicts import DEFECT, GOOD

log = logging.getLogger(__name__)

SHOWN = 6
_MOST_DEFECTS = 1000  # of an image in the table: more are noise, and make files of many MB
COLUMNS = ("image", "y", "x", "area_px", "score", "height_px", "width_px")
_WORST_PX = 300  # longest side of an image in ``worst.png``


@dataclass(frozen=True, kw_only=True)
class WholeImages:
    """Images of any size, and the steps that turn their pixels into the input of a model.

    Args:
        bank: Stored pixels [C, H, W].
        names: Path of each image below the root, with forward slashes.
        channels: For each channel of the model's input, the number of the channel of a tile.
        value_range: Pixel values that become 0 and 1; None: the whole range of the dtype, and
            floats as they are.
        classes: Names of the classes of defects.
        finish: Returns the input of the model, [C, H, W], for the number of an image; None: the
            input is the stored pixels, scaled by `value_range`.
        original_sizes: Sizes of the files, if stored images are scaled; predictions are scaled back
            to them.
        shown_channels: Number of stored channels that pictures show, such as the target without its
            references; None: all.
    """

    bank: ImageBank
    names: Sequence[str]
    channels: tuple[int, ...]
    value_range: tuple[float, float] | None
    classes: Sequence[str] = ()
    finish: Callable[[int], Tensor] | None = None
    original_sizes: OriginalSizes | None = None
    shown_channels: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tile_channels(self) -> int:
        """Number of channels of a tile."""
        return self.bank.channels if self.finish is None else len(self.channels)

    def load(self, number: int) -> ImagePixels | Tensor:
        """Return the image that the predictor gets: [C, H, W], read by slices.

        Raises:
            DataError: Its file is bad.
        """
        if self.finish is not None:
            return self.finish(number)
        if isinstance(self.bank, StoredImages):
            return self.bank.open_image(number)
        return self.bank[number]

    def count_px(self, number: int) -> int:
        """Return the number of pixels of an image; if it is stored scaled, those of the larger size."""
        stored_px = int(self.bank.heights_px[number] * self.bank.widths_px[number])
        if self.original_sizes is None:
            return stored_px
        height, width = self.original_sizes.of(number)
        return max(stored_px, height * width)

    def restore(self, number: int, values: Array) -> Array:
        """Scale the prediction of an image to the size of its file: [K, h, w] to [K, H, W]."""
        if self.original_sizes is None:
            return values
        return self.original_sizes.restore(number, values)

    def show(self, number: int) -> Array:
        """Return stored pixels at the size of the file, for pictures: [C, H, W]."""
        return self.restore(number, self.bank[number][: self.shown_channels])

    def exceed(self, size_px: Size) -> bool:
        """Return True if any image exceeds a height or a width."""
        height_px, width_px = size_px
        is_higher = self.bank.heights_px > height_px
        is_wider = self.bank.widths_px > width_px
        return bool((is_higher | is_wider).any())


@dataclass(frozen=True, slots=True)
class ProbabilityMap:
    """Probability of each pixel of an image.

    Args:
        values: [H, W] float32 in 0..1, or uint16 where 65535 is 1, which may be mapped from a file.
        kinds: [K - 1, H, W] probability of each class after the background; None if there are no
            classes.
    """

    values: Array
    kinds: Array | None = None

    @classmethod
    def of(cls, predicted: Array) -> "ProbabilityMap":
        """Make a map from [1 + classes, H, W], whose first channel is the probability of any defect."""
        kinds = predicted[1:] if len(predicted) > 1 else None
        return cls(predicted[0], kinds)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, px."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, part: slice) -> Floats:
        """Return some rows, [h, W] float32 in 0..1."""
        values = self.values[part]
        scale = np.float32(1 if values.dtype == np.float32 else 65535)
        unit: Floats = np.divide(values, scale, dtype=np.float32)
        return unit

    def number_kinds(self, threshold: float) -> Bytes | None:
        """Return the most probable class of each pixel that reaches a threshold.

        Returns:
            [H, W] numbers from 1, and 0 below the threshold; None without classes.
        """
        if self.kinds is None:
            return None
        numbers = np.empty(self.shape, np.uint8)
        for part in slabs(*self.shape):
            most_probable = 1 + self.kinds[:, part].argmax(0)
            numbers[part] = np.where(self.rows(part) >= threshold, most_probable, 0)
        return numbers

    def encode(self, part: slice, dtype: type[np.unsignedinteger[Any]]) -> Array:
        """Return some rows as integers, [h, W]; the largest value of the dtype is probability 1."""
        if self.values.dtype == dtype:
            return self.values[part]
        scaled = self.rows(part) * np.float32(np.iinfo(dtype).max)
        encoded: Array = np.rint(scaled).astype(dtype)
        return encoded


class ImageWriter(BankWriter):
    """Writes predictions of whole images.

    Args:
        images: The predicted images.
        folder: Where to write.
        options: Threshold and the like.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        super().__init__(images.bank, images.names)
        self.images = images
        self.folder = folder
        self.options = options

    def path_of(self, kind: str, name: str) -> Path:
        """Return the path of a PNG of one image, below the folder of its kind."""
        return self.folder_of(self.folder / kind, name) / fit_name(name, ".png")

    def choose_shown(self, entries: Sequence[Entry], count: int) -> list[Entry]:
        """Choose the entries with the highest scores, among images that fit into memory."""
        small = [entry for entry in entries if self.is_small(self.numbers[entry.image])]
        return sorted(small, key=lambda entry: -entry.score)[:count]

    def is_small(self, number: int) -> bool:
        """Return True if an image and its map fit into memory for a picture."""
        return self.images.count_px(number) <= self.options.large_px


class _Answer(NamedTuple):
    """Answer for an image.

    Attributes:
        probability: [H, W].
        kinds: [H, W] numbers of classes; None without classes.
        written: Defects and score, without files.
        row: Of ``images.csv``.
    """

    probability: Floats
    kinds: Bytes | None
    written: Written
    row: Row


class VerdictWriter(ImageWriter):
    """Writes ``maps/<image>.png`` (16 bit, 65535 is probability 1), tables and pictures.

    If there are classes, ``classes/<image>.png`` holds their numbers.
    ``pictures/<image>.jpg`` shows the verdict, the probability and the found defects. At the end,
    three files are written: ``defects.csv`` lists the 1,000 defects of each image with the highest
    scores, ``predictions.png`` shows the images with the highest scores, and ``images.csv`` has the
    verdict of each image. Images of more than `large_px` get no pictures.

    Its columns are the score, the number of defects, and the verdict. The score is the mean of the
    highest probabilities, as in validation. Defects are found by the threshold of pixels, and the
    verdict is ``good`` or ``defect`` by the threshold of images. Without that threshold, an image
    with any defect is defective. All tables and counts follow the verdict: a ``good`` image has no
    defects. A calibration has two thresholds; images between them are for ``review``. Its bounds
    are in the column ``guarantee``, which is ``withdrawn`` if the images differ from those of the
    calibration. If there are masks, the table also has the truth and the kind of each image, and
    ``worst.png`` shows the defective images with the lowest scores and the good images with the
    highest.

    Args:
        truth: Knows masks and kinds of the images.
        images: What is predicted.
        run: Where to write; the calibration, whose thresholds replace that of the options; and the
            reason why the model is useless, in which case verdicts are ``unsure``.
        options: Thresholds and smallest defect.
        find_misfits: Returns the references of an image that do not fit its target; empty if all
            fit. An image with such references is for ``review`` and has no defects, and the column
            ``references`` says why. None: there are no references to check.
        lists_defects: Write ``defects.csv``, and a picture of each image if the options ask for it.
    """

    labels = "regions"

    def __init__(
        self,
        truth: KnowsTruth,
        images: WholeImages,
        run: PredictRun,
        options: PredictOptions,
        *,
        find_misfits: Callable[[int], str] | None = None,
        lists_defects: bool = True,
    ) -> None:
        super().__init__(images, run.folder, options)
        self.class_names = tuple(images.classes) or (DEFECT,)
        self._draws = options.pictures and lists_defects
        self._find_misfits = find_misfits
        self._lists_defects = lists_defects
        self._truth = truth
        self._doubt = run.doubt
        self._table = VerdictTable(truth, images.bank, run, options)
        self.judge = self._table.judge

    @override
    def write(self, number: int, answer: ProbabilityMap, seconds: float) -> Written:
        """Write the map of an image and find its defects; the whole map is held in memory."""
        name = self.images.names[number]
        shape = answer.shape
        paths = [self.path_of("maps", name)]
        write_png_parts(paths[0], shape, (answer.encode(part, np.uint16) for part in slabs(*shape)))
        parts = self._find(number, answer)
        kinds = parts.kinds
        if kinds is not None:
            paths.append(self.path_of("classes", name))
            write_png_parts(paths[1], shape, (kinds[part] for part in slabs(*shape)))
        if self._draws and self.is_small(number):
            paths.append(self.path_of("pictures", name).with_suffix(".jpg"))
            write_overlay(self._show(parts.row, parts.probability, kinds), paths[-1])
        return parts.written._replace(files=paths)

    def show(self, number: int, answer: ProbabilityMap) -> ShownImage:
        """Return an image and its prediction, as pictures show them."""
        parts = self._find(number, answer)
        return self._show(parts.row, parts.probability, parts.kinds)

    def _find(self, number: int, answer: ProbabilityMap) -> "_Answer":
        """Return the defects of an image, and its verdict."""
        threshold = self.options.least_score
        kinds = answer.number_kinds(threshold)
        probability = answer.rows(slice(None))
        defects = find_defects(
            probability, threshold=threshold, min_area_px=self.options.min_area_px, kinds=kinds
        )
        # The surest come first, so the first score is the highest one.
        rows = [_round(defect) for defect in defects[:_MOST_DEFECTS]]
        note = "" if self._find_misfits is None else self._find_misfits(number)
        written = Written([], rows, self.score(answer), note)
        entry = Entry(
            image=self.images.names[number],
            stamp=(),
            files={},
            rows=rows,
            score=written.score,
            note=note,
        )
        row = self._table.make_row(entry, number, is_found=bool(rows)) | {"references": note}
        return _Answer(probability, kinds, written, row)

    def score(self, answer: ProbabilityMap) -> float:
        """Return the score of an image, as ``images.csv`` has it."""
        count = count_top_px(answer.values.size, self.options.top_fraction)
        return round_score(
            mean_highest((answer.rows(part) for part in slabs(*answer.shape)), count)
        )

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [self._make_row(entry) for entry in entries]
        cleared = [self._keep_defects(entry, row) for entry, row in zip(entries, rows, strict=True)]
        others = () if self._find_misfits is None else ("references",)
        metrics = self._table.write(self, rows, COUNTED_COLUMNS, others)
        if self._lists_defects:
            self._write_defects(cleared)
        small = [row for row in rows if self.is_small(self.numbers[row["image"]])]
        self._draw_surest(small)
        if self._doubt:  # which is in the place of each verdict
            marked = sum(bool(entry.rows) for entry in cleared)
            metrics["predict/images_with_defects"] = marked
        if self._find_misfits is not None:
            metrics["predict/misfits"] = self._warn_of_misfits(rows)
        if self._table.is_known(rows):
            self._draw_worst(small)
        return metrics | {
            "predict/images": len(entries),
            "predict/defects": sum(len(entry.rows) for entry in cleared),
        }

    def _make_row(self, entry: Entry) -> dict[str, Any]:
        """Return the row of an image in ``images.csv``."""
        row = self._table.make_row(entry, self.numbers[entry.image], is_found=bool(entry.rows))
        defects = len(self._keep_defects(entry, row).rows)
        return row | {"defects": defects, "references": entry.note}

    def _keep_defects(self, entry: Entry, row: Mapping[str, Any]) -> Entry:
        """Return an image without defects where its verdict is ``good``.

        What differs from references that do not fit is no defect either.
        """
        has_defects = row["verdict"] != GOOD and not entry.note
        return entry if has_defects else replace(entry, rows=())

    def _warn_of_misfits(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Name the images whose references do not fit; return how many there are."""
        misfits = [(row["image"], row["references"]) for row in rows if row["references"]]
        cure = "the verdict is review, because the differences may not be defects"
        images = counted(len(misfits), "image has", "images have")
        list_problems(misfits).warn_if_any(log, f"{images} references that do not fit; {cure}")
        return len(misfits)

    def _write_defects(self, entries: Sequence[Entry]) -> None:
        """Write ``defects.csv``, and warn of images that have too many for it."""
        class_names = ("", *self.images.classes)  # kind 0: no class is told
        rows = []
        full_images = 0
        for entry in entries:
            full_images += len(entry.rows) == _MOST_DEFECTS
            for row in entry.rows:
                name = class_names[row.get("kind", 0)]
                rows.append({"image": entry.image, **row, "class": name})
        columns = (*COLUMNS, "class") if self.images.classes else COLUMNS
        path = self.write_rows(self.folder / "defects", columns, rows)
        log.info("defects: %s", path)
        if full_images:
            log.warning(
                "%s %d or more defects, and %s has the highest score: the threshold "
                "%.4g is too low for them, or the model has learned nothing",
                counted(full_images, "image has", "images have"),
                _MOST_DEFECTS,
                path.name,
                self.options.least_score,
            )

    def _show(self, row: Row, probability: Floats, kinds: Bytes | None) -> ShownImage:
        """Return an image as pictures show it, by its row of ``images.csv``."""
        number = self.numbers[row["image"]]
        mask = self._truth.read_mask(number)
        if mask is None and row["truth"] == GOOD:
            mask = np.zeros(probability.shape, np.uint8)
        if mask is not None and not self.images.classes:
            mask = np.where(mask == IGNORED, IGNORED, mask > 0).astype(np.uint8)
        least = self.options.least_score
        if row["verdict"] == GOOD or row.get("references"):
            predicted = np.zeros(probability.shape, np.uint8)  # which have no defects
        else:
            predicted = (probability >= least).astype(np.uint8) if kinds is None else kinds
        return ShownImage(
            name=row["image"],
            text=describe_row(row),
            pixels=self.images.show(number),
            probability=probability,
            predicted=drop_small(predicted, self.options.min_area_px),
            truth=mask,
            least=least,
            is_wrong=is_wrong(row),
        )

    def _read_shown(self, row: Row) -> ShownImage:
        """Return an image that was written as pictures show it."""
        name = row["image"]
        kinds = None
        if self.images.classes:
            kinds = self._read("classes", name)
        return self._show(row, self.read_map(name), kinds)

    def read_map(self, name: str) -> Floats:
        """Return the map of an image from its file, [H, W] in 0..1."""
        probability: Floats = self._read("maps", name).astype(np.float32) / np.float32(65535)
        return probability

    def _read(self, kind: str, name: str) -> Array:
        values: Array = read_image(self.bring(self.path_of(kind, name)))[0]
        return values

    @override
    def measure_margin(self, entry: Entry) -> float:
        return self._table.measure_margin(entry.score, self.options.least_score)

    @override
    def label(self, entry: Entry) -> ImageLabels:
        name = entry.image
        number = self.numbers[name]
        values = self._read("maps", name)
        objects: Sequence[Labelled] = ()
        if self._make_row(entry)["defects"]:
            file = self.path_of("classes", name).relative_to(self.folder).as_posix()
            kinds = self._read("classes", name) if file in entry.files else None
            objects = find_regions(values, kinds, self.class_names, self.options)
        return ImageLabels(
            kind="regions",
            name=name,
            stem=self.stems[name],
            path=self.path(number),
            size_px=(values.shape[0], values.shape[1]),
            score=entry.score,
            margin=self.measure_margin(entry),
            objects=objects,
        )

    def _draw_surest(self, rows: Sequence[Row]) -> None:
        surest = sorted(rows, key=lambda row: -row["score"])[:SHOWN]
        if surest:
            title = "images with the highest scores, with their probability and the result"
            path = self.folder / "predictions.png"
            draw_whole_images([self._read_shown(row) for row in surest], path, title)

    def _draw_worst(self, rows: Sequence[Row]) -> None:
        """Draw the defective images of the lowest scores above the good ones of the highest."""

        def paint_row(row: Row) -> Sequence[Bytes]:
            return paint(self._read_shown(row).crop(), _WORST_PX)[1:]

        legend = list_outcomes(has_classes=bool(self.images.classes))
        draw_worst(rows, self.folder / "worst.png", paint_row, legend=legend)


def _round(defect: Defect) -> dict[str, float]:
    """Return the row of a defect; its kind is left out where there are no classes."""
    row = {name: round(value, 3) for name, value in asdict(defect).items()}
    if not defect.kind:
        del row["kind"]
    return row
