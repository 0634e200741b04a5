"""A training script as people write it: ``python -m benchmarks.plain_masks NET SPLITS ROOT SEED OUT
SECONDS...``.

A U-Net of one channel, mean and standard deviation taken off, Adam at 1e-3, cross entropy and Dice
over the batch, crops around random defect pixels, flips. NET is `unet`, that of lit_data, of which
nothing else is imported, so that both train the same one; or `smp`, the U-Net of
segmentation_models_pytorch with a ResNet-18 of random weights.
"""

import csv
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

PATCH_PX, BATCH = 128, 16
MULTIPLE_PX = 32  # of what the encoder of `smp` takes
Arrays = tuple[np.ndarray, np.ndarray]


def make_net(name: str) -> nn.Module:
    """Make a net from [B, 1, H, W] to logits of the same shape; `unet` or `smp`."""
    if name == "smp":
        import segmentation_models_pytorch as smp  # type: ignore[import-not-found]

        net: nn.Module = smp.Unet("resnet18", encoder_weights=None, in_channels=1, classes=1)
        return net
    from lit_data.modules import UNet

    return UNet(channels=1)


def read(root: Path, name: str) -> Arrays:
    """Read an image [H, W] float32 in 0..1 and its mask [H, W] bool, which lies beside it."""
    image = np.asarray(cv2.imread(str(root / name), cv2.IMREAD_GRAYSCALE))
    mask = np.asarray(cv2.imread(str((root / name).with_suffix(".png")), cv2.IMREAD_GRAYSCALE))
    return image.astype(np.float32) / 255, mask >= 128


def crop(
    image: np.ndarray, mask: np.ndarray, around_defect: bool, rng: np.random.Generator
) -> Arrays:
    """Cut a patch, mirrored at random; around a random defect pixel where there is one and that is asked for."""
    pad = [(0, max(0, PATCH_PX - length)) for length in image.shape]
    image, mask = np.pad(image, pad, mode="reflect"), np.pad(mask, pad)
    y, x = (int(rng.integers(length - PATCH_PX + 1)) for length in image.shape)
    pixels = np.argwhere(mask & around_defect)
    if len(pixels):
        middle = pixels[rng.integers(len(pixels))] - rng.integers(PATCH_PX, size=2)
        y, x = (
            int(np.clip(start, 0, length - PATCH_PX))
            for start, length in zip(middle, image.shape, strict=True)
        )
    patch = np.s_[y : y + PATCH_PX, x : x + PATCH_PX]
    flip = tuple(slice(None, None, int(rng.choice((-1, 1)))) for _ in range(2))
    return image[patch][flip], mask[patch][flip]


def predict(net: nn.Module, images: list[tuple[str, np.ndarray]], folder: Path) -> None:
    """Write a map of each image (16 bit, 65535 is probability 1)."""
    folder.mkdir(parents=True, exist_ok=True)
    net.eval()
    for stem, image in images:
        height, width = image.shape
        padded = np.pad(image, [(0, -length % MULTIPLE_PX) for length in image.shape], mode="edge")
        with torch.no_grad():
            logits = net(torch.from_numpy(padded)[None, None])[0, 0, :height, :width]
        probability = logits.sigmoid().double().numpy()
        cv2.imwrite(str(folder / f"{stem}.png"), (probability * 65535).round().astype(np.uint16))
    net.train()


def main(net_name: str, splits: Path, root: Path, seed: int, out: Path, times: list[int]) -> None:
    """Train, and write maps of the test images after each of some times in seconds, to
    ``OUT/SECONDS/maps``.

    The rate is constant, so a shorter run is the beginning of a longer one.
    """
    with splits.open(newline="") as file:
        rows = list(csv.DictReader(file))
    train = [read(root, row["image"]) for row in rows if row["split"] == "train"]
    defective = [number for number, (_, mask) in enumerate(train) if mask.any()]
    values = np.concatenate([image.ravel() for image, _ in train])
    mean, deviation = float(values.mean()), float(values.std())
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = make_net(net_name)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trained_s, steps = 0.0, 0
    while times:
        began = time.monotonic()
        numbers = [
            rng.choice(defective) if n < BATCH // 2 else rng.integers(len(train))
            for n in range(BATCH)
        ]
        patches = [crop(*train[number], n < BATCH // 2, rng) for n, number in enumerate(numbers)]
        images = torch.from_numpy(np.stack([image for image, _ in patches])[:, None])
        masks = torch.from_numpy(np.stack([mask for _, mask in patches])[:, None]).float()
        logits = net((images - mean) / deviation)
        probability = logits.sigmoid()
        dice = 1 - (2 * (probability * masks).sum() + 1) / (probability.sum() + masks.sum() + 1)
        loss = F.binary_cross_entropy_with_logits(logits, masks) + dice
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        trained_s += time.monotonic() - began
        if trained_s >= times[0]:
            print(f"steps {steps}")
            test = [
                (Path(row["image"]).stem, read(root, row["image"])[0])
                for row in rows
                if row["split"] == "test"
            ]
            predict(
                net,
                [(stem, (image - mean) / deviation) for stem, image in test],
                out / str(times.pop(0)) / "maps",
            )


if __name__ == "__main__":
    net_name, splits, root, seed, out, *times = sys.argv[1:]
    main(net_name, Path(splits), Path(root), int(seed), Path(out), sorted(map(int, times)))
