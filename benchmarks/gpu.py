"""Mode ``gpu``: what a first GPU is asked, in the order in which faults would show; each answer is a row of a table."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.gan import Bench
from benchmarks.gan_variants import list_ways
from lit_data.callbacks import AdaptiveBatchSize, DataWaitMonitor
from lit_data.commands.benchmarks.headroom import time_training
from lit_data.commands.benchmarks.options import Suite, choose_device
from lit_data.commands.benchmarks.table import write_lines
from lit_data.commands.build import build_datamodule
from lit_data.commands.diagnosis.machine import describe_machine
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.inference import TiledPredictor
from lit_data.loading.device_timer import time_in_turn
from lit_data.modules import GANModule
from lit_data.types import Batch

log = logging.getLogger(__name__)


COLUMNS: Final = ("part", "what", "value", "unit")
_GAN_PX: Final = 64
_GAN_BATCH: Final = 32
_TOLERANCE: Final = 1e-3
"""Probabilities of two devices may differ by so much: convolutions may round their inputs to TF32."""

Found = Iterator[tuple[str, float | str, str]]
"""What was measured, its value, its unit."""


@dataclass(frozen=True, slots=True)
class DeviceScene:
    """What all parts measure on.

    Attributes:
        cfg: The configuration.
        options: How often, and how large the batches are.
        device: A CUDA device.
    """

    cfg: DictConfig
    options: "GPUSuite"
    device: torch.device

    def open_data(self, **changed: Any) -> BaseDataModule:  # noqa: ANN401 - options of data
        """The experiment's data, with some options changed; its training split is open."""
        datamodule = build_datamodule(self.change(data={"backend": "device", **changed}))
        datamodule.setup("fit")
        return datamodule

    def change(self, **nodes: Mapping[str, Any]) -> DictConfig:
        """The configuration with other values, or more of them, in some of its nodes."""
        cfg = self.cfg.copy()
        OmegaConf.set_struct(cfg, False)
        merged = OmegaConf.merge(cfg, nodes)
        assert isinstance(merged, DictConfig)
        return merged

    def train(self, cfg: DictConfig, *callbacks: L.Callback) -> float:
        """Samples that are trained per second."""
        sizes = {"steps": self.options.steps, "warmup_steps": self.options.warmup_batches}
        return time_training(cfg, *callbacks, datamodule=self.open_data(), **sizes)

    def time(self, **works: Callable[[], object]) -> dict[str, float]:
        """Median seconds of each work."""
        return time_in_turn(works, self.options.repeats, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSuite(Suite):
    """What a first GPU is asked, in the order in which faults would show; each answer is a row of a
    table.

    Copies to it, drawing and augmenting with pixels of the batch and of the device, training with
    its share of waiting in three precisions, a batch that does not fit, peaks of a GAN's step,
    prediction beside the host's. What fails is a row too, and the rest is asked all the same.
    summary.json holds ``PART_WHAT`` for each row with a number, and ``failed``, how many parts did.

    Args:
        batch_size: Samples of a batch.
        steps: Of each training.
        warmup_batches: Steps before them.
        tile_px: Size of the tiles of prediction.
    """

    batch_size: int = 384
    repeats: int = 5
    steps: int = 30
    warmup_batches: int = 3
    tile_px: int = 512

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        if device.type != "cuda":
            raise ConfigError("suite=gpu needs a CUDA device, and there is none here")
        scene, lines = DeviceScene(cfg, self, device), list[dict[str, Any]]()
        for name, ask in _PARTS.items():
            log.info("%s ...", name)
            lines += [{"part": name, **line} for line in answer_part(ask, scene)]
        write_lines(lines, COLUMNS, Path(cfg.paths.run) / "benchmark.csv")
        print(format_table(lines, describe_machine(device)))
        failed = [line["part"] for line in lines if line["what"] == "failed"]
        if failed:
            log.error("failed: %s; hydra.verbose=true shows where", ", ".join(failed))
        values = {
            f"benchmark/{line['part']}_{line['what']}".replace(" ", "_"): line["value"]
            for line in lines
            if not isinstance(line["value"], str)
        }
        return {**values, "benchmark/batch_size": self.batch_size, "benchmark/failed": len(failed)}


def format_table(lines: list[dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """Markdown, as it goes into BENCHMARKS.md."""
    head = ["", f"{time.strftime('%Y-%m-%d')}, {machine['device']}, torch {machine['torch']}.", ""]
    rows = ["| part | what | value |", "|---|---|---|"]
    for line in lines:
        value = line["value"]
        text = value if isinstance(value, str) else f"{value:.4g} {line['unit']}".strip()
        rows.append(f"| {line['part']} | {line['what']} | {text} |")
    return "\n".join([*head, *rows, ""])


def answer_part(
    ask: Callable[[DeviceScene], Found], scene: DeviceScene
) -> Iterator[dict[str, Any]]:
    """The answers of one part; a fault is one too, and the next part is asked all the same."""
    try:
        for what, value, unit in ask(scene):
            yield {"what": what, "value": value, "unit": unit}
    except Exception as error:
        log.debug("the error", exc_info=error)
        yield {
            "what": "failed",
            "value": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "unit": "",
        }
    finally:
        torch.cuda.empty_cache()


def _ask_transfer(scene: DeviceScene) -> Found:
    """Copies of a batch of pixels, page-locked and not."""
    loader = scene.open_data().make_loader("train")
    loader.options = replace(loader.options, pin_memory=True, batch_size=scene.options.batch_size)
    locked: Tensor = next(iter(loader))["image"]
    plain = torch.empty_like(locked).copy_(locked)
    times_s = scene.time(
        locked=lambda: locked.to(scene.device, non_blocking=True),
        plain=lambda: plain.to(scene.device),
    )
    there = locked.to(scene.device, non_blocking=True)
    torch.cuda.synchronize(scene.device)
    yield "equal on the device", str(bool(torch.equal(there.cpu(), plain))).lower(), ""
    yield "page-locked", locked.nbytes / times_s["locked"] / 1e9, "GB/s"
    yield "not page-locked", plain.nbytes / times_s["plain"] / 1e9, "GB/s"
    loader.close()


def _ask_finish(scene: DeviceScene) -> Found:
    """A planned batch until the model sees it: cast, drawn, augmented; with its pixels, or those of the device."""
    for where in ("store", "device"):
        datamodule = scene.open_data(cache=where)
        batch = _plan(datamodule, scene)
        finish = partial(datamodule.finish_batch, batch, "train")
        (seconds,) = scene.time(finish=finish).values()
        yield f"pixels of the {'batch' if where == 'store' else 'device'}", 1e3 * seconds, "ms"


def _ask_training(scene: DeviceScene) -> Found:
    """A training with its loader: does the device wait for data, and what does lower precision gain?"""
    speeds: dict[str, float] = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        watch = DataWaitMonitor(plot=False)
        cfg = scene.change(trainer=_on_device(scene) | {"precision": precision})
        speeds[precision] = scene.train(cfg, watch, AdaptiveBatchSize())
        yield f"{precision}, samples a second", speeds[precision], ""
        yield (
            f"{precision}, waiting for data",
            100 * float(watch.summary()["data_wait_fraction"]),
            "%",
        )
    yield "bf16 by float32", speeds["bf16-mixed"] / speeds["32-true"], "x"


def _ask_memory(scene: DeviceScene) -> Found:
    """A batch that does not fit: is it split and trained?"""
    torch.cuda.reset_peak_memory_stats(scene.device)
    counted, train = AdaptiveBatchSize(), scene.change(trainer=_on_device(scene))
    scene.train(train, AdaptiveBatchSize())
    whole_bytes = torch.cuda.max_memory_allocated(scene.device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(scene.device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.6 * whole_bytes / total, scene.device)
    try:
        scene.train(train, counted)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, scene.device)
    found = counted.summary()
    yield "peak of a step", whole_bytes / 2**20, "MiB"
    yield "with 60 % of that: errors survived", float(found["batch/ooms"]), ""
    yield "with 60 % of that: samples at once", float(found.get("batch/size", 0)), ""


def _ask_gan(scene: DeviceScene) -> Found:
    """Peak memory of a GAN's step, as it is often written and in parts."""
    ways = {way.name: way for way in list_ways(4) if way.name in ("original", "whole", "parts")}
    images = torch.rand(_GAN_BATCH, 3, _GAN_PX, _GAN_PX, device=scene.device)
    batch: Batch = {"image": images, "index": torch.arange(_GAN_BATCH, device=scene.device)}
    bench = Bench(GANModule(image_px=_GAN_PX), scene.device)
    for name, way in ways.items():
        yield f"{name}, peak", bench.measure_peak(way, batch) / 2**20, "MiB"


def _ask_prediction(scene: DeviceScene) -> Found:
    """Whole images, tile by tile: as on the host, and how fast."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    drawn, tile_px = np.random.default_rng(0), scene.options.tile_px
    images = [
        drawn.integers(0, 256, (3, 2 * tile_px, 3 * tile_px)).astype(np.uint8) for _ in range(3)
    ]

    def predict(device: torch.device) -> list[Tensor]:
        predictor = TiledPredictor(
            net, tile_px=tile_px, overlap_px=tile_px // 8, batch_size=4, device=device
        )
        return [values for _, values in predictor.predict(images)]

    expected, found = predict(torch.device("cpu")), predict(scene.device)
    (seconds,) = scene.time(predict=lambda: predict(scene.device)).values()
    net.cpu()
    difference = max(
        float((one - two).abs().max()) for one, two in zip(expected, found, strict=True)
    )
    yield (
        "largest difference to the host",
        difference,
        "" if difference < _TOLERANCE else "(too much)",
    )
    yield "megapixels a second", sum(image[0].size for image in images) / seconds / 1e6, ""


def _plan(datamodule: BaseDataModule, scene: DeviceScene) -> Batch:
    """A planned training batch on the device."""
    loader = datamodule.make_loader("train")
    loader.options = replace(loader.options, batch_size=scene.options.batch_size)
    planned = datamodule.plan_batch(next(iter(loader)), "train")
    loader.close()
    return {name: value.to(scene.device) for name, value in planned.items()}


def _on_device(scene: DeviceScene) -> dict[str, Any]:
    return {"accelerator": "gpu", "devices": [scene.device.index or 0]}


_PARTS: Final[Mapping[str, Callable[[DeviceScene], Found]]] = {
    "transfer": _ask_transfer,
    "rendering": _ask_finish,
    "training": _ask_training,
    "out of memory": _ask_memory,
    "GAN": _ask_gan,
    "prediction": _ask_prediction,
}
