"""Images with one label each, in a folder for each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
from typing_extensions import override

from lit_data.core.types import Batch, PathText, PlannedBatch, Stage
from lit_data.datamodules import BaseDataModule, ImageFolder
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import FolderKeywords
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import ImageDecoder
from lit_data.images.scaling import FittedDecoder
from lit_data.loading import LoaderOptions

from my_kind.dataset import MyKindDataset


@dataclass(frozen=True, kw_only=True)
class MyKindFiles(ImageFolder):
    """Images of any size below a folder, on a server or in shards, each made square.

    Args:
        size_px: Height and width of a sample.
    """

    takes_shards = True

    size_px: int

    @property
    @override
    def decoder(self) -> FittedDecoder:
        size_px = (self.size_px, self.size_px)
        return FittedDecoder(size_px, "cover", decoder=ImageDecoder(self.read))


class MyKindDataModule(BaseDataModule[MyKindDataset]):
    """Images with the names of their folders as classes.

    A batch: ``image`` [B, 3, size_px, size_px] float32 in 0..1; ``label``, ``index`` and ``epoch``
    [B] int64.

    Options are those of `ImageFolder` with its defaults, and:

    Args:
        root: Folder or address of the images, with a folder for each class.
        size_px: Height and width of a sample.
        classes: Names of the classes in the order of their numbers; None takes all folders.
        loader: Batch size, workers, seed.
        batch_format: Form of a batch.
    """

    batch_keys = ("image", "label", "index", "epoch")
    bank: ImageBank
    source: MyKindFiles

    def __init__(
        self,
        root: PathText,
        *,
        size_px: int = 64,
        classes: Sequence[str] | None = None,
        loader: LoaderOptions | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[FolderKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.source = MyKindFiles.of(root=root, size_px=size_px, **options)
        self.classes = classes

    @override
    def find_classes(self) -> Sequence[str]:
        paths = [self.source.name(image.paths[0]) for image in self.source.list_images()]
        return sorted({Path(path).parent.name for path in paths})

    @override
    def open_source(self) -> None:
        self.bank = self.source.open_images()
        self.classes = list(self.classes or self.find_classes())
        numbers = {name: number for number, name in enumerate(self.classes)}
        names = self.source.names(self.bank)
        # -1: an image to predict, which lies in no folder of a class
        self.labels = np.array([numbers.get(Path(name).parent.name, -1) for name in names])
        self.split_images = self.source.split(names)

    @override
    def build_dataset(self, stage: Stage) -> MyKindDataset:
        if stage == "predict":
            numbers = np.arange(len(self.bank))
        else:
            numbers = self.split_images[stage]
            numbers = numbers[self.labels[numbers] >= 0]
        return MyKindDataset(self.bank, self.labels, numbers, self.source.size_px)

    @override
    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        return batch | {"image": batch["image"].float() / 255}
