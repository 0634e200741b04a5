"""job.json: what became of a job of a sweep, and of which configuration it was."""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_data.commands.result import KEYS
from lit_data.commands.tree import walk_leaves
from lit_data.errors import ConfigError
from lit_data.files import write_json

Status = Literal["running", "done", "failed", "out of memory", "killed", "interrupted", "not run"]

_PLACES = ("run", "runs", "cache")  # where files go changes nothing of what is in them
_LEFT_OUT = ("sweep.", *(f"paths.{name}" for name in _PLACES))
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job of a sweep.

    Args:
        number: from 0, in the order of the sweep.
        overrides: of the job, those that all jobs share included.
        digest: of the resolved configuration, see `digest_config`.
        config: the configuration as composed, interpolations as typed.
        status: ``running`` until it ends.
        exit_code: as the command line gives it; None while it runs.
        reason: one line that says why it did not end well.
        seconds: from its start to its end.
        ckpt: the checkpoint that it went on from.
    """

    number: int
    overrides: tuple[str, ...]
    digest: str = ""
    config: Mapping[str, Any]
    status: Status = "running"
    exit_code: int | None = None
    reason: str = ""
    seconds: float = 0.0
    ckpt: str | None = None

    def end(self, status: Status, exit_code: int, reason: str, seconds: float) -> "JobRecord":
        """The record of a job that has ended; its reason is cut to one line."""
        lines = reason.strip().splitlines()
        line = lines[0].strip() if lines else ""
        return replace(self, status=status, exit_code=exit_code, reason=line, seconds=round(seconds, 3))


def write_record(folder: Path, record: JobRecord) -> None:
    """Write `folder`/job.json, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    write_json(folder / "job.json", asdict(record))


def read_record(folder: Path) -> JobRecord | None:
    """The record of a job's folder; None where there is none or it is damaged."""
    try:
        plain = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        return JobRecord(**{**plain, "overrides": tuple(plain["overrides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What the job measured; None where there is no complete summary.json."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and set(KEYS) <= summary.keys() else None


def digest_config(cfg: DictConfig) -> str:
    """A hash of the resolved configuration, without the options of the sweep and the folders of `paths`.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    own = copy.deepcopy(cfg)
    with read_write(own), open_dict(own):
        own.pop("sweep", None)
        for name in _PLACES:
            if "paths" in own and name in own.paths:
                own.paths[name] = f"<{name}>"
    plain = OmegaConf.to_container(own, resolve=True, enum_to_str=True)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def check_same(before: JobRecord, now: JobRecord) -> None:
    """Refuse to take the results of one configuration for those of another.

    Raises:
        ConfigError: names what differs.
    """
    if before.digest == now.digest:
        return
    difference = _name_difference(before.config, now.config)
    raise ConfigError(
        f"job {now.number} was another configuration when the sweep began ({difference}): undo the change, start a new "
        "sweep, or delete the job's folder to run it as it is now"
    )


def _name_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (walk_leaves(OmegaConf.create(dict(plain))) for plain in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith(_LEFT_OUT)]
    if not keys:
        return "an interpolation such as ${oc.env:NAME} has another value"
    named = [f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now" for key in keys[:_MOST_NAMED]]
    more = f"; {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return "; ".join(named) + more
