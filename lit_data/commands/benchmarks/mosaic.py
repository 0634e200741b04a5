"""Mode ``mosaic``: what mosaics of four cost a core: drawn by workers, left to the device, and as people make them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.table import Table

from lit_data.commands.benchmarks.lines import show_table, write_lines
from lit_data.commands.benchmarks.mosaic_ways import list_ways, open_feeds, read_spec, time_finish, train_and_wait
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.loading.device_timer import one_thread, time_in_turn

log = logging.getLogger(__name__)

LABELS: Final = {
    "original": "original: four images in memory, canvas, warp, colours, flip, stack",
    "original_files": "original, decoding four files",
    "worker": "lit_data, workers draw the mosaics",
    "worker_finished": "lit_data, workers draw them; then cast, colours and flip on the same core",
    "device": "lit_data, left to the device: what is left for the core",
}
COLUMNS: Final = ("way", "us", "images_per_s", "ratio_to_original", "batch_size", "repeats")
_CPU: Final = torch.device("cpu")


def run_mosaic(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare the ways, and train if that is wanted; see `lit_data.commands.benchmark.run`."""
    device = options.choose_device()
    spec, on_device = read_spec(cfg), {}
    feeds = open_feeds(cfg, options)
    size_px, sizes = feeds["device"].datamodule.source.size_px, {way: feed.batch_size for way, feed in feeds.items()}
    with one_thread():
        times_s = time_in_turn(list_ways(feeds, spec), options.repeats, _CPU)
    lines = make_lines(times_s, {way: sizes.get(way, options.batch_sizes[0]) for way in times_s}, options.repeats)
    folder, side = Path(cfg.paths.run), "x".join(map(str, size_px))
    title = f"{cfg.name}: mosaics of four, {side} px, in batches of {options.batch_sizes[0]}, on one core"
    write_lines(lines, COLUMNS, folder / "benchmark.csv")
    draw_chart(lines, folder / "benchmark.png", title)
    _print_lines(lines, title)
    log.info("table: %s, picture: %s", folder / "benchmark.csv", folder / "benchmark.png")
    if options.train if options.train != "auto" else device.type == "cuda":
        on_device = time_finish(feeds["device"], options, device) | train_and_wait(cfg, options)
    measured = {f"benchmark/{line['way']}_{name}": line[name] for line in lines for name in COLUMNS[1:4]}
    return measured | {"benchmark/batch_size": options.batch_sizes[0]} | on_device


def make_lines(times_s: Mapping[str, float], sizes: Mapping[str, int], repeats: int) -> list[dict[str, Any]]:
    """A line of `COLUMNS` for each way.

    Args:
        times_s: Of a batch.
        sizes: Samples of a batch.
        repeats: How often it was measured.
    """
    original_s = times_s["original"] / sizes["original"]
    return [
        {
            "way": way,
            "us": 1e6 * seconds / sizes[way],
            "images_per_s": sizes[way] / seconds,
            "ratio_to_original": original_s * sizes[way] / seconds,
            "batch_size": sizes[way],
            "repeats": repeats,
        }
        for way, seconds in times_s.items()
    ]


def draw_chart(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw what an image takes, a bar for each way."""
    figure = Figure(figsize=(9.5, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    names = [LABELS[line["way"]].replace(", ", ",\n", 1) for line in lines]
    colours = ["#a0a4ab" if line["way"].startswith("original") else "#007aff" for line in lines]
    bars = axis.barh(names, [line["us"] for line in lines], color=colours)
    axis.bar_label(bars, [_format_number(line["us"]) for line in lines], padding=4, fontsize=9)
    axis.set_xscale("log")
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.tick_params("y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("us per image (logarithmic)")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _print_lines(lines: Sequence[Mapping[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("way", "us per image", "images/s", "x original"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for line in lines:
        table.add_row(LABELS[line["way"]], *(_format_number(line[name]) for name in COLUMNS[1:4]))
    show_table(table)


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
