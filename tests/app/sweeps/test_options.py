"""Options of a sweep: the metric that jobs are compared by, and which values of it are good."""

import re
from enum import Enum
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lit_data.app.configuration.targets import read_options
from lit_data.app.sweeps.options import (
    SweepOptions,
    choose_direction,
    complete_sweeper,
    explain_metric,
)
from lit_data.core.errors import ConfigError

METRICS = {"val/loss": 0.5, "test/ap": 0.25, "test/count": 3, "test/name": "a", "test/none": None}


class Direction(Enum):
    """Default of Optuna's sweeper, which nobody has typed."""

    minimize = 1


def make_cfg(
    metric: str | None = None,
    mode: str = "auto",
    monitor: str | None = "val/score",
    monitor_mode: str = "max",
    **sweeper: Any,
) -> DictConfig:
    callbacks = {"checkpoint": {"monitor": monitor, "mode": monitor_mode}} if monitor else {}
    sweep = {"metric": metric, "mode": mode}
    hydra = {"sweeper": sweeper}
    return OmegaConf.create({"seed": 7, "sweep": sweep, "callbacks": callbacks, "hydra": hydra})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("test/app", "holds no 'test/app', which sweep.metric names. Did you mean 'test/ap'?"),
        ("test/name", "sweep.metric=test/name is 'a' in the job's summary.json, which is not a"),
        ("test/none", "sweep.metric=test/none is None in the job's"),
    ],
)
def test_a_metric_without_a_number_is_explained(name: str, text: str) -> None:
    assert text in explain_metric(name, METRICS)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"isolate": "thread"}, r"^'sweep\.isolate' is 'thread': give one of process, none$"),
        ({"mode": "most"}, r"^'sweep\.mode' is 'most': give one of auto, min, max$"),
        ({"columns": [1]}, r"^'sweep\.columns' is \[1\]: give a list, each text or null$"),
        ({"metric": 3}, r"^'sweep\.metric' is 3: give text or null$"),
        ({"resume": ""}, r"sweep\.resume='': give text or null$"),
        ({"metrik": "a"}, r"^unknown key 'sweep\.metrik'.* Did you mean 'sweep\.metric'\?$"),
        ("latest", r"^'sweep' is 'latest': it must hold names and values$"),
    ],
)
def test_options_are_checked(node: Any, message: str) -> None:
    cfg = OmegaConf.create({"sweep": node})
    with pytest.raises(ConfigError, match=message):
        read_options(SweepOptions, cfg.sweep, "sweep")


@pytest.mark.parametrize(
    ("cfg", "metric", "direction"),
    [
        (make_cfg(), None, "max"),
        (make_cfg(), "val/score", "max"),
        (make_cfg(), "val/loss", None),
        (make_cfg(monitor=None), None, None),
        (make_cfg(mode="min"), "val/loss", "min"),
        (make_cfg(mode="min"), "val/score", "min"),
        (make_cfg(direction="minimize"), "x", "min"),
        (make_cfg(direction="maximize", mode="max"), "x", "max"),
        (make_cfg(direction=Direction.minimize), "val/score", "max"),
    ],
)
def test_sweeper_and_table_have_one_direction(
    cfg: DictConfig, metric: str | None, direction: str | None
) -> None:
    assert choose_direction(cfg, metric) == direction


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (make_cfg(direction="maximize", mode="min"), "direction=maximize contradict each other"),
        (make_cfg("other", direction=Direction.minimize), "which values of other are good"),
        (make_cfg(monitor=None, direction=None), "which values of the metric are good"),
        (make_cfg(direction="upwards"), "hydra.sweeper.direction=upwards is unknown"),
        (make_cfg(direction=["minimize", "maximize"]), "'maximize'] is unknown"),
    ],
)
def test_a_direction_that_is_unclear_or_contradicts_is_refused(cfg: DictConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        complete_sweeper(cfg, [])


@pytest.mark.parametrize(
    ("sweeper", "typed", "added"),
    [
        ({}, [], []),
        ({"direction": Direction.minimize}, [], ["direction=maximize"]),
        ({"direction": "maximize"}, ["hydra.sweeper.direction=maximize"], []),
        (
            {"direction": None, "sampler": {"seed": None}, "max_failure_rate": 0.0},
            [],
            ["direction=maximize", "sampler.seed=7", "max_failure_rate=1.0"],
        ),
        (
            {"direction": None, "sampler": {"seed": 3}, "max_failure_rate": 0.5},
            [],
            ["direction=maximize"],
        ),
        (
            {"direction": None, "sampler": {"seed": None}, "storage": "sqlite:///a.db"},
            [],
            ["direction=maximize"],
        ),
        (
            {"direction": None, "max_failure_rate": 0.0},
            ["hydra.sweeper.max_failure_rate=0.0"],
            ["direction=maximize"],
        ),
    ],
)
def test_a_sweeper_gets_what_nobody_has_given(
    sweeper: dict[str, Any], typed: list[str], added: list[str]
) -> None:
    words = [f"hydra.sweeper.{word}" for word in added]
    assert complete_sweeper(make_cfg(**sweeper), typed) == words
