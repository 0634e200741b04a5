"""Figures of a run: what its model scores, in tables and charts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_data.app.reports.charts import Chart, draw_precision_recall, draw_scores
from lit_data.app.reports.runs import Run
from lit_data.app.result import format_value, is_score, read_number, split_stage
from lit_data.app.untrusted import as_dict
from lit_data.core.types import Doubles
from lit_data.datasets.good_names import choose_good_classes
from lit_inspect.counts import counted

_MOST_CLASSES = 30  # rows and columns of a table
_MOST_POINTS = 1000  # of a curve
_THINGS = ("images", "pixels", "objects")
_DETECTED = ("targets", "hits", "a50_px", "a90_px", "a90_95_px")
_SPLITS = ("train", "val", "test")
_SCORE_COLUMNS = ("val", "test", "val baseline", "test baseline")
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
_OF_GOOD_IMAGES = "val/threshold"
"""Threshold of a model that knows good images alone; those of the largest F1 are not used then."""
_THRESHOLDS = {
    "f1_max_threshold": ("probability of a pixel", "F1 of the pixels is largest"),
    "image_f1_max_threshold": ("score of an image", "F1 of the images is largest"),
    "object_f1_max_threshold": ("score of an object", "F1 of the objects is largest"),
}
"""Names of thresholds that validation chooses: what they are compared with, and why this value."""


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
            return sorted(names, key=lambda name: order_scores(split_stage(name)[1], monitored))
    return []


def order_scores(metric: str, monitored: str) -> tuple[bool, int]:
    """Return what scores are sorted by: the one that chose the checkpoint, then those that tell most."""
    rank = _HEADLINES.index(metric) if metric in _HEADLINES else len(_HEADLINES)
    return metric != monitored, rank


def list_results(run: Run) -> list[ResultTable]:
    """Return the tables that a run has results for, the confusion first."""
    tables = [
        tabulate_verdicts(run),
        tabulate_confusion(run),
        tabulate_scores(run),
        tabulate_thresholds(run),
        tabulate_images(run),
        tabulate_detection(run),
    ]
    return [table for table in tables if table.rows]


def draw_results(run: Run) -> list[Chart]:
    """Draw precision over recall and the scores of images, of the test or else of the validation."""
    stages = [stage for stage in ("test", "val") if as_dict(run.curves.get(stage))]
    charts = []
    # Each of the first split that has it: the test may show no defective image.
    for draw in (_draw_curves, _draw_image_scores):
        drawn = (draw(run.curves[stage], stage) for stage in stages)
        charts.append(next(filter(None, drawn), None))
    return [chart for chart in charts if chart is not None]


def _draw_curves(known: Mapping[str, Any], stage: str) -> Chart | None:
    curves = {}
    # The file may be anybody's: what has another form is left out.
    for name, curve in as_dict(known.get("precision_recall")).items():
        recall, precision = _read_fractions(curve, "recall"), _read_fractions(curve, "precision")
        if name in _THINGS and 0 < len(recall) == len(precision):
            curves[name] = (recall, precision)
    return draw_precision_recall(curves, stage) if curves else None


def _draw_image_scores(known: Mapping[str, Any], stage: str) -> Chart | None:
    images = as_dict(known.get("image_scores"))
    edges = _read_fractions(images, "edges")
    counts = {kind: _read_numbers(images, kind) for kind in ("good", "defective")}
    threshold = _read_fractions({"threshold": [images.get("threshold")]}, "threshold")
    is_whole = all(len(of_kind) == len(edges) - 1 > 0 for of_kind in counts.values())
    if not is_whole or not len(threshold) or not (np.diff(edges) > 0).all():
        return None
    return draw_scores(edges, counts, float(threshold[0]), stage)


def _read_numbers(node: object, key: str) -> Doubles:
    """Return a list of finite numbers of at least 0; an empty one for anything else."""
    values = as_dict(node).get(key)
    if not isinstance(values, list) or len(values) > _MOST_POINTS:
        return np.zeros(0)
    numbers = [read_number({"": value}, "") for value in values]
    if any(number is None or number < 0 for number in numbers):
        return np.zeros(0)
    return np.array(numbers, np.float64)


def _read_fractions(node: object, key: str) -> Doubles:
    numbers = _read_numbers(node, key)
    return numbers if (numbers <= 1).all() else np.zeros(0)


def tabulate_images(run: Run) -> ResultTable:
    """Return how many images of each class the splits have."""
    counts = Counter(run.splits)
    splits = [split for split in _SPLITS if any(split == known for known, _ in counts)]
    # Good images first, then the classes of defects by name.
    classes = sorted({kind for _, kind in counts}, key=lambda kind: (kind != "good", kind))
    listed = classes[:_MOST_CLASSES]
    numbers = np.array([[counts[split, kind] for split in splits] for kind in classes])
    rows = []
    for kind, of_kind in zip(listed, numbers, strict=False):
        rows.append([kind or "images", *map(str, of_kind), str(of_kind.sum())])
    if len(classes) > 1:
        rows.append(["all", *map(str, numbers.sum(0)), str(numbers.sum())])
    note = ""
    if left_out := len(classes) - len(listed):
        note = f"{counted(left_out, 'more class is', 'more classes are')} in splits.csv"
    return ResultTable("Images", ["class", *splits, "all"], rows, note)


def tabulate_scores(run: Run) -> ResultTable:
    """Return the scores of validation and test beside each other, and those of the baseline."""
    scores: dict[str, dict[str, str]] = {}
    for name, value in run.values.items():
        stage, metric = split_stage(name)
        if stage in ("val", "test") and is_score(name, value) and not metric.endswith(_THRESHOLD):
            column = f"{stage} baseline" if metric.endswith(_BASELINE) else stage
            row = scores.setdefault(metric.removesuffix(_BASELINE), {})
            row[column] = format_value(name, value)
    known = set().union(*scores.values())
    columns = [column for column in _SCORE_COLUMNS if column in known]
    monitored = split_stage(run.monitor[0])[1]
    metrics = sorted(scores, key=lambda metric: order_scores(metric, monitored))
    rows = []
    for metric in metrics:
        cells = [scores[metric].get(column, "-") for column in columns]
        rows.append([_spell(metric), *cells])
    note = f"of the checkpoint with the best {_spell(monitored)}" if monitored in scores else ""
    drawn = [column for column in columns if has_drawn_defects(run, column)]
    if drawn:
        note += f"; whole images of {' and '.join(drawn)} are scored with synthetic defects"
    return ResultTable("Scores", ["score", *columns], rows, note)


def tabulate_confusion(run: Run) -> ResultTable:
    """Return how many test images of each class the model takes for which.

    Without a test split they are of the validation.
    """
    # The file may be anybody's, so its form is checked before it becomes a table.
    stage = "test" if "test" in run.confusion else "val"
    classes = run.confusion.get("classes")
    note = _describe_threshold(run, stage)
    if "verdicts" in run.confusion:  # whose table says what the threshold does
        note = "by the class of the highest probability"
    elif isinstance(classes, list) and not _has_good(run, classes):
        note = (
            "images get no verdict, because no class is known to hold good parts: set "
            "data.good=[NAME]"
        )
    title = f"Confusion matrix of images, {stage}"
    return _tabulate_counts(title, "predicted", classes, run.confusion.get(stage), note)


def _has_good(run: Run, classes: Sequence[object]) -> bool:
    typed = as_dict(run.settings.config.get("data")).get("good")
    return bool(typed or choose_good_classes(list(map(str, classes))))


def tabulate_verdicts(run: Run) -> ResultTable:
    """Return how many good and defective images get which verdict, where the classes are others."""
    verdicts = run.confusion.get("verdicts")
    if not isinstance(verdicts, dict):
        return ResultTable("", [], [])
    stage = "test" if "test" in verdicts else "val"
    note = _describe_threshold(run, stage)
    names = ["good", "defect"]
    return _tabulate_counts(
        f"Verdicts on images, {stage}", "verdict", names, verdicts.get(stage), note
    )


def _tabulate_counts(
    title: str, word: str, classes: object, counts: object, note: str
) -> ResultTable:
    """Return a square table of counts, whose columns begin with a word; nothing of any other form."""
    empty = ResultTable("", [], [])
    if not isinstance(classes, list) or not isinstance(counts, list):
        return empty
    is_square = all(isinstance(row, list) and len(row) == len(classes) for row in counts)
    if len(counts) != len(classes) or not is_square or len(classes) > _MOST_CLASSES:
        return empty
    rows = [[str(name), *map(str, row)] for name, row in zip(classes, counts, strict=True)]
    columns = ["truth", *(f"{word} {name}" for name in classes)]
    return ResultTable(title, columns, rows, note)


def _describe_threshold(run: Run, stage: str) -> str:
    # Models of good images alone have a threshold of their own, which the table below names.
    note = ""
    if has_drawn_defects(run, stage):
        note = "each as it is and with synthetic defects drawn into it; "
    threshold = run.values.get("val/image_f1_max_threshold")
    if threshold is None or run.values.get(_OF_GOOD_IMAGES) is not None:
        return note.removesuffix("; ")
    return f"{note}images scoring {format_value('', threshold)} or more count as defective"


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
    """Return the size that is found of each kind of defect, see ``pod``."""
    entries = run.detection.get("kinds")
    rows = []
    # The file may be anybody's: entries of another form are left out.
    for entry in entries[:_MOST_CLASSES] if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            cells = [format_value("", entry.get(key)) for key in _DETECTED]
            rows.append([str(entry.get("kind")), *cells, str(entry.get("note") or "")])
    columns = ["defect", "targets", "found", "a50 px", "a90 px", "a90/95 px", "remark"]
    calls, chances = (run.detection.get(key) for key in ("false_calls", "false_call_chances"))
    note = (
        f"false calls: {calls} of {chances}; a90/95 is the size that is found in at least 90 % "
        "of cases, with 95 % confidence"
    )
    return ResultTable("Size that the model finds", columns, rows, note)


def _spell(metric: str) -> str:
    return metric.replace("_", " ")
