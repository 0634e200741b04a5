"""Mode ``loaders``: every way to load one experiment's training samples."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from lit_data.app.benchmarks.measure import Candidate, Limits, measure_rows
from lit_data.app.benchmarks.options import BenchmarkOptions, choose_device
from lit_data.app.benchmarks.table import (
    COLUMNS,
    HEADINGS,
    METHODS,
    MICRO_BATCHED,
    OURS,
    Line,
    collect_metrics,
    find_best,
    list_rows,
    report_lines,
    tabulate,
)
from lit_data.app.build import build_datamodule
from lit_data.core.errors import ConfigError
from lit_data.core.machine import count_cores
from lit_data.datamodules.base import BaseDataModule

log = logging.getLogger(__name__)

Candidates = Mapping[str, Candidate | str]
"""For each method where its samples come from, or why it cannot be measured."""

FindOthers = Callable[[BaseDataModule, Candidate, bool], Candidates]
"""Makes other ways to load the training samples: of an opened datamodule, from its candidate for
`dataloader`, finished or as they are stored."""

_CLOSE = 0.95
"""Of two settings closer than this, the simpler one is better."""

_COPY_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A setting of the configuration.

    Args:
        settings: Values of keys below `data`.
        sentence: The setting and the reason.
    """

    settings: dict[str, Any]
    sentence: str

    def metrics(self) -> dict[str, Any]:
        """Keys of summary.json."""
        loader = self.settings["loader"]
        return {f"benchmark/recommended_{name}": value for name, value in loader.items()}


def run_loaders(
    cfg: DictConfig, options: BenchmarkOptions, find_others: FindOthers | None = None
) -> dict[str, Any]:
    """Compare the loaders and recommend a setting; see `lit_data.app.benchmark.run`.

    Args:
        cfg: The configuration.
        options: Methods, sizes and repeats.
        find_others: Makes further ways to load.
    """
    device_lines, host_lines = [], []
    if options.defects and options.finish is not False:
        candidates = build_candidates(cfg, options, finish=True, find_others=find_others)
        device_lines = measure_lines(cfg, options, candidates, "device")
    if not options.defects or options.finish is not True:
        candidates = build_candidates(cfg, options, finish=False, find_others=find_others)
        if device_lines:
            candidates.pop("device", None)  # which has nothing on the host
        host_lines = measure_lines(cfg, options, candidates, "host")
    title = "with defects" if options.defects else "as stored"
    report_lines(
        device_lines + host_lines,
        COLUMNS,
        Path(cfg.paths.run),
        f"{cfg.name}: training samples {title}",
        headings=HEADINGS,
    )
    batch_size = options.batch_sizes[0]
    metrics = collect_metrics(device_lines or host_lines, batch_size)
    if device_lines and host_lines:
        for key, value in collect_metrics(host_lines, batch_size).items():
            metrics[key.replace("benchmark/", "benchmark/host_", 1)] = value
    recommendation = recommend(device_lines or host_lines, batch_size)
    if recommendation is None:
        return metrics
    log.info("%s", recommendation.sentence)
    return metrics | recommendation.metrics()


def measure_lines(
    cfg: DictConfig, options: BenchmarkOptions, candidates: Candidates, until: str
) -> list[dict[str, Any]]:
    """Measure the rows of some methods.

    Args:
        cfg: The configuration: the seed.
        options: Sizes and repeats.
        candidates: The methods.
        until: Where batches are when they are counted: ``device`` or ``host``.

    Returns:
        The lines of the table.
    """
    micro_batched = set(MICRO_BATCHED)
    for method, candidate in candidates.items():
        if isinstance(candidate, Candidate) and candidate.has_micro_batches:
            micro_batched.add(method)
    rows = list_rows(
        list(candidates),
        workers=options.workers or [count_cores()],
        micro_batch_sizes=options.micro_batch_sizes,
        batch_sizes=options.batch_sizes,
        micro_batched=micro_batched,
    )
    # start and warm-up come on top of the seconds
    limits = Limits(
        seconds=options.seconds_per_row,
        samples=options.samples_per_row,
        warmup_batches=options.warmup_batches,
    )
    results = measure_rows(
        rows,
        candidates,
        repeats=options.repeats,
        limits=limits,
        device=choose_device(options.device),
        seed=cfg.seed,
    )
    return tabulate(results, until)


def recommend(lines: Sequence[Line], batch_size: int) -> Recommendation | None:
    """Return the simplest of our settings within 5 % of the fastest; None if none was measured.

    Simpler is: inline before threads, threads before processes, all of them before a set that fills
    the device's memory; fewer workers; larger micro-batches.

    Args:
        lines: The table.
        batch_size: Of the batches that it is for.
    """
    fastest = find_best(lines, OURS, batch_size)
    if fastest is None:
        return None
    close_lines = []
    for line in lines:
        # a row without measurements has NaN, which the comparison leaves out
        is_ours = line["method"] in OURS and line["batch_size"] == batch_size
        if is_ours and line["samples_per_s"] >= _CLOSE * fastest["samples_per_s"]:
            close_lines.append(line)
    chosen = min(close_lines, key=_order_by_complexity)
    loader = {
        "worker_kind": "inline" if chosen["method"] == "device" else chosen["method"],
        "num_workers": chosen["num_workers"],
        "micro_batch_size": chosen["micro_batch_size"],
    }
    settings: dict[str, Any] = {"loader": loader}
    if chosen["method"] == "device":
        settings["cache"] = "device"
    return Recommendation(settings, _explain(lines, chosen, fastest, settings))


