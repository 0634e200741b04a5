"""Results of a command: summary.json for scripts, tables, and the reason of a failure."""

import logging
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from lit_data.app.untrusted import read_text
from lit_data.core.errors import (
    BatchMemoryError,
    DataError,
    LitDataError,
    escape,
    find_headline,
    settle_lines,
)
from lit_data.core.files import write_json
from lit_data.core.plain import parse_json

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

FAILURE = "failure.json"
SUMMARY = "summary.json"
KEYS = (
    "command",
    "experiment",
    "seconds",
    "samples_per_s",
    "data_wait_fraction",
    "peak_rss_bytes",
    "samples_sha256",
)

_OF_CALLBACKS = ("amp/", "batch/", "cache/", "memory/", "train/")
_STAGE = re.compile(
    r"(?:(?P<train>train)|(?P<val>val|valid|validation)|(?P<test>test))(?:[/_.-]|$)"
)

Value = str | SupportsFloat | None
Status = Literal["running", "done", "failed", "out of memory", "killed", "interrupted"]

_UNITS = {
    "seconds": "s",
    "samples_per_s": "samples/s",
    "success_rate": "%",
    "fragmentation": "%",
}
_UNIT_ENDINGS = {
    "_bytes_per_epoch": "B/epoch",
    "_bytes": "B",
    "_fraction": "%",
    "_success_rate": "%",
    "_per_s": "/s",
    "_us": "us",
    "_us_per_sample": "us",
    "_ms": "ms",
    "_px": "px",
    "_s": "s",
}
"""The first that fits counts."""
_UNIT_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "B": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")),
    "B/epoch": (
        (2.0**30, "GiB/epoch"),
        (2.0**20, "MiB/epoch"),
        (2.0**10, "KiB/epoch"),
        (1.0, "bytes/epoch"),
    ),
    "s": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "us": ((1e6, "s"), (1e3, "ms"), (1.0, "µs")),
    "%": ((0.01, "%"),),
}
"""Sizes of units and their names, the largest first."""
_LOWER_IS_BETTER = re.compile(
    r"loss|error|(^|_)(mae|mse|rmse|seconds|bytes|ooms|perplexity|fid|distance|skipped|wait\w*)($|_)"
    r"|(?<!_per)_s$|false_|latency"
)
_HIGHER_IS_BETTER = re.compile(
    r"per_s$|precision|recall|dice|success"
    r"|(^|_)(f1|iou|ap|map|auc|auroc|aupro|aupimo|froc|acc|accuracy|psnr|ssim|r2|score|jaccard)($|_|\d)"
)


class PartlyDoneError(DataError):
    """A command has done what it could; the rest of its data is bad.

    Args:
        message: What is bad.
        metrics: What the command measured, for summary.json.
    """

    def __init__(self, message: str, metrics: Mapping[str, Value]) -> None:
        super().__init__(message)
        self.metrics = metrics


def write_summary(
    folder: Path, command: str, experiment: str, metrics: Mapping[str, Value]
) -> Path:
    """Write `folder`/summary.json, whole or not at all.

    The file is one flat JSON object. These keys come first and are always there, null where the
    command does not measure them; the command's own metrics follow by name:

    - ``command``: the word on the command line
    - ``experiment``: the configuration's ``name``
    - ``seconds``: wall-clock time of the command, from the composed configuration to its end
    - ``samples_per_s``: training samples per second over the epochs, without validation
    - ``data_wait_fraction``: share of the training time spent waiting for a batch, 0 to 1
    - ``peak_rss_bytes``: largest resident memory of the main process plus that of its largest ended
      child process
    - ``samples_sha256``: sum of the digests of the training samples, see
      `lit_data.callbacks.SampleDigest`
    - any other name: a metric of the command, such as ``test/average_precision``, or of the model,
      as it logs it

    Args:
        folder: the run folder; it exists.
        command: the word on the command line.
        experiment: the configuration's ``name``.
        metrics: measured values under the keys above.

    Returns:
        The path of the file.

    Raises:
        StoreError: the file cannot be written.
    """
    values = {**metrics, "command": command, "experiment": experiment}
    names = (*KEYS, *sorted(values.keys() - set(KEYS)))
    ordered = {name: _make_plain(values.get(name)) for name in names}
    path = folder / SUMMARY
    write_json(path, ordered)
    return path


