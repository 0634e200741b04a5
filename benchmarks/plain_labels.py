"""A training script for labels of whole images, as people write it.

``python -m benchmarks.plain_labels NET ROOT SEED OUT SECONDS...``

Images scaled to one size, mean and standard deviation taken off, Adam at 1e-3, cross entropy, flips.
NET is `conv`, that of lit_data, of which nothing else is imported, so that both train the same one; or
`timm`, the EfficientNet-Lite0 of timm that has seen ImageNet.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import lite0, plain_training
from benchmarks.learning_sets import read_split

SIZE_PX = 128
BATCH = 16


def make_net(name: str, classes: int) -> nn.Module:
    """Make a net from [B, 3, H, W] to logits [B, classes]; `conv` or `timm`."""
    if name == "timm":
        return lite0.make_classifier(classes)
    from lit_data.models import ConvClassifier

    return ConvClassifier(classes)


def main(net_name: str, root: Path, seed: int, out: Path, times: list[int]) -> None:
    """Train, and write ``labels.csv`` of the test images after each of some times."""
    train, test = read_split(root, "train"), read_split(root, "test")
    classes = sorted({Path(name).parent.name for name in train})
    labels = torch.tensor([classes.index(Path(name).parent.name) for name in train])
    train_images = torch.stack([plain_training.read_square(root / name, SIZE_PX) for name in train])
    test_images = torch.stack([plain_training.read_square(root / name, SIZE_PX) for name in test])
    mean, deviation = train_images.mean(), train_images.std()
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = make_net(net_name, len(classes))

    def find_loss() -> Tensor:
        numbers = torch.from_numpy(rng.integers(len(train), size=BATCH))
        images = (train_images[numbers] - mean) / deviation
        flips = [axis for axis in (2, 3) if rng.random() < 0.5]  # of the whole batch
        return F.cross_entropy(net(images.flip(flips)), labels[numbers])

    def predict(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "labels.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("image", "label"))
            parts = torch.split((test_images - mean) / deviation, BATCH)
            numbers = torch.cat([net(part).argmax(1) for part in parts]).tolist()
            writer.writerows(zip(test, (classes[number] for number in numbers), strict=True))

    plain_training.train(net, find_loss, predict, out, times)


if __name__ == "__main__":
    net_name, root, seed, out, *times = sys.argv[1:]
    main(net_name, Path(root), int(seed), Path(out), list(map(int, times)))
