"""Speed of an exported file, image by image as a line asks for verdicts."""

import logging
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.table import report_lines
from lit_data.commands.build import find_trained
from lit_data.commands.exported import open_exported
from lit_data.errors import ConfigError, DataError, StoreError

if TYPE_CHECKING:
    from lit_inspect import Inspector
    from lit_inspect.rows import ArrayRows

log = logging.getLogger(__name__)

_COLUMNS = (
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


def run_exported(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Measure the file that ``ckpt`` names; see `lit_data.commands.benchmark.run`.

    Raises:
        ConfigError: A mode was chosen that trains, or there is no folder of images.
        DataError: No image can be read.
        StoreError: The file is damaged, or gives other answers on this machine.
    """
    root = cfg.data.get("root")
    if options.mode != "loaders" or root is None:
        raise ConfigError(
            f"ckpt={cfg.ckpt} is measured with the images of data.root=FOLDER, which is {root}, and "
            f"without benchmark.mode, which is {options.mode}"
        )
    path = find_trained(cfg)
    began_s = perf_counter()
    inspector = open_exported(path)
    start_s = perf_counter() - began_s
    images = _read_images(inspector, Path(str(root)))
    times_ms = 1e3 * _time_calls(inspector, images, options.repeats)
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
    report_lines([line], _COLUMNS, Path(cfg.paths.run), f"{path.name}: verdicts")
    return {f"benchmark/{name}": value for name, value in line.items() if name != "file"}


def _read_images(inspector: "Inspector", folder: Path) -> "list[ArrayRows]":
    from lit_inspect import InspectError
    from lit_inspect.images import list_images
    from lit_inspect.rows import ArrayRows

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
        raise DataError(f"{folder} has no image that can be read: give another data.root")
    return images


def _time_calls(
    inspector: "Inspector", images: "list[ArrayRows]", repeats: int
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return the seconds of each call: every image once to warm up, which does not count."""
    from lit_inspect import InspectError

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
