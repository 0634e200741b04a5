"""What all datamodules share: stages, loaders, and the two hooks around the transfer to the device."""

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import Dataset

from lit_data.datamodules.batch_format import BatchFormat, check_format, format_batch, gives_fields
from lit_data.datamodules.hook_chain import HookChain
from lit_data.datamodules.inspection import Inspection
from lit_data.datamodules.packages import check_package
from lit_data.datamodules.ranks import check_ranks_agree
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.samples import ChosenRows
from lit_data.loading.transfer import StagedBatch, finish_transfer
from lit_data.types import Batch, RowWriter, Stage

_STAGES: Final[Mapping[RunningStage, Stage]] = {
    RunningStage.TRAINING: "train",
    RunningStage.SANITY_CHECKING: "val",
    RunningStage.VALIDATING: "val",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}

Loaders = MicroBatchLoader | list[MicroBatchLoader]


class BaseDataModule(L.LightningDataModule):
    """Loaders for each stage, and a batch that is planned on the host and finished on the device.

    Everything random about a batch is drawn in `plan_batch`, on the host and from the sample indices, so the device
    is never waited for; the few numbers travel with the batch. `finish_batch` then works on the device and draws
    nothing.

    Hooks around the transfer that a LightningModule has itself run behind those of this class, see `HookChain`.

    A subclass sets `batch_keys` and `channel_names` and writes `build_dataset`, `plan_batch` and `finish_batch`.

    Args:
        loader: Batch size, workers, seed.
        batch_format: `dict`, a preset, a mapping of new key to our key, a sequence of keys for a tuple, or a function
            of our batch; see `lit_data.datamodules.batch_format`.

    Raises:
        ConfigError: The format names unknown keys.
    """

    batch_keys: ClassVar[Sequence[str]] = ()
    channel_names: ClassVar[Mapping[str, int]] = {}

    def __init__(self, *, loader: LoaderOptions | None = None, batch_format: BatchFormat = "dict") -> None:
        super().__init__()
        self.loader = loader or LoaderOptions()
        check_format(batch_format, self.batch_keys, self.channel_names)
        self.batch_format = batch_format
        self._datasets: dict[Stage, RowWriter] = {}
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
        self._trainer, self._chain = trainer, HookChain(self, trainer, BaseDataModule)

    @abstractmethod
    def build_dataset(self, stage: Stage) -> RowWriter:
        """The dataset of one stage, from what `prepare_data` made."""

    @abstractmethod
    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        """Add to a batch on the host the drawn numbers that `finish_batch` needs."""

    @abstractmethod
    def finish_batch(self, batch: Batch, stage: Stage) -> Batch:
        """Turn a planned batch on its device into what the model sees."""

    def inspect(self, stage: Stage) -> Inspection:
        """What there is to say about the samples of a stage, for pictures and exports."""
        return Inspection()

    def baseline_datasets(self, stage: Stage, *, finished: bool = True) -> Mapping[str, Dataset[Batch]]:
        """For ``benchmark``: map-style datasets that give a stage's samples as people make them without lit_data.

        Args:
            stage: Whose samples.
            finished: As the model sees them, but for augmentation; otherwise as they are stored.

        Returns:
            ``original`` and ``improved``, or what there is of them.
        """
        return {}

    def check_sources(self) -> dict[str, int]:
        """Read every file strictly and keep nothing.

        Raises:
            DataError: Files are bad.
        """
        raise ConfigError(f"{type(self).__name__} has no check of its files")

    def verify_sources(self) -> list[str]:
        """What is stored and is no longer what it was when it was stored."""
        raise ConfigError(f"{type(self).__name__} has no store to verify")

    def describe(self) -> dict[str, Any]:
        """Numbers about the opened set, for the report of ``prepare``."""
        return {f"{split}_samples": len(self.dataset(split)) for split in ("train", "val", "test")}

    def export_files(self, folder: Path) -> dict[str, int] | None:
        """For ``prepare.export``: write the set in a format of its own; none where samples are written as images.

        Args:
            folder: A new or an empty one.

        Returns:
            Numbers for the report.
        """
        return None

    def dataset(self, stage: Stage) -> RowWriter:
        """The dataset of one stage, made at the first call."""
        if stage not in self._datasets:
            self._datasets[stage] = self.build_dataset(stage)
        return self._datasets[stage]

    def make_loader(self, stage: Stage) -> MicroBatchLoader:
        """A loader over one stage: shuffled for training, each sample once and in order otherwise."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        dataset = self.dataset(stage)
        if stage == "predict" and self._wanted is not None:
            dataset = ChosenRows(dataset, self._wanted)
        return MicroBatchLoader(dataset, self.loader, shuffle=stage == "train", rank=rank, world_size=world_size)

    @contextmanager
    def predicting(self, samples: Sequence[int], batch_size: int | None = None) -> Iterator[None]:
        """Let the predict stage give some of its samples only, in this order.

        Args:
            samples: Their numbers.
            batch_size: In the place of that of the loader.
        """
        before = self.loader, self._wanted
        self.loader = self.loader if batch_size is None else replace(self.loader, batch_size=batch_size)
        self._wanted = samples
        try:
            yield
        finally:
            self.loader, self._wanted = before

    def transform(self, batch: Batch, stage: Stage) -> Batch:
        """Plan and finish a batch where it is, for use without a Trainer."""
        return self.finish_batch(self.plan_batch(batch, stage), stage)

    def train_dataloader(self) -> MicroBatchLoader:
        """Batches of the training split, in an order that is new in each epoch."""
        if not len(self.dataset("train")):
            raise ConfigError("the train split holds no images: check data.splits")
        loader = self._open_loader("train")
        if self.trainer:
            loader.count_trained = functools.partial(_count_trained, self.trainer)
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
        """For each stage that was read: which workers its loader has, and why."""
        return {stage: loader.choice.to_plain() for stage, loader in self._loaders.items() if loader.has_chosen}

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

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - see `sees_example`
        """Draw what the batch needs while its indices are still on the host."""
        if self._chain.sees_example(batch):
            return self._chain.pass_on("on_before_batch_transfer", batch, dataloader_idx)
        planned = self.plan_batch(batch, self._stage())
        if self._chain.has("on_before_batch_transfer"):
            return self._chain.before(planned, dataloader_idx)
        return batch.extended(planned) if isinstance(batch, StagedBatch) else planned

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:  # noqa: ANN401
        """Take over the copy that the loader began, if it did; leave all to a module that moves batches itself."""
        if self._chain.has("transfer_batch_to_device"):
            return self._chain.transfer(batch, device, dataloader_idx)
        if isinstance(batch, StagedBatch):
            return finish_transfer(batch, device)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - the user's format
        """Finish the batch on its device: no gradient, and float32 whatever the precision of the run."""
        if self._chain.has_example:
            return self._chain.pass_on("on_after_batch_transfer", batch, dataloader_idx)
        devices = [value.device for value in batch.values() if isinstance(value, Tensor)]  # a plan may be an object
        with torch.no_grad(), torch.autocast(devices[0].type, enabled=False):
            finished = self.finish_batch(batch, self._stage())
        formatted = format_batch(finished, self.batch_format, self.channel_names)
        return self._chain.after(formatted, batch, dataloader_idx)

    def _open_loader(self, stage: Stage) -> MicroBatchLoader:
        """A loader for the Trainer, which asks on all ranks."""
        loader = self._loaders[stage] = self.make_loader(stage)
        if loader.order.world_size > 1:
            check_ranks_agree(loader, self.trainer)
        device = self.trainer.strategy.root_device if self.trainer else None
        if device is not None and device.type != "cuda" and self.loader.pin_memory == "auto":
            loader.options = replace(loader.options, pin_memory=False)  # or a run on the CPU would wake up the GPU
        elif device is not None and self.loader.pins_memory:
            loader.pin_device, loader.device = device, device if self._copies_ahead() else None
        return loader

    def _copies_ahead(self) -> bool:
        """Whether no hook of the module comes between a batch on the host and its copy."""
        return not (self._chain.has("on_before_batch_transfer") or self._chain.has("transfer_batch_to_device"))

    def _stage(self) -> Stage:
        stage = self.trainer.state.stage if self.trainer else None
        if stage is None:
            raise ConfigError("this datamodule has no running Trainer: call transform(batch, stage) instead")
        return _STAGES[stage]


def _count_trained(trainer: L.Trainer) -> tuple[int, int]:
    """The epoch under way, and the batches whose step is done: not those that are only fetched."""
    loop: Any = trainer.fit_loop  # its progress is typed without `processed`
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.processed
