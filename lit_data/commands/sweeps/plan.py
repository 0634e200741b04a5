"""plan.json: what a sweep was asked for, so that a second start goes on with the same jobs."""

import copy
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_data.commands.configuration.tree import walk_leaves
from lit_data.commands.result import KEYS
from lit_data.commands.sweeps.options import SweepOptions, split_overrides
from lit_data.errors import ConfigError, DataError
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
        return replace(
            self, status=status, exit_code=exit_code, reason=line, seconds=round(seconds, 3)
        )


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
    """A hash of the resolved configuration, without the options of the sweep and the folders of
    `paths`.

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
    difference = _name_record_difference(before.config, now.config)
    raise ConfigError(
        f"job {now.number} was another configuration when the sweep began ({difference}): undo the change, start a new "
        "sweep, or delete the job's folder to run it as it is now"
    )


def _name_record_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (walk_leaves(OmegaConf.create(dict(plain))) for plain in (before, now))
    keys = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not key.startswith(_LEFT_OUT)
    ]
    if not keys:
        return "an interpolation such as ${oc.env:NAME} has another value"
    named = [
        f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now"
        for key in keys[:_MOST_NAMED]
    ]
    more = f"; {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return "; ".join(named) + more


_BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
# What may change from one start to the next: how and where jobs run, and what is said about them.
_FREE = (
    "sweep.",
    "hydra.sweep.dir",
    "hydra/launcher",
    "hydra.launcher",
    "paths.runs",
    "paths.cache",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep as it was asked for.

    Args:
        command: the word on the command line.
        experiment: the configuration's ``name``.
        words: overrides, as Hydra gets them.
        jobs: overrides of each job; None where the sweeper chooses them by results.
        total: how many jobs there will be.
    """

    command: str
    experiment: str
    words: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...] | None
    total: int


def make_plan(hydra: Hydra, cfg: DictConfig, words: Sequence[str]) -> Plan:
    """The jobs of a checked command line.

    Args:
        hydra: the engine.
        cfg: the configuration of the first job, with Hydra's node.
        words: overrides, as Hydra gets them.

    Raises:
        ConfigError: Hydra's own sweeper cannot make jobs of a range without steps.
    """
    sweeper, jobs = cfg.hydra.sweeper, None
    total = int(sweeper.get("n_trials") or 0)
    if sweeper._target_ == _BASIC:
        params = [f"{key!s}={value}" for key, value in (sweeper.params or {}).items()]
        jobs = _list_jobs(hydra, [*params, *words])
        total = len(jobs)
    return Plan(
        command=cfg.command, experiment=cfg.name, words=tuple(words), jobs=jobs, total=total
    )


def choose_folder(cfg: DictConfig, plan: Plan, options: SweepOptions) -> Path:
    """The folder of a sweep, absolute; that of the sweep to go on with is compared with this one.

    Raises:
        ConfigError: the sweep there is another one, or there is one already and nothing says to go
            on with it.
        DataError: there is no sweep to go on with.
    """
    own = Path(cfg.hydra.sweep.dir).absolute()
    if options.resume is None:
        if (own / "plan.json").exists():
            raise ConfigError(
                f"{own} holds a sweep already: go on with sweep.resume={own}, or give another folder"
            )
        return own
    folder = (
        _find_latest(own.parent, plan)
        if options.resume == "latest"
        else Path(options.resume).absolute()
    )
    _compare(_read_plan(folder), plan, folder)
    return folder


def write_plan(folder: Path, plan: Plan) -> None:
    """Write `folder`/plan.json, and the folder.

    Raises:
        StoreError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", asdict(plan))


def is_free(word: str) -> bool:
    """Whether a word says nothing about what the jobs of a sweep compute."""
    return word.lstrip("+~").startswith(_FREE)


def _list_jobs(hydra: Hydra, words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(list(words))
    for override in parsed:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(
                f"'{override.input_line}' is a range without steps, which needs a sweeper that chooses values: "
                "hydra/sweeper=search"
            )
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return tuple(tuple(word for word in job if not word.startswith("sweep.")) for job in jobs)


def _find_latest(parent: Path, plan: Plan) -> Path:
    found = sorted(
        parent.glob("*/plan.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )
    for path in found:
        other = _read_plan(path.parent)
        if (other.command, other.experiment) == (plan.command, plan.experiment):
            return path.parent
    raise DataError(
        f"sweep.resume=latest: no sweep of {plan.command} {plan.experiment} below {parent}; give its folder"
    )


def _read_plan(folder: Path) -> Plan:
    try:
        plain = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        jobs = plain["jobs"] and tuple(map(tuple, plain["jobs"]))
        return Plan(**{**plain, "words": tuple(plain["words"]), "jobs": jobs})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} is not the folder of a sweep: it has no readable plan.json"
        ) from error


def _compare(before: Plan, now: Plan, folder: Path) -> None:
    then = [word for word in before.words if not is_free(word)]
    words = [word for word in now.words if not is_free(word)]
    if (before.command, then) == (now.command, words) and before.total == now.total:
        return
    difference = _name_difference(then, words)
    if before.command != now.command:
        difference = f"the command was {before.command}, now it is {now.command}"
    elif not difference:
        difference = (
            "they stood in another order"
            if then != words
            else f"{before.total} jobs then, {now.total} now, from files"
        )
    raise ConfigError(
        f"the sweep in {folder} began otherwise ({difference}): start a new one, or write as then "
        f"{before.command} -m {shlex.join(then)}"
    )


def _name_difference(then: Sequence[str], now: Sequence[str]) -> str:
    old, new = split_overrides(then), split_overrides(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(
        f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now" for key in changed
    )
