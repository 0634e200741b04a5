"""``pod``: probability of detection by the size of a defect."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from lit_data.app.build import find_trained
from lit_data.app.configuration.names import resolve_target
from lit_data.app.predict import Prediction
from lit_data.app.result import print_table
from lit_data.core.checks import check_choice, check_count, check_types
from lit_data.core.errors import ConfigError
from lit_data.core.files import write_json, write_table
from lit_data.predict.figures import FOUND_COLOUR, TRUE_COLOUR, new_axes, save_figure
from lit_data.predict.maps import VerdictWriter
from lit_data.predict.nets import ProbabilityNet, open_predictor
from lit_data.predict.pixels import PixelTask
from lit_data.predict.task import find_task_of
from lit_data.synthesis import FAMILIES
from lit_data.synthesis.families.base import check_range
from lit_data.wings.quality.bounds import count_needed, lower_rate, upper_rate
from lit_data.wings.quality.calibrate import open_split, read_own_options
from lit_data.wings.quality.detection_curve import DetectionCurve, fit_curve
from lit_data.wings.quality.targets import Bench, Target
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)

_CONFIDENCE = 0.95
_FOUND = 0.9  # probability of detection of a90
_SIZES = 10
_NUMBERS = 10**6  # of the targets of a size, which no other size shares
_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """The options of ``pod``; conf/pod.yaml has one line for each.

    Raises:
        ConfigError: A value is out of its range.
    """

    targets: int
    families: Sequence[str] | None
    size_px: tuple[float, float]
    amplitude: tuple[float, float]
    images: Literal["test", "val", "all"]

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_types(PodOptions, vars(self))
        check_count("targets", self.targets, _SIZES)
        names = list(FAMILIES if self.families is None else self.families)
        for name in names:
            check_choice("families", name, tuple(FAMILIES))
        if not names or len(set(names)) < len(names):  # the same targets would count twice
            raise ConfigError(f"families={names}: name each once, or remove it to use all twelve")
        low, high = check_range("size_px", self.size_px, (1.0, 1000.0))
        if not low < high:
            raise ConfigError(f"size_px=[{low:g}, {high:g}]: the largest must exceed the smallest")
        if check_range("amplitude", self.amplitude, (0.0, 1.0))[1] == 0:
            raise ConfigError("amplitude=[0, 0] draws nothing: the strongest must exceed 0")


def run(cfg: DictConfig) -> dict[str, Any]:
    """Draw defects of known sizes on good held-out images, and fit the probability of detection.

    - ``pod.csv``: a row for each target
    - ``pod.json``: a50, a90 and a90/95 of each family, and false calls
    - ``pod.png``, which ``report.html`` shows

    Returns:
        The a90/95 of each family, and the rate of false calls.

    Raises:
        ConfigError: Models of this kind of data have no maps of defects, or no image is good.
    """
    options = read_own_options(PodOptions, cfg)
    _refuse_other_kinds(cfg)
    if cfg.data.get("cache") == "device":
        cfg.data.cache = "store"  # patches are drawn on here
    prediction = open_split(cfg, find_trained(cfg), options.images).take_calibration()
    writer = prediction.task.writer(prediction.run, prediction.options)
    assert isinstance(writer, VerdictWriter)  # of all kinds with maps
    if writer.images.original_sizes is not None:
        raise ConfigError(
            "pod draws defects at the size of the files: remove data.size_px and data.scale"
        )
    _check_patches(options, min(prediction.task.datamodule.patch_px))
    bench = _open_bench(prediction, writer, options, int(cfg.seed))
    prediction.start()
    # A Trainer leaves it on the CPU.
    prediction.model.to(prediction.run.trainer.strategy.root_device)
    warn_of_few_images(len(bench.list_images()), options.targets)
    targets = judge_families(bench, options) + bench.judge_real()
    false_calls = bench.count_false_calls()
    warn_of_false_calls(*false_calls)
    result = summarise(targets, false_calls)
    _write(prediction.run.folder, targets, result)
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
            f"pod draws defects and searches maps for them, but a {kind.__name__} has no maps: "
            "use experiment=stripe, segmentation or anomaly"
        )


def _check_patches(options: PodOptions, patch_px: int) -> None:
    """Refuse defects that are larger than the patches they are drawn on.

    Raises:
        ConfigError: The largest defect is too large.
    """
    smallest_px, largest_px = options.size_px
    if largest_px > patch_px:
        raise ConfigError(
            f"size_px=[{smallest_px:g}, {largest_px:g}]: defects are drawn on patches, so the largest "
            f"has at most their {patch_px} px: set size_px or data.patch_px"
        )


def _list_images(prediction: Prediction, writer: VerdictWriter) -> Sequence[int]:
    chosen = prediction.run.chosen
    numbers = range(len(writer.names)) if chosen is None else chosen
    return [number for number in numbers if writer.is_small(number)]  # maps are held in memory


def _open_bench(
    prediction: Prediction, writer: VerdictWriter, options: PodOptions, seed: int
) -> Bench:
    datamodule = prediction.task.datamodule
    device = prediction.run.trainer.strategy.root_device
    prediction.model.to(device)
    channels = tuple(range(len(datamodule.transformation.expand)))
    net = ProbabilityNet(
        prediction.model, channels, datamodule.batch_format, datamodule.channel_names
    )
    predict = prediction.options
    # Patches come as floats in 0..1, and have the sizes that the net was trained with.
    predict = replace(predict, round_px=predict.round_px or predict.multiple_px)
    patches = replace(writer.images, value_range=None)
    bench = Bench(
        datamodule,
        open_predictor(net, patches, predict, device, overlap_px=0),
        writer,
        prediction.options,
        _list_images(prediction, writer),
        amplitude=options.amplitude,
        seed=seed,
    )
    if not len(bench.patches):
        raise ConfigError(
            f"images={options.images} has no good image to draw defects on: choose another "
            "split, or give images=all data.root=FOLDER of good parts"
        )
    return bench


def warn_of_few_images(images: int, targets: int) -> None:
    """Warn if there are fewer images than the bound needs, because it assumes independent targets.

    Args:
        images: Number of good images.
        targets: Number of targets of a family.
    """
    needed = count_needed(1 - _FOUND, _CONFIDENCE)
    if images < needed:
        log.warning(
            "only %s all %d targets of a family, and hits on one image are "
            "similar: a90/95 holds for these images and may be too small for others; it needs "
            "at least %d images: give more good parts with images=all data.root=FOLDER",
            counted(images, "good image carries", "good images carry"),
            targets,
            needed,
        )


def warn_of_false_calls(calls: int, images: int) -> None:
    """Warn if so many good images are false alarms that this alone finds a part of the defects.

    Args:
        calls: Number of good images that are not called good.
        images: Number of good images.
    """
    rate = calls / images
    if rate > 1 - _FOUND:
        log.warning(
            "%s, so defects on them count as found: at a90 "
            "only %.0f %% are found on their own; train longer, or calibrate again",
            counted_of(calls, images, "good image", "is a false alarm", "are false alarms"),
            100 * max(0.0, (_FOUND - rate) / (1 - rate)),
        )


def judge_families(bench: Bench, options: PodOptions) -> list[Target]:
    """Draw and judge the targets of all families at all sizes."""
    low, high = options.size_px
    sizes_px = np.geomspace(low, high, _SIZES).round().astype(int).tolist()
    counts = np.diff(np.linspace(0, options.targets, _SIZES + 1).round()).astype(int).tolist()
    names = list(FAMILIES)
    targets = []
    for family in options.families or names:
        for position, (size_px, count) in enumerate(zip(sizes_px, counts, strict=True)):
            # So that the targets of a family do not depend on the other families.
            first = (names.index(family) * _SIZES + position) * _NUMBERS
            targets += bench.judge(family, size_px, count, first)
        if not any(target.family == family for target in targets):
            log.warning("%s: none of its defects are visible on these images", family)
    return targets


def summarise(targets: Sequence[Target], false_calls: tuple[int, int]) -> dict[str, Any]:
    """Return the content of ``pod.json``.

    Args:
        targets: All targets.
        false_calls: Number of calls without a defect, and of the chances for one.
    """
    calls, chances = false_calls
    rows = []
    for family, of_family in _group(targets).items():
        rows.append(_fit(family, of_family))
    return {
        "confidence": _CONFIDENCE,
        "false_calls": calls,
        "false_call_chances": chances,
        "false_call_rate": calls / chances,
        "false_call_bound": upper_rate(calls, chances, _CONFIDENCE),
        "families": rows,
    }


def _group(targets: Sequence[Target]) -> dict[str, list[Target]]:
    families: dict[str, list[Target]] = {}
    for target in targets:
        families.setdefault(target.family, []).append(target)
    return families


def _fit(family: str, targets: Sequence[Target]) -> dict[str, Any]:
    """Return a row: sizes found with 50 and 90 %, the bound of the latter, and why one is missing."""
    sizes_px = np.array([target.size_px for target in targets])
    hits = np.array([target.hit for target in targets])
    curve = fit_curve(sizes_px, hits)
    drawn_px = float(sizes_px.min()), float(sizes_px.max())
    row: dict[str, Any] = {"family": family, "targets": len(targets), "hits": int(hits.sum())}
    sizes = {
        "a50_px": curve.size_at(0.5) if curve else None,
        "a90_px": curve.size_at(_FOUND) if curve else None,
        "a90_95_px": curve.bound_at(_FOUND, _CONFIDENCE) if curve else None,
    }
    for name, size_px in sizes.items():
        row[name] = _within(size_px, drawn_px)
    row["note"] = _explain(hits, curve, drawn_px[1])
    return row


def _within(size_px: float | None, drawn_px: tuple[float, float]) -> float | None:
    """Return a size within the drawn range, or the smallest; None beyond the largest, which was not tested."""
    smallest_px, largest_px = drawn_px
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
        return f"no a90/95 up to {largest_px:g} px: more targets, or larger ones"
    return "hits do not follow the curve: see the picture" if curve.is_poor else ""


def _write(folder: Path, targets: Sequence[Target], result: dict[str, Any]) -> None:
    write_table(folder / "pod.csv", Target._fields, [target._asdict() for target in targets])
    write_json(folder / "pod.json", result)
    draw_curves(targets, result, folder / "pod.png")
    rows = []
    for row in result["families"]:
        sizes = [_show(row[name]) for name in ("a50_px", "a90_px", "a90_95_px")]
        rows.append([row["family"], row["targets"], row["hits"], *sizes, row["note"]])
    print_table(
        ["family", "targets", "found", "a50 px", "a90 px", "a90/95 px", ""],
        rows,
        texts=["family", ""],
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
    for row in result["families"]:
        name = row["family"].replace(" ", "_")
        metrics[f"pod/{name}_a90_95_px"] = row["a90_95_px"]
        metrics[f"pod/{name}_found_fraction"] = row["hits"] / row["targets"]
    return metrics


def draw_curves(targets: Sequence[Target], result: dict[str, Any], path: Path) -> None:
    """Draw detection over size: a cell for each family, with the bound dashed."""
    families = _group(targets)
    columns = min(_COLUMNS, len(families))
    lines = -(-len(families) // columns)
    figure, axes = new_axes(lines, columns, 2.4 * lines + 0.8, width_inches=3.0 * columns)
    cells: list[Any] = list(axes.flat)
    for cell, of_family, row in zip(cells, families.values(), result["families"], strict=False):
        _draw_family(cell, of_family, row)
    for cell in cells[len(families) :]:
        cell.set_axis_off()
    title = "probability of detection over size, px; dots: found of each size"
    save_figure(figure, path, title, ("a90/95",), (TRUE_COLOUR,))


def _draw_family(cell: Any, targets: Sequence[Target], row: dict[str, Any]) -> None:  # noqa: ANN401 - axes
    sizes_px = np.array([target.size_px for target in targets])
    hits = np.array([target.hit for target in targets])
    cell.set_xscale("log")
    curve = fit_curve(sizes_px, hits)
    if curve is not None:
        drawn_px = np.geomspace(sizes_px.min(), sizes_px.max(), 60)
        cell.plot(drawn_px, curve.at(drawn_px), color="black", linewidth=1.8)
        levels = np.linspace(0.05, 0.95, 19)
        bounds = np.array([curve.bound_at(level, _CONFIDENCE) or np.nan for level in levels])
        cell.plot(bounds, levels, color="black", linestyle="--", linewidth=1)
    values, group = np.unique(sizes_px, return_inverse=True)
    if len(values) <= 2 * _SIZES:  # each real defect has its own size
        fractions = np.bincount(group, hits) / np.bincount(group)
        cell.plot(values, fractions, "o", color=FOUND_COLOUR, markersize=3)
    bound_px = row["a90_95_px"]
    if bound_px is not None:
        cell.axvline(bound_px, color=TRUE_COLOUR, linewidth=1)
    cell.set_xlim(sizes_px.min() * 0.9, sizes_px.max() * 1.1)
    cell.set_ylim(-0.03, 1.03)
    cell.set_yticks([0, 0.5, 0.9, 1])
    ticks = [size for size in (2, 5, 10, 20, 50, 100, 200) if size <= sizes_px.max()]
    cell.set_xticks(ticks, [str(size) for size in ticks])
    cell.minorticks_off()
    cell.tick_params(labelsize=7)
    words = row["note"].partition(":")[0] if bound_px is None else f"a90/95 {bound_px:.1f} px"
    cell.set_title(f"{row['family']}\n{words}", fontsize=8)
