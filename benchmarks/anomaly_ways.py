"""Ways to find anomalies from good parts alone, for the benchmark of learning.

``python -m benchmarks.anomaly_ways WAY ROOT SEED OUT``

ROOT is a set of ``python -m benchmarks.learning_sets good_...``. WAY is `ours`, or `exported`, by
lit_inspect; `patchcore` or `padim`, those of anomalib on the same encoder and weights, in an
environment that has it; or `plain`, a memory bank as people write it. Each writes
``OUT/images.csv`` with a score of each test image, ``OUT/maps`` and ``OUT/costs.json``.
"""

import csv
import importlib
import json
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from benchmarks import lite0
from benchmarks.learning_sets import copy_images, read_split
from benchmarks.plain_training import read_square
from lit_data.models.pretrained.efficientnet_lite import EfficientNetLite

SIZE_PX = 224
BANK_SIZE = 10_000
PADIM_FEATURES = 100  # as with its encoder of about this size, ResNet-18
CORESET_FRACTION = 0.01  # of PatchCore; the default of anomalib, 0.1, takes hours on a processor
PLAIN_BATCH = 8


class AnomalyWay(ABC):
    """Learns good images, and scores others.

    Args:
        root: The set.
        seed: Of whatever is drawn.
        out: A folder for its files.
    """

    def __init__(self, root: Path, seed: int, out: Path) -> None:
        self.root, self.seed, self.out = root, seed, out

    @property
    def good_images(self) -> list[Path]:
        """Images that train."""
        return [self.root / name for name in read_split(self.root, "train")]

    @abstractmethod
    def fit(self) -> None:
        """Learn the good images."""

    @abstractmethod
    def predict(self, folder: Path, out: Path) -> None:
        """Write ``images.csv`` and ``maps`` of the images of a folder."""


class Ours(AnomalyWay):
    """The experiment and its defaults, by the commands that a user types."""

    @override
    def fit(self) -> None:
        table = self.root / "splits.csv"
        data = [f"data.root={self.root}", f"data.splits={table}", "data.loader.num_workers=0"]
        self._run("fit", self.out / "fit", *data, f"seed={self.seed}", "report=false")

    @override
    def predict(self, folder: Path, out: Path) -> None:
        checkpoint = self.out / "fit/checkpoints/best.ckpt"
        self._run("predict", out, f"data.root={folder}", f"ckpt={checkpoint}")

    def _run(self, command: str, folder: Path, *words: str) -> None:
        _run_command(command, "+experiment=anomaly", f"hydra.run.dir={folder}", *words)


class Exported(Ours):
    """The same model, exported after training and run by lit_inspect."""

    @override
    def fit(self) -> None:
        super().fit()
        run, file = self.out / "fit", self.out / "part.inspect"
        _run_command("export", str(run), str(file))

    @override
    def predict(self, folder: Path, out: Path) -> None:
        from lit_inspect.__main__ import main

        if main([str(self.out / "part.inspect"), str(folder), "--out", str(out)]) != 0:
            raise RuntimeError("lit-inspect ended with an error")


class Anomalib(AnomalyWay):
    """A model of anomalib on blocks 2 and 4 of EfficientNet-Lite0, by its engine.

    Args:
        root: See `AnomalyWay`, as `seed` and `out`.
        seed: See there.
        out: See there.
        name: Of the model's class.
        options: Of that class.
    """

    def __init__(self, root: Path, seed: int, out: Path, name: str, **options: float) -> None:
        super().__init__(root, seed, out)
        lightning: Any = importlib.import_module("lightning")
        models: Any = importlib.import_module("anomalib.models")
        transforms: Any = importlib.import_module("torchvision.transforms.v2")
        self._engine: Any = importlib.import_module("anomalib.engine")
        self._data: Any = importlib.import_module("anomalib.data")
        processing: Any = importlib.import_module("anomalib.pre_processing")
        lightning.seed_everything(seed)
        steps = [
            transforms.Resize((SIZE_PX, SIZE_PX), antialias=True),
            transforms.Normalize([127 / 255] * 3, [128 / 255] * 3),  # of these weights
        ]
        self._model: Any = getattr(models, name)(
            backbone=lite0.NAME,
            layers=["blocks.2", "blocks.4"],
            pre_trained=False,
            pre_processor=processing.PreProcessor(transform=transforms.Compose(steps)),
            visualizer=False,
            **options,
        )
        lite0.load_lite0(self._model.model.feature_extractor)

    @override
    def fit(self) -> None:
        copy_images(self.good_images, self.out / "good")
        datamodule = self._data.Folder(
            name="good",
            root=self.out,
            normal_dir="good",
            num_workers=0,
            test_split_mode="none",
            val_split_mode="none",
        )
        self._make_engine().fit(self._model, datamodule=datamodule)

    @override
    def predict(self, folder: Path, out: Path) -> None:
        dataset = self._data.PredictDataset(path=folder)
        scores = {}
        for batch in self._make_engine().predict(self._model, dataset=dataset):
            rows = zip(batch.image_path, batch.pred_score, batch.anomaly_map, strict=True)
            for path, score, values in rows:
                scores[Path(path).name] = float(score)
                write_map(Path(path), values.float().squeeze().numpy(), out)
        write_scores(scores, out)

    def _make_engine(self) -> Any:  # noqa: ANN401 - of a library that is not installed here
        return self._engine.Engine(
            default_root_dir=self.out / "anomalib",
            accelerator="cpu",
            logger=False,
            limit_val_batches=0,
            enable_progress_bar=False,
        )


