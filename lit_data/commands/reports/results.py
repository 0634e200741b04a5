"""Figures of runs: headlines, tables of scores and images, and several runs beside each other."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_data.commands.reports.curves import (
    Chart,
    ChartLine,
    cut_final_score,
    draw_chart,
    find_chart,
)
from lit_data.commands.reports.runs import Run
from lit_data.commands.result import (
    find_direction,
    format_value,
    is_score,
    read_number,
    split_stage,
)
from lit_data.files import flatten

_MOST_SCORE_TILES = 4
_MOST_CLASSES = 30  # rows and columns of a table
_CONTRASTS = ("weak", "medium", "strong")
_DETECTED = ("targets", "hits", "a50_px", "a90_px", "a90_95_px")
_SPLITS = ("train", "val", "test")
_SCORE_COLUMNS = ("val", "test", "val, simple rule", "test, simple rule")
_BASELINE = "_baseline"
_THRESHOLD = "threshold"
_HEADLINES = (
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
_MACHINE_TILES = (
    ("seconds", "time", "from start to end"),
    ("samples_per_s", "speed", "while training"),
    ("data_wait_fraction", "waiting for data", "of the training time"),
    ("memory/peak_allocated_bytes", "device memory", "peak"),
    ("peak_rss_bytes", "host memory", "peak"),
    ("batch/ooms", "out of memory", "errors, recovered from"),
)
_OF_GOOD_IMAGES = "val/threshold"
"""Threshold of a model that knows good images alone; those of the largest F1 are not used then."""
_THRESHOLDS = {
    "f1_max_threshold": ("probability of a pixel", "F1 of the pixels is largest"),
    "image_f1_max_threshold": ("score of an image", "F1 of the images is largest"),
    "object_f1_max_threshold": ("score of an object", "F1 of the objects is largest"),
}
"""Names of thresholds that validation chooses: what they are compared with, and why this value."""

_MOST_SCORES = 4
_MOST_COLUMNS = 8
_MACHINE = ("samples_per_s", "data_wait_fraction", "peak_rss_bytes", "batch/ooms", "seconds")
_CURVES = ("data/samples_per_s", "data/wait_fraction", "memory/rss_bytes", "batch/size")
_MOST_POINTS = 120
_MOST_OVERLAYS = 9
_NO_OPTION = ("paths.", "hydra.", "report")


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
    for name in find_scores(run)[:_MOST_SCORE_TILES]:
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
        if (
            is_score(name, value)
            and stage in scores
            and not metric.endswith((_BASELINE, _THRESHOLD))
        ):
            scores[stage].append(name)
    monitored = split_stage(run.monitor[0])[1]
    for names in scores.values():
        if names:
            return sorted(names, key=lambda name: _order(split_stage(name)[1], monitored))
    return []


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
        tabulate_detection(run),
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
    drawn = [column for column in columns if has_drawn_defects(run, column)]
    if drawn:
        note += f"; whole images of {' and '.join(drawn)} are scored by synthetic defects"
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
    return ResultTable(f"Confusion matrix, {stage}", columns, rows, _describe_confusion(run, stage))


def _describe_confusion(run: Run, stage: str) -> str:
    # Models of good images alone have a threshold of their own, which the table below names.
    note = "numbers of images"
    if has_drawn_defects(run, stage):
        note += ", each as it is and with synthetic defects drawn into it"
    threshold = run.values.get("val/image_f1_max_threshold")
    if threshold is None or run.values.get(_OF_GOOD_IMAGES) is not None:
        return note
    least = format_value("", threshold)
    return f"{note}; those with a score of {least} at least count as defective"


def has_drawn_defects(run: Run, stage: str) -> bool:
    """Return True if the defects of the whole images of a split are synthetic."""
    splits = run.confusion.get("synthetic")
    return isinstance(splits, list) and stage in splits


def tabulate_thresholds(run: Run) -> ResultTable:
    """Return the thresholds that validation chose, which ``predict`` takes."""
    rows = []
    if run.values.get(_OF_GOOD_IMAGES) is not None:
        distance = format_value("", run.values[_OF_GOOD_IMAGES])
        is_balanced = bool(run.values.get("val/defective_images"))
        reason = "misses and false alarms are equally frequent, at most where good images end"
        reason = reason if is_balanced else "good images end, with a margin"
        rows.append(["distance of a pixel", distance, reason])
    else:
        for name, (measure, reason) in _THRESHOLDS.items():
            value = run.values.get(f"val/{name}")
            if value is not None:
                rows.append([measure, format_value("", value), reason])
    note = "chosen on the validation split; predict takes them"
    if has_drawn_defects(run, "val"):
        note = "chosen on synthetic defects in the validation split; predict takes them"
    if run.threshold:
        note += f"; {run.threshold}"
    return ResultTable("Thresholds", ["of", "from", "where"], rows, note)


def tabulate_detection(run: Run) -> ResultTable:
    """Return the size that is found of each family of defects, see ``pod``."""
    entries = run.detection.get("families")
    families: dict[str, dict[str, Mapping[str, Any]]] = {}
    # The file may be anybody's: entries of another form are left out.
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            by_contrast = families.setdefault(str(entry.get("family")), {})
            by_contrast[str(entry.get("contrast"))] = entry
    rows = []
    for family, by_contrast in list(families.items())[:_MOST_CLASSES]:
        overall = by_contrast.get("all", {})
        cells = [format_value("", overall.get(key)) for key in _DETECTED]
        for contrast in _CONTRASTS:
            cells.append(format_value("", by_contrast.get(contrast, {}).get("a90_95_px")))
        rows.append([family, *cells, str(overall.get("note") or "")])
    columns = ["defect", "targets", "found", "a50 px", "a90 px", "a90/95 px"]
    columns += [*(f"a90/95 {contrast}" for contrast in _CONTRASTS), "remark"]
    calls, chances = (run.detection.get(key) for key in ("false_calls", "false_call_chances"))
    note = (
        f"false calls: {calls} of {chances}; a90/95 is the size that is found with 90 % at least, at "
        "a confidence of 95 %"
    )
    return ResultTable("Size that is found", columns, rows, note)


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


def find_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Find the options that were given on a command line and are not the same in all runs.

    Where no such option differs, they are those of the configuration that do.

    Returns:
        By key, the value in each run; ``-`` where a run has no such key.
    """
    leaves_of = [flatten(run.settings.config) for run in runs]
    typed_keys: dict[str, None] = {}  # in the order of the command lines
    for run in runs:
        typed_keys |= dict.fromkeys(map(_read_key, run.settings.overrides))
    typed: list[dict[str, str]] = []
    for run, leaves in zip(runs, leaves_of, strict=True):
        typed.append({key: _look_up(run, leaves, key) for key in typed_keys})
    differing = _leave_out_paths(find_differing(typed))
    if not differing:
        differing = _leave_out_paths(find_differing(leaves_of))
    return dict(list(differing.items())[:_MOST_COLUMNS])


