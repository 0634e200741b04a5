"""Mode ``predict``: images of mixed sizes, one at a time as people predict them, and in batches with fewer bits."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from omegaconf import DictConfig
from rich.table import Table

from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.predict_variants import NAMES, PredictVariant, find_weights, list_ways, write_images
from lit_data.commands.benchmarks.rows import show_table, write_lines
from lit_data.commands.session import build_datamodule
from lit_data.inference.export.quantise import Agreement, compare_values
from lit_data.io.progress import track
from lit_data.loading.device_timer import time_in_turn

log = logging.getLogger(__name__)


COLUMNS: Final = (
    "way", "batch_size", "images_per_s", "ratio_to_original", "dice_to_fp32", "mean_difference", "max_difference",
    "peak_mib", "note",
)  # fmt: skip
_THRESHOLD: Final = 0.5
_COMPARED: Final = 20  # images, which the original predicts again for each way


def run_predict(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare the ways; see `lit_data.commands.benchmark.run`."""
    device = options.choose_device()
    folder, datamodule = Path(cfg.paths.run), build_datamodule(cfg)
    datamodule.setup("fit")
    weights = find_weights(cfg, datamodule, options)
    with TemporaryDirectory(dir=folder, prefix="images-") as temp:
        paths = write_images(datamodule, Path(temp), options.images)
        ways = list_ways(cfg, datamodule, weights, paths, options, device)
        works = {way.name: partial(way.run, paths) for way in ways if not way.note}
        times_s = time_in_turn(works, options.repeats, device)
        lines = [_measure(way, ways[0], times_s.get(way.name, math.nan), paths) for way in ways]
    for line in lines:
        line["ratio_to_original"] = line["images_per_s"] / lines[0]["images_per_s"]
    title = f"{cfg.name}: {len(paths)} images of mixed sizes, {torch.get_num_threads()} threads, {device}"
    write_lines(lines, COLUMNS, folder / "benchmark.csv")
    _print_lines(lines, title)
    log.info("table: %s", folder / "benchmark.csv")
    return collect_metrics(lines) | {"benchmark/images": len(paths)}


def collect_metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of summary.json: of each way its fastest line, and the fastest of all."""
    measured = [line for line in lines if not line["note"]]
    fastest: dict[str, Mapping[str, Any]] = {}
    for line in sorted(measured, key=lambda line: float(line["images_per_s"])):
        fastest[line["way"]] = line
    ours = [line for line in measured if not line["way"].startswith("original")]
    best = max(ours, key=lambda line: float(line["images_per_s"]))
    found = {
        f"benchmark/{way}_{name}": line[name]
        for way, line in fastest.items()
        for name in COLUMNS[1:-1]
        if not math.isnan(line[name])
    }
    return found | {
        "benchmark/batch_size": best["batch_size"],
        "benchmark/best_way": best["way"],
        "benchmark/ratio_to_original": best["ratio_to_original"],
    }


def _measure(way: PredictVariant, original: PredictVariant, seconds: float, paths: Sequence[Path]) -> dict[str, Any]:
    line = {"way": way.kind, "batch_size": way.batch_size, "note": way.note, "images_per_s": len(paths) / seconds}
    if way.note:
        return line | dict.fromkeys(("dice_to_fp32", "mean_difference", "max_difference", "peak_mib"), math.nan)
    found = _compare(way, original, paths)
    return line | {
        "dice_to_fp32": found.dice,
        "mean_difference": found.mean_difference,
        "max_difference": found.max_difference,
        "peak_mib": way.measure_peak_bytes(paths) / 2**20,
    }


def _compare(way: PredictVariant, original: PredictVariant, paths: Sequence[Path]) -> Agreement:
    """Agreement with what the original way says, which is float32 of whole images."""
    some = paths[:_COMPARED]
    pairs = zip(original.predict(some), way.predict(some), strict=True)
    return compare_values(track(pairs, f"comparing {way.name}", len(some)), threshold=_THRESHOLD)


def _print_lines(lines: Sequence[Mapping[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in COLUMNS[:-1]:
        table.add_column(name.replace("_", " "), justify="left" if name == "way" else "right")
    for line in lines:
        table.add_row(NAMES[line["way"]], *(_format(line[name]) for name in COLUMNS[1:-1]))
    console = show_table(table)
    for line in lines:
        if line["note"]:
            console.print(f"{NAMES[line['way']]}: {line['note']}", markup=False, highlight=False)


def _format(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"
