"""``pod``: probability of detection by the size of a defect."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from lit_data.app.build import find_trained
from lit_data.app.configuration.names import resolve_target
from lit_data.app.predict import Prediction
from lit_data.app.result import print_table
from lit_data.core.checks import check_types
from lit_data.core.errors import ConfigError
from lit_data.core.files import write_json, write_table
from lit_data.predict.figures import FOUND_COLOUR, TRUE_COLOUR, new_axes, save_figure
from lit_data.predict.maps import VerdictWriter
from lit_data.predict.pixels import PixelTask
from lit_data.predict.task import find_task_of
from lit_data.predict.verdicts import KnowsTruth
from lit_data.wings.quality.bounds import count_needed, lower_rate, upper_rate
from lit_data.wings.quality.calibrate import open_split, predict_scores, read_own_options
from lit_data.wings.quality.detection_curve import DetectionCurve, Floats, fit_curve
from lit_data.wings.quality.targets import Defect, Target, judge_defects, separate_defects
from lit_inspect.counts import counted
from lit_inspect.verdicts import GOOD

log = logging.getLogger(__name__)

_CONFIDENCE = 0.95
_FOUND = 0.9  # probability of detection of a90
_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The options of ``pod``; conf/pod.yaml has one line for each.

    Raises:
        ConfigError: A value is out of its range.
    """

    images: Literal["test", "val", "all"]

    def __post_init__(self) -> None:
        """Check the split."""
        check_types(PodOptions, vars(self))


def run(cfg: DictConfig) -> dict[str, Any]:
    """Compare predictions with labeled defects, and fit the probability of detection.

    - ``pod.csv``: a row for each labeled defect
    - ``pod.json``: a50, a90 and a90/95 of each kind, and false calls
    - ``pod.png``, which ``report.html`` shows

    Returns:
        The a90/95 of each kind, and the rate of false calls.

    Raises:
        ConfigError: Models of this kind of data have no maps of defects, or no image has a mask
            with a defect.
    """
    options = read_own_options(PodOptions, cfg)
    _refuse_other_kinds(cfg)
    prediction = open_split(cfg, find_trained(cfg), options.images).take_calibration()
    writer = prediction.task.writer(prediction.run, prediction.options)
    assert isinstance(writer, VerdictWriter)  # of all kinds with maps
    truth: KnowsTruth = prediction.task.datamodule
    chosen = prediction.run.chosen
    numbers = range(len(writer.names)) if chosen is None else chosen
    # Before hours of prediction.
    defects = find_defects(writer, truth, numbers)
    if not defects:
        raise ConfigError(
            f"images={options.images} has no mask with a defect: choose another split, or give "
            "images=all data.root=FOLDER of images with masks"
        )
    warn_of_few_images(len(defects))
    verdicts = _predict_verdicts(prediction, writer, numbers)
    targets = judge_defects(defects, verdicts, truth.image_kinds, writer, prediction.options)
    kinds = fit_kinds(targets)
    result = summarise(kinds, _count_false_calls(verdicts, truth))
    _write(prediction.run.folder, targets, kinds, result)
    return _list_metrics(result)


def _refuse_other_kinds(cfg: DictConfig) -> None:
    """Refuse kinds of data whose models have no maps of defects.

    Raises:
        ConfigError: The data are of such a kind.
    """
    kind = resolve_target(cfg.data._target_, "data")
    task = find_task_of(kind)
    if not (issubclass(task, PixelTask) and task.has_verdicts()):
        raise ConfigError(
            f"pod searches maps of defects, but a {kind.__name__} has no maps: "
            "use experiment=stripe, segmentation or anomaly"
        )


def find_defects(
    writer: VerdictWriter, truth: KnowsTruth, numbers: Sequence[int]
) -> dict[int, list[Defect]]:
    """Return the labeled defects of each image that has any, by the number of the image.

    Args:
        writer: Tells how large an image is; maps of larger ones than `predict.large_px` do not fit
            into memory.
        truth: Knows the masks.
        numbers: Numbers of the images.
    """
    defects = {}
    too_large = 0
    for number in numbers:
        mask = truth.read_mask(number)
        parts = [] if mask is None else separate_defects(mask)
        if parts and writer.is_small(number):
            defects[number] = parts
        too_large += bool(parts) and not writer.is_small(number)
    if too_large:
        images = counted(too_large, "image has", "images have")
        log.warning("%s more than predict.large_px pixels: pod skips their defects", images)
    return defects


