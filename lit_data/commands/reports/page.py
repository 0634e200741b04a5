"""The page around the sections: one file that loads nothing."""

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lit_data
from lit_data.commands.reports.comparison import (
    show_comparison,
    show_failures,
    show_overlays,
    show_status,
)
from lit_data.commands.reports.markup import Markup, element, join
from lit_data.commands.reports.numbers import format_value
from lit_data.commands.reports.pictures import Picture, show_picture
from lit_data.commands.reports.run_curves import show_curves
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
