"""Composing and running a suite of `benchmarks`, for its tests."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import benchmarks
from lit_data.commands.benchmark import run
from lit_data.commands.configuration.compose import compose
from lit_data.commands.configuration.names import allow_packages
from lit_data.commands.configuration.targets import instantiate

CONF = Path(benchmarks.__path__[0]) / "conf"


def compose_suite(name: str, *words: str) -> DictConfig:
    return compose(
        "benchmark", [f"+suite={name}", *words], config_dir=CONF, packages=["benchmarks"]
    )


def build_suite(cfg: DictConfig) -> Any:
    with allow_packages(["benchmarks"]):
        return instantiate(cfg.suite)


def run_suite(cfg: DictConfig) -> dict[str, Any]:
    with allow_packages(["benchmarks"]):
        return run(cfg)