def warn_of_few_images(images: int) -> None:
    """Warn if there are fewer images than the bound needs, because it assumes independent defects.

    Args:
        images: Number of images with labeled defects.
    """
    needed = count_needed(1 - _FOUND, _CONFIDENCE)
    if images < needed:
        log.warning(
            "only %s labeled defects, and defects of one image are found or missed together: "
            "a90/95 may be too small for other images; it needs at least %d images: give more "
            "with images=all data.root=FOLDER",
            counted(images, "image has", "images have"),
            needed,
        )


def _predict_verdicts(
    prediction: Prediction, writer: VerdictWriter, numbers: Sequence[int]
) -> dict[int, str]:
    """Predict images; return the verdict of each by its number, without bad images."""
    number_of = {writer.names[number]: number for number in numbers}
    return {number_of[row["image"]]: row["verdict"] for row in predict_scores(prediction)}


def _count_false_calls(verdicts: Mapping[int, str], truth: KnowsTruth) -> tuple[int, int]:
    """Return the number of good images with another verdict, and of all good images."""
    # An image of unknown truth is no chance for a false call.
    good = [verdict for number, verdict in verdicts.items() if truth.has_defect(number) is False]
    return sum(verdict != GOOD for verdict in good), len(good)


class Kind(NamedTuple):
    """Labeled defects of one kind, and their probability of detection.

    Attributes:
        name: Name of the kind.
        sizes_px: [n] size of each defect.
        hits: [n] True for those that were found.
        curve: Probability over size; None if none fits.
    """

    name: str
    sizes_px: Floats
    hits: NDArray[np.bool_]
    curve: DetectionCurve | None


def fit_kinds(targets: Sequence[Target]) -> list[Kind]:
    """Return the kinds of the targets in their order, each with its curve."""
    by_kind: dict[str, list[Target]] = {}
    for target in targets:
        by_kind.setdefault(target.kind, []).append(target)
    kinds = []
    for name, of_kind in by_kind.items():
        sizes_px = np.array([target.size_px for target in of_kind])
        hits = np.array([target.hit for target in of_kind])
        kinds.append(Kind(name, sizes_px, hits, fit_curve(sizes_px, hits)))
    return kinds


def summarise(kinds: Sequence[Kind], false_calls: tuple[int, int]) -> dict[str, Any]:
    """Return the content of ``pod.json``.

    Args:
        kinds: Kinds of all targets.
        false_calls: Number of good images with another verdict, and of all good ones.
    """
    calls, chances = false_calls
    return {
        "confidence": _CONFIDENCE,
        "false_calls": calls,
        "false_call_chances": chances,
        "false_call_rate": calls / chances if chances else None,
        "false_call_bound": upper_rate(calls, chances, _CONFIDENCE),
        "kinds": [_describe(kind) for kind in kinds],
    }


def _describe(kind: Kind) -> dict[str, Any]:
    """Return a row: sizes found with 50 and 90 %, the bound of the latter, and why one is missing."""
    name, sizes_px, hits, curve = kind
    tested_px = float(sizes_px.min()), float(sizes_px.max())
    row: dict[str, Any] = {"kind": name, "targets": len(hits), "hits": int(hits.sum())}
    sizes = {
        "a50_px": curve.size_at(0.5) if curve else None,
        "a90_px": curve.size_at(_FOUND) if curve else None,
        "a90_95_px": curve.bound_at(_FOUND, _CONFIDENCE) if curve else None,
    }
    for key, size_px in sizes.items():
        row[key] = _within(size_px, tested_px)
    row["note"] = _explain(hits, curve, tested_px[1])
    return row


def _within(size_px: float | None, tested_px: tuple[float, float]) -> float | None:
    """Return a size within the tested range, or the smallest; None beyond the largest."""
    # Beyond the largest defect, the curve is a guess.
    smallest_px, largest_px = tested_px
    if size_px is None or size_px > largest_px:
        return None
    return round(max(size_px, smallest_px), 2)


