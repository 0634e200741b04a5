"""`BaseDataModule`: the source, stages, loaders and batches of all datamodules."""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Self

from typing_extensions import TypeVar, override

from lit_data.augment import augment_rows
from lit_data.core.errors import ConfigError
from lit_data.core.types import NEUTRAL, Ints, RowWriter, Stage
from lit_data.datamodules.batch_format import BatchFormat, check_format, gives_fields
from lit_data.datamodules.source import Source
from lit_data.datamodules.trainer_run import (
    NO_LENGTH,
    check_fractions,
    check_ranks_agree,
)
from lit_data.datamodules.transfer import BatchHooks
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.split_names import SPLITS
from lit_data.datasets.splits import check_image_count
from lit_data.images.bank import ImageBank, describe_bank
from lit_data.images.store.store import StoredImages
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.order import ChosenRows
from lit_data.loading.trainer_view import note_unfinished

log = logging.getLogger(__name__)

_READ_BY: Mapping[str, tuple[Stage, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
"""Stages whose loaders each function of a Trainer requests, the required one first."""
_CURE = "choose images for it with data.splits, such as 'data.splits={train: 0.7, val: 0.15, test: 0.15}'"
Rows = TypeVar("Rows", bound=RowWriter, default=Any)
Loaders = MicroBatchLoader | list[MicroBatchLoader]


class BaseDataModule(BatchHooks, ABC, Generic[Rows]):
    """Base of all datamodules: batches are planned on the host and finished on the device.

    `plan_batch` draws everything random about a batch on the host, from the sample indices, so
    nothing waits for the device. The few drawn numbers are part of the batch. `finish_batch` then
    works on the device and draws nothing.

    Transfer hooks of the LightningModule run after those of this class; see `BatchHooks`.

    A subclass implements `build_dataset`, and usually `plan_batch` and `finish_batch`, sets
    `batch_keys` and `channel_names`, and opens its files in `open_source`. With a `source`,
    `prepare_data`, `setup` and the command ``prepare`` work.

    Args:
        loader: Options of the loader, such as batch size, workers and seed.
        batch_format: `dict`, a preset, a mapping from new keys to those of this class, a sequence
            of keys for a tuple, or a function of the batch; see
            `lit_data.datamodules.batch_format`.

    Attributes:
        task: Class that draws samples and writes predictions, or its dotted name, if this class has
            its own; see `lit_data.predict.find_task`.
        source: The files, if they are those of a `Source`.
        bank: The decoded images, if there are any; set by `setup`.
        split_images: Numbers of the images of train, val and test, if whole images are split; set
            by `setup`.
        learns: True if a model is about to learn from the data; ``fit`` sets it before its Trainer
            starts.

    Raises:
        ConfigError: The format names unknown keys.
    """

    task: ClassVar[type[Any] | str | None] = None
    source: Source | None = None
    bank: ImageBank | None = None
    split_images: Mapping[str, Ints] = MappingProxyType({})
    learns: bool = False

    def __init__(
        self,
        *,
        loader: Annotated[LoaderOptions | None, NEUTRAL] = None,
        batch_format: Annotated[BatchFormat, NEUTRAL] = "dict",
    ) -> None:
        super().__init__()
        self.loader = loader or LoaderOptions()
        check_format(batch_format, self.batch_keys, self.channel_names)
        self.batch_format = batch_format
        self._datasets: dict[Stage, Rows] = {}
        self._is_open = self._is_validation_known = False
        # Numbers of the samples to predict; None predicts all.
        self._predicted_samples: Sequence[int] | None = None

    @override
    def __str__(self) -> str:
        """Return the samples of each split in use; Lightning's text would read all batches."""
        counts = []
        for split in SPLITS:
            if split in self._datasets:
                counts.append(f"{split} {len(self._datasets[split])}")
        before = "" if self._is_open else "not set up"
        return f"{type(self).__name__}({', '.join(counts) or before})"

    @abstractmethod
    def build_dataset(self, stage: Stage) -> Rows:
        """Build the dataset of one stage from the files that `prepare_data` made."""

    def open_source(self) -> None:
        """Open what `build_dataset` needs; called once."""

    def prepare_data(self) -> None:
        """Make the synthetic dataset, the mirror and the stores, in one process per node.

        Raises:
            ConfigError: A model would learn from the data, and `check_files` refuses the files.
        """
        if self.source is not None:
            self.source.refresh()
        if self.learns or (self.trainer is not None and self.trainer.training):
            self.check_files()
        self._open()

    def check_files(self) -> None:
        """Refuse files that no model can be trained on, before decoding them; by default none.

        Raises:
            ConfigError: They have no masks, labels or boxes to learn from.
        """

    def setup(self, stage: str) -> None:
        """Open the stored files, and check the splits that a Trainer needs.

        Raises:
            ConfigError: A split that is trained on or scored holds no images, or limits are
                fractions of a loader without a length.
        """
        self._open()
        if self.trainer is None:
            return
        # Lightning leaves torch's DataLoader patched if a hook that makes a loader raises.
        stages = _READ_BY[stage]
        self._refuse_empty(stages[0])
        for read_stage in stages if self.loader.resizable else ():
            check_fractions(self.trainer, read_stage)
        if stage == "fit" and self.trainer.is_global_zero:
            self._warn_of_validation()

    def inspect(self, stage: Stage) -> Visuals:
        """Return plans, previews and unaugmented samples of a stage, for pictures and exports."""
        return Visuals()

    def find_classes(self) -> Sequence[str] | None:
        """Return the names of the classes in the data, before `setup`; None if there are none."""
        return None

    def check_sources(self) -> dict[str, int]:
        """Read every file strictly and keep nothing.

        Raises:
            DataError: Files are bad.
        """
        if self.source is None:
            raise ConfigError(f"{type(self).__name__} cannot check its files")
        with self._logging_leftovers():
            return self.source.check()

    @contextmanager
    def _logging_leftovers(self) -> Iterator[None]:
        """Log the unused ones of the files that are read here, even if an error is raised."""
        try:
            yield
        finally:
            if self.source is not None:
                self.source.leftovers.log()

    def verify_sources(self) -> list[str]:
        """Return the files that changed since they were stored.

        Raises:
            ConfigError: Nothing is stored, because this needs `cache=store`.
        """
        if self.bank is None:
            raise ConfigError(f"{type(self).__name__} has no store to verify")
        if not isinstance(self.bank, StoredImages):
            raise ConfigError("only a store can be verified: set data.cache=store")
        return self.bank.verify()

    def describe(self) -> dict[str, Any]:
        """Return numbers about the opened dataset, for the report of ``prepare``."""
        numbers = {} if self.bank is None else describe_bank(self.bank)
        for split in SPLITS:
            numbers[f"{split}_samples"] = len(self.dataset(split))
        return numbers

    def list_splits(self) -> list[dict[str, str]]:
        """Return each image below the root with its split, in the form that `splits` reads.

        An entry has the image's class if it is known. The list is empty if samples are not from
        whole images.
        """
        if self.bank is None or self.source is None:
            return []
        split_of: dict[int, str] = {}
        for split, numbers in self.split_images.items():
            split_of |= dict.fromkeys(numbers.tolist(), split)
        classes = self.image_classes
        rows = []
        for number, split in sorted(split_of.items()):
            row = {"image": self.source.name(self.bank.name(number)), "split": split}
            if classes:
                row["class"] = classes[number]
            rows.append(row)
        return rows

    @property
    def image_classes(self) -> Sequence[str]:
        """Class of each image in the bank, for tables; empty if unknown."""
        return ()

    def dataset(self, stage: Stage) -> Rows:
        """Return the dataset of one stage, which the first call builds."""
        if stage not in self._datasets:
            self._datasets[stage] = self.build_dataset(stage)
        return self._datasets[stage]

    def make_loader(self, stage: Stage) -> MicroBatchLoader:
        """Make a loader of one stage, shuffled for training, else with each sample once and in order."""
        dataset = augment_rows(self.dataset(stage), vars(self), stage, self.loader.seed)
        if stage == "predict" and self._predicted_samples is not None:
            dataset = ChosenRows(dataset, self._predicted_samples)
        rank, world_size = 0, 1
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        # Lightning's `overfit_batches` uses the same first batches in each epoch.
        is_overfitting = bool(getattr(self.trainer, "overfit_batches", 0))
        return MicroBatchLoader(
            dataset,
            self.loader,
            shuffle=stage == "train" and not is_overfitting,
            rank=rank,
            world_size=world_size,
            stage=stage,
            repeats=stage != "train" or is_overfitting,
        )

    @contextmanager
    def predicting(self, samples: Sequence[int], batch_size: int | None = None) -> Iterator[None]:
        """Restrict the predict stage to some of its samples, in this order.

        Args:
            samples: Numbers of the samples.
            batch_size: Batch size that replaces that of the loader.
        """
        loader, predicted_samples = self.loader, self._predicted_samples
        if batch_size is not None:
            self.loader = replace(loader, batch_size=batch_size)
        self._predicted_samples = samples
        try:
            yield
        finally:
            self.loader, self._predicted_samples = loader, predicted_samples

    @property
    def batch_size(self) -> int:
        """Samples per batch of each rank; Lightning's ``Tuner`` sets it for loaders made afterwards."""
        return self.loader.count_batch(self.trainer.world_size if self.trainer else 1)

    @batch_size.setter
    def batch_size(self, samples: int) -> None:
        self.loader = replace(self.loader, batch_size=samples, global_batch_size=None)

    def train_dataloader(self) -> MicroBatchLoader:
        """Return batches of the training split, in a new order in each epoch."""
        self._refuse_empty("train")
        loader = self._open_loader("train")
        self._run.start_training(loader)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the training loader's position in trained samples, for Lightning's checkpoints."""
        state = self._run.read_state()
        return {} if state is None else {"train_loader": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training loader resume where the checkpoint was saved, even within an epoch.

        Lightning also calls this method when a checkpoint is validated, tested or used to predict,
        when nothing is trained.
        """
        self._run.load_state(state_dict.get("train_loader"))

    @property
    def stacks_samples(self) -> bool:
        """True if no list in a batch has one entry for each sample, which `batch_format` may make."""
        return gives_fields(self.batch_format)

    def describe_loaders(self) -> dict[str, dict[str, Any]]:
        """Return for each stage that was read the number of its loader's workers, and the reason."""
        chosen: dict[str, dict[str, Any]] = {}
        for stage, loader in self._run.loaders.items():
            if loader.has_chosen:
                chosen[stage] = loader.choice.to_plain()
        return chosen

    def on_exception(self, exception: BaseException) -> None:
        """Explain the -1 that Lightning passes to a schedule as its number of steps."""
        loader = self._run.loaders.get("train")
        if loader is not None and loader.resizable and "total_steps" in str(exception):
            exception.add_note(
                f"{NO_LENGTH}, so the number of training steps is unknown: set "
                "trainer.max_steps, or set data.loader.resizable=false"
            )

    def teardown(self, stage: str) -> None:
        """Stop the workers."""
        self._run.close()

    def val_dataloader(self) -> Loaders:
        """Return batches of the validation split, the same in each epoch; empty for an empty split."""
        return self._open_loader("val") if len(self.dataset("val")) else []

    def test_dataloader(self) -> MicroBatchLoader:
        """Return batches of the test split."""
        self._refuse_empty("test")
        return self._open_loader("test")

    def predict_dataloader(self) -> MicroBatchLoader:
        """Return batches of all images, in order."""
        return self._open_loader("predict")

    def _open(self) -> None:
        if not self._is_open:
            with self._logging_leftovers():
                self.open_source()
            self._is_open = True

    def find_lack(self, stage: Stage) -> str:
        """Return a text on what a split lacks for its scores; empty if it lacks nothing."""
        dataset: Any = self.dataset(stage)
        if not len(dataset):
            return "images"
        return str(dataset.find_lack()) if hasattr(dataset, "find_lack") else ""

    def _refuse_empty(self, stage: Stage) -> None:
        if not len(self.dataset(stage)):
            raise ConfigError(f"the {stage} split holds no images: {_CURE}")
        count = 0 if self.bank is None else len(self.bank)
        if stage == "train" and self.source is not None and not len(self.dataset("val")):
            check_image_count(count, self.source.splits)

    def _warn_of_validation(self) -> None:
        if self._is_validation_known:  # a command sets up before its Trainer does
            return
        self._is_validation_known = True
        if lack := self.find_lack("val"):
            log.warning(
                "the val split has no %s, so its scores are undefined and the last checkpoint counts as the "
                "best: %s",
                lack,
                _CURE,
            )

    def renew(self, source: Source) -> Self:
        """Return this datamodule with another source that has not been read yet."""
        fresh = copy.copy(self)
        fresh._datasets = {}
        fresh._is_open = False
        fresh.bank = None
        fresh.source = source
        fresh.setup("fit")
        return fresh

    def _open_loader(self, stage: Stage) -> MicroBatchLoader:
        """Make a loader for the Trainer, which requests it on all ranks."""
        loader = self._run.loaders[stage] = self.make_loader(stage)  # `teardown` closes it
        if loader.order.world_size > 1:
            check_ranks_agree(loader, self.trainer)
        if self.trainer is None:
            note_unfinished(loader)
            return loader
        device = self.trainer.strategy.root_device
        if device.type != "cuda" and self.loader.pin_memory == "auto":
            # Pinning would initialize the GPU in a run on the CPU.
            loader.options = replace(loader.options, pin_memory=False)
        elif self.loader.pins_memory:
            loader.pin_device = device
            loader.device = device if self._run.copies_ahead else None
        return loader
