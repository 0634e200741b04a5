"""One job: import the command, run it, write its summary."""

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

from lit_data.commands.launcher import is_first_rank
from lit_data.commands.rank_watch import watching_ranks
from lit_data.commands.result import PartlyDoneError, write_summary
from lit_data.commands.run_report import add_report, noting_failure, warning_after
from lit_data.commands.targets import allow_packages

_SHARED_MODULES = {"validate": "evaluate", "test": "evaluate"}
_WORDS_OF_A_SWEEP = ("hydra.mode=", "hydra.sweep.dir=", "sweep.")


def run_job(cfg: DictConfig, *, flags: Sequence[str], packages: Sequence[str]) -> None:
    """Run the command of a composed configuration inside Hydra's job and print the path of its summary.

    Args:
        cfg: the configuration without Hydra's node.
        flags: options of the command line that are not overrides, such as `--config-dir FOLDER`.
        packages: packages whose targets are allowed too.
    """
    started, folder = time.perf_counter(), Path(HydraConfig.get().runtime.output_dir)
    module = import_module(f"lit_data.commands.{_SHARED_MODULES.get(cfg.command, cfg.command)}")
    try:
        with noting_failure(cfg, folder), allow_packages(packages), _as_first_of_ranks(cfg.command, flags):
            metrics, failure = module.run(cfg), None
    except PartlyDoneError as error:
        metrics, failure = error.metrics, error
    measured = {"seconds": time.perf_counter() - started, "peak_rss_bytes": _measure_peak_rss_bytes()}
    if is_first_rank():
        with warning_after(cfg.command):
            path = write_summary(folder, cfg.command, cfg.name, {**metrics, **measured})
            add_report(cfg, folder)
            if cfg.command == "fit":
                from lit_data.commands.terminal import print_end  # after Lightning, which the command has imported

                print_end({**metrics, **measured}, folder)
            print(path, flush=True)
    if failure:
        raise failure


@contextmanager
def _as_first_of_ranks(command: str, flags: Sequence[str]) -> Iterator[None]:
    with watching_ranks(), _command_line_for_ranks(command, flags), _leaving_no_ranks():
        yield


@contextmanager
def _command_line_for_ranks(command: str, flags: Sequence[str]) -> Iterator[None]:
    """Let Lightning's launcher start the other ranks with this job's own command line and run folder.

    It runs `sys.argv[1:]` again and adds `hydra.run.dir`, read from Hydra's configuration. With the words as typed,
    every rank of a sweep's job would start the whole sweep again (Lightning-AI/pytorch-lightning#11300).
    """
    before, hydra = sys.argv, HydraConfig.get()
    sys.argv = [before[0], *list_job_words(command, flags)]
    with read_write(hydra):  # type: ignore[arg-type]  # a DictConfig typed as its schema
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield
    finally:
        sys.argv = before


def list_job_words(command: str, flags: Sequence[str]) -> list[str]:
    """The command line of the job that runs now, without the words that are for the sweep it belongs to."""
    hydra = HydraConfig.get()
    words = [*_read_words(hydra.overrides.hydra), *_read_words(hydra.overrides.task)]
    return [command, *flags, *(word for word in words if not word.startswith(_WORDS_OF_A_SWEEP))]


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


def _measure_peak_rss_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    own, ended = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + ended) * unit_bytes
