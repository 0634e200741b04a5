"""What users test their own datasets with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

from lit_data.callbacks import AdaptiveBatchSize
from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, FieldSpec, Ints
from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.testing import (
    QUIET,
    LimitedMemory,
    check_datamodule,
    check_dataset,
    run_on_ranks,
    write_images,
)
from tests.helpers.stock_modules import STOCK


class Rows:
    """Numbers that depend on (index, epoch); faults can be built in."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0
        self.fields = {"value": FieldSpec((2,), "float32"), "index": FieldSpec((), "int64")}

    def __len__(self) -> int:
        return 10

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        self.calls += 1
        rows["index"][:] = indices
        rows["value"][:] = (indices * 10 + epoch)[:, None]
        if self.fault == "state":
            rows["value"] += self.calls
        elif self.fault == "place":
            rows["value"][:, 0] = np.arange(len(indices))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "fields": {}} if self.fault == "pickle" else vars(self)


def test_a_good_dataset_passes() -> None:
    check_dataset(Rows())


@pytest.mark.parametrize("fault", ["state", "place"])
def test_samples_that_depend_on_more_are_found(fault: str) -> None:
    with pytest.raises(AssertionError, match=r"sample \d of epoch 0: value differs between a ba"):
        check_dataset(Rows(fault))
    with pytest.raises(KeyError, match="index"):
        check_dataset(Rows("pickle"))  # its copy is another


def test_a_datamodule_of_ours_passes_and_one_that_draws_from_elsewhere_does_not(
    tmp_path: Path,
) -> None:
    write_images(tmp_path / "images", 6, (64, 64))
    options = {"patch_px": 32, "stride_px": 32, "mask_splits": ()}
    options |= {"cache_dir": tmp_path / "cache", "synthesis": DefectSpec(probability=0.9)}
    options |= {"loader": LoaderOptions(batch_size=4, worker_kind="inline")}
    check_datamodule(StripeDataModule(tmp_path / "images", **options))

    class Draws(StripeDataModule):
        def finish_batch(self, batch: Any, stage: Any) -> Any:
            found = super().finish_batch(batch, stage)
            return found | {"image": found["image"] + torch.rand(1)}

    with pytest.raises(AssertionError, match="train: the same batch comes out differently a sec"):
        check_datamodule(Draws(tmp_path / "images", **options))


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_memory_runs_out_and_the_step_is_cut() -> None:
    stock, limited = STOCK["classifier"], LimitedMemory(3)
    limits = {**QUIET, "max_epochs": 1, "limit_train_batches": 2}
    trainer = Trainer(**limits, callbacks=[AdaptiveBatchSize(), limited])
    trainer.fit(stock.build(), stock.loader())
    assert limited.errors > 0
    assert max(limited.sizes) <= 3
    trainer = Trainer(**limits, callbacks=[LimitedMemory(3)])
    with pytest.raises(torch.OutOfMemoryError, match=r"8 samples, 3 fit \(injected\)"):
        trainer.fit(stock.build(), stock.loader())


class Pairs(BoringModel):
    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0])


def test_memory_runs_out_with_batches_of_any_form_and_steps_without_a_number() -> None:
    limited, rows = LimitedMemory(3), torch.ones(8, 32)
    trainer = Trainer(**QUIET, callbacks=[AdaptiveBatchSize(), limited])
    pairs = DataLoader(TensorDataset(rows, rows), 8)
    [predicted] = trainer.predict(Pairs(), pairs) or []
    assert (limited.errors, limited.sizes, len(predicted)) == (2, [2] * 4, 8)
    unclear = DataLoader([{"a": rows, "b": rows[:5]}], batch_size=None)
    with pytest.raises(ConfigError, match="LimitedMemory cannot tell how many samples a dict hol"):
        trainer.predict(Pairs(), unclear)


def _sum_ranks(rank: int, start: int) -> int:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_function_runs_on_ranks() -> None:
    assert run_on_ranks(_sum_ranks, 2, 5) == [11, 11]
