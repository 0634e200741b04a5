"""Suite ``predict``: images of mixed sizes, one at a time as people do, and in batches of tiles."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from typing_extensions import override

from benchmarks.predict_variants import (
    NAMES,
    PredictVariant,
    WayOptions,
    find_weights,
    list_ways,
    write_images,
)
from benchmarks.suite import Suite
from lit_data.app.benchmarks.options import choose_device
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.app.build import build_datamodule
from lit_data.core.progress import track
from lit_data.loading.device_timer import time_in_turn

log = logging.getLogger(__name__)


COLUMNS = (
    "way", "batch_size", "images_per_s", "ratio_to_original", "dice_to_fp32", "mean_difference",
    "max_difference", "peak_mib",
)  # fmt: skip
_THRESHOLD = 0.5
_COMPARED = 20  # images, which the original predicts again for each way


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictSuite(Suite):
    """Images of mixed sizes, one at a time as people predict them, and in batches with fewer bits.

    A row for each way, from file to array: ``original`` one at a time in float32, ``batched`` tiles
    of all images in batches, ``threads`` several batches at a time, ``bf16`` in bfloat16 too.
    Columns: ``images_per_s``; ``ratio_to_original``; ``dice_to_fp32``, ``mean_difference``,
    ``max_difference`` of masks and probabilities to those of ``original``; ``peak_mib``, most memory
    of tensors while a batch is predicted. summary.json holds each way at its fastest batch size, and
    ``best_way``.

    Args:
        batch_sizes: Sizes to try.
        images: How many, cut from validation samples.
        tile_px: Size of the tiles.
        steps: Of training before, without ``ckpt``.
    """

    batch_sizes: Sequence[int] = (1,)
    images: int = 200
    tile_px: int = 512
    steps: int = 60

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        folder = Path(cfg.paths.run)
        datamodule = build_datamodule(cfg)
        datamodule.setup("fit")
        weights = find_weights(cfg, datamodule, self.steps)
        options = WayOptions(batch_sizes=self.batch_sizes, tile_px=self.tile_px, device=device)
        with TemporaryDirectory(dir=folder, prefix="images-") as temp:
            paths = write_images(datamodule, Path(temp), self.images)
            ways = list_ways(cfg, datamodule, weights, paths, options)
            works = {way.name: partial(way.run, paths) for way in ways}
            times_s = time_in_turn(works, self.repeats, device)
            lines = [_measure(way, ways[0], times_s[way.name], paths) for way in ways]
        for line in lines:
            line["ratio_to_original"] = line["images_per_s"] / lines[0]["images_per_s"]
        threads = torch.get_num_threads()
        title = f"{cfg.name}: {len(paths)} images of mixed sizes, {threads} threads, {device}"
        report_lines(lines, COLUMNS, folder, title, labels=NAMES)
        return collect_metrics(lines) | {"benchmark/images": len(paths)}


def collect_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of summary.json: of each way its fastest line, and the fastest of all."""
    fastest: dict[str, Mapping[str, Any]] = {}
    for line in sorted(lines, key=lambda line: float(line["images_per_s"])):
        fastest[line["way"]] = line
    ours = [line for line in lines if not line["way"].startswith("original")]
    best = max(ours, key=lambda line: float(line["images_per_s"]))
    return collect([*fastest.values()], COLUMNS) | {
        "benchmark/batch_size": best["batch_size"],
        "benchmark/best_way": best["way"],
        "benchmark/ratio_to_original": best["ratio_to_original"],
    }


def _measure(
    way: PredictVariant, original: PredictVariant, seconds: float, paths: Sequence[Path]
) -> dict[str, Any]:
    agreement = _compare(way, original, paths)
    return {
        "way": way.kind,
        "batch_size": way.batch_size,
        "images_per_s": len(paths) / seconds,
        "dice_to_fp32": agreement.dice,
        "mean_difference": agreement.mean_difference,
        "max_difference": agreement.max_difference,
        "peak_mib": way.measure_peak_bytes(paths) / 2**20,
    }


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two nets on the same images.

    Attributes:
        mean_difference: Mean absolute difference of the probabilities, 0 to 1.
        max_difference: The largest.
        dice: Of both masks together: 2 * shared pixels / (pixels of one + pixels of the other); NaN
            if neither marks a pixel.
    """

    mean_difference: float
    max_difference: float
    dice: float


def _compare(way: PredictVariant, original: PredictVariant, paths: Sequence[Path]) -> Agreement:
    """Agreement with the original way, which is float32 of whole images."""
    compared = paths[:_COMPARED]
    pairs = zip(original.predict(compared), way.predict(compared), strict=True)
    tracked = track(pairs, f"comparing {way.name}", len(compared))
    return compare_values(tracked, threshold=_THRESHOLD)


def compare_values(pairs: Iterable[tuple[Tensor, Tensor]], *, threshold: float) -> Agreement:
    """Compare probabilities with others.

    Args:
        pairs: Two tensors of one shape each; the reference comes first.
        threshold: Least probability of a marked pixel.
    """
    sum_of_differences = 0.0
    max_difference = 0.0
    pixels = shared_pixels = marked_pixels = other_marked_pixels = 0
    for values, other_values in pairs:
        difference = (values.float() - other_values.float()).abs()
        sum_of_differences += float(difference.sum(dtype=torch.float64))
        max_difference = max(max_difference, float(difference.max()))
        mask = values >= threshold
        other_mask = other_values >= threshold
        pixels += values.numel()
        shared_pixels += int((mask & other_mask).sum())
        marked_pixels += int(mask.sum())
        other_marked_pixels += int(other_mask.sum())
    all_marked = marked_pixels + other_marked_pixels
    return Agreement(
        mean_difference=sum_of_differences / pixels,
        max_difference=max_difference,
        dice=2 * shared_pixels / all_marked if all_marked else math.nan,
    )
