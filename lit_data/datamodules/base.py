"""What all datamodules share: their source, stages, loaders, and the way of a batch."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Self

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import TypeVar

from lit_data.datamodules.batch_format import BatchFormat, check_format, gives_fields
from lit_data.datamodules.source import Source
from lit_data.datamodules.transfer import BatchTransfer, check_package
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, RankMismatchError
from lit_data.io.images.image_source import ImageBank, describe_bank
from lit_data.io.store.store import StoredImages
from lit_data.lightning_internals import check_version, count_trained
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.order import ChosenRows
from lit_data.types import Batch, PlannedBatch, RowWriter, Stage

_OF_TRAINER: Final = ("max_epochs", "max_steps", "accumulate_grad_batches", "val_check_interval")


def check_ranks_agree(loader: MicroBatchLoader, trainer: L.Trainer | None = None) -> None:
    """Compare what decides the number of steps, before a rank waits for ever for another.

    Args:
        loader: This rank's loader; every rank calls this at the same time.
        trainer: This rank's Trainer.

    Raises:
        RankMismatchError: The ranks see sets of different sizes, or have other options.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    options = loader.options
    mine: dict[str, Any] = {
        "samples": loader.order.length,
        "batch_size": loader.batch_size,
        "seed": options.seed,
        "drop_last": options.drop_last,
        "resizable": options.resizable,
    }
    mine |= {f"trainer.{name}": getattr(trainer, name, None) for name in _OF_TRAINER}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in mine:
        values = [other[name] for other in everyone]
        if len(set(values)) > 1:
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankMismatchError(
                f"the ranks disagree on {name} ({each}): give all of them the same data and options"
            )


Rows = TypeVar("Rows", bound=RowWriter, default=Any)
Loaders = MicroBatchLoader | list[MicroBatchLoader]


