"""The ways to predict images that mode ``predict`` compares."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor, nn

from lit_data.commands.benchmarks.headroom import train_steps
from lit_data.commands.build import build_model, find_trained
from lit_data.commands.checkpoints import load_weights
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.inference import TiledPredictor
from lit_data.inference.batch_size_table import measure_peak_bytes
from lit_data.inference.cpu_parallel import choose_threads
from lit_data.inference.export.quantise import quantise
from lit_data.inference.forward import check_compiler
from lit_data.inference.sources import Image
from lit_data.io.images.readers import read_image
from lit_data.io.progress import track
from lit_data.tasks.nets import ProbabilityNet

if TYPE_CHECKING:
    from benchmarks.predict import PredictSuite

log = logging.getLogger(__name__)


Weights = dict[str, Any]


def find_weights(cfg: DictConfig, datamodule: BaseDataModule, options: "PredictSuite") -> Weights:
    """Weights of `cfg.ckpt`, or of a model that is trained for `options.steps`: enough for masks
    that can be compared.

    Raises:
        DataError: The checkpoint does not exist.
        StoreError: It is that of another model.
    """
    model = build_model(cfg)
    if cfg.ckpt is not None:
        load_weights(model, find_trained(cfg))
        return model.state_dict()
    log.info("training %d steps, as there is no ckpt", options.steps)
    model = train_steps(cfg, steps=options.steps, datamodule=datamodule)
    return {
        name: tensor.cpu() if isinstance(tensor, Tensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def make_net(
    cfg: DictConfig, datamodule: BaseDataModule, weights: Weights, channels: int
) -> nn.Module:
    """A net with these weights, from [B, C, h, w] to probability [B, 1, h, w]."""
    model = build_model(cfg)
    model.load_state_dict(weights)
    return ProbabilityNet(
        model, tuple(range(channels)), datamodule.batch_format, datamodule.channel_names
    ).eval()


_SMALLEST: Final = 0.3  # side of the smallest image, as a share of a patch
_CHANNELS: Final = (1, 3)  # of a PNG


def write_images(datamodule: BaseDataModule, folder: Path, images: int) -> list[Path]:
    """Write so many PNG files.

    Args:
        datamodule: Its validation samples, each cut at random to its own size, are the images.
        folder: For the files.
        images: How many.

    Raises:
        ConfigError: There are no validation samples, or they are no images.
    """
    import cv2

    paths, rng = [], np.random.default_rng(0)
    for number, image in enumerate(
        track(islice(_repeat(datamodule), images), "writing images", images)
    ):
        sides = [
            int(rng.integers(max(1, round(_SMALLEST * side)), side, endpoint=True))
            for side in image.shape[1:]
        ]
        corner = [
            int(rng.integers(0, length - side, endpoint=True))
            for length, side in zip(image.shape[1:], sides, strict=True)
        ]
        part = image[:, corner[0] : corner[0] + sides[0], corner[1] : corner[1] + sides[1]]
        paths.append(folder / f"{number:05}.png")
        # The order of channels in the file is that of the sample, which OpenCV writes turned round.
        paths[-1].write_bytes(
            cv2.imencode(".png", part.transpose(1, 2, 0)[:, :, ::-1])[1].tobytes()
        )
    return paths


def _repeat(datamodule: BaseDataModule) -> Iterator[NDArray[np.uint8]]:
    """The samples of the validation split, again and again: [C, H, W] each."""
    if not len(datamodule.dataset("val")):
        raise ConfigError("the val split holds no samples: check data.splits")
    while True:
        yield from _read_samples(datamodule)


def _read_samples(datamodule: BaseDataModule) -> Iterator[NDArray[np.uint8]]:
    with closing(datamodule.make_loader("val")) as loader:
        for batch in loader:
            images = datamodule.transform(batch, "val").get("image")
            if images is None or images.ndim != 4 or images.shape[1] not in _CHANNELS:
                raise ConfigError(
                    "suite=predict needs samples with image [B, C, H, W] of one or three channels: add suite=predict"
                )
            yield from (images * 255).round().byte().numpy()


NAMES: Final = {
    "original": "original: one image at a time, float32",
    "original_bf16": "original: one image at a time, bfloat16",
    "batched": "tiles of all images, float32",
    "threads": "the same, channels last, in threads",
    "bf16": "the same, bfloat16",
    "compiled": "channels last, compiled",
    "compiled_bf16": "channels last, compiled, bfloat16",
    "static": "int8 convolutions, float32",
    "static_bf16": "int8 convolutions, bfloat16",
}
COMPILED: Final = ("compiled", "compiled_bf16", "static", "static_bf16")
_CALIBRATION: Final = 32  # images
_READERS: Final = 2  # threads

Predict = Callable[[Sequence[Path]], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class PredictVariant:
    """One line of the table.

    Attributes:
        kind: One of `NAMES`.
        batch_size: Tiles at once.
        predict: From files to [1, H, W] float32 on the CPU, in their order.
        note: Why it is not measured.
        threads: Batches at one time.
        predict_alone: The same with one thread; None where it has no more.
    """

    kind: str
    batch_size: int
    predict: Predict
    note: str = ""
    threads: int = 1
    predict_alone: Predict | None = None

    @property
    def name(self) -> str:
        """It alone has it."""
        return f"{self.kind}, batch {self.batch_size}"

    def measure_peak_bytes(self, paths: Sequence[Path]) -> float:
        """Bytes of tensors while a batch is predicted in each thread; not known of what is compiled.

        Counted with one thread, as tensors are in the thread that makes them.
        """
        predict = self.predict_alone or self.predict
        if self.kind in COMPILED:
            return math.nan
        return self.threads * measure_peak_bytes(lambda: list(predict(paths[: self.batch_size])))

    def run(self, paths: Sequence[Path]) -> None:
        """Predict files, and keep nothing."""
        for _ in self.predict(paths):
            pass


def list_ways(
    cfg: DictConfig,
    datamodule: BaseDataModule,
    weights: Weights,
    paths: Sequence[Path],
    options: "PredictSuite",
    device: torch.device,
) -> list[PredictVariant]:
    """The original way, and the others at each batch size; what is compiled only if that is wanted.

    Args:
        cfg: With the model.
        datamodule: Whose format it wants.
        weights: Of the model.
        paths: The images, of which some calibrate.
        options: Batch sizes, size of a tile, whether to compile.
        device: Where to predict.
    """
    channels = len(read_image(paths[0]))
    make = partial(
        make_net, cfg, datamodule, weights, channels
    )  # a net each, as predictors change how it is stored
    ways = [
        PredictVariant(
            kind, 1, partial(_predict_one_by_one, make().to(device), has_bf16=kind.endswith("bf16"))
        )
        for kind in ("original", "original_bf16")
    ]
    sizes = options.batch_sizes
    ways += [
        PredictVariant(
            "batched",
            size,
            partial(_predict_tiles, _open("batched", make(), size, options.tile_px, device)),
        )
        for size in sizes
    ]
    ways += [
        _make_in_threads(kind, make(), size, options.tile_px, device)
        for kind in ("threads", "bf16")
        for size in sizes
    ]
    if options.compile:
        ways += [_make_compiled(kind, make(), paths, options, device) for kind in COMPILED]
    return ways


def _make_in_threads(
    kind: str, net: nn.Module, batch_size: int, tile_px: int, device: torch.device
) -> PredictVariant:
    threads = choose_threads(device)
    many, alone = (
        partial(_predict_tiles, _open(kind, net, batch_size, tile_px, device, threads=count))
        for count in (threads, 1)
    )
    return PredictVariant(kind, batch_size, many, threads=threads, predict_alone=alone)


def _make_compiled(
    kind: str, net: nn.Module, paths: Sequence[Path], options: "PredictSuite", device: torch.device
) -> PredictVariant:
    """A way whose net is compiled, at the first batch size alone, as that takes a minute; or why there is none."""
    size = options.batch_sizes[0]
    try:
        check_compiler(device)
        if kind.startswith("static"):
            tiles = [_cut_tile(path, options.tile_px) for path in paths[:_CALIBRATION]]
            net = quantise(net, mode="static", calibration=tiles)
        return PredictVariant(
            kind, size, partial(_predict_tiles, _open(kind, net, size, options.tile_px, device))
        )
    except ConfigError as error:
        return PredictVariant(
            kind, size, partial(_predict_one_by_one, net, has_bf16=False), note=str(error)
        )


def _open(
    kind: str,
    net: nn.Module,
    batch_size: int,
    tile_px: int,
    device: torch.device,
    *,
    threads: int = 1,
) -> TiledPredictor:
    return TiledPredictor(
        net,
        tile_px=tile_px,
        overlap_px=tile_px // 4,
        batch_size=batch_size,
        precision="bf16" if kind.endswith("bf16") else "fp32",
        channels_last=kind != "batched",
        compile=kind.startswith("compiled"),
        round_px=tile_px if kind in COMPILED else None,
        threads=threads,
        readers=_READERS,
        device=device,
    )


def _predict_one_by_one(
    net: nn.Module, paths: Sequence[Path], *, has_bf16: bool
) -> Iterator[Tensor]:
    """As people do it: load, to a tensor, forward, to NumPy."""
    device = next(net.parameters()).device
    for path in paths:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=has_bf16):
            image = torch.from_numpy(read_image(path)).float().div(255)[None].to(device)
            values = net(image)[0].cpu().numpy()
        yield torch.from_numpy(values)


def _predict_tiles(predictor: TiledPredictor, paths: Sequence[Path]) -> Iterator[Tensor]:
    images: list[Image] = [partial(read_image, path) for path in paths]
    return (values for _, values in predictor.predict(images))


def _cut_tile(path: Path, tile_px: int) -> Tensor:
    """[1, C, h, w] float32 in 0..1, filled up by mirroring."""
    image: Any = torch.from_numpy(read_image(path))[:, :tile_px, :tile_px].float().div(255)
    while image.shape[1] < tile_px or image.shape[2] < tile_px:
        missing = [min(tile_px - length, length - 1) for length in image.shape[1:]]
        image = nn.functional.pad(image[None], (0, missing[1], 0, missing[0]), mode="reflect")[0]
    return image[None]  # type: ignore[no-any-return]
