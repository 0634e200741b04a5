"""Suite ``exported``: speed of an exported file, image by image as a line asks for verdicts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.suite import Suite
from lit_data.app.benchmarks.table import report_lines
from lit_data.app.exported import open_exported
from lit_data.core.errors import DataError, StoreError
from lit_data.core.types import Array
from lit_inspect import InspectError, Inspector
from lit_inspect.rows import ArrayRows

log = logging.getLogger(__name__)

COLUMNS = (
    "way",
    "images",
    "calls",
    "median_ms",
    "p99_ms",
    "images_per_s",
    "cpu_ms_per_image",
    "pixels_per_image",
)
_DIFFERENCE = "difference"
_LABELS = {_DIFFERENCE: "difference of images (OpenCV)"}
_MOST_IMAGES = 64  # held in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSuite(Suite):
    """Time of a call of an exported file, with up to 64 images of a folder one at a time.

    Where the images are targets with references, a second row has the difference of images by
    OpenCV: pixels of the target that differ from the mean of its references by the threshold of
    the file, and their regions.

    Args:
        file: Written by ``export``.
        root: Folder of images.
        threads: That each way computes with.
    """

    file: str
    root: str
    threads: int = 2

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        path = Path(self.file)
        began_s = perf_counter()
        inspector = open_exported(path, self.threads)
        start_s = perf_counter() - began_s
        images = _read_images(inspector, Path(self.root))
        calls: dict[str, Callable[[ArrayRows], Any]] = {path.name: inspector.inspect}
        if inspector.settings.layout is not None:
            cv2.setNumThreads(self.threads)
            threshold, least_px = inspector.settings.threshold, inspector.settings.min_area_px

            def judge(image: ArrayRows) -> bool:
                return judge_difference(image.pixels, threshold, least_px)

            calls[_DIFFERENCE] = judge
        lines = [_measure(way, call, images, self.repeats) for way, call in calls.items()]
        title = f"{path.name}: verdicts, {self.threads} threads"
        report_lines(lines, COLUMNS, Path(cfg.paths.run), title, labels=_LABELS)
        metrics = {"benchmark/start_ms": 1e3 * start_s}
        for line, prefix in zip(lines, ("", f"{_DIFFERENCE}_"), strict=False):
            metrics |= {f"benchmark/{prefix}{name}": line[name] for name in COLUMNS[1:]}
        return metrics


def judge_difference(pixels: Array, threshold: float, least_px: int) -> bool:
    """Return whether a target differs from its references in any region.

    Args:
        pixels: [C, H, W], the target first.
        threshold: Least difference of a pixel from the mean of the references, as a fraction of
            the values of the dtype.
        least_px: Pixels of the smallest region.
    """
    white = 1.0 if pixels.dtype.kind == "f" else float(np.iinfo(pixels.dtype).max)
    target, reference = pixels[0], pixels[1]
    if len(pixels) > 2:
        reference = cv2.addWeighted(reference, 0.5, pixels[2], 0.5, 0)
    difference = cv2.absdiff(target, reference)
    marked = cv2.compare(difference, white * threshold, cv2.CMP_GE)
    count, _, stats, _ = cv2.connectedComponentsWithStats(marked, connectivity=8)
    return bool((stats[1:count, cv2.CC_STAT_AREA] >= least_px).any())


def _measure(
    way: str, call: Callable[[ArrayRows], Any], images: list[ArrayRows], repeats: int
) -> dict[str, Any]:
    began_s = process_time()
    times_ms = 1e3 * _time_calls(call, images, repeats)
    cpu_s = process_time() - began_s  # with the calls that warm up
    return {
        "way": way,
        "images": len(images),
        "calls": len(times_ms),
        "median_ms": float(np.median(times_ms)),
        "p99_ms": float(np.percentile(times_ms, 99)),
        "images_per_s": 1e3 / float(times_ms.mean()),
        "cpu_ms_per_image": 1e3 * cpu_s / (len(times_ms) + len(images)),
        "pixels_per_image": float(np.mean([image.pixels[0].size for image in images])),
    }


def _read_images(inspector: Inspector, folder: Path) -> list[ArrayRows]:
    images = []
    try:
        groups = inspector.list_groups(folder)
    except InspectError as error:
        raise DataError(str(error)) from error
    for group in groups[:_MOST_IMAGES]:
        try:
            rows = inspector.open_group(folder, group)
            images.append(ArrayRows(rows.read(0, rows.shape[1])))
        except InspectError as error:
            log.warning("left out: %s", error)
    if not images:
        raise DataError(f"{folder} has no image that can be read: give another suite.root")
    return images


def _time_calls(
    call: Callable[[ArrayRows], Any], images: list[ArrayRows], repeats: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds of each call: every image once to warm up, which does not count."""
    calls_s = []
    for _ in range(1 + repeats):
        for image in images:
            began_s = perf_counter()
            try:
                call(image)
            except InspectError as error:
                raise StoreError(str(error)) from error
            calls_s.append(perf_counter() - began_s)
    return np.array(calls_s[len(images) :])
