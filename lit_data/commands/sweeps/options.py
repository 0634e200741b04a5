"""Options of a sweep, the node `sweep` of the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Final, Literal

from omegaconf import DictConfig

from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError

Direction = Literal["min", "max"]

_DIRECTIONS: Final[dict[str, Direction]] = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of how the jobs of a sweep run and are compared.

    Args:
        metric: key of summary.json that table, plot and sweeper look at; None: what the checkpoint
            callback monitors, else the first metric of the test split.
        mode: ``min`` if the least value is the best, ``max`` if the largest is; ``auto``: as the
            checkpoint callback says, where it monitors this metric.
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


def find_monitor(cfg: DictConfig) -> tuple[str | None, Direction | None]:
    """Return the metric that decides which checkpoint is the best, and its direction."""
    callbacks = cfg.get("callbacks") or {}
    # The callback `checkpoint` first, as others such as early stopping have a monitor too.
    for name in sorted(callbacks, key=lambda name: name != "checkpoint"):
        node = callbacks[name]
        monitor = node.get("monitor") if isinstance(node, DictConfig) else None
        if isinstance(monitor, str):
            mode = node.get("mode", "min")
            return monitor, mode if mode in ("min", "max") else None
    return None, None


def choose_metric(
    options: SweepOptions, monitor: str | None, metrics: Mapping[str, Any]
) -> str | None:
    """Return the key of summary.json to compare jobs by, or None where a job has none."""
    if options.metric is not None:
        return options.metric
    if monitor is not None and is_number(metrics.get(monitor)):
        return monitor
    for key, value in metrics.items():
        if key.startswith(("test/", "test_")) and is_number(value):
            return key
    return None


def choose_direction(
    options: SweepOptions, metric: str | None, monitored: tuple[str | None, Direction | None]
) -> Direction | None:
    """Return which values of the metric are good, or None where nothing says so."""
    if options.mode != "auto":
        return options.mode
    return monitored[1] if metric is not None and metric == monitored[0] else None


def settle_direction(cfg: DictConfig, options: SweepOptions) -> tuple[SweepOptions, list[str]]:
    """Settle one direction for the sweeper and for the table.

    Of `hydra.sweeper.direction` and `sweep.mode`, either decides.

    Args:
        cfg: The configuration of the first job, with Hydra's node.
        options: Of the sweep.

    Returns:
        The options, and the override that tells the sweeper; none where it asks for no direction,
        or for several.

    Raises:
        ConfigError: The two contradict each other, or nothing says which values are good.
    """
    sweeper = cfg.hydra.sweeper
    typed = sweeper.get("direction")
    if "direction" not in sweeper or not (typed is None or isinstance(typed, str)):
        return options, []
    direction = _DIRECTIONS.get(str(typed))
    if typed is not None and direction is None:
        raise ConfigError(
            f"hydra.sweeper.direction={typed} is unknown: choose minimize or maximize, or leave it "
            "out"
        )
    if direction is not None and options.mode not in ("auto", direction):
        raise ConfigError(
            f"sweep.mode={options.mode} and hydra.sweeper.direction={typed} contradict each other: "
            "leave out one"
        )
    monitored = find_monitor(cfg)
    metric = options.metric or monitored[0]
    mode = direction or choose_direction(options, metric, monitored)
    if mode is None:
        name = options.metric or "the metric"
        raise ConfigError(f"which values of {name} are good? Say sweep.mode=min or sweep.mode=max")
    word = "minimize" if mode == "min" else "maximize"
    return replace(options, mode=mode), [f"hydra.sweeper.direction={word}"]


def optimized_metric(
    options: SweepOptions, monitor: str | None, metrics: Mapping[str, Any]
) -> float | None:
    """Return the value that a sweeper such as Optuna's learns from.

    Args:
        options: name the metric.
        monitor: what the checkpoint callback monitors.
        metrics: of the job's summary.json.

    Returns:
        The value; None where no metric was asked for and the job has none to choose.

    Raises:
        ConfigError: the job has no such metric, or its value is not a number.
    """
    name = choose_metric(options, monitor, metrics)
    if name is None:
        return None
    if not is_number(metrics.get(name)):
        raise ConfigError(explain_metric(name, metrics))
    return float(metrics[name])


def explain_metric(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the message on a metric that a job does not have."""
    if name in metrics:
        value = f"sweep.metric={name} is {metrics[name]!r}"
        return f"{value} in the job's summary.json, which is not a number"
    known = [key for key, value in metrics.items() if is_number(value)]
    suggestion = did_you_mean(nearest(name, known))
    return f"the job's summary.json holds no {name!r}, which sweep.metric names.{suggestion}"


def is_number(value: object) -> bool:
    """Return True if a value of summary.json can be compared."""
    return isinstance(value, Real) and not isinstance(value, bool)


def split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return overrides by their keys, without a leading +."""
    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[key.lstrip("+")] = value
    return values
