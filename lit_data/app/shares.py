"""Processes that share the work of ``predict``: ranks, which meet, and parts, which do not.

Each predicts its inputs with a Trainer of one process, so that no input waits for another rank.
Lightning starts the ranks, or finds those of torchrun and SLURM; they meet before the first input
and behind the last one, over gloo, which notices a rank that dies while others wait for it.
"""

import logging
import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig

from lit_data.app.build import build_bare_trainer
from lit_data.app.launcher import find_launcher
from lit_data.core.errors import ConfigError
from lit_data.predict.options import PredictOptions, Share

log = logging.getLogger(__name__)

_LONGEST = timedelta(days=20)
"""Time that a rank may predict longer than another one."""
_LONE = {"num_nodes": 1, "strategy": "auto"}


def take_share(cfg: DictConfig, options: PredictOptions, *, shares: bool) -> tuple[Share, Trainer]:
    """Find the inputs of this process, and start the other ranks if the Trainer is to have several.

    Args:
        cfg: The configuration.
        options: Of ``predict``.
        shares: False for data whose work cannot be shared.

    Returns:
        The inputs, and the Trainer of this process, which has no callbacks and no logger.

    Raises:
        ConfigError: A launcher has started several processes that would all do the same.
    """
    part = options.chosen_part
    if part is not None:
        _refuse_ranks(f"predict.part={part}")
        return Share(number=part.number, count=part.count, leads=False), build_lone_trainer(cfg)
    if options.finish:
        _refuse_ranks("predict.finish=true")
        return Share(), build_lone_trainer(cfg)
    if not shares:
        _refuse_ranks("predict with this data")
        return Share(), build_lone_trainer(cfg)
    trainer = build_bare_trainer(cfg)
    if _has_ranks(trainer):
        return _join_ranks(cfg, trainer)
    return Share(), _keep_first_device(cfg, trainer)


def _refuse_ranks(work: str) -> None:
    launcher, launched = find_launcher()
    if launched > 1:
        raise ConfigError(
            f"{work} runs in one process, but {launched} were started: start it without {launcher}"
        )


def _has_ranks(trainer: Trainer) -> bool:
    """Return True for a Trainer of several processes, which it starts or finds.

    Raises:
        ConfigError: A launcher has started several, and the Trainer has one.
    """
    strategy = trainer.strategy
    launcher = strategy.launcher
    # Launchers of notebooks fork, and such a process does not run this command.
    if (
        isinstance(strategy, ParallelStrategy)
        and launcher is not None
        and not launcher.is_interactive_compatible
    ):
        return trainer.world_size > 1 and strategy.cluster_environment is not None
    name, launched = find_launcher()
    if launched > 1:
        raise ConfigError(
            f"{name} started {launched} processes, but this trainer predicts in one: add "
            f"trainer=ddp for GPUs or trainer=ddp_cpu, or start predict without {name}"
        )
    return False


def _join_ranks(cfg: DictConfig, trainer: Trainer) -> tuple[Share, Trainer]:
    """Return the inputs of a rank, and its own Trainer of one process."""
    strategy = trainer.strategy
    assert isinstance(strategy, ParallelStrategy)
    environment = strategy.cluster_environment
    assert environment is not None
    assert strategy.launcher is not None
    strategy.launcher.launch(_go_on)
    rank = environment.global_rank()
    count = environment.world_size()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    group = dist.new_group(timeout=_LONGEST)
    share = Share(number=rank, count=count, leads=rank == 0, wait=partial(dist.barrier, group))
    device = strategy.root_device
    devices = 1 if device.type == "cpu" else [device.index]
    # The bar of the first rank stands for all.
    overrides = {} if share.leads else {"enable_progress_bar": False}
    return share, build_bare_trainer(cfg, devices=devices, **_LONE, **overrides)


def _go_on() -> None:
    """Do nothing in the processes that Lightning has started: they run this command themselves."""


def build_lone_trainer(cfg: DictConfig) -> Trainer:
    """Build a Trainer of one process, without callbacks and logger."""
    return _keep_first_device(cfg, build_bare_trainer(cfg))


def _keep_first_device(cfg: DictConfig, trainer: Trainer) -> Trainer:
    """Return a Trainer of one process: this one, or another for the first of its devices."""
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    if trainer.world_size > 1:
        log.info("this is done in one process: only the first device is used")
    return build_bare_trainer(cfg, devices=1, **_LONE)
