"""The curves of one run."""

from collections.abc import Sequence
from typing import Final

from lit_data.commands.reports.charts import Line, draw_chart
from lit_data.commands.reports.curves import Series
from lit_data.commands.reports.groups import Place, choose_looks, find_place, sort_labels
from lit_data.commands.reports.markup import Markup, element, join
from lit_data.commands.reports.numbers import find_direction, format_value
from lit_data.commands.reports.runs import Run

_MOST_CHARTS: Final = 40
_PARTS: Final[tuple[str, ...]] = (
    "forward",
    "backward",
    "optimizer",
    "augment",
    "transfer",
    "assemble",
    "wait",
    "other",
)
"""Of a step, from the bottom of the chart: first what the device should do."""


def show_curves(run: Run, *, most_points: int, heading: str) -> Markup:
    """All logged metrics, those of the model apart from those of the machine; what never changed is one line.

    Args:
        run: Whose.
        most_points: Of each line.
        heading: Name of the elements above each kind.
    """
    constant = {name: found for name, found in run.log.series.items() if found.is_constant}
    charts: dict[tuple[str, str], list[tuple[Place, str, Series]]] = {}
    for name, series in run.log.series.items():
        place = find_place(name)
        if name not in constant or place.section == "model":
            charts.setdefault((place.section, place.chart), []).append((place, name, series))
    parts = []
    for section, title in (("model", "Losses and scores"), ("machine", "Speed and memory")):
        drawn = [
            _draw_group(chart, lines, run, most_points)
            for (group, chart), lines in sorted(charts.items(), key=lambda item: _order(item[0][1]))
            if group == section and any(len(set(series.steps)) > 1 for _, _, series in lines)
        ]
        if drawn:
            parts += [element(heading, None, title), element("div", {"class": "charts"}, *drawn[:_MOST_CHARTS])]
    same = ", ".join(
        f"{name} {format_value(name, series.last)}"
        for name, series in constant.items()
        if find_place(name).section == "machine"
    )
    if same:
        parts.append(element("p", {"class": "quiet"}, f"The same all the time: {same}."))
    return join(parts)


def _order(chart: str) -> tuple[int, str]:
    return (0 if "loss" in chart else -find_direction(chart) + 2, chart)


def _draw_group(chart: str, found: Sequence[tuple[Place, str, Series]], run: Run, most_points: int) -> Markup:
    stacked = chart == "time of a step"
    labels = [place.label for place, _, _ in found]
    order = [part for part in _PARTS if part in labels] if stacked else []
    order += [label for label in sort_labels(labels) if label not in order]
    ordered = sorted(found, key=lambda entry: order.index(entry[0].label))
    looks = choose_looks(place.label for place, _, _ in ordered)
    lines = [
        Line(name, place.label, series, look, is_dashed=place.is_baseline)
        for (place, name, series), look in zip(ordered, looks, strict=True)
    ]
    alike = len({tuple(line.series.steps) for line in lines}) == 1
    return draw_chart(
        chart.replace("_", " ") if found[0][0].section == "model" else chart,
        lines,
        epoch_ends=run.log.epoch_ends,
        most_points=most_points,
        legend=len(lines) > 1 or lines[0].label != chart,
        stacked=stacked and alike,
    )
