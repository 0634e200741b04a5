"""Top of a run's page: headline figures, tables of scores, images, thresholds, confusions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lit_data.commands.reports.runs import Run
from lit_data.commands.result import find_direction, format_value, is_score, split_stage

_MOST_TILES: Final = 4
_MOST_CLASSES: Final = 30  # rows and columns of a table
_SPLITS: Final = ("train", "val", "test")
_SCORE_COLUMNS: Final = ("val", "test", "val, simple rule", "test, simple rule")
_BASELINE: Final = "_baseline"
_THRESHOLD: Final = "threshold"
_HEADLINES: Final = (
    "image_auroc",
    "accuracy",
    "average_precision",
    "map",
    "defect_recall",
    "iou",
    "f1",
    "dice",
)
"""Scores that come first, behind the one that chose the checkpoint."""
_MACHINE_TILES: Final = (
    ("seconds", "time", "from start to end"),
    ("samples_per_s", "speed", "while training"),
    ("data_wait_fraction", "waiting for data", "of the training time"),
    ("memory/peak_allocated_bytes", "device memory", "peak"),
    ("peak_rss_bytes", "host memory", "peak"),
    ("batch/ooms", "out of memory", "errors, recovered from"),
)
_OF_GOOD_IMAGES: Final = "val/threshold"
"""Threshold of a model that knows good images alone; those of the largest F1 are not used then."""
_THRESHOLDS: Final = {
    "f1_max_threshold": ("probability of a pixel", "F1 of the pixels is largest"),
    "image_f1_max_threshold": ("score of an image", "F1 of the images is largest"),
}
"""Names of thresholds that validation chooses: what they are compared with, and why this value."""


@dataclass(frozen=True)
class Tile:
    """A headline figure.

    Attributes:
        title: Name of the figure.
        number: The figure.
        unit: Of the number, if it has one.
        below: Words below it, such as the split.
    """

    title: str
    number: str
    unit: str
    below: str


@dataclass(frozen=True)
class ResultTable:
    """A small table.

    Attributes:
        title: Above it.
        columns: Titles; the first is that of the rows' names.
        rows: Cells, the name of the row first.
        note: A sentence below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def list_tiles(run: Run) -> list[Tile]:
    """Return the headline figures of a run: its scores, then what the machine did."""
    values = run.values
    tiles = []
    for name in find_scores(run)[:_MOST_TILES]:
        stage, metric = split_stage(name)
        below = stage
        baseline = values.get(f"{name}{_BASELINE}")
        if baseline is not None:
            below = f"{stage}; a simple rule: {format_value(name, baseline)}"
        tiles.append(_make_tile(_spell(metric), format_value(name, values[name]), below))
    for name, title, below in _MACHINE_TILES:
        if values.get(name) is not None:
            tiles.append(_make_tile(title, format_value(name, values[name]), below))
    return tiles


def _make_tile(title: str, value: str, below: str) -> Tile:
    # "0.75" is a number alone, "46.8 s" and "1.05 %" have a unit behind a space.
    has_unit = value[-1:].isalpha() or value.endswith("%")
    number, _, unit = value.rpartition(" ") if has_unit else (value, "", "")
    if not number:  # a text of one word
        return Tile(title, value, "", below)
    return Tile(title, number, unit, below)


def find_scores(run: Run) -> list[str]:
    """Return metrics of the model in the summary, the most telling first.

    They are those of the test, without one those of the validation; baselines and thresholds are
    left out.
    """
    # The first that is not empty counts.
    scores: dict[str, list[str]] = {"test": [], "val": [], "": []}
    for name, value in run.values.items():
        stage, metric = split_stage(name)
        if is_score(name, value) and stage in scores and _is_headline(metric):
            scores[stage].append(name)
    monitored = split_stage(run.monitor[0])[1]
    for names in scores.values():
        if names:
            return sorted(names, key=lambda name: _order(split_stage(name)[1], monitored))
    return []


def _is_headline(metric: str) -> bool:
    return not metric.endswith((_BASELINE, _THRESHOLD))


def _order(metric: str, monitored: str) -> tuple[bool, int]:
    rank = _HEADLINES.index(metric) if metric in _HEADLINES else len(_HEADLINES)
    return metric != monitored, rank


def list_results(run: Run) -> list[ResultTable]:
    """Return the tables that a run has results for."""
    tables = [
        tabulate_scores(run),
        tabulate_images(run),
        tabulate_confusion(run),
        tabulate_thresholds(run),
    ]
    return [table for table in tables if table.rows]


