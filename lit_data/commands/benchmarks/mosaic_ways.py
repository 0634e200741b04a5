"""The ways that mode `mosaic` compares, and what it measures on a device."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from omegaconf import DictConfig

from lit_data.callbacks import DataWaitMonitor
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.session import build_datamodule, build_model, build_trainer
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.datasets.detection_baselines import (
    MosaicRecipe,
    OriginalMosaics,
    collate_boxes,
    keep_images,
    read_fitting,
)
from lit_data.errors import ConfigError
from lit_data.loading.device_timer import Call, time_in_turn
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


def open_feeds(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, Feed]:
    """Batches of each way of lit_data.

    What is finished on the CPU comes in micro-batches: large ones do not fit into its caches.
    """
    batch_size, micro = options.batch_sizes[0], min(options.micro_batch_sizes[0], options.batch_sizes[0])
    sizes = {"worker": batch_size, "worker_finished": micro, "device": batch_size}
    return {
        way: open_feed(cfg, way.split("_")[0], options.repeats + 2, batch_size=size, micro_batch_size=micro)
        for way, size in sizes.items()
    }


def open_feed(cfg: DictConfig, place: str, batches: int, *, batch_size: int, micro_batch_size: int) -> Feed:
    """Batches that the main thread makes.

    Args:
        cfg: The configuration.
        place: Who draws mosaics: `worker` or `device`.
        batches: How many there must be.
        batch_size: Samples of each.
        micro_batch_size: Samples that are written at a time.
    """
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
    datamodule = open_images(cfg, place, batches, {"num_workers": 0, "worker_kind": "inline", **sizes})
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
    readers = {"original": kept.__getitem__, "original_files": lambda n: read_fitting(str(paths[n]), size_px)}
    sets = {
        way: OriginalMosaics(read, datamodule.files.labels, images, recipe, seed=datamodule.loader.seed)
        for way, read in readers.items()
    }
    finished = feeds["worker_finished"]
    return {
        "original": lambda: collate_boxes([sets["original"][number] for number in numbers]),
        "original_files": lambda: collate_boxes([sets["original_files"][number] for number in numbers]),
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
        raise ConfigError("benchmark.mode=mosaic needs images with boxes and data.mosaic: add +benchmark=mosaic")
    if given.tiles != 4 or given.probability != 1:
        raise ConfigError(
            f"data.mosaic makes mosaics of {given.tiles} with probability {given.probability}: the original way makes "
            "them of 4, always; set data.mosaic.tiles=4 data.mosaic.probability=1"
        )
    return MosaicSpec(**{name: value for name, value in given.items() if name != "_target_"})


def open_images(cfg: DictConfig, place: str, batches: int, loader: Mapping[str, Any]) -> DetectionDataModule:
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
        raise ConfigError("benchmark.mode=mosaic needs a DetectionDataModule in data._target_")
    datamodule.setup("fit")
    images = datamodule.files.splits["train"]
    if not images:
        raise ConfigError("the train split holds no images to draw: check data.splits")
    datamodule.files.splits["train"] = list(
        islice(cycle(images), max(len(images), batches * datamodule.loader.count_batch(1)))
    )
    return datamodule


def time_finish(feed: Feed, options: BenchmarkOptions, device: torch.device) -> dict[str, float]:
    """Milliseconds of a batch on its device, until its mosaics are drawn and augmented."""
    batch = finish_transfer(StagedBatch(next(feed.batches)), device)
    seconds = time_in_turn({"finish": lambda: feed.finish(batch)}, options.repeats, device)["finish"]
    log.info("finish_ms %.2f: a batch of %d, drawn and augmented on %s", 1e3 * seconds, feed.batch_size, device)
    return {"benchmark/finish_ms": 1e3 * seconds}


def train_and_wait(cfg: DictConfig, options: BenchmarkOptions) -> dict[str, float]:
    """Train the model on mosaics that are drawn on its device: what each step takes, and what of it is waiting."""
    steps = options.steps + options.warmup_batches
    datamodule = open_images(cfg, "device", steps + 1, {"batch_size": options.batch_sizes[0]})
    monitor = DataWaitMonitor(plot=False)
    trainer = build_trainer(
        cfg,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=-1,
        max_steps=steps,
    )
    trainer.fit(build_model(cfg), datamodule=datamodule)
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
