"""Suite ``start``: from nothing to the first batch, for sets of more and more images with masks."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.commands.benchmarks.options import Suite
from lit_data.commands.benchmarks.table import collect, report_lines
from lit_data.datamodules import InspectionDataModule
from lit_data.io.images.writing import write_png
from lit_data.io.progress import track
from lit_data.loading import LoaderOptions

COLUMNS = ("way", "first_start_s", "start_s", "us_per_image", "rss_mb")
_SIDE_PX = 64
_MASKED = 4
"""One of so many images has a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSuite(Suite):
    """Wait of a run for its first step: files are found, decoded, compared, split.

    ``first_start_s`` with nothing stored, ``start_s`` of every later run (median of `repeats`),
    that for each image, and the memory of the process behind it.

    Args:
        images: Sizes of sets of drawn images of 64 px, in turn; each is larger than the one before.
    """

    images: Sequence[int] = (2_000, 8_000, 32_000)

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        lines = []
        written = 0
        with TemporaryDirectory() as name:
            for count in self.images:
                _write(Path(name) / "set", range(written, count))
                written = count
                first_s = _start(Path(name), count)
                start_s = median(_start(Path(name), count) for _ in range(self.repeats))
                line = {
                    "way": f"images_{count}",
                    "first_start_s": first_s,
                    "start_s": start_s,
                    "us_per_image": 1e6 * start_s / count,
                    "rss_mb": psutil.Process().memory_info().rss / 1e6,
                }
                lines.append(line)
        title = f"images of {_SIDE_PX} px, one of {_MASKED} with a mask"
        report_lines(lines, COLUMNS, Path(cfg.paths.run), title)
        return collect(lines, COLUMNS)


def _write(root: Path, numbers: range) -> None:
    for number in track(numbers, "drawing images", len(numbers)):
        image = np.random.default_rng(number).integers(0, 256, (_SIDE_PX, _SIDE_PX), np.uint8)
        write_png(root / "images" / f"{number:06}.png", image)
        if number % _MASKED == 0:
            write_png(root / "masks" / f"{number:06}.png", (image > 250).astype(np.uint8))


def _start(folder: Path, count: int) -> float:
    """Measure the seconds from nothing to the first training batch."""
    logger = logging.getLogger("lit_data")
    level = logger.level
    logger.setLevel(logging.WARNING)  # each start would say the same
    try:
        began_s = time.perf_counter()
        data = InspectionDataModule(
            str(folder / "set"),
            patch_px=_SIDE_PX,
            cache_dir=str(folder / str(count)),
            loader=LoaderOptions(batch_size=32, num_workers=0),
        )
        data.prepare_data()
        data.setup("fit")
        next(iter(data.train_dataloader()))
        return time.perf_counter() - began_s
    finally:
        logger.setLevel(level)
