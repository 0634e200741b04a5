"""Suite ``exported``: speed of an exported file, image by image as a line asks for verdicts."""

import logging
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import report_lines
from lit_data.commands.exported import open_exported
from lit_data.errors import DataError, StoreError
from lit_inspect import InspectError, Inspector
from lit_inspect.images import list_images
from lit_inspect.rows import ArrayRows

log = logging.getLogger(__name__)

COLUMNS = (
    "file",
    "images",
    "calls",
    "start_ms",
    "median_ms",
    "p99_ms",
    "images_per_s",
    "pixels_per_image",
)
_MOST_IMAGES = 64  # held in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSuite(Suite):
    """Time of a call of an exported file, with up to 64 images of a folder one at a time.

    Args:
        file: Written by ``export``.
        root: Folder of images.
    """

    file: str
    root: str

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        path = Path(self.file)
        began_s = perf_counter()
        inspector = open_exported(path)
        start_s = perf_counter() - began_s
        images = _read_images(inspector, Path(self.root))
        times_ms = 1e3 * _time_calls(inspector, images, self.repeats)
        line = {
            "file": path.name,
            "images": len(images),
            "calls": len(times_ms),
            "start_ms": 1e3 * start_s,
            "median_ms": float(np.median(times_ms)),
            "p99_ms": float(np.percentile(times_ms, 99)),
            "images_per_s": 1e3 / float(times_ms.mean()),
            "pixels_per_image": float(np.mean([image.pixels[0].size for image in images])),
        }
        report_lines([line], COLUMNS, Path(cfg.paths.run), f"{path.name}: verdicts")
        return {f"benchmark/{name}": value for name, value in line.items() if name != "file"}


def _read_images(inspector: Inspector, folder: Path) -> list[ArrayRows]:
    images = []
    try:
        names = list_images(folder)
    except InspectError as error:
        raise DataError(str(error)) from error
    for name in names[:_MOST_IMAGES]:
        try:
            rows = inspector.open(folder / name)
            images.append(ArrayRows(rows.read(0, rows.shape[1])))
        except InspectError as error:
            log.warning("left out: %s", error)
    if not images:
        raise DataError(f"{folder} has no image that can be read: give another suite.root")
    return images


def _time_calls(
    inspector: Inspector, images: list[ArrayRows], repeats: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds of each call: every image once to warm up, which does not count."""
    calls_s = []
    for _ in range(1 + repeats):
        for image in images:
            began_s = perf_counter()
            try:
                inspector.inspect(image)
            except InspectError as error:
                raise StoreError(str(error)) from error
            calls_s.append(perf_counter() - began_s)
    return np.array(calls_s[len(images) :])
