"""Rank and run folder of this process before there is a Trainer, by torchrun, srun or Lightning.

Lightning starts ranks with the run folder of the first on their command line. torchrun and srun
start all of them with the same words, and a folder named by the time would be another one for each.
"""

import os
import secrets
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_data.commands.configuration.addresses import name_remote
from lit_data.errors import ConfigError
from lit_data.io.remote.options import is_remote

AUTO = "auto"
"""Value of `resume` that goes on in the folder of the run itself."""
RESUMED = ("last.ckpt", "interrupted.ckpt", "step.ckpt")
"""Checkpoints that hold the whole state of a training, which goes on from them."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a process that was told to stop."""
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""In the order in which Lightning reads them."""
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "JSM_NAMESPACE_LOCAL_RANK")
_NODES = ("NODE_RANK", "GROUP_RANK")  # with ranks of a machine only: those of Lightning
_WAIT_S = 300.0  # machines of one job need not start at the same time


def is_first_rank() -> bool:
    """Return True for the first process of the run, on the first machine."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return _read(_RANKS) == "0" and _read(_NODES) == "0"


def is_first_of_machine() -> bool:
    """Return True for the first process of the run on its machine."""
    return _read(_LOCAL_RANKS) == "0"


def is_started_by_rank() -> bool:
    """Return True for a process that the first rank of its machine has started."""
    return not is_first_of_machine() and find_launcher()[1] < 2


def place_run(cfg: DictConfig, *, sweeps: bool) -> list[str]:
    """Overrides that give all processes of a run one folder, on this machine.

    Under torchrun the first process chooses the folder and the others ask for it, in the store of
    the job; under srun its name is that of the job, so that a job that is requeued finds its
    checkpoints. A folder that was given stays. Runs at an address get a random
    end, as machines that start in the same second see no folder of each other.

    Args:
        cfg: The composed configuration with Hydra's node.
        sweeps: True for a sweep.

    Returns:
        Overrides; none where one process was started, which starts the others itself, and writes
        to a folder.

    Raises:
        ConfigError: Each of several processes would run the whole sweep, or `resume` looks for
            checkpoints in a folder that no earlier start can have had, or a sweep would lie at an
            address.
    """
    launcher, world_size = find_launcher()
    is_named_by_job = launcher == "srun" and world_size > 1
    if cfg.get("resume") == AUTO and has_new_folder(cfg) and not (sweeps or is_named_by_job):
        raise ConfigError(
            f"resume={AUTO} goes on in the folder of the run, and each start gets a new one, named "
            "by the time: give hydra.run.dir=FOLDER"
        )
    if sweeps:
        _check_sweep(cfg.paths.runs)
        return []
    goes_to_address = is_remote(cfg.paths.runs)
    if world_size < 2 and not goes_to_address:
        return []
    folder = Path(cfg.hydra.run.dir)
    is_named_by_time = _is_named_by_time(cfg)
    if goes_to_address:
        name_remote(folder.absolute(), cfg.paths.runs, cfg.paths.cache)  # refuses one elsewhere
    if goes_to_address and is_named_by_time:
        folder = folder.with_name(f"{folder.name}_{secrets.token_hex(2)}")
    if world_size < 2:
        return [f"hydra.run.dir='{folder}'"]
    if is_named_by_time and launcher == "srun":
        folder = folder.parent / f"slurm_{os.environ.get('SLURM_JOB_ID', 0)}"
    elif is_named_by_time:
        folder = Path(_share(str(folder)))
    overrides = [f"hydra.run.dir='{folder}'"]
    if not is_first_rank():  # it has a log of its own, and leaves .hydra to the first
        overrides += [f"hydra.job.name=rank_{_read(_RANKS)}", "hydra.output_subdir=null"]
    return overrides


def _check_sweep(runs: str) -> None:
    """Refuse a sweep at an address, and one that a launcher of ranks has started."""
    launcher, world_size = find_launcher()
    if is_remote(runs):
        raise ConfigError(
            f"paths.runs={runs} is an address, and a sweep reads what its jobs wrote: name a "
            "folder that all of them see"
        )
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
    return "${hydra:" in str(paths["run"]) and _is_named_by_time(cfg)


def _is_named_by_time(cfg: DictConfig) -> bool:
    return "${now:" in str(OmegaConf.to_container(cfg.hydra.run, resolve=False))


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
