"""sweep.png: the metric of every job against each swept parameter."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

Points = Sequence[tuple[str, float | None]]
"""The parameter's value as typed, and the metric; None for a job that did not end well."""

_COLUMNS: Final = 3
_MOST_PLACES: Final = 12  # numbers of more different values get an axis of numbers
_LONGEST_LABEL: Final = 24
_LOGARITHMIC_FROM: Final = 50.0  # ratio of the largest to the least value


def draw_sweep(path: Path, parameters: Mapping[str, Points], metric: str, *, title: str) -> None:
    """Write a picture with one panel for each parameter.

    Each point is a job, a short line the mean of the jobs with one value, a cross on the lower edge a job that did not
    end well. Few numbers and all texts stand at equal distances; many numbers on an axis of numbers.

    Args:
        path: of the picture.
        parameters: the points by the parameter's key; at least one with a metric.
        metric: name of the metric.
        title: over the picture.
    """
    columns = 2 if len(parameters) == 4 else min(_COLUMNS, len(parameters))
    rows = math.ceil(len(parameters) / columns)
    figure = Figure(figsize=(max(4.6 * columns, 6.0), 3.6 * rows + 0.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(parameters) :]:
        axis.set_visible(False)
    for place, (axis, (key, points)) in enumerate(zip(axes.flat, parameters.items(), strict=False)):
        _draw_panel(axis, points)
        axis.set_xlabel(key, fontsize=9)
        axis.tick_params(labelleft=True, labelsize=8)
        if place % columns == 0:
            axis.set_ylabel(metric, fontsize=9)
    failed = any(metric is None for points in parameters.values() for _, metric in points)
    figure.suptitle(f"{title} (x: no result)" if failed else title, fontsize=11)
    figure.savefig(path)


def _draw_panel(axis: Axes, points: Points) -> None:
    labels = sort_values([value for value, _ in points])
    numbers = [to_number(label) for label in labels]
    if len(labels) > _MOST_PLACES and None not in numbers:
        places = {label: float(number or 0) for label, number in zip(labels, numbers, strict=True)}
        if min(places.values()) > 0 and max(places.values()) / min(places.values()) >= _LOGARITHMIC_FROM:
            axis.set_xscale("log")
    else:
        places = {label: float(place) for place, label in enumerate(labels)}
        texts = [_shorten(label) for label in labels]
        slanted = sum(map(len, texts)) > 36  # characters that fit below one panel
        axis.set_xticks(
            list(places.values()), texts, rotation=30 if slanted else 0, ha="right" if slanted else "center"
        )
        axis.set_xlim(-0.5, len(labels) - 0.5)
        _draw_means(axis, points, places)
    done = [(places[value], metric) for value, metric in points if metric is not None]
    axis.plot(*zip(*done, strict=True), "o", color="#0a6cbd", alpha=0.7, markersize=6, markeredgewidth=0)
    failed = [places[value] for value, metric in points if metric is None]
    at_the_edge = blended_transform_factory(axis.transData, axis.transAxes)
    if failed:
        axis.plot(failed, [0.0] * len(failed), "x", color="#c62828", transform=at_the_edge, clip_on=False, zorder=3)
    axis.grid(axis="y", alpha=0.3)
    axis.margins(y=0.12)


def _draw_means(axis: Axes, points: Points, places: Mapping[str, float]) -> None:
    for label, place in places.items():
        values = [metric for value, metric in points if value == label and metric is not None]
        if len(values) > 1:
            axis.hlines(fmean(values), place - 0.22, place + 0.22, color="#444444", linewidth=1.2)


def sort_values(values: Sequence[str]) -> list[str]:
    """Different values: numbers by their size, texts after them as they came."""
    different = list(dict.fromkeys(values))
    order = {value: place for place, value in enumerate(different)}
    numbers = {value: to_number(value) for value in different}
    return sorted(different, key=lambda value: (numbers[value] is None, numbers[value] or 0.0, order[value]))


def to_number(text: str) -> float | None:
    """The number a text stands for, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..."
