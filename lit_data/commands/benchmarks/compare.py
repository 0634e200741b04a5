"""Mode ``loaders``: every way to load one experiment's training samples."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset

from lit_data.commands.benchmarks.feeds import Candidate
from lit_data.commands.benchmarks.measure import Limits, measure_rows
from lit_data.commands.benchmarks.options import BenchmarkOptions, choose_device
from lit_data.commands.benchmarks.rows import (
    COLUMNS,
    HEADINGS,
    METHODS,
    NAMES,
    OURS,
    Result,
    collect_metrics,
    find_best,
    list_rows,
    tabulate,
)
from lit_data.commands.benchmarks.table import (
    OTHERS_COLOUR,
    OURS_COLOUR,
    Line,
    Panel,
    draw_bars,
    show_lines,
    write_lines,
)
from lit_data.commands.build import build_datamodule
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, StoreError
from lit_data.loading.machine import count_cores
from lit_data.types import Batch

log = logging.getLogger(__name__)


_CLOSE: Final = 0.95
"""Of two settings closer than this, the simpler one is better."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A setting of the configuration.

    Args:
        settings: What to set below `data`.
        sentence: The setting and the reason.
    """

    settings: dict[str, Any]
    sentence: str

    def metrics(self) -> dict[str, Any]:
        """Keys of summary.json."""
        return {
            f"benchmark/recommended_{name}": value
            for name, value in self.settings["loader"].items()
        }


def recommend(lines: Sequence[Line], batch_size: int) -> Recommendation | None:
    """The simplest of our settings that is within 5 % of the fastest; none if none was measured.

    Simpler is: inline before threads, threads before processes, all of them before a set that fills
    the device's memory; fewer workers; larger micro-batches.

    Args:
        lines: The table.
        batch_size: For which batches.
    """
    best = find_best(lines, OURS, batch_size)
    if best is None:
        return None
    close = [
        line
        for line in lines
        if line["method"] in OURS
        and line["batch_size"] == batch_size
        and line["samples_per_s"] >= _CLOSE * best["samples_per_s"]
    ]
    chosen = min(close, key=_count_complexity)
    loader = {
        "worker_kind": "inline" if chosen["method"] == "device" else chosen["method"],
        "num_workers": chosen["num_workers"],
        "micro_batch_size": chosen["micro_batch_size"],
    }
    settings: dict[str, Any] = {"loader": loader}
    if chosen["method"] == "device":
        settings["cache"] = "device"
    return Recommendation(settings, _explain(lines, chosen, best, settings))


def apply(recommendation: Recommendation, folder: Path, name: str) -> Path:
    """Write a setting as an option of the group `tuned`: ``fit --config-dir FOLDER +tuned=NAME``
    uses it.

    Args:
        recommendation: What to write.
        folder: A configuration folder, made if need be.
        name: Name of the option.

    Raises:
        ConfigError: There is such an option, and it is not from here.
        StoreError: The file cannot be written.
    """
    path = folder / "tuned" / f"{name}.yaml"
    first = "# Written by python -m lit_data benchmark."
    try:
        if path.is_file() and first not in path.read_text(encoding="utf-8"):
            raise ConfigError(
                f"benchmark.apply={name}: {path} was written by hand; choose another name"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"data": recommendation.settings}, sort_keys=False)
        path.write_text(
            f"# @package _global_\n{first}\n# {recommendation.sentence}\n{text}", encoding="utf-8"
        )
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}. Set benchmark.apply_folder."
        ) from error
    return path


def _count_complexity(line: Line) -> tuple[int, int, int]:
    return OURS.index(line["method"]), line["num_workers"], -line["micro_batch_size"]


def _explain(lines: Sequence[Line], chosen: Line, best: Line, settings: dict[str, Any]) -> str:
    loader = ", ".join(f"{name}={value}" for name, value in settings["loader"].items())
    cache = ", cache=device" if "cache" in settings else ""
    batch_size = chosen["batch_size"]
    reasons = [f"{chosen['samples_per_s']:.0f} samples/s"]
    dataloader = find_best(lines, ["dataloader"], batch_size)
    if dataloader:
        ratio = chosen["samples_per_s"] / dataloader["samples_per_s"]
        reasons.append(f"{ratio:.1f} times torch's DataLoader")
    others = [
        find_best(lines, [method], batch_size) for method in OURS if method != chosen["method"]
    ]
    reasons += [f"{line['method']} gave {line['samples_per_s']:.0f}" for line in others if line]
    if chosen is not best:
        reasons.append("the simplest within 5 % of the fastest")
    return f"Recommended for batches of {batch_size}: {loader}{cache}: {'; '.join(reasons)}."


_COPY_BYTES: Final = 2**29


def run_loaders(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare the loaders and recommend a setting; see `lit_data.commands.benchmark.run`."""
    methods = [*options.methods] if options.defects else ["copy", *options.methods]
    finishes = bool(options.finish)
    lines, metrics = _compete_until(cfg, options, methods, finishes=finishes, name="benchmark")
    if options.finish == "both" and options.defects:
        on_host = [
            method for method in methods if method != "device"
        ]  # which has nothing on the host
        _, found = _compete_until(cfg, options, on_host, finishes=False, name="benchmark_host")
        metrics |= {
            key.replace("benchmark/", "benchmark/host_", 1): value for key, value in found.items()
        }
    recommendation = recommend(lines, options.batch_sizes[0])
    if recommendation is None:
        return metrics
    log.info("%s", recommendation.sentence)
    if options.apply:
        folder = Path(options.apply_folder)
        path = apply(recommendation, folder, options.apply)
        log.info(
            "written to %s; use it with: fit --config-dir %s +tuned=%s", path, folder, options.apply
        )
    return metrics | recommendation.metrics()


