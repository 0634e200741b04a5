"""``benchmark``: the speed of loading, and what training would gain of it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from lit_data.app.benchmarks.compare import run_loaders
from lit_data.app.benchmarks.options import BenchmarkOptions, choose_device
from lit_data.app.benchmarks.training import run_headroom
from lit_data.app.checkpoints import is_exported
from lit_data.app.configuration.targets import instantiate, read_options
from lit_data.app.machine import describe_machine, print_machine
from lit_data.core.errors import ConfigError

log = logging.getLogger(__name__)

_MODES: Mapping[str, Callable[[DictConfig, BenchmarkOptions], dict[str, Any]]] = {
    "loaders": run_loaders,
    "headroom": run_headroom,
}


def run(cfg: DictConfig) -> dict[str, Any]:
    """Measure what `benchmark.mode` says, print a table and write it as ``benchmark.csv``.

    Every row is measured several times, in turn with the others, and the table holds medians. That
    of `loaders`:

    - ``until``: batches are finished on the ``device``, or leave the ``host``
    - ``samples_per_s``: after start and warm-up
    - ``ratio_to_dataloader``: to torch's DataLoader with as many workers
    - ``process_cpu_ms_per_1000``: processor time of the main process, all its threads, for 1000
      samples
    - ``main_thread_cpu_ms_per_1000``: the same of its main thread alone
    - ``first_batch_ms``: from asking for an iterator, which starts workers, to the first finished
      batch
    - ``load_ms_mean``, ``load_ms_std``: from asking for a batch to having it finished
    - ``transfer_ms``: copy of a batch from host to device; 0 where that is the CPU
    - ``pss_mib``: memory of the main process and its workers, shared pages counted once
    - ``samples``, ``repeats``, ``note``: what was measured, or why it was not

    With `suite`, an object of a package that ``--package`` names measures in place of a mode: by
    its `run`, from the configuration to keys of summary.json, on its `device`. Those under
    ``benchmarks``, beside this package in the repository, are such.

    Returns:
        Keys ``benchmark/NAME``:

        - ``cores``, ``cpu``, ``memory_bytes``, ``device``, ``python``, ``torch``, ``numpy``,
          ``lightning``: where
        - ``batch_size``: that of all figures below
        - mode `loaders` with ``finish=both``: keys of rows until the host begin with ``host_``
        - mode `loaders`: the columns above under ``METHOD_COLUMN``, of each method's fastest row;
          ``best_method`` and ``best_samples_per_s`` of the methods of lit_data;
          ``ratio_to_dataloader`` and ``share_of_copy`` of that best one to the fastest row of the
          other; ``recommended_worker_kind``, ``recommended_num_workers``,
          ``recommended_micro_batch_size``
        - mode `headroom`: ``fit_samples_per_s`` of training as it is, ``headroom_samples_per_s`` of
          training on batches that are replayed from the device's memory, ``fit_share_of_headroom``

    Raises:
        ConfigError: An option is out of its range, the mode does not fit the data, or the
            checkpoint is an exported file.
    """
    if is_exported(cfg.ckpt):
        raise ConfigError(
            f"ckpt={cfg.ckpt} is an exported file: test and validate score it; to measure its "
            "speed, run in a checkout of the repository python -m benchmarks exported "
            f"suite.file={cfg.ckpt} suite.root=FOLDER"
        )
    suite = instantiate(cfg.suite)
    options = suite or read_options(BenchmarkOptions, cfg.benchmark, "benchmark")
    node = "suite" if suite else "benchmark"
    machine = describe_machine(choose_device(options.device, f"{node}.device"))
    log.info("%s", print_machine(machine))
    metrics: dict[str, Any]
    if suite:
        metrics = suite.run(cfg)
    else:
        metrics = _MODES[options.mode](cfg, options)
    return {f"benchmark/{name}": value for name, value in machine.items()} | metrics
