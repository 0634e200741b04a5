"""Which setting to use, why, and how the next run gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from lit_data.commands.benchmarks.rows import OURS
from lit_data.commands.benchmarks.table import find_best
from lit_data.errors import ConfigError, StoreError

_CLOSE: Final = 0.95
"""Of two settings closer than this, the simpler one is better."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A setting of the configuration.

    Args:
        settings: What to set below `data`.
        sentence: The setting and the reason.
    """

    settings: dict[str, Any]
    sentence: str

    def metrics(self) -> dict[str, Any]:
        """Keys of summary.json."""
        return {f"benchmark/recommended_{name}": value for name, value in self.settings["loader"].items()}


def recommend(lines: Sequence[Mapping[str, Any]], batch_size: int) -> Recommendation | None:
    """The simplest of our settings that is within 5 % of the fastest; none if none was measured.

    Simpler is: inline before threads, threads before processes, all of them before a set that fills the device's
    memory; fewer workers; larger micro-batches.

    Args:
        lines: The table.
        batch_size: For which batches.
    """
    best = find_best(lines, OURS, batch_size)
    if best is None:
        return None
    close = [
        line
        for line in lines
        if line["method"] in OURS
        and line["batch_size"] == batch_size
        and line["samples_per_s"] >= _CLOSE * best["samples_per_s"]
    ]
    chosen = min(close, key=_count_complexity)
    loader = {
        "worker_kind": "inline" if chosen["method"] == "device" else chosen["method"],
        "num_workers": chosen["num_workers"],
        "micro_batch_size": chosen["micro_batch_size"],
    }
    settings: dict[str, Any] = {"loader": loader}
    if chosen["method"] == "device":
        settings["cache"] = "device"
    return Recommendation(settings, _explain(lines, chosen, best, settings))


def apply(recommendation: Recommendation, folder: Path, name: str) -> Path:
    """Write a setting as an option of the group `tuned`: ``fit --config-dir FOLDER +tuned=NAME`` uses it.

    Args:
        recommendation: What to write.
        folder: A configuration folder, made if need be.
        name: Name of the option.

    Raises:
        ConfigError: There is such an option, and it is not from here.
        StoreError: The file cannot be written.
    """
    path = folder / "tuned" / f"{name}.yaml"
    first = "# Written by python -m lit_data benchmark."
    try:
        if path.is_file() and first not in path.read_text(encoding="utf-8"):
            raise ConfigError(f"benchmark.apply={name}: {path} was written by hand; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"data": recommendation.settings}, sort_keys=False)
        path.write_text(f"# @package _global_\n{first}\n# {recommendation.sentence}\n{text}", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}. Set benchmark.apply_folder.") from error
    return path


def _count_complexity(line: Mapping[str, Any]) -> tuple[int, int, int]:
    return OURS.index(line["method"]), line["num_workers"], -line["micro_batch_size"]


def _explain(
    lines: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], best: Mapping[str, Any], settings: dict[str, Any]
) -> str:
    loader = ", ".join(f"{name}={value}" for name, value in settings["loader"].items())
    cache = ", cache=device" if "cache" in settings else ""
    batch_size = chosen["batch_size"]
    reasons = [f"{chosen['samples_per_s']:.0f} samples/s"]
    dataloader = find_best(lines, ["dataloader"], batch_size)
    if dataloader:
        ratio = chosen["samples_per_s"] / dataloader["samples_per_s"]
        reasons.append(f"{ratio:.1f} times torch's DataLoader")
    others = [find_best(lines, [method], batch_size) for method in OURS if method != chosen["method"]]
    reasons += [f"{line['method']} gave {line['samples_per_s']:.0f}" for line in others if line]
    if chosen is not best:
        reasons.append("the simplest within 5 % of the fastest")
    return f"Recommended for batches of {batch_size}: {loader}{cache}: {'; '.join(reasons)}."
