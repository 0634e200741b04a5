"""Suite ``gpu``: questions to a first GPU, in the order in which faults would show."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.suite import Suite
from lit_data.app.benchmarks.options import choose_device
from lit_data.app.benchmarks.table import write_lines
from lit_data.app.benchmarks.training import time_training
from lit_data.app.build import build_datamodule
from lit_data.app.machine import describe_machine
from lit_data.callbacks import AdaptiveBatchSize, DataWaitMonitor
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading.device_timer import time_in_turn
from lit_data.predict import TiledPredictor
from lit_data.testing import QUIET
from lit_data.wings.gan import GANModule

log = logging.getLogger(__name__)


COLUMNS = ("part", "what", "value", "unit")
_GAN_BATCH = 32
_GAN_PART = 4
_GAN_STEPS = 2
_TOLERANCE = 1e-3
"""Largest difference of probabilities of two devices: convolutions may round inputs to TF32."""

Answers = Iterator[tuple[str, float | str, str]]
"""A quantity, its value, its unit."""


@dataclass(frozen=True, slots=True)
class DeviceScene:
    """Configuration and device that all parts measure.

    Attributes:
        cfg: The configuration.
        options: Repeats, and sizes of batches.
        device: A CUDA device.
    """

    cfg: DictConfig
    options: "GPUSuite"
    device: torch.device

    def open_data(self, **changed: Any) -> BaseDataModule:  # noqa: ANN401 - options of data
        """Open the experiment's data, with some options changed."""
        datamodule = build_datamodule(self.change(data={"backend": "device", **changed}))
        datamodule.setup("fit")
        return datamodule

    def change(self, **nodes: Mapping[str, Any]) -> DictConfig:
        """Return the configuration with other values, or more of them, in some of its nodes."""
        cfg = self.cfg.copy()
        OmegaConf.set_struct(cfg, False)
        merged = OmegaConf.merge(cfg, nodes)
        assert isinstance(merged, DictConfig)
        return merged

    def train(self, cfg: DictConfig, *callbacks: L.Callback) -> float:
        """Measure the samples that are trained per second."""
        return time_training(
            cfg,
            *callbacks,
            datamodule=self.open_data(),
            steps=self.options.steps,
            warmup_steps=self.options.warmup_batches,
        )

    def time(self, **works: Callable[[], object]) -> dict[str, float]:
        """Measure the median seconds of each work."""
        return time_in_turn(works, self.options.repeats, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSuite(Suite):
    """Questions to a first GPU, in the order in which faults would show; each answer is a row.

    Copies to it, drawing and augmenting with pixels of the batch and of the device, training with
    its share of waiting in three precisions, a batch that does not fit, peaks of a GAN's step,
    prediction beside the host's. What fails is a row too, and the rest is asked all the same.
    summary.json holds ``PART_WHAT`` for each row with a number, and ``failed``, how many parts did.

    Args:
        batch_size: Samples of a batch.
        steps: Of each training.
        warmup_batches: Steps before them.
        gan_px: Size of the images of the GAN.
        tile_px: Size of the tiles of prediction.
    """

    batch_size: int = 384
    repeats: int = 5
    steps: int = 30
    warmup_batches: int = 3
    gan_px: int = 64
    tile_px: int = 512

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        if device.type != "cuda":
            raise ConfigError("suite=gpu needs a CUDA device, and there is none here")
        scene = DeviceScene(cfg, self, device)
        lines: list[dict[str, Any]] = []
        for name, ask in _PARTS.items():
            log.info("%s ...", name)
            lines += [{"part": name, **line} for line in answer_part(ask, scene)]
        write_lines(lines, COLUMNS, Path(cfg.paths.run) / "benchmark.csv")
        print(format_table(lines, describe_machine(device)))
        failed = [line["part"] for line in lines if line["what"] == "failed"]
        if failed:
            log.error("failed: %s; hydra.verbose=true shows where", ", ".join(failed))
        metrics = {"benchmark/batch_size": self.batch_size, "benchmark/failed": len(failed)}
        for line in lines:
            if not isinstance(line["value"], str):
                key = f"benchmark/{line['part']}_{line['what']}".replace(" ", "_")
                metrics[key] = line["value"]
        return metrics


def format_table(lines: list[dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """Format a table of Markdown, as it goes into BENCHMARKS.md."""
    head = ["", f"{time.strftime('%Y-%m-%d')}, {machine['device']}, torch {machine['torch']}.", ""]
    rows = ["| part | what | value |", "|---|---|---|"]
    for line in lines:
        value = line["value"]
        text = value if isinstance(value, str) else f"{value:.4g} {line['unit']}".strip()
        rows.append(f"| {line['part']} | {line['what']} | {text} |")
    return "\n".join([*head, *rows, ""])


def answer_part(
    ask: Callable[[DeviceScene], Answers], scene: DeviceScene
) -> Iterator[dict[str, Any]]:
    """Yield the answers of one part; an error is one too, and the next part is asked then."""
    try:
        for what, value, unit in ask(scene):
            yield {"what": what, "value": value, "unit": unit}
    except Exception as error:
        log.debug("the error", exc_info=error)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield {"what": "failed", "value": reason, "unit": ""}
    finally:
        torch.cuda.empty_cache()


def _ask_transfer(scene: DeviceScene) -> Answers:
    """Measure copies of a batch of pixels, page-locked and not."""
    loader = scene.open_data().make_loader("train")
    loader.options = replace(loader.options, pin_memory=True, batch_size=scene.options.batch_size)
    locked: Tensor = next(iter(loader))["image"]
    plain = torch.empty_like(locked).copy_(locked)
    times_s = scene.time(
        locked=lambda: locked.to(scene.device, non_blocking=True),
        plain=lambda: plain.to(scene.device),
    )
    copied = locked.to(scene.device, non_blocking=True)
    torch.cuda.synchronize(scene.device)
    is_equal = torch.equal(copied.cpu(), plain)
    yield "equal on the device", str(is_equal).lower(), ""
    yield "page-locked", locked.nbytes / times_s["locked"] / 1e9, "GB/s"
    yield "not page-locked", plain.nbytes / times_s["plain"] / 1e9, "GB/s"
    loader.close()


def _ask_finish(scene: DeviceScene) -> Answers:
    """Measure a planned batch until the model sees it, with its pixels, or those of the device."""
    for cache, owner in (("store", "batch"), ("device", "device")):
        datamodule = scene.open_data(cache=cache)
        batch = _plan(datamodule, scene)
        finish = partial(datamodule.finish_batch, batch, "train")
        (seconds,) = scene.time(finish=finish).values()
        yield f"pixels of the {owner}", 1e3 * seconds, "ms"


def _ask_training(scene: DeviceScene) -> Answers:
    """Train with the loader: waiting for data, and the gain of lower precision."""
    speeds: dict[str, float] = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        watch = DataWaitMonitor(plot=False)
        cfg = scene.change(trainer=_on_device(scene) | {"precision": precision})
        speeds[precision] = scene.train(cfg, watch, AdaptiveBatchSize())
        yield f"{precision}, samples a second", speeds[precision], ""
        waiting = float(watch.summary()["data_wait_fraction"])
        yield f"{precision}, waiting for data", 100 * waiting, "%"
    yield "bf16 by float32", speeds["bf16-mixed"] / speeds["32-true"], "x"


def _ask_memory(scene: DeviceScene) -> Answers:
    """Train with a batch that does not fit: it should be split."""
    torch.cuda.reset_peak_memory_stats(scene.device)
    cfg = scene.change(trainer=_on_device(scene))
    scene.train(cfg, AdaptiveBatchSize())
    peak_bytes = torch.cuda.max_memory_allocated(scene.device)
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(scene.device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.6 * peak_bytes / total_bytes, scene.device)
    adaptive = AdaptiveBatchSize()
    try:
        scene.train(cfg, adaptive)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, scene.device)
    summary = adaptive.summary()
    yield "peak of a step", peak_bytes / 2**20, "MiB"
    yield "with 60 % of that: errors survived", float(summary["batch/ooms"]), ""
    yield "with 60 % of that: samples at once", float(summary.get("batch/size", 0)), ""


def _ask_gan(scene: DeviceScene) -> Answers:
    """Measure the peak memory of a GAN's step with its penalty, whole and in parts."""
    size_px = scene.options.gan_px
    images = torch.rand(_GAN_BATCH, 3, size_px, size_px)
    batch: Batch = {"image": images, "index": torch.arange(_GAN_BATCH)}
    settings = {**QUIET, **_on_device(scene), "max_steps": 2 * _GAN_STEPS}  # both nets' count
    for name, part in (("whole", None), ("parts", _GAN_PART)):
        module = GANModule(
            image_px=size_px, r1_every=1, micro_batch_size=part, r1_micro_batch_size=part
        )
        torch.cuda.reset_peak_memory_stats(scene.device)
        loader: Any = DataLoader([batch] * _GAN_STEPS, batch_size=None)  # type: ignore[arg-type]
        L.Trainer(**settings).fit(module, loader)
        yield f"{name}, peak", torch.cuda.max_memory_allocated(scene.device) / 2**20, "MiB"


def _ask_prediction(scene: DeviceScene) -> Answers:
    """Predict whole images tile by tile: the difference to the host, and the speed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    rng, tile_px = np.random.default_rng(0), scene.options.tile_px
    shape = (3, 2 * tile_px, 3 * tile_px)
    images = [rng.integers(0, 256, shape).astype(np.uint8) for _ in range(3)]

    def predict(device: torch.device) -> list[Tensor]:
        predictor = TiledPredictor(
            net, tile_px=tile_px, overlap_px=tile_px // 8, batch_size=4, device=device
        )
        return [values for _, values in predictor.predict(images)]

    on_host = predict(torch.device("cpu"))
    on_device = predict(scene.device)
    times_s = scene.time(predict=partial(predict, scene.device))
    net.cpu()
    difference = 0.0
    for one, other in zip(on_host, on_device, strict=True):
        difference = max(difference, float((one - other).abs().max()))
    remark = "" if difference < _TOLERANCE else "(too much)"
    yield "largest difference to the host", difference, remark
    pixels = sum(image[0].size for image in images)
    yield "megapixels a second", pixels / times_s["predict"] / 1e6, ""


def _plan(datamodule: BaseDataModule, scene: DeviceScene) -> Batch:
    """Plan a training batch and copy it to the device."""
    loader = datamodule.make_loader("train")
    loader.options = replace(loader.options, batch_size=scene.options.batch_size)
    planned = datamodule.plan_batch(next(iter(loader)), "train")
    loader.close()
    return {name: value.to(scene.device) for name, value in planned.items()}


def _on_device(scene: DeviceScene) -> dict[str, Any]:
    return {"accelerator": "gpu", "devices": [scene.device.index or 0]}


_PARTS: Mapping[str, Callable[[DeviceScene], Answers]] = {
    "transfer": _ask_transfer,
    "rendering": _ask_finish,
    "training": _ask_training,
    "out of memory": _ask_memory,
    "GAN": _ask_gan,
    "prediction": _ask_prediction,
}
