"""What Lightning's Trainer and Tuner ask of a datamodule works with ours."""

from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner.tuning import Tuner

from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec
from lit_data.testing import QUIET
from tests.reading import Watcher, opened

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled"),
]


class Model(BoringModel):
    """Trains on the mean of the pixels, and notes the samples of its batches."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch["index"].tolist(), float(batch["image"].sum())))
        return self.layer(batch["image"].mean((1, 2, 3))[:, None].expand(-1, 32)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.fixture
def data(tmp_path: Path) -> StripeDataModule:
    return StripeDataModule(
        samples={"count": 10, "height_px": 128, "width_px": 112},
        patch_px=64,
        stride_px=64,
        synthesis=DefectSpec(probability=1.0),
        cache_dir=tmp_path,
        loader=LoaderOptions(batch_size=4, num_workers=0),
    )


def _trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(**{**QUIET, "default_root_dir": folder, **options})


def test_overfitting_sees_the_same_samples_in_each_epoch(
    data: StripeDataModule, tmp_path: Path
) -> None:
    model = Model()
    _trainer(tmp_path, overfit_batches=2, max_epochs=3).fit(model, datamodule=data)
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]  # to the last defect
    assert model.seen[0] != model.seen[1]


def test_overfitting_reads_a_loader_that_does_not_shuffle(
    data: StripeDataModule, tmp_path: Path
) -> None:
    loader = MicroBatchLoader(opened(data).dataset("train"), LoaderOptions(num_workers=0))
    trainer = _trainer(tmp_path, overfit_batches=1, max_epochs=2)
    trainer.fit(Watcher(), loader)
    assert trainer.global_step == 2


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"global_batch_size": 4}])
def test_the_tuner_sets_the_batch_size(
    data: StripeDataModule, tmp_path: Path, options: dict[str, int]
) -> None:
    model, trainer = Model(), _trainer(tmp_path, max_epochs=1)
    data.loader = LoaderOptions(num_workers=0, **options)  # type: ignore[arg-type]
    assert data.batch_size == 4
    found = Tuner(trainer).scale_batch_size(
        model, datamodule=data, max_trials=2, init_val=3, steps_per_trial=1
    )
    assert found == data.batch_size == 6
    model.seen.clear()
    trainer.fit(model, datamodule=data)
    assert len(model.seen[0][0]) == 6