def _explain(hits: NDArray[np.bool_], curve: DetectionCurve | None, largest_px: float) -> str:
    """Return why a figure is missing, or is not reliable; empty otherwise."""
    count, trials = int(hits.sum()), len(hits)
    if not count:
        at_most = upper_rate(0, trials, _CONFIDENCE)
        return f"no a90: never found, detection at most {at_most:.2f}"
    if count == trials:
        at_least = lower_rate(count, trials, _CONFIDENCE)
        return f"always found, detection at least {at_least:.2f}"
    a90 = None if curve is None else curve.size_at(_FOUND)
    if curve is None or a90 is None:
        return "no a90: larger defects are not found more often"
    if a90 > largest_px:
        return f"no a90 up to {largest_px:g} px"
    bound = curve.bound_at(_FOUND, _CONFIDENCE)
    if bound is None or bound > largest_px:
        return f"no a90/95 up to {largest_px:g} px: label more defects, or larger ones"
    return ""


def _write(
    folder: Path, targets: Sequence[Target], kinds: Sequence[Kind], result: dict[str, Any]
) -> None:
    write_table(folder / "pod.csv", Target._fields, [target._asdict() for target in targets])
    write_json(folder / "pod.json", result)
    draw_curves(kinds, result, folder / "pod.png")
    rows = []
    for row in result["kinds"]:
        sizes = [_show(row[name]) for name in ("a50_px", "a90_px", "a90_95_px")]
        rows.append([row["kind"], row["targets"], row["hits"], *sizes, row["note"]])
    print_table(
        ["kind", "targets", "found", "a50 px", "a90 px", "a90/95 px", ""],
        rows,
        texts=["kind", ""],
        title="size that the model finds",
        caption=f"false calls: {result['false_calls']} of {result['false_call_chances']}",
    )


def _show(size_px: float | None) -> str:
    return "-" if size_px is None else f"{size_px:.1f}"


def _list_metrics(result: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "pod/false_call_rate": result["false_call_rate"],
        "pod/false_call_bound": result["false_call_bound"],
    }
    for row in result["kinds"]:
        name = row["kind"].replace(" ", "_")
        metrics[f"pod/{name}_a90_95_px"] = row["a90_95_px"]
        metrics[f"pod/{name}_found_fraction"] = row["hits"] / row["targets"]
    return metrics


def draw_curves(kinds: Sequence[Kind], result: dict[str, Any], path: Path) -> None:
    """Draw detection over size: a cell for each kind, with the bound dashed."""
    columns = min(_COLUMNS, len(kinds))
    lines = -(-len(kinds) // columns)
    figure, axes = new_axes(lines, columns, 2.6 * lines + 0.8, width_inches=3.0 * columns)
    cells: list[Any] = list(axes.flat)
    for cell, kind, row in zip(cells, kinds, result["kinds"], strict=False):
        _draw_kind(cell, kind, row)
    for cell in cells[len(kinds) :]:
        cell.set_axis_off()
    # A short one, as a figure of one kind is narrow.
    save_figure(figure, path, "probability of detection", ("a90/95",), (TRUE_COLOUR,))


def _draw_kind(cell: Any, kind: Kind, row: dict[str, Any]) -> None:  # noqa: ANN401 - axes
    name, sizes_px, hits, curve = kind
    cell.set_xscale("log")
    if curve is not None:
        tested_px = np.geomspace(sizes_px.min(), sizes_px.max(), 60)
        cell.plot(tested_px, curve.at(tested_px), color="black", linewidth=1.8)
        levels = np.linspace(0.05, 0.95, 19)
        bounds = np.array([curve.bound_at(level, _CONFIDENCE) or np.nan for level in levels])
        cell.plot(bounds, levels, color="black", linestyle="--", linewidth=1)
    # Nearly each defect has its own size, so there are no fractions to draw.
    cell.plot(sizes_px, hits, "|", color=FOUND_COLOUR, markersize=6)
    bound_px = row["a90_95_px"]
    if bound_px is not None:
        cell.axvline(bound_px, color=TRUE_COLOUR, linewidth=1)
    cell.set_xlim(sizes_px.min() * 0.9, sizes_px.max() * 1.1)
    cell.set_ylim(-0.03, 1.03)
    cell.set_yticks([0, 0.5, 0.9, 1])
    ticks = [size for size in (2, 5, 10, 20, 50, 100, 200) if size <= sizes_px.max()]
    cell.set_xticks(ticks, [str(size) for size in ticks])
    cell.minorticks_off()
    cell.set_xlabel("size, px (marks: found 1, missed 0)", fontsize=7)
    cell.tick_params(labelsize=7)
    words = row["note"].partition(":")[0] if bound_px is None else f"a90/95 {bound_px:.1f} px"
    cell.set_title(f"{name}\n{words}", fontsize=8)