class BaseDataModule(L.LightningDataModule, ABC, Generic[Rows]):
    """Loaders for each stage, and a batch that is planned on the host and finished on the device.

    Everything random about a batch is drawn in `plan_batch`, on the host and from the sample
    indices, so the device is never waited for; the few numbers travel with the batch.
    `finish_batch` then works on the device and draws nothing.

    Hooks around the transfer that a LightningModule has itself run behind those of this class, see
    `BatchTransfer`.

    A subclass writes `build_dataset`, and mostly `plan_batch` and `finish_batch`, sets `batch_keys`
    and `channel_names`, and opens its files in `open_source`. With a `source`, `prepare_data`,
    `setup` and the command ``prepare`` work.

    Args:
        loader: Batch size, workers, seed.
        batch_format: `dict`, a preset, a mapping of new key to our key, a sequence of keys for a
            tuple, or a function of our batch; see `lit_data.datamodules.batch_format`.

    Attributes:
        task: The class of how samples are drawn and predictions written, if this class brings its
            own; see `lit_data.tasks.find_task`.
        source: Where the files lie, if they are those of a `Source`.
        bank: The decoded images, if there are any; after `setup`.
        split_images: For train, val and test the numbers of their images, where whole images are
            split; after `setup`.

    Raises:
        ConfigError: The format names unknown keys.
    """

    task: ClassVar[type[Any] | None] = None
    source: Source | None = None
    bank: ImageBank | None = None
    split_images: Mapping[str, NDArray[np.int64]] = MappingProxyType({})
    batch_keys: ClassVar[Sequence[str]] = ()
    channel_names: ClassVar[Mapping[str, int]] = {}

    def __init__(
        self, *, loader: LoaderOptions | None = None, batch_format: BatchFormat = "dict"
    ) -> None:
        super().__init__()
        self.loader = loader or LoaderOptions()
        check_format(batch_format, self.batch_keys, self.channel_names)
        self.batch_format = batch_format
        self._datasets: dict[Stage, Rows] = {}
        self._is_open = False
        self._loaders: dict[Stage, MicroBatchLoader] = {}
        self._resumed: dict[str, Any] | None = None
        self._wanted: Sequence[int] | None = None

    @property
    def trainer(self) -> L.Trainer | None:
        """The Trainer of the run; each run sets it, after it has chosen whose hooks it calls."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        check_package(self, trainer)
        check_version()
        self._trainer, self._transfer = trainer, BatchTransfer(self, trainer, BaseDataModule)

    @abstractmethod
    def build_dataset(self, stage: Stage) -> Rows:
        """The dataset of one stage, from what `prepare_data` made."""

    def open_source(self) -> None:
        """Open what `build_dataset` needs; called once."""

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Add to a batch on the host the drawn numbers that `finish_batch` needs; by default there are none."""
        return batch

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Turn a planned batch on its device into what the model sees; by default it is that already."""
        return batch

    def prepare_data(self) -> None:
        """Make the drawn set or the mirror if need be, and what is stored; on one process of each node."""
        if self.source is not None:
            self.source.refresh()
        self._open()

    def setup(self, stage: str) -> None:
        """Open what is stored."""
        self._open()

    def inspect(self, stage: Stage) -> Visuals:
        """What there is to say about the samples of a stage, for pictures and exports."""
        return Visuals()

    def baseline_datasets(
        self, stage: Stage, *, finished: bool = True
    ) -> Mapping[str, Dataset[Batch]]:
        """For ``benchmark``: map-style datasets that give a stage's samples as people make them
        without lit_data.

        Args:
            stage: Whose samples.
            finished: As the model sees them, but for augmentation; otherwise as they are stored.

        Returns:
            ``original`` and ``improved``, or what there is of them.
        """
        return {}

    def find_classes(self) -> Sequence[str] | None:
        """Return the names of the classes that the data give, before `setup`; None where they give none."""
        return None

    def check_sources(self) -> dict[str, int]:
        """Read every file strictly and keep nothing.

        Raises:
            DataError: Files are bad.
        """
        if self.source is None:
            raise ConfigError(f"{type(self).__name__} has no check of its files")
        return self.source.check()

    def verify_sources(self) -> list[str]:
        """What is stored and is no longer what it was when it was stored.

        Raises:
            ConfigError: Nothing is stored: needs `cache=store`.
        """
        if self.bank is None:
            raise ConfigError(f"{type(self).__name__} has no store to verify")
        if not isinstance(self.bank, StoredImages):
            raise ConfigError("only a store can be verified: set data.cache=store")
        return self.bank.verify()

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set, for the report of ``prepare``."""
        about = {} if self.bank is None else describe_bank(self.bank)
        return about | {f"{split}_samples": len(self.dataset(split)) for split in SPLITS}

    def list_splits(self) -> list[dict[str, str]]:
        """Each image below the root with its split, which `splits` takes from a file; none without whole images."""
        if self.bank is None or self.source is None:
            return []
        split_of = {
            n: split for split, numbers in self.split_images.items() for n in numbers.tolist()
        }
        name = self.bank.name
        return [
            {"image": self.source.name(name(number)), "split": split}
            for number, split in sorted(split_of.items())
        ]

    def dataset(self, stage: Stage) -> Rows:
        """The dataset of one stage, made at the first call."""
        if stage not in self._datasets:
            self._datasets[stage] = self.build_dataset(stage)
        return self._datasets[stage]

    def make_loader(self, stage: Stage) -> MicroBatchLoader:
        """A loader over one stage: shuffled for training, each sample once and in order otherwise."""
        dataset: RowWriter = self.dataset(stage)
        if stage == "predict" and self._wanted is not None:
            dataset = ChosenRows(dataset, self._wanted)
        rank, world_size = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        shuffle = stage == "train" and not getattr(self.trainer, "overfit_batches", 0)
        return MicroBatchLoader(
            dataset, self.loader, shuffle=shuffle, rank=rank, world_size=world_size, stage=stage
        )

    @contextmanager
    def predicting(self, samples: Sequence[int], batch_size: int | None = None) -> Iterator[None]:
        """Let the predict stage give some of its samples only, in this order.

        Args:
            samples: Their numbers.
            batch_size: In the place of that of the loader.
        """
        before = self.loader, self._wanted
        self.loader = (
            self.loader if batch_size is None else replace(self.loader, batch_size=batch_size)
        )
        self._wanted = samples
        try:
            yield
        finally:
            self.loader, self._wanted = before

    @property
    def batch_size(self) -> int:
        """Samples per batch of each rank; Lightning's ``Tuner`` sets it, for the loaders that are made from then on."""
        return self.loader.count_batch(self.trainer.world_size if self.trainer else 1)

    @batch_size.setter
    def batch_size(self, samples: int) -> None:
        self.loader = replace(self.loader, batch_size=samples, global_batch_size=None)

    def transform(self, batch: Batch, stage: Stage) -> Batch:
        """Plan and finish a batch where it is, for use without a Trainer."""
        return self.finish_batch(self.plan_batch(batch, stage), stage)

    def train_dataloader(self) -> MicroBatchLoader:
        """Batches of the training split, in an order that is new in each epoch."""
        if not len(self.dataset("train")):
            raise ConfigError("the train split holds no images: check data.splits")
        loader = self._open_loader("train")
        if self.trainer:
            loader.count_trained = partial(count_trained, self.trainer)
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Where the training loader stands, in samples trained; for Lightning, which puts it into checkpoints."""
        loader = self._loaders.get("train")
        return {"train_loader": loader.state_dict()} if loader else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training loader go on where the checkpoint was saved, also inside an epoch."""
        self._resumed = state_dict.get("train_loader")

    @property
    def stacks_samples(self) -> bool:
        """Whether no list of a batch has one entry for each sample, as `batch_format` may make it."""
        return gives_fields(self.batch_format)

    def describe_loaders(self) -> dict[str, dict[str, Any]]:
        """Return for each stage that was read the workers of its loader, and why."""
        return {
            stage: loader.choice.to_plain()
            for stage, loader in self._loaders.items()
            if loader.has_chosen
        }

    def teardown(self, stage: str) -> None:
        """End the workers."""
        for loader in self._loaders.values():
            loader.close()

    def val_dataloader(self) -> Loaders:
        """Batches of the validation split, the same in each epoch; none if the split is empty."""
        return self._open_loader("val") if len(self.dataset("val")) else []

    def test_dataloader(self) -> MicroBatchLoader:
        """Batches of the test split."""
        if not len(self.dataset("test")):
            raise ConfigError("the test split holds no images: check data.splits")
        return self._open_loader("test")

    def predict_dataloader(self) -> MicroBatchLoader:
        """Batches of all images, in order."""
        return self._open_loader("predict")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - see `BatchTransfer`
        """Plan the batch on the host."""
        return self._transfer.before(batch, dataloader_idx)

    def transfer_batch_to_device(
        self,
        batch: Any,  # noqa: ANN401
        device: torch.device,
        dataloader_idx: int,
    ) -> Any:  # noqa: ANN401
        """Move the planned batch."""
        usual = partial(super().transfer_batch_to_device, batch, device, dataloader_idx)
        return self._transfer.move(batch, device, dataloader_idx, usual)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - the user's format
        """Finish the batch on its device."""
        return self._transfer.after(batch, dataloader_idx)

    def _open(self) -> None:
        if not self._is_open:
            self.open_source()
            self._is_open = True

    def renew(self, source: Source) -> Self:
        """This datamodule with another source, of which nothing was read yet."""
        fresh = copy.copy(self)
        fresh._datasets, fresh._is_open, fresh.bank, fresh.source = {}, False, None, source
        fresh.setup("fit")
        return fresh

    def _open_loader(self, stage: Stage) -> MicroBatchLoader:
        """A loader for the Trainer, which asks on all ranks."""
        loader = self._loaders[stage] = self.make_loader(stage)
        if loader.order.world_size > 1:
            check_ranks_agree(loader, self.trainer)
        device = self.trainer.strategy.root_device if self.trainer else None
        if device is not None and device.type != "cuda" and self.loader.pin_memory == "auto":
            loader.options = replace(
                loader.options, pin_memory=False
            )  # or a run on the CPU would wake up the GPU
        elif device is not None and self.loader.pins_memory:
            loader.pin_device, loader.device = (
                device,
                device if self._transfer.copies_ahead() else None,
            )
        return loader
