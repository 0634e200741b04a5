"""What is typed for a training that goes on takes effect or is refused, and all else is as it was trained."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import OmegaConf
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader

from lit_data.app import api
from lit_data.app.cli import main
from lit_data.app.resuming import ResumedTraining, check_splits
from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.models.schedule import Schedule, schedule_optimizer
from lit_data.testing import QUIET

EPOCH, TRAINED, EPOCHS = 8, 2, 4  # steps; epochs

Configure = Callable[[Any, Trainer], Any]


class Model(LightningModule):
    """Notes its learning rates."""

    def __init__(self, configure: Configure, schedule: str | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.configure, self.schedule = configure, schedule
        self.rates: list[float] = []
        self.groups: list[dict[str, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.groups = self.trainer.optimizers[0].param_groups
        self.rates.append(self.groups[0]["lr"])
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.configure(self.layer.parameters(), self.trainer)


class SaveAt(Callback):
    """Saves behind a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _ours(schedule: Schedule, lr: float = 0.004, **options: Any) -> Model:
    def configure(parameters: Any, trainer: Trainer) -> Any:
        return schedule_optimizer(AdamW(parameters, lr=lr, **options), schedule, trainer)

    return Model(configure, schedule)


def _theirs(make: Callable[[Optimizer, Trainer], Any], lr: float = 0.004) -> Model:
    """Return somebody's module: an optimizer, and a schedule that it names itself."""

    def configure(parameters: Any, trainer: Trainer) -> Any:
        optimizer = SGD(parameters, lr=lr, momentum=0.9)
        schedule = {"scheduler": make(optimizer, trainer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Model(configure)


def _fit(model: Model, *, start: Path | None = None, batch: int = 1, **options: Any) -> Trainer:
    arguments = {**QUIET, "max_epochs": EPOCHS, **options}
    callbacks = [*arguments.pop("callbacks", []), ResumedTraining()]
    trainer = Trainer(callbacks=callbacks, **arguments)
    loader = DataLoader(torch.ones(EPOCH, 1), batch_size=batch)
    trainer.fit(model, loader, ckpt_path=start, weights_only=True)
    return trainer


def _save(model: Model, folder: Path, **options: Any) -> Path:
    trainer = _fit(model, **{"max_epochs": TRAINED, **options})
    trainer.save_checkpoint(folder / "first.ckpt")
    return folder / "first.ckpt"


def _cosine(step: float, steps: float, lr: float = 0.004) -> float:
    return lr * (0.5 + 0.5 * math.cos(math.pi * (step + 0.5) / steps))


pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
WHOLE, DONE = EPOCHS * EPOCH, TRAINED * EPOCH


@pytest.mark.parametrize(
    ("model", "options", "rates", "said"),
    [
        # The schedule of a run that has ended is stretched over the longer one.
        (_ours("cosine"), {}, _cosine(DONE, WHOLE), "max_epochs=4 for 2"),
        (_ours("cosine", 0.4), {}, _cosine(DONE, WHOLE, 0.4), "lr=0.19 for 0"),
        (_ours("none"), {}, 0.004, "model.schedule=none for cosine"),
        (_ours("none", 0.25), {}, 0.25, "lr=0.25 for 0"),
        (_ours("steps"), {}, 0.0004, "model.schedule=steps for cosine"),
        (_ours("cosine", weight_decay=0.5), {}, _cosine(DONE, WHOLE), "weight_decay=0.5"),
        (_ours("cosine", betas=(0.5, 0.9)), {}, _cosine(DONE, WHOLE), r"betas=(0.5, 0.9)"),
        # Half of the epochs are half of the way, however many steps they had.
        (_ours("cosine"), {"batch": 2}, _cosine(DONE / 2, WHOLE / 2), "lr="),
        (_ours("cosine"), {"accumulate_grad_batches": 2}, _cosine(DONE / 2, WHOLE / 2), "lr="),
        (_ours("cosine"), {"max_steps": 20}, _cosine(DONE, 20), "trainer.max_steps=20 for -1"),
    ],
)
def test_what_is_built_differently_takes_effect(
    model: Model,
    options: dict[str, Any],
    rates: float,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = _save(_ours("cosine"), tmp_path)
    with caplog.at_level(logging.INFO, "lit_data.app.resuming"):
        trainer = _fit(model, start=start, **options)
    assert model.rates[0] == pytest.approx(rates)
    assert min(model.rates) > 0
    assert trainer.current_epoch == EPOCHS or options.get("max_steps")
    assert said in caplog.text
    built = model.configure(model.layer.parameters(), trainer)
    optimizer = built if isinstance(built, Optimizer) else built["optimizer"]
    for name in ("weight_decay", "betas"):
        assert model.groups[0][name] == optimizer.param_groups[0][name]


def test_schedules_of_others_keep_their_count_and_take_what_changed(tmp_path: Path) -> None:
    def one_cycle(optimizer: Optimizer, trainer: Trainer) -> OneCycleLR:
        return OneCycleLR(optimizer, 0.1, total_steps=trainer.estimated_stepping_batches)

    start = _save(_theirs(one_cycle), tmp_path)
    model = _theirs(one_cycle)
    trainer = _fit(model, start=start)  # torch refuses more steps than it was made for
    assert trainer.global_step == WHOLE
    assert max(model.rates) > 0.05
    halving = partial(ExponentialLR, gamma=0.5)
    start = _save(_theirs(lambda optimizer, _: halving(optimizer)), tmp_path, max_epochs=1)
    model = _theirs(lambda optimizer, _: halving(optimizer), lr=0.4)
    _fit(model, start=start, max_epochs=2)
    assert model.rates == pytest.approx([0.4 / 2 ** (EPOCH + step) for step in range(EPOCH)])
    model = _theirs(lambda optimizer, _: ExponentialLR(optimizer, 0.9))
    _fit(model, start=start, max_epochs=2)
    first = 0.004 / 2**EPOCH
    assert model.rates == pytest.approx([first * 0.9**step for step in range(EPOCH)])


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", "steps", "none"])
def test_nothing_changes_to_the_bit_where_nothing_differs(
    schedule: Schedule, tmp_path: Path
) -> None:
    whole, resumed = _ours(schedule), _ours(schedule)
    _fit(whole, callbacks=[SaveAt(11, tmp_path / "inside.ckpt")])
    _fit(resumed, start=tmp_path / "inside.ckpt")
    assert resumed.rates == whole.rates[11:]


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    start = _save(_ours("none"), tmp_path)
    other = Model(lambda parameters, _: SGD(parameters, lr=0.1))
    with pytest.raises(ConfigError, match="holds the state of AdamW, and the optimizer is SGD now"):
        _fit(other, start=start)


def test_the_patience_of_an_early_stop_is_that_of_the_configuration(tmp_path: Path) -> None:
    def stop(patience: int) -> EarlyStopping:
        return EarlyStopping("epoch", patience=patience, check_on_train_epoch_end=True)

    class Logging(Model):
        def on_train_epoch_end(self) -> None:
            self.log("epoch", 1.0)

    def model() -> Logging:
        return Logging(lambda parameters, _: SGD(parameters, lr=0.1))

    start = _save(model(), tmp_path, callbacks=[stop(2)])
    stopping = stop(7)
    trainer = _fit(model(), start=start, callbacks=[stopping])
    assert stopping.patience == 7
    assert trainer.current_epoch == EPOCHS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of `fit`."""
    folder = tmp_path_factory.mktemp("resuming")
    words = ("model.schedule=cosine", "model.optimizer.lr=0.125", "model.optimizer.eps=1e-6")
    words += ("data.patch_px=48", "data.stride_px=48")
    objects = api.build("stripe", *TOY, f"paths.cache={folder}", f"paths.run={folder}", *words)
    objects.trainer.fit(objects.model, objects.datamodule)
    objects.trainer.save_checkpoint(folder / "trained.ckpt")
    return folder / "trained.ckpt"


TOY = (
    "debug=fast",
    "data.samples.count=4",
    "model.net.width=4",
    "callbacks=fast",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=0",
    "callbacks.checkpoint.monitor=null",
)


@pytest.mark.parametrize(
    ("words", "lr", "schedule"),
    [
        ((), 0.125, "cosine"),
        (("model.optimizer.lr=0.5",), 0.5, "cosine"),
        (("model.schedule=none",), 0.125, "none"),
    ],
)
def test_what_is_not_typed_is_as_it_was_trained(
    trained: Path,
    words: tuple[str, ...],
    lr: float,
    schedule: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lit_data.app.resuming")
    objects = api.build("stripe", *TOY, f"ckpt={trained}", f"paths.run={trained.parent}", *words)
    optimizer = objects.model.optimizer_factory([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["lr"] == lr
    assert optimizer.defaults["eps"] == 1e-6
    assert objects.model.schedule == schedule
    assert objects.datamodule.patch_px == (48, 48)
    assert "from the checkpoint: model.optimizer.eps=1e-06" in caplog.text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.optimizer._target_=torch.optim.SGD", "holds the state of torch.optim.AdamW: "),
        ("model.net.prior=0.25", "model.net.prior=0.25 has no effect on a training that resumes"),
        ("model.net.weights=other.ckpt", "model.net.weights=other.ckpt has no effect"),
    ],
)
def test_what_cannot_take_effect_is_refused(trained: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        api.build("stripe", *TOY, f"ckpt={trained}", f"paths.run={trained.parent}", word)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_first_rank_says_what_others_would_repeat(
    trained: Path,
    rank: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    words = [f"ckpt={trained}", f"hydra.run.dir={trained.parent}/{rank}", "model.loss=none"]
    assert main(["fit", "experiment=stripe", *TOY, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("from the checkpoint: model.optimizer.eps") == lines
    assert "loss='none' is unknown" in printed.err


def test_a_loader_goes_on_that_a_schedule_had_made_before_its_checkpoint_was_read(
    tmp_path: Path,
) -> None:
    def loader() -> MicroBatchLoader:
        samples = [{"x": torch.full((1,), float(number))} for number in range(EPOCH)]
        return MicroBatchLoader(samples, LoaderOptions(batch_size=1, num_workers=0), shuffle=True)

    class Noting(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.rates.append(float(batch["x"]))
            return self.layer(batch["x"]).square().mean()

    def fit(start: Path | None = None, callbacks: Sequence[Callback] = ()) -> list[float]:
        model = Noting(_ours("one_cycle").configure)
        trainer = Trainer(**QUIET, max_epochs=2, callbacks=[*callbacks, ResumedTraining()])
        trainer.fit(model, loader(), ckpt_path=start, weights_only=True)
        return model.rates

    path = tmp_path / "inside.ckpt"
    assert fit(callbacks=[SaveAt(3, path)])[3:] == fit(path)


def test_images_that_were_trained_on_are_not_scored_where_the_folder_has_changed(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start, table = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "splits.csv"
    start.parent.mkdir()
    start.write_bytes(trained.read_bytes())
    cfg = OmegaConf.create({"data": {"root": None}})  # as that of the checkpoint
    rows = [{"image": "a.png", "split": "test"}, {"image": "b.png", "split": "train"}]
    check_splits(cfg, start, rows)
    table.write_text("image,split\na.png,train\nb.png,train\nc.png,test\n")
    text = r"trained on 1 image of the present val and test, such as a\.png, because .*/splits\.csv"
    with pytest.raises(ConfigError, match=text):
        check_splits(cfg, start, rows)
    check_splits(cfg, start, rows[1:])
    check_splits(OmegaConf.create({"data": {"root": "/elsewhere"}}), start, rows)
    assert not caplog.messages
    monkeypatch.setattr("lit_data.app.resuming.find_typed", lambda: {"data.splits"})
    check_splits(cfg, start, rows)
    assert "such as a.png: their scores will be too good" in caplog.text
