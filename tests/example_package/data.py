"""Images with one label each, in a folder for each class: a kind of data that lit_data does not know."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.datamodules import BaseDataModule, ImageFolder
from lit_data.datasets import BankDataset
from lit_data.datasets.splits import Splits, split_images
from lit_data.files import write_table
from lit_data.io.images.decoders import ImageDecoder
from lit_data.io.images.image_source import ImageBank
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.resize import FittedDecoder
from lit_data.loading import LoaderOptions
from lit_data.tasks import Entry, PredictionWriter, PredictOptions, PredictRun, Task, Written
from lit_data.tasks.answers import ask_step
from lit_data.tasks.figures import CELL_INCHES, new_axes, save_figure, show_pixels
from lit_data.types import Array, Batch, FieldSpec, PlannedBatch, Stage


class LabelledImages(BankDataset):
    """Images of one split: ``image`` [3, H, W] uint8, ``label``, ``index`` and ``epoch`` int64."""

    def __init__(
        self, bank: ImageBank, labels: NDArray[np.int64], numbers: NDArray[np.int64], size_px: int
    ) -> None:
        self.bank, self.labels, self.numbers = bank, labels, numbers
        number = FieldSpec((), "int64")
        image = FieldSpec((3, size_px, size_px), "uint8")
        self.fields = {"image": image, "label": number, "index": number, "epoch": number}

    def __len__(self) -> int:
        return len(self.numbers)

    @override
    def images_of(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self.numbers[indices]

    @override
    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        numbers = self.numbers[indices]
        for row, number in zip(rows["image"], numbers.tolist(), strict=True):
            row[...] = self.bank[number]
        rows["label"][:], rows["index"][:], rows["epoch"][:] = self.labels[numbers], numbers, epoch


@dataclass(frozen=True, kw_only=True)
class ClassFolders(ImageFolder):
    """A folder for each class."""

    takes_shards = True

    size_px: int

    @property
    @override
    def decoder(self) -> FittedDecoder:
        return FittedDecoder(
            (self.size_px, self.size_px),
            "cover",
            decoder=ImageDecoder(ReadOptions(gray_to_rgb=True)),
        )


class LabelTask(Task["LabelDataModule"]):
    """Images with the names of their classes above them."""

    predicts = "probabilities [B, classes]"

    @override
    def describe_sample(self, batch: Batch, row: int) -> str:
        return self.datamodule.classes[int(batch["label"][row])]

    @override
    def draw_predictions(
        self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int
    ) -> bool:
        count = min(count, len(batch["image"]))
        found = ask_step(model, batch).cpu()
        figure, axes = new_axes(1, count, CELL_INCHES + 0.5)
        for row, cell in enumerate(axes[0]):
            show_pixels(cell, batch["image"][row])
            score, label = found[row].max(0)
            cell.set_title(
                f"{self.describe_sample(batch, row)}: {self.datamodule.classes[label]} {score:.2f}",
                fontsize=8,
            )
        save_figure(figure, path, title, ())
        return True

    @override
    def writer(self, run: PredictRun, options: PredictOptions) -> "LabelWriter":
        options.refuse("labels", *self.unused)
        return LabelWriter(self.datamodule, run.folder)


class LabelDataModule(BaseDataModule[LabelledImages]):
    """A batch: ``image`` [B, 3, H, W] float32 in 0..1, ``label``, ``index`` and ``epoch`` [B] int64."""

    task = LabelTask
    batch_keys = ("image", "label", "index", "epoch")
    bank: ImageBank

    def __init__(
        self,
        root: str,
        *,
        size_px: int = 32,
        splits: Splits = "auto",
        split_seed: int = 0,
        on_bad: Any = "error",
        cache_dir: str | None = None,
        cache_bytes: int = 2**30,
        loader: LoaderOptions | None = None,
    ) -> None:
        super().__init__(loader=loader)
        self.source: ClassFolders = ClassFolders(
            root=root,
            on_bad=on_bad,
            cache_dir=cache_dir,
            patterns=("**/*",),
            cache="store",
            cache_bytes=cache_bytes,
            size_px=size_px,
        )
        self.splits, self.split_seed = splits, split_seed

    @override
    def open_source(self) -> None:
        self.bank = self.source.open_images()
        names = self.source.names(self.bank)
        self.classes = sorted({Path(name).parent.name for name in names})
        self.labels = np.array([self.classes.index(Path(name).parent.name) for name in names])
        self.numbers = split_images(names, self.splits, seed=self.split_seed)

    @override
    def build_dataset(self, stage: Stage) -> LabelledImages:
        numbers = np.arange(len(self.bank)) if stage == "predict" else self.numbers[stage]
        return LabelledImages(self.bank, self.labels, numbers, self.source.size_px)

    @override
    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        return batch | {"image": batch["image"].float() / 255}


class LabelWriter(PredictionWriter):
    """Writes ``labels.csv``."""

    expects = "probabilities [B, classes]"

    def __init__(self, datamodule: LabelDataModule, folder: Path) -> None:
        self._classes, self._folder = datamodule.classes, folder
        self.names, self.bad = datamodule.source.names(datamodule.bank), datamodule.bank.skipped

    @override
    def read(self, outputs: Any, batch: Any) -> Sequence[torch.Tensor] | None:
        return (
            list(outputs.cpu()) if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 else None
        )

    @override
    def write(self, number: int, answer: torch.Tensor, seconds: float) -> Written:
        score, label = answer.max(0)
        return Written(
            [], [{"label": self._classes[label], "score": round(float(score), 4)}], float(score)
        )

    @override
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        rows = [{"image": entry.image, **entry.rows[0]} for entry in entries]
        write_table(self._folder / "labels.csv", ("image", "label", "score"), rows)
        return {
            f"predict/{name}": count
            for name, count in sorted(Counter(row["label"] for row in rows).items())
        }
