"""A training script for labels of whole images, as people write it.

``python -m benchmarks.plain_labels NET SPLITS ROOT SEED OUT SECONDS...``

Images scaled to one size, mean and standard deviation taken off, Adam at 1e-3, cross entropy, flips.
NET is `conv`, that of lit_data, of which nothing else is imported, so that both train the same one;
`resnet18`, that of torchvision with random weights; or `timm_lite0`, the EfficientNet-Lite0 of timm
that has seen ImageNet.
"""

import csv
import importlib
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import lite0

SIZE_PX = 128
BATCH = 16


def make_net(name: str, classes: int) -> nn.Module:
    """Make a net from [B, 3, H, W] to logits [B, classes]; `conv`, `resnet18` or `timm_lite0`."""
    if name == "timm_lite0":
        return lite0.make_classifier(classes)
    if name == "resnet18":
        models = importlib.import_module("torchvision.models")
        net: nn.Module = models.resnet18(num_classes=classes)
        return net
    from lit_data.models import ConvClassifier

    return ConvClassifier(classes)


def read(path: Path) -> Tensor:
    """Read an image as [3, H, W] float32 in 0..1, scaled to `SIZE_PX`."""
    image = np.asarray(cv2.imread(str(path), cv2.IMREAD_COLOR))
    scaled = cv2.resize(image, (SIZE_PX, SIZE_PX), interpolation=cv2.INTER_AREA)
    return torch.from_numpy(scaled).permute(2, 0, 1).float() / 255


def predict(
    net: nn.Module, images: Tensor, names: list[str], classes: list[str], folder: Path
) -> None:
    """Write ``labels.csv`` with the columns ``image`` and ``label``."""
    net.eval()
    with torch.no_grad():
        numbers = torch.cat([net(part).argmax(1) for part in torch.split(images, BATCH)])
    net.train()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "label"))
        writer.writerows(zip(names, (classes[number] for number in numbers.tolist()), strict=True))


def main(net_name: str, splits: Path, root: Path, seed: int, out: Path, times: list[int]) -> None:
    """Train, and write the labels of the test images after each of some times, to ``OUT/SECONDS``.

    The rate is constant, so a shorter run is the beginning of a longer one.
    """
    with splits.open(newline="") as file:
        rows = [(row["image"], row["split"]) for row in csv.DictReader(file)]
    train = [name for name, split in rows if split == "train"]
    test = [name for name, split in rows if split == "test"]
    classes = sorted({Path(name).parent.name for name in train})
    labels = torch.tensor([classes.index(Path(name).parent.name) for name in train])
    train_images = torch.stack([read(root / name) for name in train])
    test_images = torch.stack([read(root / name) for name in test])
    mean, deviation = train_images.mean(), train_images.std()
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = make_net(net_name, len(classes))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trained_s, steps = 0.0, 0
    while times:
        began = time.monotonic()
        numbers = torch.from_numpy(rng.integers(len(train), size=BATCH))
        images = (train_images[numbers] - mean) / deviation
        flips = [axis for axis in (2, 3) if rng.random() < 0.5]  # of the whole batch
        loss = F.cross_entropy(net(images.flip(flips)), labels[numbers])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
        trained_s += time.monotonic() - began
        if trained_s >= times[0]:
            print(f"steps {steps}")
            folder = out / str(times.pop(0))
            predict(net, (test_images - mean) / deviation, test, classes, folder)


if __name__ == "__main__":
    net_name, splits, root, seed, out, *times = sys.argv[1:]
    main(net_name, Path(splits), Path(root), int(seed), Path(out), sorted(map(int, times)))
