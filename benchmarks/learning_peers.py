"""Trainers of other libraries, as their pages use them, for the benchmark of learning.

``python -m benchmarks.learning_peers ultralytics ROOT SEED SECONDS OUT`` writes
``OUT/detections.json``; ``python -m benchmarks.learning_peers torchgeo ROOT SEED SECONDS OUT``
writes ``OUT/maps``. Each needs an environment that has the library, and starts from random weights.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks import plain_masks
from benchmarks.learning_detection import Box, list_images, write_detections

SIZE_PX = 320
LEAST_SCORE = 0.001


def train_ultralytics(folder: Path, seed: int, seconds: int, out: Path) -> None:
    """Train YOLO11n, and predict with the weights that validation chose.

    Options are its defaults but for the size of images, that of `detection`, and the time.

    Args:
        folder: A dataset with list files and YOLO text, see `benchmarks.learning_sets`.
        seed: Of weights and order.
        seconds: Time to train for, validation included; the schedule of the rate follows it.
        out: Gets ``detections.json``.
    """
    ultralytics: Any = importlib.import_module("ultralytics")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        paths = [str(path.absolute()) for path in list_images(folder, split)]
        (out / f"{split}.txt").write_text("\n".join(paths) + "\n")
    classes = (folder / "classes.txt").read_text().split()
    names = [f"  {number}: {name}" for number, name in enumerate(classes)]
    table = ["train: train.txt", "val: val.txt", f"path: {out}", "names:", *names]
    (out / "data.yaml").write_text("\n".join(table) + "\n")
    model = ultralytics.YOLO("yolo11n.yaml")
    model.add_callback("on_train_start", _use_all_cores)
    model.train(
        data=str(out / "data.yaml"),
        time=seconds / 3600,
        epochs=1000,
        imgsz=SIZE_PX,
        pretrained=False,
        device="cpu",
        seed=seed,
        plots=False,
        project=str(out),
        name="train",
    )
    model = ultralytics.YOLO(out / "train" / "weights" / "best.pt")
    predictions = {}
    for path in list_images(folder, "test"):
        found = model.predict(path, imgsz=SIZE_PX, conf=LEAST_SCORE, verbose=False)[0].boxes
        boxes = []
        for row in zip(found.cls.tolist(), found.xyxy.tolist(), found.conf.tolist(), strict=True):
            number, (left, top, right, bottom), score = row
            boxes.append(Box(int(number), (left, top, right, bottom), score))
        predictions[path.stem] = boxes
    write_detections(predictions, out / "detections.json")


def _use_all_cores(_trainer: object) -> None:
    """Take the core that Ultralytics leaves free, as it does on a processor."""
    torch.set_num_threads(os.cpu_count() or 1)


class _Crops(IterableDataset[dict[str, Tensor]]):
    """Endless batches of the plain script, with the names of torchgeo.

    Args:
        splits: The dataset.
        seed: Of images, places and flips.
    """

    def __init__(self, splits: plain_masks.Splits, seed: int) -> None:
        self._splits, self._seed = splits, seed

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng = np.random.default_rng(self._seed)
        train, _, mean, deviation = self._splits
        defective = [number for number, (_, mask) in enumerate(train) if mask.any()]
        while True:
            images, masks = plain_masks.draw_batch(train, defective, rng)
            standardised = (images - mean) / deviation
            yield {"image": standardised, "mask": masks[:, 0].long()}


class _Logits(nn.Module):
    """Logits of the defect, out of those of two classes.

    Args:
        task: From [B, 1, H, W] to [B, 2, H, W].
    """

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self._task = task

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._task(images)
        return logits[:, 1:] - logits[:, :1]


def train_torchgeo(root: Path, seed: int, seconds: int, out: Path) -> None:
    """Train the task of torchgeo, a U-Net with a ResNet-18, on the crops of the plain script.

    Args:
        root: A dataset with ``splits.csv``, see `benchmarks.learning_sets`.
        seed: Of weights and crops.
        seconds: Time to train for; there is no validation.
        out: Gets maps of the test images.
    """
    lightning: Any = importlib.import_module("lightning")
    trainers: Any = importlib.import_module("torchgeo.trainers")
    splits = plain_masks.read_splits(root)
    lightning.seed_everything(seed)
    task = trainers.SemanticSegmentationTask(
        "unet", "resnet18", in_channels=1, task="multiclass", num_classes=2, loss="ce"
    )
    trainer = lightning.Trainer(
        max_time={"seconds": seconds},
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(task, DataLoader(_Crops(splits, seed), batch_size=None, num_workers=1))
    print(f"steps {trainer.global_step}")
    plain_masks.predict(_Logits(task), splits.test, out / "maps")


def main(library: str, root: Path, seed: int, seconds: int, out: Path) -> None:
    """Train with a library, and write what it predicts of the test images."""
    train = {"ultralytics": train_ultralytics, "torchgeo": train_torchgeo}[library]
    torch.manual_seed(seed)
    train(root, seed, seconds, out)


if __name__ == "__main__":
    library, root, seed, seconds, out = sys.argv[1:]
    main(library, Path(root), int(seed), int(seconds), Path(out))
