"""Several runs beside each other: options that differ, and figures."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lit_data.app.reports.results import find_scores
from lit_data.app.reports.runs import Run
from lit_data.app.result import find_direction, read_number, split_stage
from lit_data.core.files import flatten

_MOST_SCORES = 4
_MOST_COLUMNS = 8
_MACHINE = ("samples_per_s", "data_wait_fraction", "peak_rss_bytes", "batch/ooms", "seconds")
_NO_OPTION = ("paths.", "hydra.", "report")


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
    if any(run.settings.config.get("tags") for run in runs):
        typed_keys["tags"] = None
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


def find_unlike(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Find the scores that runs have of different images, so none of them is the best."""
    unlike = []
    for name in metrics:
        stage, _ = split_stage(name)
        images = {runs[index].scored_images for index in rank(runs, name)}
        if stage in ("val", "test") and len(images) > 1:
            unlike.append(name)
    return unlike


def find_best(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, int]:
    """Find the index of the best run for each metric by which several differ."""
    best = {}
    for name in metrics:
        ranking = rank(runs, name)
        numbers = {read_number(runs[index].values, name) for index in ranking}
        if len(numbers) > 1:
            best[name] = ranking[0]
    return best
