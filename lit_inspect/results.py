"""Files of results, those of `predict`: maps, tables, and the list of bad images."""

import csv
import io
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_inspect.coco import CocoTable, describe_boxes
from lit_inspect.drift import FEATURES, WITHDRAWN
from lit_inspect.errors import BoardError
from lit_inspect.inspector import Inspector, Verdict
from lit_inspect.regions import Defect, slabs
from lit_inspect.rows import ArrayRows, MapFile
from lit_inspect.tiles import Rows

_MOST_DEFECTS = 1000  # of an image in the table, as in that of `predict`
_UP = 2  # PNG filter: each byte less the one above it
_TABLES = {
    "maps": ("images.csv", "defects.csv"),
    "labels": ("labels.csv",),
    "boxes": ("detections.json",),
}
_BAD_TABLE = "bad.csv"
_MAP_COLUMNS = ("image", "score", "defects", "verdict")
_DEFECT_COLUMNS = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


class Results:
    """Folder of the results of one file. Tables come last, and those of an earlier run go first.

    Args:
        inspector: Whose verdicts.
        folder: Where they go.

    Raises:
        BoardError: The folder cannot be written.
    """

    def __init__(self, inspector: Inspector, folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Else they would pass for those of a run that was interrupted.
            for name in (*_TABLES[inspector.settings.task], _BAD_TABLE):
                (folder / name).unlink(missing_ok=True)
        self._inspector = inspector
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._defects: list[dict[str, Any]] = []
        self._bad: list[dict[str, str]] = []
        self._features: list[NDArray[np.float64]] = []
        self._guarantee = inspector.settings.guarantee
        self._objects = CocoTable()

    def add(self, name: str, image: Rows) -> Verdict:
        """Inspect an image, and write its map or its boxes.

        Raises:
            UsageError: It does not fit the model.
            BoardError: Its file cannot be written.
        """
        settings = self._inspector.settings
        height, width = image.shape[1:]
        if settings.task == "labels":
            verdict = self._inspector.inspect(image)
            score = round(verdict.score, 4)
            self._rows.append({"image": name, "label": verdict.verdict, "score": score})
            return verdict
        if settings.task == "boxes":
            return self._add_boxes(name, image)
        if height * width <= settings.large_px or settings.scaling is not None:
            values = ArrayRows(self._inspector.predict(image, (0, height, width)))
            verdict = self._write_map(name, values)
        else:
            verdict = self._add_large(name, image)
        self._note(name, verdict)
        if self._guarantee is not None:
            self._features.append(self._inspector.describe(image))
        return verdict

    def _add_boxes(self, name: str, image: Rows) -> Verdict:
        verdict = self._inspector.inspect(image)
        height, width = image.shape[1:]
        self._objects.add(name, (height, width), verdict.boxes)
        text = describe_boxes(verdict.boxes, (height, width))
        with replacing(self._folder / "labels" / PurePath(name).with_suffix(".txt")) as file:
            file.write(text.encode())
        return verdict

    def note_bad(self, path: Path, reason: str) -> None:
        """Note an image that has no verdict."""
        self._bad.append({"image": str(path), "reason": reason})

    def finish(self) -> str | None:
        """Write the tables.

        Returns:
            The feature in which the images differ so much from those of the calibration that the
            guarantee is withdrawn; None if they do not.
        """
        drift = None
        columns: tuple[str, ...] = _MAP_COLUMNS
        if self._guarantee is not None:
            drift = self._guarantee.find_drift(np.array(self._features).reshape(-1, len(FEATURES)))
            text = WITHDRAWN if drift else self._guarantee.promise
            columns = (*columns, "guarantee")
            self._rows = [row | {"guarantee": text} for row in self._rows]
        if self._inspector.settings.task == "labels":
            self._write("labels.csv", ("image", "label", "score"), self._rows)
        elif self._inspector.settings.task == "boxes":
            with replacing(self._folder / "detections.json") as file:
                file.write(self._objects.encode(self._inspector.settings.classes))
        else:
            classes = ("class",) if self._inspector.settings.classes else ()
            self._write("images.csv", columns, self._rows)
            self._write("defects.csv", (*_DEFECT_COLUMNS, *classes), self._defects)
        self._write(_BAD_TABLE, ("image", "reason"), self._bad)
        return drift

    def _add_large(self, name: str, image: Rows) -> Verdict:
        """Inspect an image a row of tiles at a time, through a file of 16 bit."""
        values: MapFile | None = None
        try:
            for top, rows in self._inspector.stream(image):
                if values is None:
                    with writing(self._folder):
                        values = MapFile(self._folder, (len(rows), *image.shape[1:]))
                with writing(self._folder):
                    values.write(top, rows)
            assert values is not None
            return self._write_map(name, values)
        finally:
            if values is not None:
                values.close()

    def _write_map(self, name: str, values: ArrayRows | MapFile) -> Verdict:
        height, width = values.shape[1:]
        parts = list(slabs(height, width))
        path = self._folder / "maps" / f"{name}.png"
        write_png(path, (height, width), (_encode(values, part) for part in parts))
        if len(self._inspector.settings.classes):
            path = self._folder / "classes" / f"{name}.png"
            pairs = (self._inspector.read_pair(values, part) for part in parts)
            write_png(path, (height, width), (kinds for _, kinds in pairs if kinds is not None))
        return self._inspector.judge(values)

    def _note(self, name: str, verdict: Verdict) -> None:
        count = min(len(verdict.defects), _MOST_DEFECTS)
        self._rows.append(
            {"image": name, "score": verdict.score, "defects": count, "verdict": verdict.verdict}
        )
        class_names = ("", *self._inspector.settings.classes)
        for defect in verdict.defects[:_MOST_DEFECTS]:
            row = {"image": name, **_round(defect), "class": class_names[defect.kind]}
            self._defects.append(row)

    def _write(self, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _plain(value) for key, value in row.items()})
        with replacing(self._folder / name) as file:
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))


