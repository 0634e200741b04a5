"""Rank and run folder of this process before there is a Trainer, by torchrun, srun or Lightning.

Lightning starts ranks with the run folder of the first on their command line. torchrun and srun
start all of them with the same words, and a folder named by the time would be another one for each.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_data.app.configuration.words import write_override
from lit_data.app.run_folder import AUTO, check_typed, claim_new
from lit_data.core.errors import ConfigError

RESUMED = ("last.ckpt", "interrupted.ckpt", "step.ckpt")
"""Checkpoints that hold the whole state of a training, which goes on from them."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a process that was told to stop."""
SWEEP_JOB = "LIT_DATA_SWEEP_JOB"
"""In the environment of a job of a sweep: its folder."""
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""In the order in which Lightning reads them."""
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "JSM_NAMESPACE_LOCAL_RANK")
_NODES = ("NODE_RANK", "GROUP_RANK")  # with ranks of a machine only: those of Lightning
_WAIT_S = 300.0  # machines of one job need not start at the same time


def is_stop(error: BaseException) -> bool:
    """Return True for the end of a process that was told to stop, by Ctrl-C or SIGTERM."""
    if isinstance(error, SystemExit) and error.code in STOPPED:
        return True
    # Lightning turns Ctrl-C into SystemExit(1).
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)


def is_first_rank() -> bool:
    """Return True for the first process of the run, on the first machine."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return _read(_RANKS) == "0" and _read(_NODES) == "0"


def is_first_of_machine() -> bool:
    """Return True for the first process of the run on its machine."""
    return _read(_LOCAL_RANKS) == "0"


def let_first_rank_speak() -> None:
    """Leave what is no warning to the first rank of each machine: the others would print the same."""
    if is_first_of_machine():
        return
    for handler in logging.getLogger().handlers:
        if type(handler) is not logging.StreamHandler:
            continue
        if handler.stream in (sys.stdout, sys.__stdout__):
            handler.setLevel(logging.WARNING)


def is_started_by_rank() -> bool:
    """Return True for a process that the first rank of its machine has started."""
    return not is_first_of_machine() and find_launcher()[1] < 2


def check_resume(cfg: DictConfig) -> None:
    """Refuse `resume` in a folder that no earlier start can have had.

    Args:
        cfg: The composed configuration with Hydra's node.

    Raises:
        ConfigError: It would look for checkpoints there.
    """
    if cfg.get("resume") == AUTO and has_new_folder(cfg) and not _is_named_by_job(cfg):
        raise ConfigError(
            f"resume={AUTO} resumes in the folder of the run, but each start gets a new folder, "
            "named by the time: give hydra.run.dir=FOLDER"
        )


def place_run(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Overrides that give all processes of a run a folder of its own, on this machine.

    The first process claims it. Under torchrun the others ask for it, in the store of the job;
    under srun its name is that of the job and its step, so that a job that is requeued finds its
    checkpoints.

    Args:
        cfg: The composed configuration with Hydra's node.
        overrides: Of the command line.

    Returns:
        Overrides; none where the command line names the folder of a lone process.

    Raises:
        ConfigError: Another run lies in the folder that was typed.
    """
    world_size = find_launcher()[1]
    folder = Path(cfg.hydra.run.dir)
    is_typed = not is_named_by_time(cfg.hydra.run)
    if is_typed and is_first_rank() and os.environ.get(SWEEP_JOB) != str(folder.absolute()):
        check_typed(cfg, overrides)
    if world_size < 2 and (is_typed or not is_first_rank()):
        return []
    if _is_named_by_job(cfg):
        folder = folder.parent / _name_job()
    elif not is_typed:
        folder = claim_folder(cfg)
        folder = Path(_share(str(folder))) if world_size > 1 else folder
    placed = [write_override("hydra.run.dir", folder)]
    if not is_first_rank():  # it has a log of its own, and leaves .hydra to the first
        placed += [f"hydra.job.name=rank_{_read(_RANKS)}", "hydra.output_subdir=null"]
    return placed


def claim_folder(cfg: DictConfig) -> Path:
    """Claim the folder of a run that is named by the time, in the first process.

    Args:
        cfg: The composed configuration with Hydra's node.
    """
    folder = Path(cfg.hydra.run.dir)
    return claim_new(folder) if is_first_rank() else folder


def _is_named_by_job(cfg: DictConfig) -> bool:
    launcher, world_size = find_launcher()
    return launcher == "srun" and world_size > 1 and is_named_by_time(cfg.hydra.run)


def _name_job() -> str:
    """Return the name of a step of a job, which is the same where the job is requeued."""
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"slurm_{job}" if step == "0" else f"slurm_{job}_{step}"


def check_alone() -> None:
    """Refuse a sweep that a launcher of ranks has started.

    Raises:
        ConfigError: Each of several processes would run the whole sweep.
    """
    launcher, world_size = find_launcher()
    if world_size > 1:
        raise ConfigError(
            f"{launcher} started {world_size} processes, and each would run the whole sweep: start "
            "the sweep alone and let trainer=ddp start the ranks of each job"
        )


def has_new_folder(cfg: DictConfig) -> bool:
    """Return True if each start gets a run folder of its own, named by the time.

    Args:
        cfg: The composed configuration with Hydra's node.
    """
    paths: Any = OmegaConf.to_container(cfg.paths, resolve=False)
    return "${hydra:" in str(paths["run"]) and is_named_by_time(cfg.hydra.run)


def is_named_by_time(node: DictConfig) -> bool:
    """Return True if the time names the folder of Hydra's node for runs, or of that for sweeps."""
    return "${now:" in str(OmegaConf.to_container(node, resolve=False))


def find_launcher() -> tuple[str, int]:
    """Return the launcher that started this process, and the number of processes it started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ.get("WORLD_SIZE", 1))
    # As Lightning tells an interactive job, in which srun has started one process.
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "srun", 1 if is_interactive else int(os.environ.get("SLURM_NTASKS", 1))


def _share(text: str) -> str:
    """Return the text of the first process in all of them, by the store of torchrun's agents.

    Where they keep none, the ranks find out later that their folders differ.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return text
    import torch.distributed as dist  # it takes a second, and most runs need no other process

    job = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    key = "/".join(("lit_data", *job, os.environ["WORLD_SIZE"], "run_folder"))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=_WAIT_S)
    store = dist.TCPStore(address, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]  # it is public
    if is_first_rank():
        store.set(key, text)
    shared: bytes = store.get(key)
    return shared.decode()


def _read(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "0")
