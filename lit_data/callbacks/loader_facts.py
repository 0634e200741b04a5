"""Facts about the batches of the loader of the running stage."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from lit_data.core.batch_form import count_plain, count_samples
from lit_data.core.checks import is_count
from lit_data.core.errors import ConfigError
from lit_data.loading import MicroBatchLoader

WRONG_FORM = (ConfigError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of a module's `slice_batch` or `count_samples` that was written for another form of its batches."""
_MISSING: Any = object()


class LoaderFacts(NamedTuple):
    """Facts about the batches of a loader.

    Attributes:
        sizes: Possible numbers of samples in a batch; empty if they are not known.
        stacked: The loader stacks samples, so that no list in a batch has one entry for each
            sample.
    """

    sizes: Collection[int] = ()
    stacked: bool = False


def read_loader(trainer: Trainer, dataloader_idx: int = 0) -> LoaderFacts:
    """Return the facts about the batches that arrive now.

    Args:
        trainer: Trainer of the loaders.
        dataloader_idx: Index of the loader if evaluation has several.
    """
    loader = _find_loader(trainer, dataloader_idx)
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    # Several loaders make one batch, in a list or dict.
    stacked = all(map(_stacks, tree_leaves(loader)))
    return LoaderFacts(_list_sizes(loader), stacked)


def find_method(trainer: Trainer, name: str) -> Callable[..., Any] | None:
    """Return the method of that name that the module or its datamodule has for its batches."""
    for owner in ("lightning_module", "datamodule"):
        method = getattr(getattr(trainer, owner, None), name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def count_batch(trainer: Trainer, batch: Any, dataloader_idx: int = 0) -> int:  # noqa: ANN401 - any form
    """Return the number of samples in a batch of the datamodule's form; 0 if unclear.

    The module's or datamodule's own ``count_samples`` decides, unless it is for batches before
    their transfer.
    """
    count = find_method(trainer, "count_samples")
    if count is not None:
        with suppress(*WRONG_FORM):
            return int(count(batch))
    samples = count_plain(batch)
    if samples:
        return samples
    facts = read_loader(trainer, dataloader_idx)
    datamodule = getattr(trainer, "datamodule", None)
    stacked = facts.stacked and getattr(datamodule, "stacks_samples", True)
    return count_samples(batch, facts.sizes, stacked=stacked)


def _stacks(loader: object) -> bool:
    """Return True if a loader stacks samples."""
    collate = getattr(loader, "collate_fn", _MISSING)
    return collate is default_collate or (isinstance(loader, MicroBatchLoader) and collate is None)


def _find_loader(trainer: Trainer, dataloader_idx: int) -> object:
    """Return the loader of the running stage; None if several are read at once."""
    stage = trainer.state.stage
    loaders: Any = None
    if stage == RunningStage.TRAINING:
        return trainer.train_dataloader
    if stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING):
        loaders = trainer.val_dataloaders
    elif stage == RunningStage.TESTING:
        loaders = trainer.test_dataloaders
    elif stage is not None:
        loaders = trainer.predict_dataloaders
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if not isinstance(loaders, list | tuple):
        return loaders
    return loaders[dataloader_idx] if dataloader_idx < len(loaders) else None


def _list_sizes(loader: object) -> Collection[int]:
    """Return the size of a full batch and that of the last one.

    The last one may have any size if the loader has no length.
    """
    if isinstance(loader, MicroBatchLoader):
        return loader.batch_sizes
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not is_count(size, 1):
        return ()
    if isinstance(loader, DataLoader) and loader.drop_last:
        return {size}
    try:
        return {size, len(loader.sampler) % size} - {0}  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # an iterable dataset, or a loader of another kind
        return range(1, size + 1)
