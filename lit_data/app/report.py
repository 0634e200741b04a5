"""``report``: one HTML page of a run, of several, or of a sweep, which needs only a browser."""

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from lit_data.app.cli import Parser
from lit_data.app.remote_runs import RESULTS, fetching_runs, put_file
from lit_data.app.reports.comparison import choose_metrics
from lit_data.app.reports.page import FILE, make_comparison, make_page
from lit_data.app.reports.pictures import read_pictures
from lit_data.app.reports.runs import Run, read_run
from lit_data.app.run_folder import is_run
from lit_data.app.untrusted import as_dict, load, parse_csv
from lit_data.core.addresses import is_remote, parse_store
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.files import natural_key, write_text
from lit_data.core.plain import parse_json
from lit_data.core.temp import scratch_folder

_DEEPEST = 4
_SKIPPED = (".", "replaced")  # a search moves jobs there whose values it has dropped
_WHAT_IT_IS = (
    "a run is a folder that a command of lit_data wrote, with .hydra/config.yaml or summary.json in "
    "it; a sweep, or runs/fit/NAME, is a folder of runs"
)

_HELP = """\
usage: lit-data report RUN [RUN ...] [--output FILE] [--metrics NAME,NAME]
                                 [--picture-width PX]

Writes one HTML page of what is in the folders, without asking the network for anything, and prints
its path.

  RUN                    folder of a run or of a sweep, or a folder of runs such as runs/fit/stripe;
                         also at an address, s3://bucket/runs/fit/stripe
  --output FILE          the page; by default report.html in the folder of the run or sweep, of
                         several RUNs in the folder that holds them all; may be an address
  --metrics NAME,NAME    figures of summary.json to compare, such as test/dice,samples_per_s
  --picture-width PX     pictures are scaled down to this width, by default 1200; 0 leaves them out"""
_WIDTH_PX = 1200

