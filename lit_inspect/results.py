"""Files of results, the same as those of `predict`: maps, tables, and the list of bad images."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_inspect.cells import plain_cell
from lit_inspect.coco import CocoTable, describe_boxes
from lit_inspect.drift import FEATURES, WITHDRAWN
from lit_inspect.files import fit_name, replacing, write_png, writing
from lit_inspect.inspector import Inspector, Verdict
from lit_inspect.marks import tint
from lit_inspect.regions import Defect, slabs
from lit_inspect.rows import ArrayRows, MapFile
from lit_inspect.tiles import Rows
from lit_inspect.verdicts import REVIEW

_MOST_DEFECTS = 1000  # for each image in the table, as in `predict`
_TABLES = {
    "maps": ("images.csv", "defects.csv"),
    "labels": ("images.csv", "labels.csv"),
    "boxes": ("images.csv", "detections.json"),
}
_MARK_TABLES = ("marks.csv",)
_MARK_COLUMNS = ("image", "marked_share", "mean_score", "height_px", "width_px")
_BAD_TABLE = "bad.csv"
_COLUMNS = {
    "maps": ("image", "score", "defects", "verdict"),
    "labels": ("image", "score", "verdict"),
    "boxes": ("image", "score", "defects", "verdict"),
}
_DEFECT_COLUMNS = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


class Results:
    """Folder with the results of one file. Tables are written last; those of an earlier run are removed first.

    Args:
        inspector: Inspector that returns the verdicts.
        folder: Folder for the results.
        names: Names of all images.

    Raises:
        BoardError: The folder cannot be written.
    """

    def __init__(self, inspector: Inspector, folder: Path, names: Sequence[str] = ()) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Otherwise they would seem to be the results of this run if it is interrupted.
            tables = _TABLES[inspector.settings.task]
            for name in (*tables, *_MARK_TABLES, _BAD_TABLE):
                (folder / name).unlink(missing_ok=True)
        self._inspector = inspector
        self._folder = folder
        self._stem_counts = Counter(map(_stem_of, names))
        self._rows: list[dict[str, Any]] = []
        self._defects: list[dict[str, Any]] = []
        self._labels: list[dict[str, Any]] = []
        self._bad: list[dict[str, str]] = []
        self._features: list[NDArray[np.float64]] = []
        self._guarantee = inspector.settings.guarantee
        self._objects = CocoTable()

    def add(self, name: str, image: Rows) -> Verdict:
        """Inspect an image, and write its map or its boxes.

        Raises:
            UsageError: The image does not fit the model.
            ImageError: The image cannot be read.
            AnswerError: The net gives no answer; see `note_unanswered`.
            BoardError: A file cannot be written.
        """
        settings = self._inspector.settings
        height, width = image.shape[1:]
        if settings.task == "labels":
            verdict = self._add_label(name, image)
        elif settings.task == "boxes":
            verdict = self._add_boxes(name, image)
        elif height * width <= settings.large_px or settings.scaling is not None:
            values = ArrayRows(self._inspector.predict(image, (0, height, width)))
            verdict = self._write(name, image, values)
        else:
            verdict = self._add_large(name, image)
        if self._guarantee is not None:
            self._features.append(self._inspector.describe(image))
        if settings.shows == "marks":
            self._note_marks(name, image, verdict)
        else:
            self._note(name, verdict)
        return verdict

    def _add_label(self, name: str, image: Rows) -> Verdict:
        verdict = self._inspector.inspect(image)
        score = round(float(verdict.probability.max()), 4)
        self._labels.append({"image": name, "label": verdict.label, "score": score})
        return verdict

    def _add_boxes(self, name: str, image: Rows) -> Verdict:
        verdict = self._inspector.inspect(image)
        height, width = image.shape[1:]
        self._objects.add(name, (height, width), verdict.boxes)
        text = describe_boxes(verdict.boxes, (height, width))
        # Names of images that differ only in their suffix keep it, as in `predict`.
        stem = _stem_of(name) if self._stem_counts[_stem_of(name)] < 2 else name
        with replacing(self._folder, f"labels/{stem}.txt") as file:
            file.write(text.encode())
        return verdict

    @property
    def has_bad(self) -> bool:
        """Return True if an image has no verdict, or a verdict without an answer of the net."""
        return bool(self._bad)

    @property
    def misfits(self) -> int:
        """Return the number of images whose references do not fit."""
        return sum(bool(row.get("references")) for row in self._rows)

    def note_bad(self, name: str, reason: str) -> None:
        """Record an image that has no verdict."""
        self._bad.append({"image": name, "reason": reason})

    def note_unanswered(self, name: str, reason: str) -> None:
        """Record an image for which the net gives no answer: it is listed as bad, and its verdict is review.

        Watermarks have no table of verdicts, and the tables of watermarks and boxes skip the image.
        """
        self.note_bad(name, reason)
        if self._inspector.settings.shows == "marks":
            return
        self._rows.append({"image": name, "verdict": REVIEW, "guarantee": ""})
        self._labels.append({"image": name, "label": REVIEW})

    def finish(self) -> str | None:
        """Write the tables.

        Returns:
            The feature in which the images differ so much from those of the calibration that the
            guarantee is withdrawn; None if they do not.
        """
        drift = None
        settings = self._inspector.settings
        columns = _COLUMNS[settings.task]
        if settings.reference_limits is not None:
            columns = (*columns, "references")
        if self._guarantee is not None:
            drift = self._guarantee.find_drift(np.array(self._features).reshape(-1, len(FEATURES)))
            text = WITHDRAWN if drift else self._guarantee.promise
            columns = (*columns, "guarantee")
            self._rows = [{"guarantee": text} | row for row in self._rows]
        if settings.shows == "marks":
            self._write_table("marks.csv", _MARK_COLUMNS, self._rows)
        elif settings.task != "labels" or settings.good:
            self._write_table("images.csv", columns, self._rows)
        if settings.task == "labels":
            self._write_table("labels.csv", ("image", "label", "score"), self._labels)
        elif settings.task == "boxes":
            with replacing(self._folder, "detections.json") as file:
                file.write(self._objects.encode(settings.classes))
        elif settings.shows == "defects":
            classes = ("class",) if settings.classes else ()
            self._write_table("defects.csv", (*_DEFECT_COLUMNS, *classes), self._defects)
        self._write_table(_BAD_TABLE, ("image", "reason"), self._bad)
        return drift

    def _add_large(self, name: str, image: Rows) -> Verdict:
        """Inspect an image by rows of tiles, with a map in a 16-bit file."""
        values: MapFile | None = None
        try:
            for top, rows in self._inspector.stream(image):
                if values is None:
                    with writing(self._folder):
                        values = MapFile(self._folder, (len(rows), *image.shape[1:]))
                with writing(self._folder):
                    values.write(top, rows)
            assert values is not None
            return self._write(name, image, values)
        finally:
            if values is not None:
                values.close()

    def _write(self, name: str, image: Rows, values: ArrayRows | MapFile) -> Verdict:
        """Write the pictures of an image, and return its verdict."""
        if self._inspector.settings.shows == "marks":
            self._write_marks(name, image, values)
        else:
            self._write_map(name, values)
        return self._inspector.judge(values, self._inspector.find_misfits(image))

    def _write_marks(self, name: str, image: Rows, values: ArrayRows | MapFile) -> None:
        height, width = values.shape[1:]
        threshold = self._inspector.settings.threshold
        parts = list(slabs(height, width))

        def read(part: slice) -> NDArray[np.float32]:
            return self._inspector.read_pair(values, part)[0]

        masks = (np.rint(read(part) * np.float32(255)).astype(np.uint8) for part in parts)
        overlays = (
            tint(image.read(part.start, part.stop), read(part), threshold) for part in parts
        )
        for kind, pictures in (("masks", masks), ("overlays", overlays)):
            write_png(self._folder, f"{kind}/{fit_name(name, '.png')}", (height, width), pictures)

    def _write_map(self, name: str, values: ArrayRows | MapFile) -> None:
        height, width = values.shape[1:]
        parts = list(slabs(height, width))
        encoded = (_encode(values, part) for part in parts)
        write_png(self._folder, f"maps/{fit_name(name, '.png')}", (height, width), encoded)
        if len(self._inspector.settings.classes):
            pairs = (self._inspector.read_pair(values, part) for part in parts)
            numbers = (kinds for _, kinds in pairs if kinds is not None)
            write_png(self._folder, f"classes/{fit_name(name, '.png')}", (height, width), numbers)

    def _note_marks(self, name: str, image: Rows, verdict: Verdict) -> None:
        row = {"image": name, "marked_share": round(verdict.marked_share, 6)}
        row |= {"mean_score": round(verdict.score, 4)}
        row |= {"height_px": image.shape[1], "width_px": image.shape[2]}
        self._rows.append(row)

    def _note(self, name: str, verdict: Verdict) -> None:
        count = len(verdict.boxes) or min(len(verdict.defects), _MOST_DEFECTS)
        row = {"image": name, "score": verdict.score, "defects": count}
        self._rows.append(row | {"verdict": verdict.verdict, "references": verdict.references})
        class_names = ("", *self._inspector.settings.classes)
        for defect in verdict.defects[:_MOST_DEFECTS]:
            row = {"image": name, **_round(defect), "class": class_names[defect.kind]}
            self._defects.append(row)

    def _write_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
    ) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: plain_cell(value) for key, value in row.items()})
        with replacing(self._folder, name) as file:
            file.write(text.getvalue().encode())


def _round(defect: Defect) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(defect).items()}


def _encode(values: ArrayRows | MapFile, part: slice) -> NDArray[np.uint16]:
    """Return rows of a map in 16 bits; 65535 is probability 1."""
    rows: NDArray[Any] = values.read(part.start, part.stop)[0]
    if rows.dtype == np.uint16:
        return rows
    encoded: NDArray[np.uint16] = np.rint(rows * np.float32(65535)).astype(np.uint16)
    return encoded


def _stem_of(name: str) -> str:
    return PurePath(name).with_suffix("").as_posix()
