"""The options of a sweep, the node `sweep` of the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from omegaconf import DictConfig

from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError

Direction = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How the jobs of a sweep run, and what is said about them at its end.

    Args:
        metric: key of summary.json that table, plot and sweeper look at; None: what the checkpoint
            callback monitors, else the first metric of the test split.
        mode: whether the best job is that of the least (``min``) or the largest value (``max``);
            ``auto``: as the checkpoint callback says, where it monitors this metric.
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
            raise ConfigError(
                f"sweep.metric={self.metric!r}, sweep.resume={self.resume!r}: give text or null"
            )


def find_monitor(cfg: DictConfig) -> tuple[str | None, Direction | None]:
    """The metric that decides which checkpoint is the best one, and whether its least or largest value is."""
    callbacks = cfg.get("callbacks") or {}
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
    """The key of summary.json to compare jobs by, or None where a job has nothing of the kind."""
    if options.metric is not None:
        return options.metric
    if monitor is not None and is_number(metrics.get(monitor)):
        return monitor
    return next(
        (key for key in metrics if key.startswith(("test/", "test_")) and is_number(metrics[key])),
        None,
    )


def choose_direction(
    options: SweepOptions, metric: str | None, monitored: tuple[str | None, Direction | None]
) -> Direction | None:
    """Whether small or large values of the metric are good, or None where nothing says so."""
    if options.mode == "min":
        return "min"
    if options.mode == "max":
        return "max"
    return monitored[1] if metric is not None and metric == monitored[0] else None


def settle_direction(cfg: DictConfig, options: SweepOptions) -> tuple[SweepOptions, list[str]]:
    """One direction for the sweeper and for the table: of `hydra.sweeper.direction` and
    `sweep.mode`, either decides.

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
    given = sweeper.get("direction")
    if "direction" not in sweeper or not (given is None or isinstance(given, str)):
        return options, []
    said: Direction | None = {"minimize": "min", "maximize": "max"}.get(str(given))  # type: ignore[assignment]
    if given is not None and said is None:
        raise ConfigError(
            f"hydra.sweeper.direction={given} is unknown: choose minimize or maximize, or leave it out"
        )
    if said is not None and options.mode not in ("auto", said):
        raise ConfigError(
            f"sweep.mode={options.mode} and hydra.sweeper.direction={given} contradict each other: leave out one"
        )
    monitored = find_monitor(cfg)
    mode = said or choose_direction(options, options.metric or monitored[0], monitored)
    if mode is None:
        raise ConfigError(
            f"which values of {options.metric or 'the metric'} are good? Say sweep.mode=min or sweep.mode=max"
        )
    return replace(options, mode=mode), [
        f"hydra.sweeper.direction={'minimize' if mode == 'min' else 'maximize'}"
    ]


def optimized_metric(
    options: SweepOptions, monitor: str | None, metrics: Mapping[str, Any]
) -> float | None:
    """The value that a sweeper such as Optuna's learns from.

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
    if name is None or is_number(metrics.get(name)):
        return None if name is None else float(metrics[name])
    raise ConfigError(explain_metric(name, metrics))


def explain_metric(name: str, metrics: Mapping[str, Any]) -> str:
    """The line for a metric that a job does not have."""
    if name in metrics:
        return f"sweep.metric={name} is {metrics[name]!r} in the job's summary.json, which is not a number"
    known = [key for key, value in metrics.items() if is_number(value)]
    return f"the job's summary.json holds no {name!r}, which sweep.metric names.{did_you_mean(nearest(name, known))}"


def is_number(value: object) -> bool:
    """Whether a value of summary.json can be compared."""
    return isinstance(value, Real) and not isinstance(value, bool)


def split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by their keys, without a leading +."""
    return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in overrides)}