log = logging.getLogger(__name__)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return all runs that the paths name, each once.

    Args:
        paths: Folders of runs, of sweeps, or of both at any depth up to 4.

    Raises:
        DataError: A path is none of these, or cannot be read.
    """
    folders: dict[Path, Path] = {}  # by their resolved paths, as a link may name a run again
    for path in paths:
        if not path.is_dir():
            problem = "not a folder" if path.exists() else "not there"
            raise DataError(f"{path} is {problem}: {_WHAT_IT_IS}")
        try:
            runs = [path] if is_run(path) else _find_below(path)
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        if not runs:
            raise DataError(f"{path} is not a run and holds none: {_WHAT_IT_IS}")
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())


def choose_folder(paths: Sequence[Path]) -> Path:
    """Return the folder of the page: that of the path, of several the one that holds them all."""
    if len(paths) == 1:
        return paths[0]
    # Resolved, as a relative path and an absolute one have nothing in common.
    return Path(os.path.commonpath([path.resolve() for path in paths]))


def _find_below(folder: Path, depth: int = 1) -> list[Path]:
    """Return runs in the order of their names; within a run nothing is looked for."""
    runs: list[Path] = []
    for child in sorted(folder.iterdir(), key=lambda path: natural_key(path.name)):
        if not child.is_dir() or child.name.startswith(_SKIPPED):
            continue
        if is_run(child):
            runs.append(child)
        elif depth < _DEEPEST:
            runs += _find_below(child, depth + 1)
    return runs


@dataclass(frozen=True)
class SweepFolder:
    """A sweep as a whole.

    Attributes:
        metric: Name of the metric that its jobs are compared by; empty where that is not known.
        jobs: Number, status and reason of each job that came to no end or never began.
    """

    metric: str = ""
    jobs: tuple[tuple[str, str, str], ...] = ()


def read_sweep(folder: Path, notes: list[str]) -> SweepFolder:
    """Read sweep.json and sweep.csv as far as they are there.

    Args:
        folder: Of the sweep.
        notes: Gets a sentence for each that cannot be read.
    """
    summary = as_dict(load(folder, "sweep.json", parse_json, notes))
    jobs = []
    for row in load(folder, "sweep.csv", parse_csv, notes) or []:
        if row.get("status") not in (None, "done"):
            jobs.append((str(row.get("job")), str(row["status"]), str(row.get("reason") or "")))
    return SweepFolder(str(summary.get("metric") or ""), tuple(jobs))


def main(arguments: Sequence[str]) -> None:
    """Write the page that the command line asks for and print its path.

    Args:
        arguments: Of the command line, after ``report``.

    Raises:
        ConfigError: An option is wrong.
        DataError: A folder is no run.
        StoreError: The page cannot be written.
    """
    options = _parse(arguments)
    if options.help:
        print(_HELP)
        return
    names = [name.strip() for name in options.metrics.split(",")]
    metrics = [name for name in names if name]
    addresses = [word for word in options.words if is_remote(word)]
    output = options.output
    if output is None and addresses:
        if len(options.words) > 1:
            raise ConfigError(f"{addresses[0]} is one of several runs: give --output FILE")
        output = f"{addresses[0].rstrip('/')}/{FILE}"
    with fetching_runs(options.words, RESULTS) as paths, _placing(output) as page:
        path = write_report(paths, output=page, metrics=metrics, width_px=options.picture_width)
    print(output if is_remote(output) else path)


@contextmanager
def _placing(output: str | None) -> Iterator[str | None]:
    """Give a file to write to; at the end one that is meant for an address is copied there."""
    if not is_remote(output):
        yield output
        return
    parse_store(str(output), "--output")
    with scratch_folder() as folder:
        page = Path(folder) / FILE
        yield str(page)
        put_file(page, str(output), "--output")


def write_report(
    paths: Sequence[Path],
    *,
    output: str | Path | None = None,
    metrics: Sequence[str] = (),
    width_px: int = _WIDTH_PX,
) -> Path:
    """Write a page of runs.

    Args:
        paths: Folders of runs, of sweeps, or folders of runs.
        output: The file; by default `FILE` in the folder of the run or sweep, or in the folder that
            holds them all.
        metrics: Keys of summary.json to compare; by default scores and what the machine did.
        width_px: Pictures are scaled down to this; 0 leaves them out.

    Returns:
        The file.

    Raises:
        DataError: A folder is no run.
        StoreError: The page cannot be written.
    """
    folders = find_runs(paths)
    path = Path(output) if output is not None else choose_folder(paths) / FILE
    runs = [read_run(*named) for named in zip(folders, _name(folders), strict=True)]
    notes: list[str] = []
    sweeps = {path: read_sweep(path, notes) for path in paths if path not in folders}
    lost = []
    for path_of_sweep, sweep in sweeps.items():
        lost += [job for job in sweep.jobs if not is_run(path_of_sweep / job[0])]
    title = _entitle(runs)
    # A sweep of which one job left a folder is a comparison too.
    if len(runs) == 1 and not lost:
        page = make_page(_add_pictures(runs[0], width_px), title=title)
    else:
        first = next(iter(sweeps.values())).metric if sweeps else ""
        pictures = []
        for path_of_sweep in sweeps:
            pictures += read_pictures(path_of_sweep, notes, width_px=width_px, names=["sweep"])
        page = make_comparison(
            runs,
            title=title,
            folder=path.parent,
            metrics=choose_metrics(runs, metrics, first=first),
            pictures=pictures,
            notes=notes,
            lost=lost,
        )
    write_text(path, page)
    return path


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("report", packages=False)
    parser.add_argument("--output")
    parser.add_argument("--metrics", default="")
    parser.add_argument("--picture-width", type=int, default=_WIDTH_PX)
    options = parser.read(arguments)
    if not options.words and not options.help:
        raise ConfigError(
            "report needs the folder of a run or a sweep, such as "
            "runs/fit/stripe/2026-01-31_12-00-00"
        )
    if options.picture_width < 0:
        raise ConfigError(
            f"--picture-width {options.picture_width} is below 0: give pixels, or 0 for no pictures"
        )
    return options


def _name(folders: Sequence[Path]) -> list[str]:
    """Return the end of each path that tells it from the others."""
    # One name more from the right until all of them differ.
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own_parts[-length:]) for own_parts in parts]
        if len(set(names)) == len(names):
            break
    # A job of a sweep has but a number.
    return [f"job {name}" if name.isdecimal() else name for name in names]


def _entitle(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.experiment for run in runs))
    title = ", ".join(names[:3])
    return f"{title} and {len(names) - 3} more" if len(names) > 3 else title


def _add_pictures(run: Run, width_px: int) -> Run:
    notes = list(run.notes)
    pictures = read_pictures(run.folder, notes, width_px=width_px)
    return replace(run, pictures=tuple(pictures), notes=tuple(notes))


def add_report(cfg: DictConfig, folder: Path) -> None:
    """Write report.html of a run or a sweep where the configuration asks for it; never fail."""
    if not cfg.get("report", False):
        return
    try:
        # A run is worth more than its page: whatever goes wrong here is logged, and that is all.
        log.debug("report: %s", write_report([folder]))
    except Exception:
        log.exception("cannot write a report of %s", folder)
