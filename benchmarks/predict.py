"""Suite ``predict``: images of mixed sizes, one at a time as people do, and in batches of tiles."""

import math
from collections.abc import Iterable, Sequence
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
    find_weights,
    list_ways,
    make_net,
    write_images,
)
from benchmarks.suite import Suite
from lit_data.app.benchmarks.options import choose_device
from lit_data.app.benchmarks.table import collect, report_lines
from lit_data.app.build import build_datamodule
from lit_data.core.progress import track
from lit_data.images.readers import read_image
from lit_data.loading.device_timer import time_in_turn

COLUMNS = ("way", "images_per_s", "ratio_to_original", "dice_to_fp32", "peak_mib")
_THRESHOLD = 0.5
_COMPARED = 20  # images, which the original predicts again for each way


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictSuite(Suite):
    """Images of mixed sizes, one at a time as people predict them, and in tiles with fewer bits.

    A row for each way, from file to array: ``original`` one at a time in float32, ``original_bf16``,
    and ``ours``, tiles in bfloat16, several at a time. Columns: ``images_per_s``;
    ``ratio_to_original``; ``dice_to_fp32`` of masks to those of ``original``; ``peak_mib``, most
    memory of tensors while images are predicted.

    Args:
        images: How many, cut from validation samples.
        tile_px: Size of the tiles.
        steps: Of training before, without ``ckpt``.
    """

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
        with TemporaryDirectory(dir=folder, prefix="images-") as temp:
            paths = write_images(datamodule, Path(temp), self.images)
            make = partial(make_net, cfg, datamodule, weights, len(read_image(paths[0])))
            ways = list_ways(make, self.tile_px, device)
            works = {way.name: partial(way.run, paths) for way in ways}
            times_s = time_in_turn(works, self.repeats, device)
            lines = []
            for way in ways:
                line = {
                    "way": way.name,
                    "images_per_s": len(paths) / times_s[way.name],
                    "ratio_to_original": times_s["original"] / times_s[way.name],
                    "dice_to_fp32": _compare(way, ways[0], paths[:_COMPARED]),
                    "peak_mib": way.measure_peak_bytes(paths) / 2**20,
                }
                lines.append(line)
        threads = torch.get_num_threads()
        title = f"{cfg.name}: {len(paths)} images of mixed sizes, {threads} threads, {device}"
        report_lines(lines, COLUMNS, folder, title, labels=NAMES)
        return collect(lines, COLUMNS) | {"benchmark/images": len(paths)}


def _compare(way: PredictVariant, original: PredictVariant, paths: Sequence[Path]) -> float:
    """Compare the masks of a way with those of float32 of whole images, see `find_dice`."""
    pairs = zip(original.predict(paths), way.predict(paths), strict=True)
    return find_dice(track(pairs, f"comparing {way.name}", len(paths)))


def find_dice(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Find the Dice score of all masks together.

    Args:
        pairs: Probabilities of one shape each.

    Returns:
        2 * shared pixels / (pixels of one + pixels of the other); NaN if neither marks a pixel.
    """
    shared_px = marked_px = 0
    for values, other_values in pairs:
        mask, other_mask = values >= _THRESHOLD, other_values >= _THRESHOLD
        shared_px += int((mask & other_mask).sum())
        marked_px += int(mask.sum()) + int(other_mask.sum())
    return 2 * shared_px / marked_px if marked_px else math.nan
