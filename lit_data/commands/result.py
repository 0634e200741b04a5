"""Results of a command: summary.json for scripts, and tables."""

import json
import logging
import math
import re
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat

from lit_data.errors import DataError
from lit_data.files import write_json

log = logging.getLogger(__name__)


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
    path = folder / "summary.json"
    write_json(path, ordered)
    return path


def write_confusion(folder: Path, confusion: Mapping[str, Any]) -> None:
    """Write `folder`/confusion.json: ``classes``, and for ``val`` and ``test`` the counts of images.

    Each true class is a row, what the model says a column. Nothing is written where there is none.

    Args:
        folder: The run folder.
        confusion: By stage, see `lit_data.modules.scored.Confusion`.

    Raises:
        StoreError: The file cannot be written.
    """
    if confusion:
        classes = list(next(iter(confusion.values())).classes)
        counts = {stage: table.counts for stage, table in confusion.items()}
        write_json(folder / "confusion.json", {"classes": classes, **counts})


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what `write_summary` wrote into a run folder.

    Raises:
        DataError: There is none, or it is damaged.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(f"{folder} has no summary.json: the run failed, or has not ended")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return summary


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


def _make_plain(value: Value) -> str | int | float | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)  # JSON has neither NaN nor infinity
    return number if math.isfinite(number) else None
