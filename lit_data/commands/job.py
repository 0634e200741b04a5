"""One job: import the command, run it, write its summary."""

import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write

from lit_data.commands.result import PartlyDoneError, write_summary
from lit_data.commands.targets import allow_packages
from lit_data.errors import RankMismatchError

_SHARED_MODULES = {"validate": "evaluate", "test": "evaluate"}
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # in the order Lightning reads them
_LAST_WORDS_S = 5.0  # Lightning looks at its ranks this often


def run_job(cfg: DictConfig, *, flags: Sequence[str], packages: Sequence[str]) -> None:
    """Run the command of a composed configuration inside Hydra's job and print the path of its summary.

    Args:
        cfg: the configuration without Hydra's node.
        flags: options of the command line that are not overrides, such as `--config-dir FOLDER`.
        packages: packages whose targets are allowed too.
    """
    started = time.perf_counter()
    module = import_module(f"lit_data.commands.{_SHARED_MODULES.get(cfg.command, cfg.command)}")
    logging.getLogger("lightning").handlers.clear()  # its own handler would print every line a second time
    try:
        with allow_packages(packages), _command_line_for_ranks(cfg.command, flags), _leaving_no_ranks():
            metrics, failure = module.run(cfg), None
    except PartlyDoneError as error:
        metrics, failure = error.metrics, error
    except RankMismatchError:
        _let_first_rank_end()
        raise
    measured = {"seconds": time.perf_counter() - started, "peak_rss_bytes": _measure_peak_rss_bytes()}
    if _is_first_rank():
        folder = Path(HydraConfig.get().runtime.output_dir)
        print(write_summary(folder, cfg.command, cfg.name, {**metrics, **measured}), flush=True)
    if failure:
        raise failure


@contextmanager
def _command_line_for_ranks(command: str, flags: Sequence[str]) -> Iterator[None]:
    """Let Lightning's launcher start the other ranks with this job's own command line and run folder.

    It runs `sys.argv[1:]` again and adds `hydra.run.dir`, read from Hydra's configuration. With the words as typed,
    every rank of a sweep's job would start the whole sweep again (Lightning-AI/pytorch-lightning#11300).
    """
    hydra = HydraConfig.get()
    words = [*_read_words(hydra.overrides.hydra), *_read_words(hydra.overrides.task)]
    before = sys.argv
    sys.argv = [before[0], command, *flags, *(word for word in words if not word.startswith("hydra.mode="))]
    with read_write(hydra):  # type: ignore[arg-type]  # a DictConfig typed as its schema
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _leaving_no_ranks() -> Iterator[None]:
    """Put the environment back and end the process group, or the next job of a sweep would not start its ranks."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _read_words(overrides: object) -> list[str]:
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))  # interpolations stay as typed


def _is_first_rank() -> bool:
    ranks = [os.environ[name] for name in _RANK_VARIABLES if name in os.environ]
    return not ranks or ranks[0] == "0"


def _let_first_rank_end() -> None:
    """Wait for the rank that started this one, for Lightning kills it as soon as it sees that this one has failed."""
    launcher, until_s = os.getppid(), time.monotonic() + _LAST_WORDS_S
    while not _is_first_rank() and os.getppid() == launcher and time.monotonic() < until_s:
        time.sleep(0.02)


def _measure_peak_rss_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    own, ended = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + ended) * unit_bytes
