"""``why``: the first step, sample, file and option in which two runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.commands.configuration.suggest import Parser
from lit_data.commands.remote_runs import fetching_runs
from lit_data.commands.replay import SCOPE, Record, opening
from lit_data.commands.reports.untrusted import (
    Masker,
    as_dict,
    load,
    parse_csv,
)
from lit_data.errors import ConfigError, DataError, LitDataError, escape, first_line, show_path
from lit_data.files import flatten
from lit_data.io.plain import parse_json, parse_yaml
from lit_data.io.remote.options import is_remote
from lit_data.types import Bools

_HELP = """\
usage: python -m lit_data why RUN_A RUN_B [--package NAME]

Says in what two runs of fit differ: options, versions, files of the splits, then the first step
whose batch has other samples, the first sample whose bytes differ, with its file, and the first
step whose loss differs. Samples are compared by the digests of the runs (callbacks.digest, the
first 20,000 samples unless callbacks.digest.max_samples says more); nothing is trained. Both RUNs
may be at addresses."""
_PLACES = ("paths.", "hydra.", "resume", "run", "logger.")
"""Keys of options that decide no sample and no weight."""
_MOST_LINES = 20
_MOST_LETTERS = 400


def compare_options(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each option that differs; those of the data come first."""
    configs = [_read(folder, ".hydra/config.yaml", parse_yaml) for folder in (first, second)]
    yield from _compare(*configs, without=_PLACES)