def tabulate_images(run: Run) -> ResultTable:
    """Return how many images of each class the splits have."""
    counts = Counter(run.splits)
    splits = [split for split in _SPLITS if any(split == known for known, _ in counts)]
    # Good images first, then the classes of defects by name.
    classes = sorted({kind for _, kind in counts}, key=lambda kind: (kind != "good", kind))
    rows = []
    for kind in classes[:_MOST_CLASSES]:
        by_split = [counts[split, kind] for split in splits]
        rows.append([kind or "images", *map(str, by_split), str(sum(by_split))])
    if len(classes) > 1:
        totals = Counter(split for split, _ in run.splits)
        by_split = [totals[split] for split in splits]
        rows.append(["all", *map(str, by_split), str(sum(by_split))])
    left_out = len(classes) - _MOST_CLASSES
    note = f"{left_out} more classes are in splits.csv" if left_out > 0 else ""
    return ResultTable("Images", ["class", *splits, "all"], rows, note)


def tabulate_scores(run: Run) -> ResultTable:
    """Return the scores of validation and test beside each other, and those of a simple rule."""
    scores: dict[str, dict[str, str]] = {}
    for name, value in run.values.items():
        stage, metric = split_stage(name)
        if stage in ("val", "test") and is_score(name, value) and not metric.endswith(_THRESHOLD):
            column = f"{stage}, simple rule" if metric.endswith(_BASELINE) else stage
            row = scores.setdefault(metric.removesuffix(_BASELINE), {})
            row[column] = format_value(name, value)
    known = set().union(*scores.values())
    columns = [column for column in _SCORE_COLUMNS if column in known]
    monitored = split_stage(run.monitor[0])[1]
    metrics = sorted(scores, key=lambda metric: _order(metric, monitored))
    rows = []
    for metric in metrics:
        cells = [scores[metric].get(column, "-") for column in columns]
        rows.append([_spell(metric), *cells])
    note = f"of the checkpoint with the best {_spell(monitored)}" if monitored in scores else ""
    return ResultTable("Scores", ["score", *columns], rows, note)


def tabulate_confusion(run: Run) -> ResultTable:
    """Return how many test images of each class the model takes for which.

    Without a test split they are of the validation.
    """
    # The file may be anybody's, so its form is checked before it becomes a table.
    classes = run.confusion.get("classes")
    stage = "test" if "test" in run.confusion else "val"
    counts = run.confusion.get(stage)
    empty = ResultTable("", [], [])
    if not isinstance(classes, list) or not isinstance(counts, list):
        return empty
    is_square = all(isinstance(row, list) and len(row) == len(classes) for row in counts)
    if len(counts) != len(classes) or not is_square or len(classes) > _MOST_CLASSES:
        return empty
    rows = [[str(name), *map(str, row)] for name, row in zip(classes, counts, strict=True)]
    columns = ["truth", *(f"model: {name}" for name in classes)]
    return ResultTable(f"Confusion matrix, {stage}", columns, rows, _describe_confusion(run))


def _describe_confusion(run: Run) -> str:
    # Models of good images alone have a threshold of their own, which the table below names.
    threshold = run.values.get("val/image_f1_max_threshold")
    if threshold is None or run.values.get(_OF_GOOD_IMAGES) is not None:
        return "numbers of images"
    least = format_value("", threshold)
    return f"numbers of images; those with a score of {least} at least count as defective"


def tabulate_thresholds(run: Run) -> ResultTable:
    """Return the thresholds that validation chose, which ``predict`` takes."""
    rows = []
    if run.values.get(_OF_GOOD_IMAGES) is not None:
        distance = format_value("", run.values[_OF_GOOD_IMAGES])
        rows.append(["distance of a pixel", distance, "good images end, with a margin"])
    else:
        for name, (measure, reason) in _THRESHOLDS.items():
            value = run.values.get(f"val/{name}")
            if value is not None:
                rows.append([measure, format_value("", value), reason])
    note = "chosen on the validation split; predict takes them"
    return ResultTable("Thresholds", ["of", "from", "where"], rows, note)


def _spell(metric: str) -> str:
    return metric.replace("_", " ")


def find_sign(runs: Sequence[Run], name: str) -> int:
    """Return 1 if more of a metric is better, -1 if less is, 0 where nothing tells."""
    # The checkpoint callback of any of the runs knows better than the name of the metric.
    for run in runs:
        monitored, sign = run.monitor
        if monitored == name and sign:
            return sign
    return find_direction(name)
