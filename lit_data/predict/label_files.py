"""Predictions as label files of other tools, the most uncertain first: ``predict.to``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_data.annotations.writing import FORMS, Kind, Labelled
from lit_data.core.errors import ConfigError, show_path
from lit_data.core.files import explaining, write_table
from lit_data.core.temp import temp_folder
from lit_data.core.types import Array, Bytes
from lit_data.predict.journal import Entry
from lit_inspect.counts import counted

if TYPE_CHECKING:
    from lit_data.predict.options import PredictOptions
    from lit_data.predict.writer import PredictionWriter

log = logging.getLogger(__name__)

_MOST_OBJECTS = 1000  # of an image, as in tables


def check_form(kind: Kind | None, folder: Path, options: "PredictOptions") -> None:
    """Refuse label files that cannot hold the predictions, or that would replace other files.

    Raises:
        ConfigError: The files are refused.
    """
    assert options.to is not None
    forms = [name for name, (_, kinds) in FORMS.items() if kind in kinds]
    if options.to not in forms:
        what = "these predictions" if kind is None else f"predicted {kind}"
        cure = f"choose one of {', '.join(forms)}" if forms else "remove it"
        raise ConfigError(f"predict.to={options.to} cannot store {what}: {cure}")
    target = folder / options.to
    if target.exists():
        raise ConfigError(
            f"{show_path(target)} already exists and may hold corrected labels: move it, or "
            "choose another predict.folder"
        )


def write_label_files(
    writer: "PredictionWriter", entries: Sequence[Entry], folder: Path, options: "PredictOptions"
) -> None:
    """Write the label files of the predicted images, and the order in which to check them.

    Args:
        writer: Reads the predictions that were written for an image.
        entries: Of all images.
        folder: Folder of the predictions; label files go into a new folder below it.
        options: The format, and the number of images.

    Raises:
        ConfigError: The images are missing.
        StoreError: A file cannot be written.
    """
    assert options.to is not None
    write, _ = FORMS[options.to]
    margins = {entry.image: writer.measure_margin(entry) for entry in entries}
    chosen = sorted(entries, key=lambda entry: margins[entry.image])[: options.first]
    target = folder / options.to
    with explaining(target, "set predict.folder"), temp_folder(folder) as part:
        write((writer.label(entry) for entry in chosen), writer.class_names, part)
        part.rename(target)
    rows = []
    for entry in chosen:
        margin = round(margins[entry.image], 6)
        rows.append({"image": entry.image, "score": entry.score, "margin": margin})
    write_table(folder / "order.csv", ("image", "score", "margin"), rows)
    images = counted(len(chosen), "image")
    log.info("labels of %s, the most uncertain first: %s", images, show_path(target))


def find_regions(
    values: Array, kinds: Bytes | None, names: Sequence[str], options: "PredictOptions"
) -> list[Labelled]:
    """Return the connected regions of a map, those with the highest scores first, at most 1,000.

    Args:
        values: [H, W] uint16, of which 65535 is probability 1.
        kinds: [H, W] class numbers, 0 for unmarked pixels; None: all regions have the first class.
        names: Names of the classes.
        options: Threshold and smallest region.
    """
    import cv2

    if kinds is None:
        kinds = (values >= round(options.least_score * 65535)).astype(np.uint8)
    regions = []
    for number, name in enumerate(names, 1):
        is_marked = (kinds == number).astype(np.uint8)
        _, labels, stats, _ = cv2.connectedComponentsWithStats(is_marked, connectivity=8)
        for region, (left, top, width, height, area_px) in enumerate(stats.tolist()):
            if region == 0 or area_px < options.min_area_px:
                continue
            part = slice(top, top + height), slice(left, left + width)
            pixels = labels[part] == region
            score = round(float(values[part][pixels].max()) / 65535, 4)
            regions.append(Labelled(name, number, score, (left, top, width, height), pixels))
    return sorted(regions, key=lambda region: -region.score)[:_MOST_OBJECTS]