def _order_by_complexity(line: Line) -> tuple[int, int, int]:
    return OURS.index(line["method"]), line["num_workers"], -line["micro_batch_size"]


def _explain(lines: Sequence[Line], chosen: Line, fastest: Line, settings: dict[str, Any]) -> str:
    loader = ", ".join(f"{name}={value}" for name, value in settings["loader"].items())
    cache = ", cache=device" if "cache" in settings else ""
    batch_size = chosen["batch_size"]
    reasons = [f"{chosen['samples_per_s']:.0f} samples/s"]
    copy = find_best(lines, ["copy"], batch_size)
    if copy:
        fraction = chosen["samples_per_s"] / copy["samples_per_s"]
        reasons.append(f"{fraction:.2f} of the bare copy of ready samples")
    dataloader = find_best(lines, ["dataloader"], batch_size)
    if dataloader:
        ratio = chosen["samples_per_s"] / dataloader["samples_per_s"]
        reasons.append(f"{ratio:.1f} times torch's DataLoader")
    for method in OURS:
        other = find_best(lines, [method], batch_size)
        if other and method != chosen["method"]:
            reasons.append(f"{method} gave {other['samples_per_s']:.0f}")
    if chosen is not fastest:
        reasons.append("the simplest within 5 % of the fastest")
    return f"Recommended for batches of {batch_size}: {loader}{cache}: {'; '.join(reasons)}."


def build_candidates(
    cfg: DictConfig,
    options: BenchmarkOptions,
    *,
    finish: bool = True,
    find_others: FindOthers | None = None,
) -> dict[str, Candidate | str]:
    """Find where the samples of each method come from.

    Augmentation is left out: it is the same work for every loader, and a GPU does it.

    Args:
        cfg: The configuration.
        options: The methods; `defects` are drawn, or batches stay as stored, beside a bare copy.
        finish: Batches are cast on the device; otherwise workers draw, and that is all.
        find_others: Makes further ways to load.

    Raises:
        ConfigError: The train split is empty.
    """
    # samples as they are stored have nothing that a device could finish
    is_finished = options.defects and finish
    backend = None  # that of the experiment
    if not options.defects:
        backend = "device"  # where nothing is drawn then
    elif not finish:
        backend = "cpu"
    datamodule = _open_datamodule(cfg, backend=backend)
    if not len(datamodule.dataset("train")):
        raise ConfigError("the train split holds no images to measure with: check data.splits")
    # torch's loader and ours read the same dataset, so that the rows differ in the loader alone
    on_host = _make_candidate(datamodule, is_finished=is_finished)
    candidates: dict[str, Candidate | str] = {}
    if not options.defects or "copy" in options.methods:
        candidates["copy"] = Candidate(dataset=_gather_samples(datamodule.dataset("train")))
    if find_others is not None:
        candidates |= find_others(datamodule, on_host, options.defects)
    for method in sorted(options.methods, key=METHODS.index):
        if method == "device":
            candidates[method] = _open_device_candidate(cfg, is_finished=is_finished)
        elif method != "copy":
            candidates[method] = on_host
    return candidates


def _open_device_candidate(cfg: DictConfig, *, is_finished: bool) -> Candidate | str:
    if not is_finished:
        return (
            "patches are cut when a batch is finished: measure with benchmark.defects=true "
            "benchmark.finish=true"
        )
    if "cache" not in cfg.data:
        return "the datamodule has no option cache"
    try:
        datamodule = _open_datamodule(cfg, cache="device")
    except ConfigError as error:
        return str(error)
    return _make_candidate(datamodule, is_finished=True)


def _open_datamodule(
    cfg: DictConfig, *, cache: str | None = None, backend: str | None = None
) -> BaseDataModule:
    """Open the experiment's datamodule without augmentation, on the host if no cache is given."""
    changed = cfg.copy()
    if "augment" in cfg.data:
        changed.data.augment = None
    if cache or cfg.data.get("cache") == "device":
        changed.data.cache = cache or "store"
    if backend and "backend" in cfg.data:
        changed.data.backend = backend
    datamodule = build_datamodule(changed)
    datamodule.setup("fit")
    return datamodule


def _make_candidate(datamodule: BaseDataModule, *, is_finished: bool) -> Candidate:
    """Take the decoded samples, and the datamodule's own hooks behind the loader."""
    dataset = datamodule.dataset("train")
    if not is_finished:
        return Candidate(dataset=dataset, options=datamodule.loader)
    return Candidate(
        dataset=dataset,
        options=datamodule.loader,
        plan=lambda batch: datamodule.plan_batch(batch, "train"),
        finish=lambda batch: datamodule.finish_batch(batch, "train"),
    )


def _gather_samples(dataset: Any) -> Tensor:  # noqa: ANN401 - map-style
    """Return the images of a dataset, as many as fit into 512 MiB: [N, C, H, W]."""
    first = dataset[0]["image"]
    count = max(1, min(len(dataset), _COPY_BYTES // max(first.nbytes, 1)))
    return torch.stack([dataset[number]["image"] for number in range(count)])
