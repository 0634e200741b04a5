"""What the loader of the running stage says of its batches."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, default_collate

from lit_data.batch_form import count_plain, count_samples
from lit_data.loading import MicroBatchLoader

_MISSING: Any = object()


class LoaderFacts(NamedTuple):
    """What is known of the batches of a loader.

    Attributes:
        sizes: How many samples they can have; empty if that is not known.
        stacked: Whether the loader stacks samples, so that no list in a batch has one entry for
            each sample.
    """

    sizes: Collection[int] = ()
    stacked: bool = False


def read_loader(trainer: L.Trainer, dataloader_idx: int = 0) -> LoaderFacts:
    """What is known of the batches that arrive now.

    Args:
        trainer: Whose loaders.
        dataloader_idx: Which of several in evaluation.
    """
    loader = _find_loader(trainer, dataloader_idx)
    collate = getattr(loader, "collate_fn", _MISSING)
    stacked = collate is default_collate or (
        isinstance(loader, MicroBatchLoader) and collate is None
    )
    return LoaderFacts(_list_sizes(loader), stacked)


def count_batch(trainer: L.Trainer, batch: Any, dataloader_idx: int = 0) -> int:  # noqa: ANN401 - any form
    """Samples of the batch that a callback was given, in the form that its datamodule has given it.

    Returns:
        The number; 0 where it cannot be told.
    """
    if samples := count_plain(batch):
        return samples
    facts = read_loader(trainer, dataloader_idx)
    stacked = facts.stacked and getattr(
        getattr(trainer, "datamodule", None), "stacks_samples", True
    )
    return count_samples(batch, facts.sizes, stacked=stacked)


def _find_loader(trainer: L.Trainer, dataloader_idx: int) -> object:
    """The loader of the running stage; nothing where several are read at once."""
    stage = trainer.state.stage
    if stage == RunningStage.TRAINING:
        return trainer.train_dataloader
    loaders: Any = None
    if stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING):
        loaders = trainer.val_dataloaders
    elif stage is not None:
        loaders = (
            trainer.test_dataloaders
            if stage == RunningStage.TESTING
            else trainer.predict_dataloaders
        )
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if not isinstance(several, list | tuple):
        return several
    return several[dataloader_idx] if dataloader_idx < len(several) else None


def _list_sizes(loader: object) -> Collection[int]:
    """The size of a full batch and that of the last one, which may be anything where the loader does not know."""
    if isinstance(loader, MicroBatchLoader):
        return loader.batch_sizes
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return ()
    if isinstance(loader, DataLoader) and loader.drop_last:
        return {size}
    try:
        return {size, len(loader.sampler) % size} - {0}  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # an iterable dataset, or a loader of another kind
        return range(1, size + 1)
