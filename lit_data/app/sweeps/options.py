"""Options of a sweep: by which metric its jobs are compared, and which values of it are good."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from omegaconf import DictConfig

from lit_data.app.configuration.rows import read_words
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.app.result import find_monitor, read_number
from lit_data.core.errors import ConfigError

Direction = Literal["min", "max"]

_DIRECTIONS: dict[str, Direction] = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of how the jobs of a sweep run and are compared.

    Args:
        metric: key of summary.json that table, plot and sweeper look at; None: what the checkpoint
            callback monitors, else the first metric of the test split.
        mode: ``min`` if the least value is the best, ``max`` if the largest is; ``auto``: as the
            sweeper's direction says, else as the checkpoint callback does of this metric.
        columns: further keys of summary.json in the table.
        isolate: ``process``: each job in a process of its own; ``none``: one after the other in
            this one.
        resume: folder of a sweep to go on with, or ``latest``.

    Raises:
        ConfigError: an option is out of its range.
    """

    metric: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"
    columns: Sequence[str] | None = ()
    isolate: Literal["process", "none"] = "process"
    resume: str | None = None

    def __post_init__(self) -> None:
        if "" in (self.metric, self.resume):
            options = f"sweep.metric={self.metric!r}, sweep.resume={self.resume!r}"
            raise ConfigError(f"{options}: give text or null")


def choose_metric(cfg: DictConfig, metrics: Mapping[str, Any]) -> str | None:
    """Return the key of summary.json to compare jobs by, or None where a job has none.

    Args:
        cfg: the configuration of a job.
        metrics: of its summary.json.
    """
    if cfg.sweep.metric is not None:
        return str(cfg.sweep.metric)
    monitor, _ = find_monitor(cfg.get("callbacks") or {})
    if monitor in metrics:  # also where it is no number, or a search would compare unlike metrics
        return monitor
    for name in metrics:
        if name.startswith(("test/", "test_")) and read_number(metrics, name) is not None:
            return name
    return None


def choose_direction(cfg: DictConfig, metric: str | None) -> Direction | None:
    """Return which values of the metric are good, or None where nothing says so.

    Args:
        cfg: the configuration of a job, with Hydra's node.
        metric: None: what the checkpoint callback monitors.

    Raises:
        ConfigError: `hydra.sweeper.direction` names no direction, or not that of `sweep.mode`.
    """
    mode: Direction | None = None if cfg.sweep.mode == "auto" else cfg.sweep.mode
    typed = cfg.hydra.sweeper.get("direction")
    if typed is None or isinstance(typed, Enum):  # the default of Optuna's sweeper
        monitor, monitored_mode = find_monitor(cfg.get("callbacks") or {})
        return mode or (monitored_mode if metric in (None, monitor) else None)
    direction = _DIRECTIONS.get(str(typed))
    if direction is None:
        raise ConfigError(
            f"hydra.sweeper.direction={typed} is unknown: choose minimize or maximize, or remove it"
        )
    if mode not in (None, direction):
        raise ConfigError(
            f"sweep.mode={mode} and hydra.sweeper.direction={typed} contradict each other: "
            "remove one"
        )
    return direction


def complete_sweeper(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return overrides for options of a sweeper that nobody has given.

    The direction is that of the metric. The seed of a search follows `seed`, but not in a storage,
    whose other starts would choose the same values. A failed job ends no search.

    Args:
        cfg: the configuration of the first job, with Hydra's node.
        overrides: of the command line.

    Raises:
        ConfigError: nothing says which values are good, or two options contradict each other.
    """
    sweeper = cfg.hydra.sweeper
    if "direction" not in sweeper:
        return []
    mode = choose_direction(cfg, cfg.sweep.metric)
    if mode is None:
        name = cfg.sweep.metric or "the metric"
        raise ConfigError(f"which values of {name} are good? Set sweep.mode=min or sweep.mode=max")
    completed = {"hydra.sweeper.direction": "minimize" if mode == "min" else "maximize"}
    is_seedless = "seed" in (sweeper.get("sampler") or {}) and sweeper.sampler.seed is None
    if is_seedless and sweeper.get("storage") is None:
        completed["hydra.sweeper.sampler.seed"] = str(cfg.seed)
    if not sweeper.get("max_failure_rate", 1.0):
        completed["hydra.sweeper.max_failure_rate"] = "1.0"
    typed = read_words(overrides)
    return [f"{key}={value}" for key, value in completed.items() if key not in typed]


def explain_metric(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the message on a metric that a job does not have."""
    if name in metrics:
        value = f"sweep.metric={name} is {metrics[name]!r}"
        return f"{value} in the job's summary.json, which is not a number"
    known = [key for key in metrics if read_number(metrics, key) is not None]
    suggestion = did_you_mean(nearest(name, known))
    return f"the job's summary.json holds no {name!r}, which sweep.metric names.{suggestion}"