def _compete_until(
    cfg: DictConfig, options: BenchmarkOptions, methods: list[str], *, finishes: bool, name: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    candidates = build_candidates(cfg, methods, defects=options.defects, finish=finishes)
    until = (
        "until they are cast on the device"
        if finishes
        else "until they leave the host, what loading itself costs"
    )
    what = f"with defects, {until}" if options.defects else "as stored"
    return compete(
        cfg,
        options,
        choose_device(options.device),
        candidates,
        f"{cfg.name}: training samples {what}",
        name,
    )


def compete(
    cfg: DictConfig,
    options: BenchmarkOptions,
    device: torch.device,
    candidates: Mapping[str, Candidate | str],
    title: str,
    name: str = "benchmark",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure the rows of some methods and write what came out.

    Args:
        cfg: The configuration: the run folder, the seed.
        options: Sizes and repeats.
        device: Where batches go.
        candidates: For each method where its samples come from, or why it cannot be measured.
        title: Of the table and the picture.
        name: Of their files.

    Returns:
        The lines of the table, and metrics.
    """
    rows = list_rows(
        list(candidates),
        workers=options.workers or [count_cores()],
        micro_batch_sizes=options.micro_batch_sizes,
        batch_sizes=options.batch_sizes,
    )
    limits = Limits(
        seconds=options.seconds_per_row,
        samples=options.samples_per_row,
        warmup_batches=options.warmup_batches,
    )
    results: list[Result] = measure_rows(
        rows, candidates, repeats=options.repeats, limits=limits, device=device, seed=cfg.seed
    )
    lines, folder = tabulate(results), Path(cfg.paths.run)
    write_lines(lines, COLUMNS, folder / f"{name}.csv")
    show_lines(lines, title, headings=HEADINGS)
    log.info("table: %s", folder / f"{name}.csv")
    draw_bars(
        [_make_panel(lines, size) for size in options.batch_sizes],
        folder / f"{name}.png",
        title,
        "samples/s",
    )
    return lines, collect_metrics(lines, options.batch_sizes[0])


def _make_panel(lines: Sequence[Line], batch_size: int) -> Panel:
    """The fastest row of each method at one batch size."""
    best = [line for method in METHODS if (line := find_best(lines, [method], batch_size))]
    colours = [OURS_COLOUR if line["method"] in OURS else OTHERS_COLOUR for line in best]
    return Panel(
        names=[_describe(line) for line in best],
        bars={"": [line["samples_per_s"] for line in best]},
        colours={"": colours},
        title=f"batches of {batch_size}",
    )


def _describe(line: Line) -> str:
    workers = f"{line['num_workers']} workers" if line["num_workers"] else "no workers"
    micro = (
        f", micro-batch {line['micro_batch_size']}"
        if line["micro_batch_size"] != line["batch_size"]
        else ""
    )
    return f"{NAMES[line['method']]}\n{workers}{micro}"


def build_candidates(
    cfg: DictConfig, methods: list[str], *, defects: bool, finish: bool = True
) -> dict[str, Candidate | str]:
    """Where the samples of each method come from.

    Augmentation is left out: it is the same work for every loader, and a GPU does it.

    Args:
        cfg: The configuration.
        methods: Which methods.
        defects: Whether defects are drawn, or batches stay as stored.
        finish: Whether batches are cast on the device.

    Raises:
        ConfigError: The train split is empty.
    """
    finished = defects and finish
    backend = "device" if not defects else None if finish else "cpu"
    datamodule = _open_datamodule(cfg, backend=backend)
    if not len(datamodule.dataset("train")):
        raise ConfigError("the train split holds no images to measure with: check data.splits")
    candidates: dict[str, Candidate | str] = {}
    has_files = datamodule.source is None or datamodule.source.shards is None
    baselines = datamodule.baseline_datasets("train", finished=defects) if has_files else {}
    for method in sorted(methods, key=METHODS.index):
        if method == "device":
            candidates[method] = _open_device_candidate(cfg, finished=finished)
        elif method == "copy":
            candidates[method] = Candidate(dataset=_gather_samples(datamodule.dataset("train")))
        elif method not in ("original", "improved"):
            candidates[method] = _make_candidate(datamodule, finished=finished)
        elif method in baselines:
            candidates[method] = _make_baseline_candidate(baselines[method])
        else:
            candidates[method] = f"{type(datamodule).__name__} has no such baseline"
    return candidates


def _make_baseline_candidate(dataset: Any) -> Candidate:  # noqa: ANN401 - a dataset, perhaps one that can be warmed up
    warm_up = getattr(dataset, "warm_up", None)
    if warm_up is not None:
        warm_up()
    return Candidate(dataset=dataset, forked=warm_up is not None)


def _open_device_candidate(cfg: DictConfig, *, finished: bool) -> Candidate | str:
    if not finished:
        return "patches are cut when a batch is finished: measure with benchmark.defects=true benchmark.finish=true"
    if "cache" not in cfg.data:
        return "the datamodule has no option cache"
    try:
        datamodule = _open_datamodule(cfg, cache="device")
    except ConfigError as error:
        return str(error)
    return _make_candidate(datamodule, finished=True)


def _open_datamodule(
    cfg: DictConfig, *, cache: str | None = None, backend: str | None = None
) -> BaseDataModule:
    """The experiment's datamodule without augmentation; one that reads on the host if no cache is asked for."""
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


def _make_candidate(datamodule: BaseDataModule, *, finished: bool) -> Candidate:
    """The decoded samples, and the datamodule's own hooks after the loader."""
    dataset = datamodule.dataset("train")
    if not finished:
        return Candidate(dataset=dataset, options=datamodule.loader)
    return Candidate(
        dataset=dataset,
        options=datamodule.loader,
        plan=lambda batch: datamodule.plan_batch(batch, "train"),
        finish=lambda batch: datamodule.finish_batch(batch, "train"),
    )


def _gather_samples(dataset: Any) -> Tensor:  # noqa: ANN401 - map-style
    """The images of a set, as many as fit into 512 MiB: [N, C, H, W]."""
    first = dataset[0]["image"]
    count = max(1, min(len(dataset), _COPY_BYTES // max(first.nbytes, 1)))
    return torch.stack([dataset[number]["image"] for number in range(count)])


_UNAVAILABLE = {
    "copy": "compared in mode loaders",
    "original": "samples are in memory already",
    "improved": "samples are in memory already",
    "device": "samples are in the host's memory",
}


class SamplesInMemory(Dataset[Batch]):
    """Map-style as a user writes it: a sample is a view of a ready array.

    Args:
        count: Number of samples.
        shape: Shape of a sample, uint8.
    """

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images: Tensor = torch.randint(
            0, 256, (count, *shape), dtype=torch.uint8, generator=generator
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.images[index]}


def run_collate(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Any]:
    """Compare ways to make batches; see `lit_data.commands.benchmark.run`."""
    device = choose_device(options.device)
    dataset = SamplesInMemory(options.samples_in_memory, options.sample_shape)
    candidates = {
        method: _UNAVAILABLE.get(method) or Candidate(dataset=dataset) for method in options.methods
    }
    shape = "x".join(map(str, options.sample_shape))
    _, metrics = compete(
        cfg, options, device, candidates, f"batches of {shape} uint8 samples in memory"
    )
    return metrics
