"""plan.json: what a sweep was asked for, so that a second start goes on with the same jobs."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from lit_data.commands.sweep_options import SweepOptions, split_overrides
from lit_data.errors import ConfigError, DataError
from lit_data.files import write_json

_BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
# What may change from one start to the next: how and where jobs run, and what is said about them.
_FREE = ("sweep.", "hydra.sweep.dir", "hydra/launcher", "hydra.launcher", "paths.runs", "paths.cache")


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
    return Plan(command=cfg.command, experiment=cfg.name, words=tuple(words), jobs=jobs, total=total)


def choose_folder(cfg: DictConfig, plan: Plan, options: SweepOptions) -> Path:
    """The folder of a sweep, absolute; that of the sweep to go on with is compared with this one.

    Raises:
        ConfigError: the sweep there is another one, or there is one already and nothing says to go on with it.
        DataError: there is no sweep to go on with.
    """
    own = Path(cfg.hydra.sweep.dir).absolute()
    if options.resume is None:
        if (own / "plan.json").exists():
            raise ConfigError(f"{own} holds a sweep already: go on with sweep.resume={own}, or give another folder")
        return own
    folder = _find_latest(own.parent, plan) if options.resume == "latest" else Path(options.resume).absolute()
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
    found = sorted(parent.glob("*/plan.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
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
        raise DataError(f"{folder} is not the folder of a sweep: it has no readable plan.json") from error


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
            "they stood in another order" if then != words else f"{before.total} jobs then, {now.total} now, from files"
        )
    raise ConfigError(
        f"the sweep in {folder} began otherwise ({difference}): start a new one, or write as then "
        f"{before.command} -m {shlex.join(then)}"
    )


def _name_difference(then: Sequence[str], now: Sequence[str]) -> str:
    old, new = split_overrides(then), split_overrides(now)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now" for key in changed)