def _round(defect: Defect) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(defect).items()}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a cell of any type
    """Return a cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def _encode(values: ArrayRows | MapFile, part: slice) -> NDArray[np.uint16]:
    """Return rows of a map in 16 bit, 65535 is probability 1."""
    rows: NDArray[Any] = values.read(part.start, part.stop)[0]
    if rows.dtype == np.uint16:
        return rows
    encoded: NDArray[np.uint16] = np.rint(rows * np.float32(65535)).astype(np.uint16)
    return encoded


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one line.

    Raises:
        BoardError: There was one.
    """
    try:
        yield
    except OSError as error:
        raise BoardError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the place of `path` at the end, or leaves nothing after an error."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".lit_inspect-{secrets.token_hex(8)}.part")
        try:
            with part.open("xb") as file:
                yield file
            os.replace(part, path)  # noqa: PTH105 - of a path that may hold any bytes
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def write_png(path: Path, shape: tuple[int, int], parts: Iterable[NDArray[Any]]) -> None:
    """Write a grey PNG part by part, whole or not at all.

    Args:
        path: The file; its folder is made.
        shape: (height, width) px.
        parts: Its rows from the top, [h, W] uint8 or uint16.
    """
    packer = zlib.compressobj(1)
    above = np.zeros((1, 0), np.uint8)
    with replacing(path) as file:
        for number, part in enumerate(parts):
            if number == 0:
                file.write(b"\x89PNG\r\n\x1a\n")
                header = struct.pack(">IIBBBBB", shape[1], shape[0], 8 * part.itemsize, 0, 0, 0, 0)
                _write_chunk(file, b"IHDR", header)
            big_endian = np.ascontiguousarray(part, part.dtype.newbyteorder(">"))
            rows = big_endian.view(np.uint8).reshape(len(part), -1)
            filtered = np.full((len(rows), rows.shape[1] + 1), _UP, np.uint8)
            filtered[:, 1:] = rows
            filtered[1:, 1:] -= rows[:-1]
            if above.size:
                filtered[:1, 1:] -= above
            _write_chunk(file, b"IDAT", packer.compress(filtered.data))
            above = rows[-1:]
        _write_chunk(file, b"IDAT", packer.flush())
        _write_chunk(file, b"IEND", b"")


def _write_chunk(file: BinaryIO, kind: bytes, data: bytes) -> None:
    if data or kind == b"IEND":  # the packer may hold all back for now
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        file.write(struct.pack(">I", len(data)) + kind + data + checksum)
