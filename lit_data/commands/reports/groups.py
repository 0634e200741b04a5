"""Which metrics stand together in one chart, and under which names."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

_STAGE: Final = re.compile(r"^(train|training|val|valid|validation|test|predict)[/_.](.+)$")
_STAGES: Final = {"training": "train", "valid": "val", "validation": "val"}
_FORKED: Final = re.compile(r"^(.+)_(step|epoch)$")  # Lightning's names of a metric with on_step and on_epoch
_ORDER: Final = ("train", "val", "test", "predict")
_OTHERS: Final = len(_ORDER)
_LIMITS: Final = ("memory/free_bytes", "memory/limit_bytes")


@dataclass(frozen=True)
class Place:
    """Where a metric is shown.

    Attributes:
        section: Scores of the model, or the machine.
        chart: Title of the chart.
        label: Of the line in it.
        is_baseline: Whether it is what a simple rule scores.
    """

    section: Literal["model", "machine"]
    chart: str
    label: str
    is_baseline: bool = False


def find_place(name: str) -> Place:
    """Where a metric is shown: train and val on one axis, parts of a step in one chart, memory in one."""
    staged = _STAGE.match(name)
    if staged:
        stage, rest = _STAGES.get(staged[1], staged[1]), staged[2]
        is_baseline = rest.endswith("_baseline")
        rest = rest.removesuffix("_baseline")
        forked = _FORKED.match(rest)
        label = f"{stage}, each {forked[2]}" if forked else stage
        return Place("model", forked[1] if forked else rest, f"{label}, baseline" * is_baseline or label, is_baseline)
    group, _, last = name.partition("/")
    if group == "time" and last.endswith("_s"):
        return Place("machine", "time of a step", last.removesuffix("_s"))
    if name in _LIMITS:
        return Place("machine", "memory there is", last.removesuffix("_bytes"))
    if group == "memory" and last.endswith("_bytes"):
        return Place("machine", "memory in use", last.removesuffix("_bytes"))
    machine = group in ("data", "batch", "memory", "time", "cache", "amp") and bool(last)
    return Place("machine" if machine else "model", name, name)


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Train before val before test, each before its baseline."""
    return sorted(labels, key=lambda label: (_rank(label), "baseline" in label, label))


def choose_looks(labels: Iterable[str]) -> list[int]:
    """A colour for each label: of a stage the same everywhere, of others one after the other."""
    others: dict[str, int] = {}
    looks = []
    for label in labels:
        known = _rank(label)
        looks.append(known if known < _OTHERS else others.setdefault(label, len(others)))
    return looks


def _rank(label: str) -> int:
    stage = label.split(",")[0]
    return _ORDER.index(stage) if stage in _ORDER else _OTHERS