def find_differing(
    options: Sequence[Mapping[str, Any]], *, missing: str = "-"
) -> dict[str, list[str]]:
    """Return the values of those keys that are not the same in all mappings.

    Args:
        options: Of each run or job, by key.
        missing: Stands for the value where one has no such key.

    Returns:
        By key, the value in each mapping.
    """
    all_keys: dict[str, None] = {}  # in the order of the mappings
    for one in options:
        all_keys |= dict.fromkeys(one)
    differing = {}
    for key in all_keys:
        values = [_format(one[key]) if key in one else missing for one in options]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def _leave_out_paths(values: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Leave out where runs lie: it differs between all of them and changes no figure."""
    return {key: of_runs for key, of_runs in values.items() if not key.startswith(_NO_OPTION)}


def _read_key(override: str) -> str:
    key = override.partition("=")[0].lstrip("+~")
    return key.partition("@")[0]  # of group@package


def _look_up(run: Run, leaves: Mapping[str, Any], key: str) -> str:
    """Return the value of an option in a run, of a group the option that was chosen."""
    if key in run.settings.choices:
        return run.settings.choices[key]
    if key in leaves:
        return _format(leaves[key])
    # An override such as data.loader={...} gives several leaves at once.
    below = {}
    for name, value in leaves.items():
        if name.startswith(f"{key}."):
            below[name.removeprefix(f"{key}.")] = value
    return _format(below) if below else "-"


def _format(value: Any) -> str:  # noqa: ANN401 - what YAML may hold
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key its end that no other key has: ``lr`` for ``model.optimizer.lr``.

    Names of metrics stay whole.
    """
    short = {}
    for key in keys:
        others = [f".{other}" for other in keys if other != key]
        parts = key.split(".")
        short[key] = key
        for length in range(1, len(parts)):
            end = ".".join(parts[-length:])
            if not any(other.endswith(f".{end}") for other in others):
                short[key] = end
                break
    return short


def choose_metrics(runs: Sequence[Run], asked_for: Sequence[str], *, first: str = "") -> list[str]:
    """Choose the columns of figures: those that were asked for, or scores and what the machine did.

    Args:
        runs: That are compared.
        asked_for: Names that were given on the command line.
        first: Metric that the sweep compares by; empty for none.
    """
    if asked_for:
        return list(asked_for)
    scores: dict[str, None] = {}
    for run in runs:
        scores |= dict.fromkeys(find_scores(run)[:_MOST_SCORES])
    machine = [name for name in _MACHINE if any(run.values.get(name) for run in runs)]
    names = [first, *list(scores)[:_MOST_SCORES], *machine]
    return list(dict.fromkeys(filter(None, names)))


def rank(runs: Sequence[Run], name: str) -> list[int]:
    """Rank the runs that have a number for a metric.

    Returns:
        Indices of the runs, the best first; empty where no direction is known.
    """
    sign = find_sign(runs, name)
    if not sign:
        return []  # nobody knows which of them is good
    numbers = {}
    for index, run in enumerate(runs):
        number = read_number(run.values, name)
        if number is not None:
            numbers[index] = sign * number
    return sorted(numbers, key=lambda index: -numbers[index])


def find_best(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, int]:
    """Find the index of the best run for each metric by which several differ."""
    best = {}
    for name in metrics:
        ranking = rank(runs, name)
        numbers = {read_number(runs[index].values, name) for index in ranking}
        if len(numbers) > 1:
            best[name] = ranking[0]
    return best


def draw_overlays(runs: Sequence[Run], metrics: Sequence[str]) -> list[Chart]:
    """Draw one chart for each curve that several runs have, with one line for each run."""
    charts = []
    for name in _choose_curves(runs, metrics)[:_MOST_OVERLAYS]:
        lines = []
        for index, run in enumerate(runs):
            if name in run.log.series:
                series = cut_final_score(run.log.series[name])
                lines.append(ChartLine(name, run.label, series, look=index))  # as in the table
        charts.append(draw_chart(name, lines, most_points=_MOST_POINTS, has_legend=False))
    return charts


def _choose_curves(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Choose losses and scores of training and validation, then what changed of the machine."""
    runs_of: dict[str, list[Run]] = {}
    for run in runs:
        for name in run.log.series:
            runs_of.setdefault(name, []).append(run)
    model_curves, machine_curves = [], []
    for name, having in runs_of.items():  # a curve of one run stands in its own section
        several = [run.log.series[name] for run in having]
        longest = max(len(series.values) for series in several)
        if len(several) < 2 or longest < 2:
            continue
        chart = find_chart(name)
        if name in _CURVES and not all(series.is_constant for series in several):
            machine_curves.append(name)
        elif chart.section == "model" and chart.stage != "test" and not chart.is_baseline:
            model_curves.append(name)
    model_curves.sort(key=lambda name: ("loss" not in name, name not in metrics))
    return [*model_curves, *sorted(machine_curves, key=_CURVES.index)]
