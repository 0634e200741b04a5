"""What Lightning's Trainer and Tuner ask of a datamodule works with ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner.tuning import Tuner

from lit_data.core.errors import ConfigError
from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.testing import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")


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


def test_a_printed_datamodule_reads_no_batch(data: StripeDataModule) -> None:
    assert str(data) == "StripeDataModule(not set up)"
    data.prepare_data()
    data.setup("fit")
    numbers = [len(data.dataset(split)) for split in ("train", "val", "test")]
    assert str(data) == "StripeDataModule(train {}, val {}, test {})".format(*numbers)


def test_overfitting_sees_the_same_samples_in_each_epoch(
    data: StripeDataModule, tmp_path: Path
) -> None:
    model = Model()
    _trainer(tmp_path, overfit_batches=2, max_epochs=3).fit(model, datamodule=data)
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]  # to the last defect
    assert model.seen[0] != model.seen[1]


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


@pytest.mark.parametrize(
    ("run", "options"),
    [
        ("fit", {"limit_train_batches": 0.5}),
        ("fit", {"val_check_interval": 0.5}),
        ("fit", {"limit_val_batches": 0.5}),
        ("fit", {"overfit_batches": 0.5}),
        ("validate", {"limit_val_batches": 0.5}),
    ],
)
def test_a_fraction_of_a_loader_without_length_is_refused(
    data: StripeDataModule, tmp_path: Path, run: str, options: dict[str, float]
) -> None:
    data.loader = LoaderOptions(num_workers=0, resizable=True)
    [(name, value)] = options.items()
    text = (
        rf"trainer.{name}={value}: data.loader.resizable=true loaders have no length: give a whole"
    )
    with pytest.raises(ConfigError, match=text):
        getattr(_trainer(tmp_path, max_epochs=1, **options), run)(Model(), datamodule=data)
    whole = {name: 1}
    getattr(_trainer(tmp_path, max_epochs=1, **whole), run)(Model(), datamodule=data)


def test_a_schedule_that_needs_a_length_says_what_to_do(
    data: StripeDataModule, tmp_path: Path
) -> None:
    class OneCycle(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    data.loader = LoaderOptions(num_workers=0, resizable=True)
    with pytest.raises(ValueError, match="total_steps") as caught:
        _trainer(tmp_path, max_epochs=1).fit(OneCycle(), datamodule=data)
    [note] = caught.value.__notes__
    assert "data.loader.resizable=true loaders have no length" in note
    assert "trainer.max_steps" in note
    _trainer(tmp_path, max_steps=2).fit(OneCycle(), datamodule=data)
