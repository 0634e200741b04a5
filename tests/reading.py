"""Opened datamodules and their batches, for tests."""

from typing import TypeVar

import numpy as np
import torch

from lit_data.datamodules import BaseDataModule
from lit_data.types import Batch, Stage

Data = TypeVar("Data", bound=BaseDataModule)


def opened(data: Data, stage: str = "fit") -> Data:
    """Return a datamodule whose files are open."""
    data.prepare_data()
    data.setup(stage)
    return data


def first(data: BaseDataModule, stage: Stage = "train", count: int = 4, epoch: int = 0) -> Batch:
    """Return the first samples of a stage, finished."""
    return data.transform(data.make_loader(stage).read(np.arange(count), epoch), stage)


def read_all(data: BaseDataModule, stage: Stage = "train", epoch: int = 0) -> Batch:
    """Return all samples of a stage in the order of an epoch, finished, as one batch."""
    loader = data.make_loader(stage)
    loader.set_epoch(epoch)
    batches = [data.transform(dict(batch), stage) for batch in loader]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
