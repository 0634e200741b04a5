"""The questions of the suite ``gpu``, each of which yields rows of its table."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import cv2
import lightning as L
import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.loaders import make_forking_loader
from benchmarks.predict_variants import list_ways
from benchmarks.stripe_ways import make_stripe_ways
from lit_data.app.benchmarks.measure import Candidate
from lit_data.app.benchmarks.table import Row
from lit_data.app.benchmarks.training import time_training
from lit_data.app.build import build_datamodule
from lit_data.callbacks import AdaptiveBatchSize, DataWaitMonitor, EmptyCache
from lit_data.core.machine import count_cores
from lit_data.core.types import Array, Batch
from lit_data.datamodules import StripeDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.images.writing import write_image
from lit_data.loading.device_timer import time_in_turn
from lit_data.models import UNet
from lit_data.predict import TiledPredictor
from lit_data.testing import QUIET
from lit_data.wings.gan import GANModule

if TYPE_CHECKING:
    from benchmarks.gpu import GPUSuite

_GAN_BATCH = 32
_GAN_PART = 4
_GAN_STEPS = 2
_TOLERANCE = 1e-3
"""Largest difference of probabilities of two devices: convolutions may round inputs to TF32."""

Answers = Iterator[tuple[str, float | str, str]]
"""A quantity, its value, its unit."""


class UnavailableError(Exception):
    """What a part needs is not here."""


@dataclass(frozen=True, slots=True)
class DeviceScene:
    """Configuration and device that all parts measure.

    Attributes:
        cfg: The configuration.
        options: Repeats, and sizes of batches.
        device: Where training runs.
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

    def place(self, precision: str = "bf16-mixed") -> DictConfig:
        """Return the configuration with a Trainer of this device."""
        return self.change(trainer=on_device(self.device) | {"precision": precision})

    def train(
        self,
        cfg: DictConfig,
        *callbacks: Callback,
        data: Mapping[str, Any] | None = None,
        batches: Iterable[Batch] | None = None,
    ) -> float:
        """Measure the samples that are trained per second.

        Args:
            cfg: Model and Trainer.
            callbacks: Further callbacks.
            data: Options of our loader that are changed.
            batches: Another loader, for `plain_steps` alone; None trains with ours.
        """
        train = partial(time_training, cfg, *callbacks)
        options = self.options
        if batches is not None:
            return train(steps=options.plain_steps, warmup_steps=1, train_dataloaders=batches)
        datamodule = self.open_data(**(data or {}))
        return train(
            steps=options.steps, warmup_steps=options.warmup_batches, datamodule=datamodule
        )

    def time(self, **works: Callable[[], object]) -> dict[str, float]:
        """Measure the median seconds of each work."""
        return time_in_turn(works, self.options.repeats, self.device)

    def check_cuda(self) -> None:
        """Raise `UnavailableError` unless the device is a CUDA device."""
        if self.device.type != "cuda":
            raise UnavailableError("needs a CUDA device")


Ask = Callable[[DeviceScene], Answers]


