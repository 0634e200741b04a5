"""What torchrun, srun or Lightning say of this process before there is a Trainer: which one it is,
and where it writes.

Lightning starts ranks with the run folder of the first on their command line. torchrun and srun
start all of them with the same words, and a folder named by the time would be another one for each.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lit_data.errors import ConfigError

_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
)  # in the order Lightning reads them
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "JSM_NAMESPACE_LOCAL_RANK")
_NODES = ("NODE_RANK", "GROUP_RANK")  # with ranks of a machine only: those of Lightning
_WAIT_S = 300.0  # machines of one job need not start at the same time


def is_first_rank() -> bool:
    """Whether this is the first process of the run, on the first machine."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return _read(_RANKS) == "0" and _read(_NODES) == "0"


def is_first_of_machine() -> bool:
    """Whether this is the first process of the run on its machine."""
    return _read(_LOCAL_RANKS) == "0"


def place_run(cfg: DictConfig, *, sweeps: bool) -> list[str]:
    """Overrides that give all processes which torchrun or srun started one run folder.

    Under torchrun the first process chooses the folder and the others ask for it, in the store of
    the job; under srun its name is that of the job, so that a job that is requeued finds its
    checkpoints. A folder that was given stays.

    Args:
        cfg: The composed configuration with Hydra's node.
        sweeps: Whether this is a sweep.

    Returns:
        Overrides; none where one process was started, which starts the others itself.

    Raises:
        ConfigError: Each of several processes would run the whole sweep.
    """
    launcher, world_size = _find_launcher()
    if world_size < 2:
        return []
    if sweeps:
        raise ConfigError(
            f"{launcher} started {world_size} processes, and each would run the whole sweep: start "
            "the sweep alone and let trainer=ddp start the ranks of each job"
        )
    own = (
        []
        if is_first_rank()
        else [f"hydra.job.name=rank_{_read(_RANKS)}", "hydra.output_subdir=null"]
    )
    folder = Path(cfg.hydra.run.dir)
    if "${now:" in str(OmegaConf.to_container(cfg.hydra.run, resolve=False)):
        named = folder.parent / f"slurm_{os.environ.get('SLURM_JOB_ID', 0)}"
        folder = named if launcher == "srun" else Path(_share(str(folder)))
    return [f"hydra.run.dir='{folder}'", *own]


def _find_launcher() -> tuple[str, int]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ.get("WORLD_SIZE", 1))
    interactive = os.environ.get("SLURM_JOB_NAME") in (
        "bash",
        "interactive",
    )  # as Lightning tells it
    return "srun", 1 if interactive else int(os.environ.get("SLURM_NTASKS", 1))


def _share(text: str) -> str:
    """What the first process says, in each of them; the agents of torchrun keep a store for their
    processes.

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
    found: bytes = store.get(key)
    return found.decode()


def _read(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "0")
