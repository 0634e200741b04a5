"""Suite ``mosaic``: mosaics of four, drawn by workers or the device, and as people make them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.mosaic_variants import (
    MosaicRecipe,
    OriginalMosaics,
    collate_boxes,
    keep_images,
    read_fitting,
)
from lit_data.callbacks import DataWaitMonitor
from lit_data.checks import check_choice
from lit_data.commands.benchmarks.options import Suite, choose_device
from lit_data.commands.benchmarks.table import (
    OTHERS_COLOUR,
    OURS_COLOUR,
    Line,
    Panel,
    collect,
    draw_bars,
    report_lines,
)
from lit_data.commands.benchmarks.training import train_steps
from lit_data.commands.build import build_datamodule
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.errors import ConfigError
from lit_data.loading.device_timer import Call, one_thread, time_in_turn
from lit_data.loading.transfer import StagedBatch, finish_transfer
from lit_data.mosaic import MosaicSpec
from lit_data.types import Array, Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """Training batches of an experiment, one after the other, planned on the host.

    Attributes:
        datamodule: Where they come from.
        batches: As many as were asked for.
    """

    datamodule: DetectionDataModule
    batches: Iterator[Batch]

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.datamodule.loader.count_batch(1)

    @torch.no_grad()
    def finish(self, batch: Batch) -> Batch:
        """Finish a batch for the model."""
        return self.datamodule.finish_batch(batch, "train")


def open_feeds(cfg: DictConfig, options: "MosaicSuite") -> dict[str, Feed]:
    """Open the batches of each way of lit_data."""
    batch_size = options.batch_size
    micro_batch_size = min(options.micro_batch_size, batch_size)

    def open_one(mosaic_on: str, size: int) -> Feed:
        batches = options.repeats + 2
        return open_feed(
            cfg, mosaic_on, batches, batch_size=size, micro_batch_size=micro_batch_size
        )

    return {
        "worker": open_one("worker", batch_size),
        # on the CPU in micro-batches: large ones do not fit into its caches
        "worker_finished": open_one("worker", micro_batch_size),
        "device": open_one("device", batch_size),
    }


def open_feed(
    cfg: DictConfig, mosaic_on: str, batches: int, *, batch_size: int, micro_batch_size: int
) -> Feed:
    """Open batches that the main thread makes.

    Args:
        cfg: The configuration.
        mosaic_on: `worker` or `device`, which draws the mosaics.
        batches: Number of batches that there must be.
        batch_size: Samples of each.
        micro_batch_size: Samples that are written at a time.
    """
    loader = {
        "num_workers": 0,
        "worker_kind": "inline",
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
    }
    datamodule = open_images(cfg, mosaic_on, batches, loader)
    return Feed(datamodule, _read(datamodule))


def list_ways(feeds: Mapping[str, Feed], spec: MosaicSpec) -> dict[str, Call]:
    """Return the work of a batch for each way of `LABELS`.

    Args:
        feeds: Those of lit_data, see `open_feeds`.
        spec: The mosaics.
    """
    datamodule = feeds["device"].datamodule
    files, size_px = datamodule.files, datamodule.source.size_px
    images = files.splits["train"]
    recipe = MosaicRecipe(size_px=size_px, spec=spec)
    numbers = range(datamodule.loader.count_batch(1))
    decoded = keep_images(datamodule.bank, images)
    finished = feeds["worker_finished"]

    def read_file(number: int) -> Array:
        return read_fitting(str(files.images[number]), size_px)

    def work_originally(read: Callable[[int], Array]) -> Call:
        seed = datamodule.loader.seed
        mosaics = OriginalMosaics(read, files.labels, images, recipe, seed=seed)
        return lambda: collate_boxes([mosaics[number] for number in numbers])

    return {
        "original": work_originally(decoded.__getitem__),
        "original_files": work_originally(read_file),
        "worker": lambda: next(feeds["worker"].batches),
        "worker_finished": lambda: finished.finish(next(finished.batches)),
        "device": lambda: next(feeds["device"].batches),
    }


def read_spec(cfg: DictConfig) -> MosaicSpec:
    """Read the mosaics of the experiment.

    Raises:
        ConfigError: It has none, or others than the original way makes.
    """
    options = cfg.data.get("mosaic")
    if not options or "mosaic_on" not in cfg.data:
        raise ConfigError(
            "suite=mosaic needs images with boxes and data.mosaic: choose data=detection"
        )
    if options.tiles != 4 or options.probability != 1:
        raise ConfigError(
            f"data.mosaic makes mosaics of {options.tiles} with probability {options.probability}: "
            "the original way makes them of 4, always; set data.mosaic.tiles=4 "
            "data.mosaic.probability=1"
        )
    return MosaicSpec(**{name: value for name, value in options.items() if name != "_target_"})


def open_images(
    cfg: DictConfig, mosaic_on: str, batches: int, loader: Mapping[str, Any]
) -> DetectionDataModule:
    """Open the experiment's images, repeated until they fill some batches of one epoch.

    Args:
        cfg: The configuration.
        mosaic_on: `worker` or `device`, which draws the mosaics.
        batches: Number of batches that there must be.
        loader: Options of the loader, the size of a batch among them.

    Raises:
        ConfigError: There are no training images.
    """
    changed = cfg.copy()
    changed.data.mosaic_on = mosaic_on
    changed.data.loader.update({"drop_last": True, **loader})
    datamodule = build_datamodule(changed)
    if not isinstance(datamodule, DetectionDataModule):
        raise ConfigError("suite=mosaic needs a DetectionDataModule in data._target_")
    datamodule.setup("fit")
    images = datamodule.files.splits["train"]
    if not images:
        raise ConfigError("the train split holds no images to draw: check data.splits")
    samples = max(len(images), batches * datamodule.loader.count_batch(1))
    datamodule.files.splits["train"] = list(islice(cycle(images), samples))
    return datamodule


def time_finish(feed: Feed, options: "MosaicSuite", device: torch.device) -> dict[str, float]:
    """Measure a batch on its device, in ms, until its mosaics are drawn and augmented."""
    batch = finish_transfer(StagedBatch(next(feed.batches)), device)
    works: dict[str, Call] = {"finish": lambda: feed.finish(batch)}
    finish_ms = 1e3 * time_in_turn(works, options.repeats, device)["finish"]
    log.info(
        "finish_ms %.2f: a batch of %d, drawn and augmented on %s",
        *(finish_ms, feed.batch_size, device),
    )
    return {"benchmark/finish_ms": finish_ms}


def train_and_wait(cfg: DictConfig, options: "MosaicSuite") -> dict[str, float]:
    """Train on mosaics that are drawn on the device: time of a step, and waiting in it."""
    steps = options.steps + options.warmup_batches
    datamodule = open_images(cfg, "device", steps + 1, {"batch_size": options.batch_size})
    monitor = DataWaitMonitor(plot=False)
    train_steps(cfg, monitor, steps=steps, datamodule=datamodule)
    summary = monitor.summary()
    step_ms = 1e3 * float(summary["train/mean_step_s"])
    wait = float(summary["data_wait_fraction"])
    log.info("training: %.1f ms a step, %.2f %% of it spent waiting for data", step_ms, 100 * wait)
    return {
        "benchmark/train_samples_per_s": float(summary["samples_per_s"]),
        "benchmark/train_step_ms": step_ms,
        "benchmark/train_wait_fraction": wait,
    }


def _read(datamodule: DetectionDataModule) -> Iterator[Batch]:
    with closing(datamodule.make_loader("train")) as loader:
        for batch in loader:
            yield datamodule.plan_batch(batch, "train")


LABELS = {
    "original": "original: four images in memory, canvas, warp, colours, flip, stack",
    "original_files": "original, decoding four files",
    "worker": "lit_data, workers draw the mosaics",
    "worker_finished": "lit_data, workers draw them; then cast, colours and flip on the same core",
    "device": "lit_data, left to the device: what is left for the core",
}
COLUMNS = ("way", "us", "images_per_s", "ratio_to_original", "batch_size", "repeats")
_HEADINGS = {
    "way": "way",
    "us": "us per image",
    "images_per_s": "images/s",
    "ratio_to_original": "x original",
}
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicSuite(Suite):
    """Mosaics of four on one core: drawn by workers, left to the device, and as people make them.

    A row for each way, all in memory and on one core: ``original`` as people do it, with colours
    and a flip; ``original_files`` with decoding; ``worker``, drawn by workers, and
    ``worker_finished``, with what else the model needs, a micro-batch at a time; ``device``, what
    is left for the core where the device draws. Medians of ``us``, time of an image,
    ``images_per_s`` of a core, and ``ratio_to_original``.

    Where mosaics are finished on a device, summary.json also holds ``finish_ms``, a planned batch
    until its mosaics are drawn and augmented, ``train_samples_per_s``, ``train_step_ms`` and
    ``train_wait_fraction``, the fraction of a step that waits for data.

    Args:
        batch_size: Samples of a batch.
        micro_batch_size: Samples that are written, or finished on the CPU, at a time.
        steps: Of the training.
        warmup_batches: Steps before them.
        train: Finish batches on the device and train, too; `auto` where that is a CUDA device.

    Raises:
        ConfigError: A value is out of its range.
    """

    batch_size: int = 384
    micro_batch_size: int = 32
    repeats: int = 5
    steps: int = 50
    warmup_batches: int = 3
    train: bool | str = "auto"

    def __post_init__(self) -> None:
        """Check every range."""
        Suite.__post_init__(self)
        check_choice("suite.train", self.train, (True, False, "auto"))

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        spec = read_spec(cfg)
        feeds = open_feeds(cfg, self)
        with one_thread():
            times_s = time_in_turn(list_ways(feeds, spec), self.repeats, _CPU)
        sizes = {}
        for way in times_s:
            sizes[way] = feeds[way].batch_size if way in feeds else self.batch_size
        lines = make_lines(times_s, sizes, self.repeats)
        folder = Path(cfg.paths.run)
        side = "x".join(map(str, feeds["device"].datamodule.source.size_px))
        title = (
            f"{cfg.name}: mosaics of four, {side} px, in batches of {self.batch_size}, on one core"
        )
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS, labels=LABELS)
        draw_bars([make_panel(lines)], folder / "benchmark.png", title, "us per image")
        metrics = collect(lines, COLUMNS[:4]) | {"benchmark/batch_size": self.batch_size}
        trains = device.type == "cuda" if self.train == "auto" else self.train
        if trains:
            metrics |= time_finish(feeds["device"], self, device) | train_and_wait(cfg, self)
        return metrics


def make_lines(
    times_s: Mapping[str, float], sizes: Mapping[str, int], repeats: int
) -> list[dict[str, Any]]:
    """Make a line of `COLUMNS` for each way.

    Args:
        times_s: Of a batch.
        sizes: Samples of a batch.
        repeats: Number of measurements.
    """
    original_s = times_s["original"] / sizes["original"]
    lines = []
    for way, seconds in times_s.items():
        images_per_s = sizes[way] / seconds
        lines.append(
            {
                "way": way,
                "us": 1e6 / images_per_s,
                "images_per_s": images_per_s,
                "ratio_to_original": original_s * images_per_s,
                "batch_size": sizes[way],
                "repeats": repeats,
            }
        )
    return lines


def make_panel(lines: Sequence[Line]) -> Panel:
    """Make a bar for each way, of the time that an image takes."""
    colours = []
    for line in lines:
        is_original = line["way"].startswith("original")
        colours.append(OTHERS_COLOUR if is_original else OURS_COLOUR)
    return Panel(
        names=[LABELS[line["way"]].replace(", ", ",\n", 1) for line in lines],
        bars={"": [line["us"] for line in lines]},
        colours={"": colours},
    )
