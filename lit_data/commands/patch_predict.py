"""``predict`` for stripes: a probability map of every image, and a table of its defects."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from lit_data.commands.patch_pictures import draw_maps
from lit_data.commands.predict_files import ProbabilityMap, slabs
from lit_data.commands.predict_images import Written
from lit_data.commands.predict_journal import Entry
from lit_data.commands.predict_options import PredictOptions
from lit_data.commands.result import write_table
from lit_data.commands.whole_images import WholeImages
from lit_data.inference import Defect, find_defects
from lit_data.io.image_files import write_png_parts
from lit_data.io.readers import read_image

log = logging.getLogger(__name__)

_SHOWN: Final = 6
COLUMNS: Final = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


class MapFiles:
    """Writes ``maps/<image>.png`` (16 bit, 65535 is probability 1).

    At the end come ``defects.csv`` and ``predictions.png`` with the images that hold the surest defects, but for images
    of more than `large_px`.

    Args:
        images: What is predicted.
        folder: Where to write.
        options: Threshold and smallest defect.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        self._images, self._folder, self._options = images, folder, options

    def write(self, number: int, probability: ProbabilityMap, seconds: float) -> Written:
        """Write the map of an image and find its defects, for which all of it is held in memory."""
        path, shape = self._map_of(self._images.names[number]), probability.shape
        write_png_parts(path, shape, (probability.encode(part, np.uint16) for part in slabs(shape)))
        found = find_defects(
            probability.rows(slice(None)), threshold=self._options.threshold, min_area_px=self._options.min_area_px
        )
        return Written([path], [_round(defect) for defect in found], max((defect.score for defect in found), default=0))

    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write the table and the picture.

        Returns:
            The numbers for summary.json.
        """
        path = self._folder / "defects.csv"
        write_table(path, COLUMNS, [{"image": entry.image, **row} for entry in entries for row in entry.rows])
        log.info("defects: %s", path)
        self._draw(entries)
        return {
            "predict/images": len(entries),
            "predict/images_with_defects": sum(bool(entry.rows) for entry in entries),
            "predict/defects": sum(len(entry.rows) for entry in entries),
        }

    def _draw(self, entries: Sequence[Entry]) -> None:
        numbers = {name: number for number, name in enumerate(self._images.names)}
        small = [e for e in entries if self._images.count_px(numbers[e.image]) <= self._options.large_px]
        shown = sorted(small, key=lambda entry: -entry.score)[:_SHOWN]
        if shown:
            images = [
                (e.image, self._images.bank[numbers[e.image]][0], read_image(self._map_of(e.image))[0] / 65535, e.rows)
                for e in shown
            ]
            named = [(name, pixels, found, [_read(row) for row in rows]) for name, pixels, found, rows in images]
            draw_maps(named, self._folder / "predictions.png")

    def _map_of(self, name: str) -> Path:
        return self._folder / "maps" / f"{name}.png"


def _round(defect: Defect) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(defect).items()}


def _read(row: Mapping[str, Any]) -> Defect:
    return Defect(**row)