def write_confusion(folder: Path, confusion: Mapping[str, Any], curves: Mapping[str, Any]) -> None:
    """Write `folder`/confusion.json: ``classes``, and for ``val`` and ``test`` the counts of images.

    Each true class is a row, what the model says a column. ``synthetic`` lists the splits whose
    defects were drawn. ``verdicts`` has good and defective images by their verdicts, where the
    classes are others. Curves of the scores go into curves.json, by ``val`` and ``test``. Neither is
    written where it would be empty.

    Args:
        folder: The run folder.
        confusion: By stage, see `lit_data.models.scored.Confusion`.
        curves: By stage, see `lit_data.models.score_curves.ScoreCurves`.

    Raises:
        StoreError: The file cannot be written.
    """
    if confusion:
        classes = list(next(iter(confusion.values())).classes)
        counts = {stage: table.counts for stage, table in confusion.items()}
        synthetic = [stage for stage, table in confusion.items() if table.is_drawn]
        content = {"classes": classes, **counts}
        if synthetic:
            content["synthetic"] = synthetic
        verdicts = {stage: table.verdicts for stage, table in confusion.items() if table.verdicts}
        if verdicts:
            content["verdicts"] = verdicts
        write_json(folder / "confusion.json", content)
    drawn = {stage: of.as_dict() for stage, of in curves.items() if of.precision_recall}
    if drawn:
        write_json(folder / "curves.json", drawn)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what `write_summary` wrote into a run folder.

    Raises:
        DataError: There is none, or it is damaged.
    """
    path = folder / SUMMARY
    try:
        summary = parse_json(read_text(folder, path))
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no summary.json: the run failed or is not finished"
        ) from error
    except (OSError, DataError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path} is not a JSON object")
    return summary


def find_summary(folder: Path) -> dict[str, Any] | None:
    """Return what `write_summary` wrote, as far as it is whole; None without it."""
    try:
        summary = read_summary(folder)
    except DataError:
        return None
    return summary if summary.keys() >= set(KEYS) else None


def read_number(metrics: Mapping[str, Any], name: str | None) -> float | None:
    """Return a figure of a summary; None where it is missing, NaN, infinite or no number."""
    value = metrics.get(name or "")
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    texts: Collection[str],
    title: str | None = None,
    caption: str | None = None,
    console: "Console | None" = None,
) -> None:
    """Print a table on the terminal, numbers to the right.

    Args:
        headings: Of the columns.
        rows: Cells; one of `rich.text.Text` has a style.
        texts: Headings of columns that hold text, to the left.
        title: Above the table.
        caption: Below it.
        console: Where to; by default the standard output.
    """
    from rich import markup
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left", caption_justify="left")
    # Names and messages may be anybody's: nothing of them is read as markup.
    table.title = markup.escape(title) if title else None
    table.caption = markup.escape(caption) if caption else None
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading in texts else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(escape(str(cell))) for cell in row]
        table.add_row(*cells)
    (console or Console()).print(table)


def split_stage(name: str) -> tuple[str, str]:
    """Split a metric's name into the stage that it begins with, as anybody writes it, and the rest.

    Returns:
        ``train``, ``val``, ``test`` or nothing, and the name without it: ``valid_iou`` is
        (val, iou).
    """
    match = _STAGE.match(name)
    if match is None or match.end() == len(name):  # nothing would be left of the name
        return "", name
    return str(match.lastgroup), name[match.end() :]


def is_score(key: str, value: object) -> bool:
    """Return True for a figure of the model, and not one of the run or of our callbacks."""
    is_number = isinstance(value, SupportsFloat) and not isinstance(value, str | bool)
    return is_number and key not in KEYS and not key.startswith(_OF_CALLBACKS)


def join_scores(
    metrics: Mapping[str, Value], scores: Mapping[str, Value], stage: str
) -> dict[str, Value]:
    """Add the scores of a stage of any model to metrics.

    Args:
        metrics: Those that there are.
        scores: By the model's own names; some models call those of validation and test alike.
        stage: ``val`` or ``test``, which goes before a name that is taken.

    Returns:
        All of them.
    """
    joined = dict(metrics)
    for name, score in scores.items():
        is_taken = name in metrics or name in KEYS
        joined[f"{stage}/{name}" if is_taken else name] = score
    return joined


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a command or of a job: its status, exit code, and one line that says why."""

    status: Status
    exit_code: int = 0
    reason: str = ""


