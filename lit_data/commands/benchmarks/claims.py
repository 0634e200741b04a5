"""Mode ``claims``: figures that circulate for this kind of tuning, measured on an experiment's stripes."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig
from rich.table import Table

from lit_data.commands.benchmarks.claims_memory import measure_index, measure_sample, measure_shared
from lit_data.commands.benchmarks.claims_reading import measure_reading
from lit_data.commands.benchmarks.claims_training import measure_training
from lit_data.commands.benchmarks.lines import format_number, show_table, write_lines
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.pair import Pair
from lit_data.commands.session import build_datamodule
from lit_data.datamodules import StripeDataModule
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)

WORKERS: Final = 4
COLUMNS: Final = ("claim", "circulates", "usual", "ours", "unit", "saved_fraction", "ratio")

CIRCULATES: Final[Mapping[str, str]] = {
    "index": "a list of patches -> arithmetic: 98.3 % less memory",
    "sample": "crop first: 96 % less memory for a sample",
    "cache_reads": "cache of decoded images: 87.5 % fewer reads",
    "cache_time": "and 1.6x as fast",
    "cache_reads_shuffled": "the same, patches in shuffled order",
    "cache_time_shuffled": "and its time",
    "workers": f"one cache for all of {WORKERS} workers: 75 % less memory",
    "training_time": "tuned loader: 20 to 40 % faster training",
    "training_memory": "and 30 to 50 % less memory",
}
"""Each claim as people tell it."""


def run_claims(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Measure each claim; see `lit_data.commands.benchmark.run`.

    Raises:
        ConfigError: The experiment has no stripes with spots, which the usual ways can draw.
    """
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    if not isinstance(datamodule, StripeDataModule) or not datamodule.baseline_datasets("train"):
        raise ConfigError("benchmark.mode=claims needs stripes with plain spots: +experiment=stripe")
    found: dict[str, Pair] = {}
    found |= {"index": measure_index(datamodule), "sample": measure_sample(datamodule)}
    found["workers"] = measure_shared(datamodule, workers=WORKERS)
    for suffix in ("", "_shuffled"):
        pairs = measure_reading(datamodule, options.repeats, shuffled=bool(suffix))
        found |= {f"{name}{suffix}": pair for name, pair in pairs.items()}
    found |= measure_training(cfg, options, datamodule)
    lines = [_make_line(name, found[name]) for name in CIRCULATES]
    path = Path(cfg.paths.run) / "benchmark.csv"
    write_lines(lines, COLUMNS, path)
    _print_lines(lines)
    log.info("table: %s", path)
    return {
        f"benchmark/{line['claim']}_{name}": line[name]
        for line in lines
        for name in ("usual", "ours", "saved_fraction", "ratio")
        if not math.isnan(line[name])
    }


def _make_line(name: str, pair: Pair) -> dict[str, Any]:
    return {
        "claim": name,
        "circulates": CIRCULATES[name],
        "usual": pair.usual,
        "ours": pair.ours,
        "unit": pair.unit,
        "saved_fraction": 1 - pair.ours / pair.usual if pair.usual else math.nan,
        "ratio": pair.usual / pair.ours if pair.ours else math.nan,
    }


def _print_lines(lines: Sequence[Mapping[str, Any]]) -> None:
    table = Table("circulates", title="what circulates, and what came out here", title_justify="left")
    for name in ("usual", "ours", "unit", "saved", "ratio"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for line in lines:
        numbers = [format_number(line[name]) for name in ("usual", "ours")]
        saved = f"{100 * line['saved_fraction']:.1f} %"
        table.add_row(line["circulates"], *numbers, line["unit"], saved, format_number(line["ratio"]))
    show_table(table)
