"""Mode ``mosaic``: what mosaics of four cost a core: drawn by workers, left to the device, and as people make them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

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
from lit_data.commands.benchmarks.headroom import train_steps
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
from lit_data.commands.build import build_datamodule
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.errors import ConfigError
from lit_data.loading.device_timer import Call, one_thread, time_in_turn
from lit_data.loading.transfer import StagedBatch, finish_transfer
from lit_data.mosaic import MosaicSpec
from lit_data.types import Batch

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
        """What the model sees of a batch."""
        return self.datamodule.finish_batch(batch, "train")


def open_feeds(cfg: DictConfig, options: "MosaicSuite") -> dict[str, Feed]:
    """Batches of each way of lit_data.

    What is finished on the CPU comes in micro-batches: large ones do not fit into its caches.
    """
    batch_size, micro = options.batch_size, min(options.micro_batch_size, options.batch_size)
    sizes = {"worker": batch_size, "worker_finished": micro, "device": batch_size}
    return {
        way: open_feed(
            cfg, way.split("_")[0], options.repeats + 2, batch_size=size, micro_batch_size=micro
        )
        for way, size in sizes.items()
    }


def open_feed(
    cfg: DictConfig, place: str, batches: int, *, batch_size: int, micro_batch_size: int
) -> Feed:
    """Batches that the main thread makes.

    Args:
        cfg: The configuration.
        place: Who draws mosaics: `worker` or `device`.
        batches: How many there must be.
        batch_size: Samples of each.
        micro_batch_size: Samples that are written at a time.
    """
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
    datamodule = open_images(
        cfg, place, batches, {"num_workers": 0, "worker_kind": "inline", **sizes}
    )
    return Feed(datamodule, _read(datamodule))


def list_ways(feeds: Mapping[str, Feed], spec: MosaicSpec) -> dict[str, Call]:
    """For each way of `LABELS` the work of a batch.

    Args:
        feeds: Those of lit_data, see `open_feeds`.
        spec: The mosaics.
    """
    datamodule = feeds["device"].datamodule
    numbers, images = range(datamodule.loader.count_batch(1)), datamodule.files.splits["train"]
    paths, size_px = datamodule.files.images, datamodule.source.size_px
    kept, recipe = keep_images(datamodule.bank, images), MosaicRecipe(size_px=size_px, spec=spec)
    readers = {
        "original": kept.__getitem__,
        "original_files": lambda n: read_fitting(str(paths[n]), size_px),
    }
    sets = {
        way: OriginalMosaics(
            read, datamodule.files.labels, images, recipe, seed=datamodule.loader.seed
        )
        for way, read in readers.items()
    }
    finished = feeds["worker_finished"]
    return {
        "original": lambda: collate_boxes([sets["original"][number] for number in numbers]),
        "original_files": lambda: collate_boxes(
            [sets["original_files"][number] for number in numbers]
        ),
        "worker": lambda: next(feeds["worker"].batches),
        "worker_finished": lambda: finished.finish(next(finished.batches)),
        "device": lambda: next(feeds["device"].batches),
    }


def read_spec(cfg: DictConfig) -> MosaicSpec:
    """The mosaics of the experiment.

    Raises:
        ConfigError: It has none, or others than the original way makes.
    """
    given = cfg.data.get("mosaic")
    if not given or "mosaic_on" not in cfg.data:
        raise ConfigError(
            "suite=mosaic needs images with boxes and data.mosaic: choose data=detection"
        )
    if given.tiles != 4 or given.probability != 1:
        raise ConfigError(
            f"data.mosaic makes mosaics of {given.tiles} with probability {given.probability}: the original way makes "
            "them of 4, always; set data.mosaic.tiles=4 data.mosaic.probability=1"
        )
    return MosaicSpec(**{name: value for name, value in given.items() if name != "_target_"})


def open_images(
    cfg: DictConfig, place: str, batches: int, loader: Mapping[str, Any]
) -> DetectionDataModule:
    """The experiment's images, repeated until they fill so many batches of one epoch.

    Args:
        cfg: The configuration.
        place: Who draws mosaics: `worker` or `device`.
        batches: How many there must be.
        loader: Options of the loader, the size of a batch among them.

    Raises:
        ConfigError: There are no training images.
    """
    changed = cfg.copy()
    changed.data.mosaic_on = place
    changed.data.loader.update({"drop_last": True, **loader})
    datamodule = build_datamodule(changed)
    if not isinstance(datamodule, DetectionDataModule):
        raise ConfigError("suite=mosaic needs a DetectionDataModule in data._target_")
    datamodule.setup("fit")
    images = datamodule.files.splits["train"]
    if not images:
        raise ConfigError("the train split holds no images to draw: check data.splits")
    datamodule.files.splits["train"] = list(
        islice(cycle(images), max(len(images), batches * datamodule.loader.count_batch(1)))
    )
    return datamodule


def time_finish(feed: Feed, options: "MosaicSuite", device: torch.device) -> dict[str, float]:
    """Milliseconds of a batch on its device, until its mosaics are drawn and augmented."""
    batch = finish_transfer(StagedBatch(next(feed.batches)), device)
    seconds = time_in_turn({"finish": lambda: feed.finish(batch)}, options.repeats, device)[
        "finish"
    ]
    log.info(
        "finish_ms %.2f: a batch of %d, drawn and augmented on %s",
        1e3 * seconds,
        feed.batch_size,
        device,
    )
    return {"benchmark/finish_ms": 1e3 * seconds}


def train_and_wait(cfg: DictConfig, options: "MosaicSuite") -> dict[str, float]:
    """Train the model on mosaics that are drawn on its device: what each step takes, and what of it is waiting."""
    steps = options.steps + options.warmup_batches
    datamodule = open_images(cfg, "device", steps + 1, {"batch_size": options.batch_size})
    monitor = DataWaitMonitor(plot=False)
    train_steps(cfg, monitor, steps=steps, datamodule=datamodule)
    found = monitor.summary()
    step_ms, wait = 1e3 * float(found["train/mean_step_s"]), float(found["data_wait_fraction"])
    log.info("training: %.1f ms a step, %.2f %% of it spent waiting for data", step_ms, 100 * wait)
    return {
        "benchmark/train_samples_per_s": float(found["samples_per_s"]),
        "benchmark/train_step_ms": step_ms,
        "benchmark/train_wait_fraction": wait,
    }


def _read(datamodule: DetectionDataModule) -> Iterator[Batch]:
    with closing(datamodule.make_loader("train")) as loader:
        for batch in loader:
            yield datamodule.plan_batch(batch, "train")


LABELS: Final = {
    "original": "original: four images in memory, canvas, warp, colours, flip, stack",
    "original_files": "original, decoding four files",
    "worker": "lit_data, workers draw the mosaics",
    "worker_finished": "lit_data, workers draw them; then cast, colours and flip on the same core",
    "device": "lit_data, left to the device: what is left for the core",
}
COLUMNS: Final = ("way", "us", "images_per_s", "ratio_to_original", "batch_size", "repeats")
_HEADINGS: Final = {
    "way": "way",
    "us": "us per image",
    "images_per_s": "images/s",
    "ratio_to_original": "x original",
}
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MosaicSuite(Suite):
    """What mosaics of four cost a core: drawn by workers, left to the device, and as people make
    them.

    A row for each way, all in memory and on one core: ``original`` as people do it, with colours
    and a flip; ``original_files`` with decoding; ``worker``, drawn by workers, and
    ``worker_finished``, with what else the model needs, a micro-batch at a time; ``device``, what
    is left for the core where the device draws. Medians of ``us``, time of an image,
    ``images_per_s`` of a core, and ``ratio_to_original``.

    Where mosaics are finished on a device, summary.json also holds ``finish_ms``, a planned batch
    until its mosaics are drawn and augmented, ``train_samples_per_s``, ``train_step_ms`` and
    ``train_wait_fraction``, the share of a step that waits for data.

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
        spec, on_device = read_spec(cfg), {}
        feeds = open_feeds(cfg, self)
        size_px, sizes = (
            feeds["device"].datamodule.source.size_px,
            {way: feed.batch_size for way, feed in feeds.items()},
        )
        with one_thread():
            times_s = time_in_turn(list_ways(feeds, spec), self.repeats, _CPU)
        lines = make_lines(
            times_s, {way: sizes.get(way, self.batch_size) for way in times_s}, self.repeats
        )
        folder, side = Path(cfg.paths.run), "x".join(map(str, size_px))
        title = (
            f"{cfg.name}: mosaics of four, {side} px, in batches of {self.batch_size}, on one core"
        )
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS, labels=LABELS)
        draw_bars([make_panel(lines)], folder / "benchmark.png", title, "us per image")
        if self.train if self.train != "auto" else device.type == "cuda":
            on_device = time_finish(feeds["device"], self, device) | train_and_wait(cfg, self)
        return collect(lines, COLUMNS[:4]) | {"benchmark/batch_size": self.batch_size} | on_device


def make_lines(
    times_s: Mapping[str, float], sizes: Mapping[str, int], repeats: int
) -> list[dict[str, Any]]:
    """A line of `COLUMNS` for each way.

    Args:
        times_s: Of a batch.
        sizes: Samples of a batch.
        repeats: How often it was measured.
    """
    original_s = times_s["original"] / sizes["original"]
    return [
        {
            "way": way,
            "us": 1e6 * seconds / sizes[way],
            "images_per_s": sizes[way] / seconds,
            "ratio_to_original": original_s * sizes[way] / seconds,
            "batch_size": sizes[way],
            "repeats": repeats,
        }
        for way, seconds in times_s.items()
    ]


def make_panel(lines: Sequence[Line]) -> Panel:
    """What an image takes, a bar for each way."""
    return Panel(
        names=[LABELS[line["way"]].replace(", ", ",\n", 1) for line in lines],
        bars={"": [line["us"] for line in lines]},
        colours={
            "": [
                OTHERS_COLOUR if line["way"].startswith("original") else OURS_COLOUR
                for line in lines
            ]
        },
    )
