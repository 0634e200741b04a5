"""Images of one split as samples."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.core.types import Array, FieldSpec
from lit_data.datasets import BankDataset
from lit_data.images.bank import ImageBank


class MyKindDataset(BankDataset):
    """Images of one split: ``image`` [3, size_px, size_px] uint8, ``label``, ``index`` in the bank.

    Args:
        bank: All decoded images.
        labels: [N] int64 class number of each image of the bank.
        numbers: [n] int64 numbers in the bank of the images of this split.
        size_px: Height and width of an image.
    """

    def __init__(
        self, bank: ImageBank, labels: NDArray[np.int64], numbers: NDArray[np.int64], size_px: int
    ) -> None:
        self.bank = bank
        self.labels = labels
        self.numbers = numbers
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
        rows["label"][:] = self.labels[numbers]
        rows["index"][:] = numbers
        rows["epoch"][:] = epoch
