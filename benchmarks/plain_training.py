"""Training loop of the plain scripts, and how they read images."""

import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn


def train(
    net: nn.Module,
    find_loss: Callable[[], Tensor],
    predict: Callable[[Path], None],
    out: Path,
    times: list[int],
) -> None:
    """Train with Adam at 1e-3, and predict after each of some times, to ``OUT/SECONDS``.

    The rate is constant, so a shorter run is the beginning of a longer one.

    Args:
        net: The net.
        find_loss: Draws a batch.
        predict: Writes what the net says of the test images into a folder.
        out: Of all times.
        times: Seconds of training, without that of prediction.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    trained_s, steps = 0.0, 0
    for seconds in sorted(times):
        while trained_s < seconds:
            began = time.monotonic()
            loss = find_loss()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            trained_s += time.monotonic() - began
        print(f"steps {steps}")
        net.eval()
        with torch.no_grad():
            predict(out / str(seconds))
        net.train()


def read_square(path: Path, size_px: int) -> Tensor:
    """Read an image as [3, S, S] float32 in 0..1, R, G, B, squeezed to a square."""
    image = np.asarray(cv2.imread(str(path), cv2.IMREAD_COLOR))[..., ::-1]
    scaled = cv2.resize(image, (size_px, size_px), interpolation=cv2.INTER_AREA)
    return torch.from_numpy(scaled).permute(2, 0, 1).float() / 255
