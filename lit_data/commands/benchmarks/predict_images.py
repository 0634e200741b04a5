"""The images that mode ``predict`` predicts: finished samples of an experiment, cut to mixed sizes, as files."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.io.progress import track

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
    for number, image in enumerate(track(islice(_repeat(datamodule), images), "writing images", images)):
        sides = [int(rng.integers(max(1, round(_SMALLEST * side)), side, endpoint=True)) for side in image.shape[1:]]
        corner = [
            int(rng.integers(0, length - side, endpoint=True))
            for length, side in zip(image.shape[1:], sides, strict=True)
        ]
        part = image[:, corner[0] : corner[0] + sides[0], corner[1] : corner[1] + sides[1]]
        paths.append(folder / f"{number:05}.png")
        # The order of channels in the file is that of the sample, which OpenCV writes turned round.
        paths[-1].write_bytes(cv2.imencode(".png", part.transpose(1, 2, 0)[:, :, ::-1])[1].tobytes())
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
                    "benchmark.mode=predict needs samples with image [B, C, H, W] of one or three channels: add "
                    "+benchmark=predict"
                )
            yield from (images * 255).round().byte().numpy()