def compare_machines(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each version or property of the machine that differs."""
    machines = [_read(folder, "machine.json", parse_json) for folder in (first, second)]
    yield from _compare(*machines)


def _read(folder: Path, name: str, parse: Any) -> dict[str, Any]:  # noqa: ANN401 - a function
    notes: list[str] = []
    content = as_dict(load(folder, name, parse, notes))
    if notes:  # an empty one would look like one without differences
        raise DataError(f"{show_path(folder)}: {notes[0]}")
    return flatten(Masker().mask_tree(content))


def _compare(
    first: Mapping[str, Any], second: Mapping[str, Any], *, without: Sequence[str] = ()
) -> Iterator[str]:
    keys = [key for key in {**first, **second} if not key.startswith(tuple(without) or "\0")]
    for key in sorted(keys, key=_rank):
        values = [table.get(key, "missing") for table in (first, second)]
        if values[0] != values[1]:
            before, now = (_shorten(value) for value in values)
            yield f"{key}: {before} -> {now}"


def _shorten(value: object) -> str:
    text = str(value)
    if len(text) <= _MOST_LETTERS:
        return text
    return f"{text[:_MOST_LETTERS]}... ({len(text)} letters)"


def _rank(key: str) -> tuple[bool, bool, bool]:
    """Return the rank of a key: data first, then the seed, and callbacks last."""
    return not key.startswith("data."), key != "seed", key.startswith("callbacks.")


def compare_splits(first: Path, second: Path) -> Iterator[str]:
    """Yield a line for each image that is in another split, or in one run alone."""
    splits: list[dict[str, str]] = []
    for folder in (first, second):
        rows = load(folder, "splits.csv", parse_csv, []) or []
        splits.append({row.get("image", ""): row.get("split", "") for row in rows})
    yield from _compare(*splits)


def find_first(differs: Bools) -> int | None:
    """Return the number of the first true value; None without any."""
    numbers = np.flatnonzero(differs)
    return int(numbers[0]) if len(numbers) else None


def find_other_batch(first: Record, second: Record) -> int | None:
    """Return the first step whose batch is of other places of the order; None without any."""
    steps = min(len(first.steps), len(second.steps))
    differs = np.zeros(steps, bool)
    for name in ("epoch", "position", "samples", "ranks"):
        differs |= first.steps[name][:steps] != second.steps[name][:steps]
    has_both = (first.steps["samples"][:steps] > 0) & (second.steps["samples"][:steps] > 0)
    return find_first(differs & has_both)


def find_other_sample(first: Record, second: Record) -> tuple[int, int] | None:
    """Return step and row of the first sample whose digests differ; None without any."""
    steps = np.intersect1d(first.digests["step"], second.digests["step"])
    for step in steps.tolist():
        digests, others = first.digests_of(step), second.digests_of(step)
        count = min(len(digests), len(others))
        row = find_first(digests[:count] != others[:count])
        if row is not None:
            return step, row
    return None


def find_other_loss(first: Record, second: Record) -> int | None:
    """Return the first step whose losses differ; None without any."""
    steps = min(len(first.steps), len(second.steps))
    losses, others = first.steps["loss"][:steps], second.steps["loss"][:steps]
    has_both = (first.steps["samples"][:steps] > 0) & (second.steps["samples"][:steps] > 0)
    is_equal = (losses == others) | (np.isnan(losses) & np.isnan(others))
    return find_first(~is_equal & has_both)


def explain(runs: Sequence[str], folders: Sequence[Path], packages: Sequence[str]) -> list[str]:
    """Return a line for each thing in which two runs differ, causes before consequences.

    Args:
        runs: Folders or addresses, as typed.
        folders: Their folders here.
        packages: Packages whose classes their configurations may name.

    Raises:
        DataError: A folder is none of a run.
    """
    first, second = (Record.read(folder) for folder in folders)
    lines: list[str] = []
    for title, differences in (
        ("option", compare_options(*folders)),
        ("machine", compare_machines(*folders)),
        ("split", compare_splits(*folders)),
        ("order", _compare(first.order, second.order)),
    ):
        all_of_them = list(differences)
        lines += [f"{title} {difference}" for difference in all_of_them[:_MOST_LINES]]
        if len(all_of_them) > _MOST_LINES:
            lines.append(f"{title} ... and {len(all_of_them) - _MOST_LINES} more")
    batch = find_other_batch(first, second)
    if batch is not None:
        lines.append(f"batch: from step {batch} on, other places of the order are trained")
    sample = find_other_sample(first, second)
    if sample is not None and (batch is None or sample[0] < batch):
        names = [
            _name(run, folder, sample, packages) for run, folder in zip(runs, folders, strict=True)
        ]
        both = names[0] if names[0] == names[1] else f"{names[0]} -> {names[1]}"
        lines.append(
            f"sample: the first that differs is row {sample[1]} of step {sample[0]}: {both}"
        )
    if len(first.steps) != len(second.steps) or not len(first.steps):
        lines.append(f"steps: {len(first.steps)} -> {len(second.steps)}")
    loss = find_other_loss(first, second)
    if loss is not None:
        values = [f"{float(record.steps['loss'][loss]):.9g}" for record in (first, second)]
        lines.append(f"loss: from step {loss} on: {values[0]} -> {values[1]}")
    compared = min(len(first.steps), len(second.steps))
    hashed = min(len(first.digests), len(second.digests))
    lines.append(f"compared: {compared} steps, and the bytes of the first {hashed} samples")
    return lines


def _name(run: str, folder: Path, sample: tuple[int, int], packages: Sequence[str]) -> str:
    """Return file and place of a sample, as the data of a run give it now."""
    step, row = sample
    try:
        with opening(run, folder, packages=packages) as replay:
            return replay.make(step).names[row]
    except LitDataError as error:  # its data may be gone, and those of the other there
        return f"unknown ({first_line(error)})"


def main(words: Sequence[str]) -> None:
    """Print in what two runs differ.

    Args:
        words: Those behind ``why``.

    Raises:
        LitDataError: There is no such run.
    """
    parser = Parser("why")
    options = parser.read(words)
    if options.help:
        print(_HELP)
        return
    if len(options.words) != 2:
        raise ConfigError("why needs the folders of two runs. See why --help.")
    # Absolute, as the data of a run are read from the folder where it was started.
    runs = [run if is_remote(run) else str(Path(run).absolute()) for run in options.words]
    with fetching_runs(runs, SCOPE) as folders:
        lines = explain(runs, folders, options.package)
    if len(lines) == 1:
        print("the runs do not differ")
    for line in lines:
        print(escape(line))  # names of files may be anybody's