class Plain(AnomalyWay):
    """A memory bank as people write it: whole images squeezed to one size, a random sample of features.

    Of lit_data it has the encoder alone.
    """

    def __init__(self, root: Path, seed: int, out: Path) -> None:
        super().__init__(root, seed, out)
        torch.manual_seed(seed)
        self._encoder = EfficientNetLite(strides_px=[8, 16]).eval()
        self._bank = torch.empty(0)

    @override
    def fit(self) -> None:
        features = []
        for first in range(0, len(self.good_images), PLAIN_BATCH):
            features.append(self._describe(self.good_images[first : first + PLAIN_BATCH])[0])
        all_features = torch.cat(features)
        self._bank = all_features[torch.randperm(len(all_features))[:BANK_SIZE]]

    @override
    def predict(self, folder: Path, out: Path) -> None:
        scores = {}
        for path in sorted(folder.iterdir()):
            features, (rows, columns) = self._describe([path])
            distances = torch.cdist(features, self._bank).amin(1)
            scores[path.name] = float(distances.max())
            write_map(path, distances.view(rows, columns).numpy(), out)
        write_scores(scores, out)

    @torch.no_grad()
    def _describe(self, paths: Sequence[Path]) -> tuple[Tensor, tuple[int, int]]:
        """Return features [N, F] of the places of images, and how many there are in an image."""
        fine, coarse = self._encoder(torch.stack([read_square(path, SIZE_PX) for path in paths]))
        coarse = F.interpolate(coarse, size=fine.shape[2:], mode="bilinear")
        maps = F.avg_pool2d(torch.cat((fine, coarse), 1), 3, 1, 1)
        return maps.permute(0, 2, 3, 1).flatten(0, 2), (maps.shape[2], maps.shape[3])


def _run_command(command: str, *words: str) -> None:
    from lit_data.app.cli import main

    if main([command, *words]) != 0:
        raise RuntimeError(f"{command} ended with an error")


def write_map(image: Path, values: np.ndarray, out: Path) -> None:
    """Write a map of an image, scaled to its size, as ``maps/NAME.npy`` in float32."""
    height, width = np.asarray(cv2.imread(str(image), cv2.IMREAD_GRAYSCALE)).shape
    scaled = cv2.resize(values, (width, height), interpolation=cv2.INTER_LINEAR)
    (out / "maps").mkdir(parents=True, exist_ok=True)
    np.save(out / "maps" / f"{image.stem}.npy", scaled)


def write_scores(scores: Mapping[str, float], out: Path) -> None:
    """Write ``images.csv`` with the columns ``image`` and ``score``."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "images.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "score"))
        writer.writerows(scores.items())


def make_way(name: str, root: Path, seed: int, out: Path) -> AnomalyWay:
    """Make one of the ways."""
    own: dict[str, type[AnomalyWay]] = {"ours": Ours, "exported": Exported, "plain": Plain}
    if name in own:
        return own[name](root, seed, out)
    if name == "padim":
        return Anomalib(root, seed, out, "Padim", n_features=PADIM_FEATURES)
    return Anomalib(root, seed, out, "Patchcore", coreset_sampling_ratio=CORESET_FRACTION)


def main(name: str, root: Path, seed: int, out: Path) -> None:
    """Run a way, and write what it found and what it cost.

    ``costs.json`` has ``fit_s`` and ``images_per_s``, by the time of all threads of this process,
    and ``memory_mib``, by which the process grew. What a prediction of a single image takes is the
    start of one, and is taken off.
    """
    test_images = [root / image for image in read_split(root, "test")]
    copy_images(test_images, out / "test")
    copy_images(test_images[:1], out / "first")
    way = make_way(name, root, seed, out)
    resident_mib = read_memory_mib("VmRSS")
    began = time.process_time()
    way.fit()
    fit_s = time.process_time() - began
    way.predict(out / "first", out / "warm")  # imports, and plans of the net
    began = time.process_time()
    way.predict(out / "first", out / "warm")
    start_s = time.process_time() - began
    began = time.process_time()
    way.predict(out / "test", out)
    predict_s = time.process_time() - began - start_s
    costs = {
        "fit_s": fit_s,
        "images_per_s": (len(test_images) - 1) / predict_s,
        "memory_mib": read_memory_mib("VmHWM") - resident_mib,
    }
    (out / "costs.json").write_text(json.dumps(costs))
    for folder in ("test", "first", "warm", "good"):
        shutil.rmtree(out / folder, ignore_errors=True)


def read_memory_mib(name: str) -> float:
    """Read the memory of this process: ``VmRSS``, or ``VmHWM``, the most it has had.

    ``ru_maxrss`` begins with what the process that started this one had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kib) / 1024


if __name__ == "__main__":
    name, root, seed, out = sys.argv[1:]
    main(name, Path(root), int(seed), Path(out))
