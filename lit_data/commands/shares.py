"""Processes that share the work of ``predict``: ranks, which meet, and parts, which do not.

Each predicts its inputs with a Trainer of one process, so that no input waits for another rank.
Lightning starts the ranks, or finds those of torchrun and SLURM; they meet before the first input
and behind the last one, over gloo, which notices a rank that dies while others wait for it.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig

from lit_data.commands.build import build_trainer
from lit_data.commands.launcher import find_launcher
from lit_data.errors import ConfigError
from lit_data.parts import Part
from lit_data.tasks.options import PredictOptions, Share

log = logging.getLogger(__name__)

_LONGEST = timedelta(days=20)
"""Time that a rank may predict longer than another one."""


class Seat(NamedTuple):
    """Work of a process, and where it is done.

    Attributes:
        share: Inputs that it predicts.
        device: Of a rank; None: the first that the Trainer is to have.
    """

    share: Share
    device: torch.device | None = None


def take_seat(cfg: DictConfig, options: PredictOptions, *, shares: bool) -> Seat:
    """Find the share of this process, and start the other ranks if the Trainer is to have several.

    Args:
        cfg: The configuration.
        options: Of ``predict``.
        shares: False for data whose work cannot be shared.

    Raises:
        ConfigError: A launcher has started several processes that would all do the same.
    """
    part = options.chosen_part
    if part is not None:
        _refuse_ranks(f"predict.part={part}")
        return Seat(Share(part=part, leads=False))
    if options.finish:
        _refuse_ranks("predict.finish=true")
        return Seat(Share())
    if not shares:
        _refuse_ranks("predict with this data")
        return Seat(Share())
    return _join_ranks(cfg)


def _refuse_ranks(work: str) -> None:
    launcher, launched = find_launcher()
    if launched > 1:
        raise ConfigError(
            f"{work} runs in one process, and {launched} were started: start it without {launcher}"
        )


def _join_ranks(cfg: DictConfig) -> Seat:
    trainer = build_trainer(cfg, callbacks=[], logger=False)
    strategy = trainer.strategy
    launcher = strategy.launcher
    # Launchers of notebooks fork, and such a process does not run this command.
    if (
        not isinstance(strategy, ParallelStrategy)
        or launcher is None
        or launcher.is_interactive_compatible
    ):
        name, launched = find_launcher()
        if launched > 1:
            raise ConfigError(
                f"{name} started {launched} processes, and this trainer predicts in one: add "
                f"trainer=ddp for GPUs or trainer=ddp_cpu, or start predict without {name}"
            )
        return Seat(Share())
    environment = strategy.cluster_environment
    if trainer.world_size < 2 or environment is None:
        return Seat(Share())
    launcher.launch(_go_on)
    rank = environment.global_rank()
    count = environment.world_size()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    group = dist.new_group(timeout=_LONGEST)
    share = Share(part=Part(rank, count), leads=rank == 0, wait=partial(dist.barrier, group))
    return Seat(share, strategy.root_device)


def _go_on() -> None:
    """Do nothing in the processes that Lightning has started: they run this command themselves."""


def build_lone_trainer(cfg: DictConfig, seat: Seat, callbacks: Sequence[Callback]) -> Trainer:
    """Build a Trainer of one process, which reads images in their order.

    Args:
        cfg: The configuration.
        seat: Of this process.
        callbacks: All that there are; it has no logger.
    """
    overrides: dict[str, Any] = {"callbacks": list(callbacks), "logger": False}
    lone = {"num_nodes": 1, "strategy": "auto"}
    if seat.device is not None:
        if not seat.share.leads:  # the bar of the first rank stands for all
            overrides["enable_progress_bar"] = False
        devices = 1 if seat.device.type == "cpu" else [seat.device.index]
        return build_trainer(cfg, devices=devices, **lone, **overrides)
    trainer = build_trainer(cfg, **overrides)
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    if trainer.world_size > 1:
        log.info("this is done in one process: only the first device is used")
    return build_trainer(cfg, devices=1, **lone, **overrides)
