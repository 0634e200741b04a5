"""The page around the sections: one file that loads nothing."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lit_data
from lit_data.commands.reports.charts import ChartLine, draw_chart
from lit_data.commands.reports.comparison import (
    Place,
    choose_looks,
    find_place,
    show_comparison,
    show_failures,
    show_overlays,
    show_status,
    sort_labels,
)
from lit_data.commands.reports.curves import Series
from lit_data.commands.reports.markup import Markup, element, find_direction, format_value, join
from lit_data.commands.reports.pictures import Picture, show_picture
from lit_data.commands.reports.run_parts import (
    show_events,
    show_loaders,
    show_machine,
    show_pictures,
    show_settings,
    show_state,
    show_summary,
    show_tiles,
)
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
        ChartLine(name, place.label, series, look, is_dashed=place.is_baseline)
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


_HERE: Final = Path(__file__).parent
_POINTS_ALONE: Final = 300
_POINTS_OF_MANY: Final = 100


def make_page(
    runs: Sequence[Run],
    *,
    title: str,
    metrics: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    lost: Sequence[tuple[str, str, str]] = (),
) -> str:
    """The whole page.

    Args:
        runs: At least one; several are compared before each has its section.
        title: Of the page.
        metrics: Figures to compare.
        pictures: Of the sweep as a whole.
        notes: Sentences below the title.
        lost: Number, status and reason of jobs of a sweep that left no folder.
    """
    several = len(runs) > 1 or bool(lost)
    head = _show_head(runs, title, notes, several=several)
    body = [_compare(runs, metrics, pictures, lost)] if several else []
    body += [_show_run(run, several=several) for run in runs]
    foot = element(
        "footer", None, f"Written by lit_data {lit_data.__version__} at {time.strftime('%Y-%m-%d %H:%M:%S')}."
    )
    return _wrap(title, join([head, element("main", None, *body), foot]))


def _wrap(title: str, body: Markup) -> str:
    """The document, which may load nothing and run nothing but its own script."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("meta", {"name": "referrer", "content": "no-referrer"}),
        element("link", {"rel": "icon", "href": "data:,"}),
        element("title", None, title),
        element("style", None, Markup(style)),
    ]
    script_tag = element("script", None, Markup(script))
    page = element("html", {"lang": "en"}, element("head", None, *head), element("body", None, body, script_tag))
    return f"<!doctype html>\n{page}\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _show_head(runs: Sequence[Run], title: str, notes: Sequence[str], *, several: bool) -> Markup:
    links = [("#comparison", "Comparison")] if several else []
    links += [(f"#{run.anchor}", run.label) for run in runs] if several else _list_sections(runs[0])
    states = [show_status(run) for run in runs]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    chips = [
        element("span", {"class": f"chip {kind}"}, f"{count} {word}" if several else word)
        for (kind, word), count in counts.items()
    ]
    first = runs[0]
    facts = [f"{len(runs)} runs"] if several else [*_list_facts(first), str(first.folder)]
    nav = element("nav", {"aria-label": "sections"}, *(element("a", {"href": target}, text) for target, text in links))
    return element(
        "header",
        None,
        element("h1", None, title, " ", *chips),
        element("p", {"class": "facts"}, " · ".join(filter(None, facts))),
        *(element("p", {"class": "quiet"}, note) for note in notes),
        nav,
    )


def _compare(
    runs: Sequence[Run], metrics: Sequence[str], pictures: Sequence[Picture], lost: Sequence[tuple[str, str, str]]
) -> Markup:
    failures = show_failures(runs, lost)
    parts = [element("h2", None, "Comparison"), show_comparison(runs, metrics)]
    if failures:
        parts += [element("h3", None, "Without an end"), failures]
    parts += map(show_picture, pictures)
    overlays = show_overlays(runs, metrics)
    if overlays:
        parts += [element("h3", None, "Curves of all runs"), overlays]
    return element("section", {"id": "comparison"}, *parts)


def _list_sections(run: Run) -> list[tuple[str, str]]:
    return [(f"#{run.anchor}-{name}", title) for name, title, _ in _make_sections(run, most_points=2, level=2)]


def _make_sections(run: Run, *, most_points: int, level: int) -> list[tuple[str, str, Markup]]:
    """Short name, title and content of each section that has something to show."""
    sections = [
        ("curves", "Curves", show_curves(run, most_points=most_points, heading=f"h{level + 1}")),
        ("pictures", "Pictures", show_pictures(run, timelines=False)),
        ("timelines", "Memory and throughput", show_pictures(run, timelines=True)),
        ("events", "Events", show_events(run)),
        ("loading", "Loading", show_loaders(run)),
        ("settings", "Configuration", show_settings(run)),
        ("machine", "Machine and figures", join([show_machine(run), show_summary(run)])),
    ]
    return [section for section in sections if section[2]]


def _list_facts(run: Run) -> list[str]:
    began, seconds = run.journal.began, run.values.get("seconds")
    times = [f"began {began}" if began else "", format_value("seconds", seconds) if seconds else ""]
    return [run.command, *filter(None, times)]


def _show_run(run: Run, *, several: bool) -> Markup:
    level, most_points = (3, _POINTS_OF_MANY) if several else (2, _POINTS_ALONE)
    parts = [show_state(run), show_tiles(run)]
    for name, title, content in _make_sections(run, most_points=most_points, level=level):
        parts.append(element("section", {"id": f"{run.anchor}-{name}"}, element(f"h{level}", None, title), content))
    if several:
        kind, word = show_status(run)
        chip = element("span", {"class": f"chip {kind}"}, word)
        back = element("a", {"href": "#comparison", "class": "back"}, "comparison")
        facts = element("p", {"class": "facts"}, " · ".join([run.experiment, *_list_facts(run)]))
        parts.insert(0, element("header", None, element("h2", None, run.label, " ", chip, " ", back), facts))
    return element("article", {"id": run.anchor}, *parts)