def on_device(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a Trainer that trains on this device."""
    if device.type != "cuda":
        return {"accelerator": device.type, "devices": 1}
    return {"accelerator": "gpu", "devices": [device.index or 0]}


class PreparedModel(Callback):
    """Changes the model before its first step.

    Args:
        prepare: Called with the model.
    """

    def __init__(self, prepare: Callable[[LightningModule], object]) -> None:
        self.prepare = prepare

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.prepare(pl_module)


def _ask_others(
    scene: DeviceScene, make: Callable[[Dataset[Batch], int], Iterable[Batch]], *, is_decoded: bool
) -> Answers:
    """Train with another loader, of images on the disk or decoded in memory."""
    datamodule = scene.open_data(backend="cpu")
    assert isinstance(datamodule, StripeDataModule)
    original, improved = make_stripe_ways(datamodule, "train")
    if is_decoded:
        improved.warm_up()
    dataset = improved if is_decoded else original
    yield from _ask_training(scene, batches=make(dataset, scene.options.batch_size))


def _make_dataloader(dataset: Dataset[Batch], batch_size: int) -> Iterable[Batch]:
    """Make a loader as most people do."""
    row = Row("dataloader", batch_size, count_cores(), batch_size)
    return make_forking_loader(row, Candidate(dataset=dataset), seed=0)


def _make_thread_loader(dataset: Dataset[Batch], batch_size: int) -> Iterable[Batch]:
    """Make the loader of MONAI that has threads for workers.

    Raises:
        UnavailableError: MONAI is not installed.
    """
    try:
        data: Any = importlib.import_module("monai.data")
    except ImportError:
        raise UnavailableError("needs MONAI: pip install monai") from None
    loader: Iterable[Batch] = data.ThreadDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=count_cores(),
        use_thread_workers=True,
    )
    return loader


def _ask_transfer(scene: DeviceScene) -> Answers:
    """Measure copies of a batch of pixels, page-locked and not."""
    scene.check_cuda()
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
    """Measure a planned batch until the model sees it: drawn, cast and augmented (on a GPU by Kornia)."""
    host = torch.device("cpu")
    ways = {
        "on the device": ("store", scene.device),
        "on the device, which holds the pixels": ("device", scene.device),
        "on the host, by OpenCV": ("store", host),
    }
    for what, (cache, device) in ways.items():
        datamodule = scene.open_data(cache=cache)
        batch = _plan(datamodule, scene.options.batch_size, device)
        finish = partial(datamodule.finish_batch, batch, "train")
        (seconds,) = scene.time(finish=finish).values()
        yield what, 1e3 * seconds, "ms"


def _ask_training(
    scene: DeviceScene,
    precision: str = "bf16-mixed",
    callbacks: Callable[[], Iterable[Callback]] = lambda: (),
    **source: Any,  # noqa: ANN401 - arguments of `DeviceScene.train`
) -> Answers:
    """Train: samples a second, and how much of the time waits for data."""
    watch = DataWaitMonitor(plot=False)
    speed = scene.train(scene.place(precision), watch, *callbacks(), **source)
    yield "samples a second", speed, ""
    yield "waiting for data", 100 * float(watch.summary()["data_wait_fraction"]), "%"


def _store_channels_last() -> Iterable[Callback]:
    return [PreparedModel(lambda model: model.to(memory_format=torch.channels_last))]


def _compile_net() -> Iterable[Callback]:
    return [PreparedModel(lambda model: model.net.compile())]  # type: ignore[union-attr]


def _empty_each_step() -> Iterable[Callback]:
    return [EmptyCache(every_n_steps=1, max_cost_fraction=0.99)]


def _ask_memory(scene: DeviceScene) -> Answers:
    """Train with a batch that does not fit: it should be split."""
    scene.check_cuda()
    torch.cuda.reset_peak_memory_stats(scene.device)
    cfg = scene.place()
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
    scene.check_cuda()
    size_px = scene.options.gan_px
    images = torch.rand(_GAN_BATCH, 3, size_px, size_px)
    batch: Batch = {"image": images, "index": torch.arange(_GAN_BATCH)}
    settings = {**QUIET, **on_device(scene.device), "max_steps": 2 * _GAN_STEPS}  # both nets' count
    for name, part in (("whole", None), ("parts", _GAN_PART)):
        module = GANModule(
            image_px=size_px, r1_every=1, micro_batch_size=part, r1_micro_batch_size=part
        )
        torch.cuda.reset_peak_memory_stats(scene.device)
        loader: Any = DataLoader([batch] * _GAN_STEPS, batch_size=None)  # type: ignore[arg-type]
        L.Trainer(**settings).fit(module, loader)
        yield f"{name}, peak", torch.cuda.max_memory_allocated(scene.device) / 2**20, "MiB"


def _ask_agreement(scene: DeviceScene) -> Answers:
    """Predict whole images tile by tile on the device and on the host."""
    net, tile_px = _make_net(), scene.options.tile_px
    images = _draw_images(3, (2 * tile_px, 3 * tile_px))

    def predict(device: torch.device) -> list[Tensor]:
        predictor = TiledPredictor(
            net, tile_px=tile_px, overlap_px=tile_px // 8, batch_size=4, device=device
        )
        return [values for _, values in predictor.predict(images)]

    pairs = zip(predict(torch.device("cpu")), predict(scene.device), strict=True)
    differences = [(on_host - on_device_).abs().max() for on_host, on_device_ in pairs]
    difference = float(torch.stack(differences).max())  # NaN if any is, unlike the max of Python
    remark = "" if difference < _TOLERANCE else "(too much)"
    yield "largest difference to the host", difference, remark


def _ask_prediction(scene: DeviceScene) -> Answers:
    """Predict files as people do, one at a time, and in tiles: images/s."""
    side_px = 2 * scene.options.tile_px
    with TemporaryDirectory() as folder:
        paths = []
        for number, image in enumerate(_draw_images(scene.options.images, (side_px, side_px))):
            paths.append(Path(folder, write_image(Path(folder, f"{number:04}"), image)))
        for way in list_ways(_make_net, scene.options.tile_px, scene.device):
            (seconds,) = scene.time(run=partial(way.run, paths)).values()
            yield way.name, len(paths) / seconds, "images/s"


def _make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(UNet(width=16), nn.Sigmoid()).eval()


def _draw_images(count: int, shape_px: tuple[int, int]) -> list[Array]:
    """Draw smooth noise, which a PNG stores about as well as a photograph: [3, H, W] uint8."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(count):
        coarse = rng.integers(0, 256, [side // 8 for side in shape_px] + [3], np.uint8)
        image = cv2.resize(coarse, shape_px[::-1], interpolation=cv2.INTER_CUBIC)
        images.append(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return images


def _plan(datamodule: BaseDataModule, batch_size: int, device: torch.device) -> Batch:
    """Plan a training batch and copy it to the device."""
    loader = datamodule.make_loader("train")
    loader.options = replace(loader.options, batch_size=batch_size)
    planned = datamodule.plan_batch(next(iter(loader)), "train")
    loader.close()
    return {name: value.to(device) for name, value in planned.items()}


PARTS: Mapping[str, Ask] = {
    "bf16": _ask_training,
    "bf16, a DataLoader that decodes each patch": partial(
        _ask_others, make=_make_dataloader, is_decoded=False
    ),
    "bf16, a DataLoader of decoded images": partial(
        _ask_others, make=_make_dataloader, is_decoded=True
    ),
    "bf16, MONAI's ThreadDataLoader of decoded images": partial(
        _ask_others, make=_make_thread_loader, is_decoded=True
    ),
    "bf16, copied in the step": partial(_ask_training, data={"loader": {"pin_memory": False}}),
    "bf16, channels last": partial(_ask_training, callbacks=_store_channels_last),
    "bf16, compiled": partial(_ask_training, callbacks=_compile_net),
    "bf16, EmptyCache in each step": partial(_ask_training, callbacks=_empty_each_step),
    "fp16": partial(_ask_training, precision="16-mixed"),
    "float32": partial(_ask_training, precision="32-true"),
    "copies": _ask_transfer,
    "defects and augmentation": _ask_finish,
    "out of memory": _ask_memory,
    "GAN": _ask_gan,
    "agreement": _ask_agreement,
    "prediction": _ask_prediction,
}
