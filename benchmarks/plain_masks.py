"""A training script as people write it.

``python -m benchmarks.plain_masks NET ROOT SEED OUT SECONDS...``

A U-Net of one channel, mean and standard deviation taken off, Adam at 1e-3, cross entropy and Dice
over the batch, crops around random defect pixels, flips. NET is `unet`, that of lit_data, of which
nothing else is imported, so that both train the same one; or `smp`, the U-Net of
segmentation_models_pytorch with an EfficientNet-Lite0 that has seen ImageNet.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import lite0, plain_training
from benchmarks.learning_sets import read_split

PATCH_PX = 128
BATCH = 16
MULTIPLE_PX = 32  # of what the encoder of `smp` takes
Arrays = tuple[np.ndarray, np.ndarray]


def make_net(name: str) -> nn.Module:
    """Make a net from [B, 1, H, W] to logits of the same shape; `unet` or `smp`."""
    if name == "smp":
        import segmentation_models_pytorch as smp  # type: ignore[import-not-found]

        encoder = f"tu-{lite0.NAME}"
        net: nn.Module = smp.Unet(encoder, encoder_weights=None, in_channels=3, classes=1)
        lite0.load_lite0(net.encoder)  # type: ignore[arg-type]
        return _Grey(net)
    from lit_data.models import UNet

    return UNet(channels=1)


class _Grey(nn.Module):
    """Gives a net of three channels grey images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._net(images.expand(-1, 3, -1, -1))
        return logits


def read(root: Path, name: str) -> Arrays:
    """Read an image [H, W] float32 in 0..1 and its mask [H, W] bool, which lies beside it."""
    image = np.asarray(cv2.imread(str(root / name), cv2.IMREAD_GRAYSCALE))
    mask = np.asarray(cv2.imread(str((root / name).with_suffix(".png")), cv2.IMREAD_GRAYSCALE))
    return image.astype(np.float32) / 255, mask >= 128


class Splits(NamedTuple):
    """Images of a dataset, and the scale that standardises them.

    Attributes:
        train: Images and masks.
        test: Names without ending, and standardised images [H, W].
        mean: Of the pixels of `train`.
        deviation: Of the same.
    """

    train: list[Arrays]
    test: list[tuple[str, np.ndarray]]
    mean: float
    deviation: float


def read_splits(root: Path) -> Splits:
    """Read the images that train and those that are tested."""
    train = [read(root, name) for name in read_split(root, "train")]
    values = np.concatenate([image.ravel() for image, _ in train])
    mean, deviation = float(values.mean()), float(values.std())
    test = []
    for name in read_split(root, "test"):
        image, _ = read(root, name)
        test.append((Path(name).stem, (image - mean) / deviation))
    return Splits(train, test, mean, deviation)


def crop(
    image: np.ndarray, mask: np.ndarray, around_defect: bool, rng: np.random.Generator
) -> Arrays:
    """Cut a patch and flip it at random.

    Args:
        image: [H, W].
        mask: [H, W].
        around_defect: Around a random defect pixel, where there is one.
        rng: Draws the place and the flips.
    """
    pad = [(0, max(0, PATCH_PX - length)) for length in image.shape]
    image, mask = np.pad(image, pad, mode="reflect"), np.pad(mask, pad)
    last_y, last_x = (length - PATCH_PX for length in image.shape)
    y, x = int(rng.integers(last_y + 1)), int(rng.integers(last_x + 1))
    pixels = np.argwhere(mask & around_defect)
    if len(pixels):
        start = pixels[rng.integers(len(pixels))] - rng.integers(PATCH_PX, size=2)
        y, x = int(np.clip(start[0], 0, last_y)), int(np.clip(start[1], 0, last_x))
    patch = np.s_[y : y + PATCH_PX, x : x + PATCH_PX]
    flip_y, flip_x = int(rng.choice((-1, 1))), int(rng.choice((-1, 1)))
    return image[patch][::flip_y, ::flip_x], mask[patch][::flip_y, ::flip_x]


def predict(net: nn.Module, images: list[tuple[str, np.ndarray]], folder: Path) -> None:
    """Write a map of each image (16 bit, 65535 is probability 1)."""
    folder.mkdir(parents=True, exist_ok=True)
    net.eval()
    for stem, image in images:
        height, width = image.shape
        pad = [(0, -length % MULTIPLE_PX) for length in image.shape]
        padded = np.pad(image, pad, mode="edge")
        with torch.no_grad():
            logits = net(torch.from_numpy(padded)[None, None])[0, 0, :height, :width]
        probability = logits.sigmoid().double().numpy()
        cv2.imwrite(str(folder / f"{stem}.png"), (probability * 65535).round().astype(np.uint16))
    net.train()


def main(net_name: str, root: Path, seed: int, out: Path, times: list[int]) -> None:
    """Train, and write maps of the test images after each of some times, to ``OUT/SECONDS/maps``."""
    train, test, mean, deviation = read_splits(root)
    defective = [number for number, (_, mask) in enumerate(train) if mask.any()]
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = make_net(net_name)

    def find_loss() -> torch.Tensor:
        images, masks = draw_batch(train, defective, rng)
        logits = net((images - mean) / deviation)
        probability = logits.sigmoid()
        dice = 1 - (2 * (probability * masks).sum() + 1) / (probability.sum() + masks.sum() + 1)
        loss: torch.Tensor = F.binary_cross_entropy_with_logits(logits, masks) + dice
        return loss

    plain_training.train(
        net, find_loss, lambda folder: predict(net, test, folder / "maps"), out, times
    )


def draw_batch(
    train: list[Arrays], defective: list[int], rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw patches, the first half around defects.

    Args:
        train: Images and masks.
        defective: Numbers of those with a defect.
        rng: Draws images, places and flips.

    Returns:
        Images and masks [B, 1, h, w] float32.
    """
    around_defects = BATCH // 2
    numbers = []
    for row in range(BATCH):
        is_around = row < around_defects
        numbers.append(rng.choice(defective) if is_around else rng.integers(len(train)))
    images, masks = [], []
    for row, number in enumerate(numbers):
        image, mask = crop(*train[number], row < around_defects, rng)
        images.append(image)
        masks.append(mask)
    image_batch = torch.from_numpy(np.stack(images)[:, None])
    return image_batch, torch.from_numpy(np.stack(masks)[:, None]).float()


if __name__ == "__main__":
    net_name, root, seed, out, *times = sys.argv[1:]
    main(net_name, Path(root), int(seed), Path(out), list(map(int, times)))
