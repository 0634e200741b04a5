"""The ways to predict images that the suite ``predict`` compares."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor, nn

from lit_data.app.benchmarks.training import train_steps
from lit_data.app.build import build_model, find_trained
from lit_data.app.checkpoints import load_weights
from lit_data.core.errors import ConfigError
from lit_data.core.progress import track
from lit_data.datamodules.base import BaseDataModule
from lit_data.images.readers import read_image
from lit_data.predict import TiledPredictor
from lit_data.predict.forward import choose_threads
from lit_data.predict.memory_limit import measure_peak_bytes
from lit_data.predict.nets import ProbabilityNet
from lit_data.predict.tiles import Image

log = logging.getLogger(__name__)

Weights = dict[str, Any]


def find_weights(cfg: DictConfig, datamodule: BaseDataModule, steps: int) -> Weights:
    """Return the weights of `cfg.ckpt`, or of a model that is trained for some steps.

    Args:
        cfg: With the model.
        datamodule: An opened set.
        steps: Of training without ``ckpt``: enough for masks that can be compared.

    Raises:
        DataError: The checkpoint does not exist.
        StoreError: It is that of another model.
    """
    model = build_model(cfg)
    if cfg.ckpt is not None:
        load_weights(model, find_trained(cfg))
        return model.state_dict()
    log.info("training %d steps, as there is no ckpt", steps)
    model = train_steps(cfg, steps=steps, datamodule=datamodule)
    return model.cpu().state_dict()


def make_net(
    cfg: DictConfig, datamodule: BaseDataModule, weights: Weights, channels: int
) -> nn.Module:
    """Make a net with these weights, from [B, C, h, w] to probability [B, 1, h, w]."""
    model = build_model(cfg)
    model.load_state_dict(weights)
    net = ProbabilityNet(
        model, tuple(range(channels)), datamodule.batch_format, datamodule.channel_names
    )
    return net.eval()


_SMALLEST = 0.3  # side of the smallest image, as a fraction of a patch
_CHANNELS = (1, 3)  # of a PNG


def write_images(datamodule: BaseDataModule, folder: Path, images: int) -> list[Path]:
    """Write so many PNG files.

    Args:
        datamodule: Its validation samples, each cut at random to its own size, are the images.
        folder: For the files.
        images: Number of files.

    Raises:
        ConfigError: There are no validation samples, or they are no images.
    """
    import cv2

    paths = []
    rng = np.random.default_rng(0)
    samples = islice(_repeat(datamodule), images)
    for number, image in enumerate(track(samples, "writing images", images)):
        height, width = (_choose_side(rng, side) for side in image.shape[1:])
        top = int(rng.integers(0, image.shape[1] - height, endpoint=True))
        left = int(rng.integers(0, image.shape[2] - width, endpoint=True))
        part = image[:, top : top + height, left : left + width]
        # The order of channels in the file is that of the sample, which OpenCV writes turned round.
        pixels = part.transpose(1, 2, 0)[:, :, ::-1]
        paths.append(folder / f"{number:05}.png")
        paths[-1].write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    return paths


def _choose_side(rng: np.random.Generator, patch_side: int) -> int:
    return int(rng.integers(max(1, round(_SMALLEST * patch_side)), patch_side, endpoint=True))


def _repeat(datamodule: BaseDataModule) -> Iterator[NDArray[np.uint8]]:
    """Yield the samples of the validation split, again and again: [C, H, W] each."""
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
                    "suite=predict needs samples with image [B, C, H, W] of one or three channels: "
                    "add suite=predict"
                )
            yield from (images * 255).round().byte().numpy()


NAMES = {
    "original": "one image at a time, float32",
    "original_bf16": "the same, bfloat16",
    "ours": "the same, channels last, in threads",
}
_READERS = 2  # threads

Predict = Callable[[Sequence[Path]], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class PredictVariant:
    """One line of the table.

    Attributes:
        name: One of `NAMES`.
        predict: From files to [1, H, W] float32 on the CPU, in their order.
        threads: Batches at one time.
        predict_alone: The same with one thread; None where it has no more.
    """

    name: str
    predict: Predict
    threads: int = 1
    predict_alone: Predict | None = None

    def measure_peak_bytes(self, paths: Sequence[Path]) -> float:
        """Measure the bytes of tensors while each thread predicts an image.

        Counted with one thread, as tensors are in the thread that makes them.
        """
        predict = self.predict_alone or self.predict
        return self.threads * measure_peak_bytes(lambda: list(predict(paths[:1])))

    def run(self, paths: Sequence[Path]) -> None:
        """Predict files, and keep nothing."""
        for _ in self.predict(paths):
            pass


def list_ways(
    make: Callable[[], nn.Module], tile_px: int, device: torch.device
) -> list[PredictVariant]:
    """List the original way, with fewer bits, and ours.

    Args:
        make: Makes the net, one for each way, as predictors change how it is stored.
        tile_px: Size of a tile.
        device: Where to predict.
    """
    ways = []
    for name in ("original", "original_bf16"):
        net = make().to(device)
        predict = partial(_predict_one_by_one, net, has_bf16=name == "original_bf16")
        ways.append(PredictVariant(name, predict))
    net, threads = make(), choose_threads(device)

    def open_tiles(threads: int) -> Predict:
        predictor = TiledPredictor(
            net,
            tile_px=tile_px,
            overlap_px=tile_px // 4,
            batch_size=1,
            precision="bf16",
            channels_last=True,
            threads=threads,
            readers=_READERS,
            device=device,
        )
        return partial(_predict_tiles, predictor)

    ways.append(PredictVariant("ours", open_tiles(threads), threads, open_tiles(1)))
    return ways


def _predict_one_by_one(
    net: nn.Module, paths: Sequence[Path], *, has_bf16: bool
) -> Iterator[Tensor]:
    """Predict as people do it: load, to a tensor, forward, to NumPy."""
    device = next(net.parameters()).device
    for path in paths:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=has_bf16):
            image = torch.from_numpy(read_image(path)).float().div(255)[None].to(device)
            values = net(image)[0].cpu().numpy()
        yield torch.from_numpy(values)


def _predict_tiles(predictor: TiledPredictor, paths: Sequence[Path]) -> Iterator[Tensor]:
    images: list[Image] = [partial(read_image, path) for path in paths]
    return (values for _, values in predictor.predict(images))
