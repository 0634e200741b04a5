"""What there is to say about the samples of a GAN set."""

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.inspection import Inspection
from lit_data.datamodules.stripe_transform import to_unit
from lit_data.datasets.gan import GANDataset
from lit_data.synthesis.values import ValueRange
from lit_data.types import Batch


class GANInspection(Inspection):
    """See `Inspection`.

    Args:
        dataset: The images of the stage.
        values: The pixel values that become 0 and 1.
        plain: Finishes a planned batch without augmentation; none where nothing is augmented.
    """

    def __init__(self, dataset: GANDataset, values: ValueRange, plain: Callable[[Batch], Batch] | None) -> None:
        self._dataset, self._values, self._plain = dataset, values, plain

    @override
    def draw(self, batch: Batch) -> Batch | None:
        return self._plain(batch) if self._plain else None

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        if self._plain or not self._values.whole:
            return None
        return self._dataset.bank.dtype.name, self._values

    def views_of(self, number: int) -> Tensor:
        """All views of one object: [V, C, h, w] float32 in 0..1."""
        return to_unit(torch.from_numpy(self._dataset.views_of(number)), self._values)