def describe_failure(error: Exception) -> Outcome:
    """Return the outcome of a command that raised an error, as failure.json keeps it."""
    code, name = 1, f"{type(error).__name__}: "
    if isinstance(error, LitDataError):
        code, name = error.exit_code, ""
    if code == 1 and _ran_out_of_memory(error):
        code = BatchMemoryError.exit_code
    line = settle_lines(find_headline(str(error)))
    reason = f"{name}{line}".rstrip(": ")
    return Outcome(status=name_failure(code), exit_code=code, reason=reason)


def name_failure(code: int) -> Status:
    """Return the status that an exit code other than 0 stands for."""
    return "out of memory" if code == BatchMemoryError.exit_code else "failed"


def read_failure(folder: Path) -> Outcome | None:
    """Return the failure that a command noted in its run folder; None without one."""
    try:
        return Outcome(**parse_json(read_text(folder, folder / FAILURE)))
    except (OSError, DataError, TypeError):
        return None


def _ran_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # then it was no tensor that did not fit
        return isinstance(error, MemoryError)
    from lit_data.core.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def _make_plain(value: Value) -> str | int | float | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)  # JSON has neither NaN nor infinity
    return number if math.isfinite(number) else None


def find_monitor(
    callbacks: Mapping[str, Any],
) -> tuple[str | None, Literal["min", "max"] | None]:
    """Return the metric that decides which checkpoint is the best, and its direction.

    Args:
        callbacks: The node `callbacks` of a configuration.
    """
    # The callback `checkpoint` first, as others such as early stopping have a monitor too.
    for name in sorted(callbacks, key=lambda name: name != "checkpoint"):
        node = callbacks[name]
        monitor = node.get("monitor") if isinstance(node, Mapping) else None
        if isinstance(monitor, str):
            mode = node.get("mode", "min")
            return monitor, mode if mode in ("min", "max") else None
    return None, None


def find_unit(name: str) -> str:
    """Return the unit that a metric's name tells: bytes, seconds, ``%`` of a fraction, or none."""
    last = name.rpartition("/")[2]
    if last in _UNITS:
        return _UNITS[last]
    for ending, unit in _UNIT_ENDINGS.items():
        if last.endswith(ending):
            return unit
    return ""


def choose_scale(unit: str, top: float) -> tuple[float, str]:
    """Return what numbers up to `top` are divided by to be read, and the unit they then have."""
    scales = _UNIT_SCALES.get(unit)
    if scales is None:
        return 1.0, unit
    for size, name in scales:
        # 90 s are read as such; minutes and hours begin at two.
        least = 2 * size if unit == "s" and size >= 60 else size
        if abs(top) >= least:
            return size, name
    return scales[-1]


def format_value(name: str, value: object) -> str:
    """Return a value of summary.json or of a log with its unit."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    divisor, unit = choose_scale(find_unit(name), float(value))
    number = format_number(value if divisor == 1 else value / divisor)
    return f"{number} {unit}".rstrip()


def format_number(value: float) -> str:
    """Return four digits at most, more only of whole numbers."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:  # larger floats are no exact counts
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    if 1 <= abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.4g}"


def find_direction(name: str) -> int:
    """Return 1 if more of a metric is better, -1 if less is, 0 where its name does not tell."""
    last = name.rpartition("/")[2]
    if _LOWER_IS_BETTER.search(last):
        return -1
    return 1 if _HIGHER_IS_BETTER.search(last) else 0


@contextmanager
def warning_after(command: str, what: str = "the end of the run") -> Iterator[None]:
    """Let nothing that comes after training end a run: of an error there is but a warning.

    Args:
        command: Errors of commands other than ``fit``, whose result is what they write, pass
            through.
        what: What may be missing then.
    """
    try:
        yield
    except Exception as error:
        if command != "fit":
            raise
        log.warning(
            "%s: %s: %s; training itself is done", what, type(error).__name__, error, exc_info=error
        )
