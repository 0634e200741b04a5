"""What a loader can read."""

import numpy as np
import torch

from lit_data.errors import ConfigError
from lit_data.loading.options import LoaderOptions
from lit_data.loading.samples import Collate, MapStyle, SampleWriter
from lit_data.types import RowWriter


def count_samples(dataset: RowWriter | MapStyle) -> int:
    """The length of a dataset.

    Raises:
        ConfigError: It cannot be read by index.
    """
    if not (hasattr(dataset, "__getitem__") or isinstance(dataset, RowWriter)) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} cannot be read by index: give a map-style dataset with __getitem__ and __len__, "
            "or one with `fields` and `write_into` (lit_data.types.RowWriter)"
        )
    return len(dataset)


def as_rows(dataset: RowWriter | MapStyle, options: LoaderOptions, collate_fn: Collate | None = None) -> RowWriter:
    """The dataset, if it writes rows; else a writer of its samples.

    Raises:
        ConfigError: Its samples cannot be put into a batch, or there is nothing for `collate_fn` to do.
    """
    if not isinstance(dataset, RowWriter):
        return SampleWriter(dataset, seed=options.seed, collate_fn=collate_fn)
    if collate_fn is not None:
        raise ConfigError(f"{type(dataset).__name__} writes into the rows of a batch itself: leave out collate_fn")
    return dataset


class SingleSamples:
    """A dataset that writes rows, read sample by sample, as torch's own loader does.

    Args:
        dataset: Its fields are not ragged.
    """

    def __init__(self, dataset: RowWriter) -> None:
        self._dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch: int) -> None:
        """Samples are those of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = {key: np.zeros((1, *spec.shape), spec.dtype) for key, spec in self._dataset.fields.items()}
        self._dataset.write_into(rows, np.array([index]), self.epoch)
        return {key: torch.from_numpy(row)[0] for key, row in rows.items()}
