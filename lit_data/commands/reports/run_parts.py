"""The parts of the section of one run."""

from collections.abc import Mapping
from typing import Any, Final

from lit_data.commands.reports.markup import Markup, element, format_value, join, make_table
from lit_data.commands.reports.pictures import show_picture
from lit_data.commands.reports.runs import Run, describe_age
from lit_data.commands.reports.settings import write_yaml
from lit_data.commands.result import is_score, split_stage

_MOST_TILES: Final = 4
_MACHINE_TILES: Final = (
    ("seconds", "time", "from start to end"),
    ("samples_per_s", "speed", "while training"),
    ("data_wait_fraction", "waiting for data", "of the training time"),
    ("memory/peak_allocated_bytes", "device memory", "peak"),
    ("peak_rss_bytes", "host memory", "peak"),
    ("batch/ooms", "out of memory", "errors, recovered from"),
)
_MOST_EVENTS: Final = 100


def show_state(run: Run) -> Markup:
    """What a reader must know first: that it failed or broke off, what limited it, what to change."""
    parts = []
    if run.status == "failed":
        parts.append(_note("bad", "This run failed", run.failure))
    elif run.status == "unfinished":
        text = (
            "There is no summary.json: it was broken off, or it is still running. The last file of it was written at "
            f"{describe_age(run.written_s)}. What follows is what it left."
        )
        parts.append(_note("bad", "This run did not come to its end", text))
    if run.limited_by:
        parts.append(_note("hint", "What limits this run", _begin(run.limited_by)))
    parts += [_note("hint", "What costs memory for nothing", _begin(text)) for text in run.journal.advice]
    if run.notes:
        items = [element("li", None, _begin(text)) for text in run.notes]
        parts.append(_note("quiet", "What could not be read", element("ul", None, *items)))
    return join(parts)


def show_tiles(run: Run) -> Markup:
    """The headline figures."""
    values, tiles = run.values, []
    for name in find_scores(run)[:_MOST_TILES]:
        baseline = values.get(f"{name}_baseline")
        stage, metric = split_stage(name)
        below = f"{stage}; a simple rule: {format_value(name, baseline)}" if baseline is not None else stage
        tiles.append(_tile(metric.replace("_", " "), format_value(name, values[name]), below))
    on_host = (
        values.get("memory/peak_allocated_bytes") == values.get("memory/peak_rss_bytes")
        or (run.machine or {}).get("device") == "cpu"
    )
    for name, title, below in _MACHINE_TILES:
        if values.get(name) is not None and not (name == "memory/peak_allocated_bytes" and on_host):
            tiles.append(_tile(title, format_value(name, values[name]), below))
    return element("div", {"class": "tiles"}, *tiles) if tiles else Markup()


def find_scores(run: Run) -> list[str]:
    """Metrics of the model in the summary: of the test, without one of the validation; the monitored one first."""
    scores = [name for name, value in run.values.items() if is_score(name, value) and not name.endswith("_baseline")]
    monitored = split_stage(run.monitor[0])[1]
    for stage in ("test", "val", ""):
        found = [name for name in scores if split_stage(name)[0] == stage]
        if found:
            return sorted(found, key=lambda name: split_stage(name)[1] != monitored)
    return []


def show_pictures(run: Run, *, timelines: bool) -> Markup:
    """Those of samples, or the timelines that the callbacks drew."""
    shown = [show_picture(picture) for picture in run.pictures if picture.is_timeline == timelines]
    return element("div", {"class": "pictures"}, *shown) if shown else Markup()


def show_events(run: Run) -> Markup:
    """What happened, and what held the memory when it ran out."""
    parts = []
    releases = run.values.get("cache/releases")
    if releases:
        freed = format_value("freed_bytes", run.values.get("cache/freed_bytes"))
        cost = format_value("seconds", run.values.get("cache/seconds"))
        parts.append(element("p", None, f"Cached memory was given back {releases} times: {freed} in {cost}."))
    events = run.journal.events
    if events:
        rows = [
            (
                entry.time,
                element("td", None, element("span", {"class": f"chip {_chip(entry.level)}"}, entry.kind)),
                entry.text,
            )
            for entry in events[:_MOST_EVENTS]
        ]
        parts.append(make_table(("time", "what", "text"), rows, {"class": "events"}))
        if len(events) > _MOST_EVENTS:
            parts.append(element("p", {"class": "quiet"}, f"{len(events) - _MOST_EVENTS} more stand in the log."))
    elif not releases:
        parts.append(element("p", {"class": "quiet"}, "The log holds no warnings and no errors."))
    parts += [fold(name, element("pre", None, text)) for name, text in run.post_mortems]
    return join(parts)


def show_loaders(run: Run) -> Markup:
    """How the batches were made, and why so."""
    rows = []
    for stage, entry in run.loaders.items():
        if isinstance(entry, Mapping):
            kind = entry.get("kind", entry.get("backend", ""))
            cost = format_value("inline_us_per_sample", entry.get("inline_us_per_sample"))
            rows.append((stage, str(kind), str(entry.get("workers", "-")), cost, str(entry.get("reason", ""))))
    return make_table(("", "kind", "workers", "one sample", "why"), rows) if rows else Markup()


def show_settings(run: Run) -> Markup:
    """Overrides, command line and the whole configuration."""
    parts = []
    if run.settings.command_line:
        parts.append(element("pre", {"class": "command"}, run.settings.command_line))
    if run.settings.choices:
        groups = {key: value for key, value in run.settings.choices.items() if not key.startswith("hydra")}
        parts.append(show_pairs(groups))
    text = write_yaml(dict(run.settings.config))
    if text:
        parts.append(fold("The whole configuration", element("pre", None, text)))
    return join(parts)


def show_summary(run: Run) -> Markup:
    """All of summary.json and the machine, folded."""
    rows = [(name, format_value(name, value)) for name, value in run.values.items() if value is not None]
    parts = (
        [fold("All figures of summary.json", make_table(("key", "value"), rows, {"class": "pairs"}))] if rows else []
    )
    return join(parts)


def show_machine(run: Run) -> Markup:
    """Where it ran."""
    if not run.machine:
        return element("p", {"class": "quiet"}, "Not recorded.")
    return show_pairs({name: format_value(name, value) for name, value in run.machine.items()})


def show_pairs(pairs: Mapping[str, Any]) -> Markup:
    """Names and values."""
    entries = [join([element("dt", None, name), element("dd", None, str(value))]) for name, value in pairs.items()]
    return element("dl", {"class": "pairs"}, *(element("div", None, entry) for entry in entries))


def fold(title: str, *content: str) -> Markup:
    """Content that opens when its title is chosen."""
    return element("details", None, element("summary", None, title), *content)


def _note(kind: str, title: str, text: str) -> Markup:
    body = text if isinstance(text, Markup) else element("p", None, text)
    return element("div", {"class": f"note {kind}"}, element("strong", None, title), body)


def _tile(title: str, value: str, below: str) -> Markup:
    number, _, unit = value.rpartition(" ") if value[-1:].isalpha() or value.endswith("%") else (value, "", "")
    shown = element(
        "p", {"class": "figure"}, number or value, element("small", None, f" {unit}") if number and unit else ""
    )
    head = element("p", {"class": "name"}, title)
    return element("div", {"class": "tile"}, head, shown, element("p", {"class": "below"}, below))


def _chip(level: str) -> str:
    return "bad" if level in ("ERROR", "CRITICAL") else "warn" if level == "WARNING" else "plain"


def _begin(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
