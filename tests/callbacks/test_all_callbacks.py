"""Modules that others wrote run under all five callbacks at once, and nothing stays behind."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import (
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.demos.transformer import LightningTransformer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.callbacks.amp import AMP
from lit_data.callbacks.data_wait_monitor import DataWaitMonitor
from lit_data.callbacks.empty_cache import EmptyCache
from lit_data.callbacks.memory_monitor import MemoryMonitor
from lit_data.callbacks.wrapping import Wrapped
from lit_data.testing import QUIET
from tests.helpers.limited_memory import STAGES, FaultPlan, install
from tests.helpers.stock_modules import STOCK

SAMPLES, BATCH, FITS = 32, 8, 4

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no:UserWarning"),
]


class Ran(NamedTuple):
    """What a module did, and what its run left."""

    module: LightningModule
    trainer: Trainer
    predictions: list[Any]


def _build(name: str) -> tuple[LightningModule, DataLoader[Any]]:
    """A module as its author wrote it, and data for it."""
    if name in STOCK:
        return STOCK[name].build(), STOCK[name].loader(SAMPLES, BATCH)
    torch.manual_seed(0)
    if name == "transformer":
        module = LightningTransformer(vocab_size=20)
        module.prepare_data = lambda: None  # which would download a text
        words = torch.randint(0, 20, (SAMPLES, 7), generator=torch.Generator().manual_seed(0))
        return module, DataLoader(TensorDataset(words[:, :6], words[:, 1:]), BATCH)
    module = {"boring": BoringModel, "manual": ManualOptimBoringModel, "demo": DemoModel}[name]()
    return module, DataLoader(RandomDataset(32, SAMPLES), BATCH)


MODULES = [*STOCK, "boring", "manual", "demo", "transformer"]


def _make_callbacks(path: Path, precision: Any, **options: Any) -> list[Callback]:
    return [
        AdaptiveBatchSize(grow_after=None, **options),
        AMP(precision),
        MemoryMonitor(every_n_steps=1, path=path, plot=False),
        EmptyCache(every_n_steps=2, unused_fraction=0.5),
        DataWaitMonitor(path=path, plot=False),
    ]


def _run(module: LightningModule, loader: DataLoader[Any], path: Path, *callbacks: Callback) -> Ran:
    """Fit with validation, then test and predict, as far as the module has steps for it."""
    settings = {**QUIET, "logger": CSVLogger(path), "max_epochs": 2, "log_every_n_steps": 1}
    trainer = Trainer(**settings, default_root_dir=path, callbacks=list(callbacks))
    torch.manual_seed(1)
    trainer.fit(module, loader, loader if is_overridden("validation_step", module) else None)
    if is_overridden("test_step", module):
        trainer.test(module, loader, verbose=False)
    can_predict = not isinstance(module, LightningTransformer)
    predictions = trainer.predict(module, loader) if can_predict else []
    return Ran(module, trainer, predictions or [])


def _assert_same(one: Any, two: Any, tolerance: float = 0.0) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, two, rtol=0, atol=tolerance)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            _assert_same(one[key], two[key], tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            _assert_same(a, b, tolerance)
    else:
        assert one == two


def _assert_nothing_left(ran: Ran, before: dict[str, Any]) -> None:
    trainer, module = ran.trainer, ran.module
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = [trainer.fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization]
    loops += [epoch_loop.manual_optimization, trainer.validate_loop, trainer.test_loop]
    loops += [trainer.predict_loop, trainer._data_connector]
    owners = [trainer, trainer.strategy, trainer.profiler, *loops, *module.modules()]
    for owner in [*owners, *trainer.optimizers]:
        assert not any(isinstance(value, Wrapped) for value in vars(owner).values()), owner
    assert type(trainer.strategy.precision_plugin) is Precision
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert _describe(module) == before


def _describe(module: LightningModule) -> dict[str, Any]:
    """What a module consists of: attributes, hooks and flags."""
    return {
        name: (
            sorted(key for key in vars(part) if not key.startswith("_")),
            [len(found) for key, found in vars(part).items() if key.endswith("_hooks")],
            [parameter.requires_grad for parameter in part.parameters()],
        )
        for name, part in module.named_modules()
    }


@pytest.mark.parametrize(
    ("name", "order"), [*((name, 1) for name in MODULES), ("classifier", -1), ("gan", -1)]
)
def test_with_nothing_to_do_they_change_nothing(name: str, order: int, tmp_path: Path) -> None:
    module, loader = _build(name)
    before = _describe(module)
    callbacks = _make_callbacks(tmp_path / "with", "fp32")[::order]
    ran = _run(module, loader, tmp_path / "with", *callbacks)
    plain = _run(*_build(name), tmp_path / "without")
    _assert_same(ran.module.state_dict(), plain.module.state_dict())
    _assert_same(ran.predictions, plain.predictions)
    assert ran.trainer.global_step == plain.trainer.global_step > 0
    _assert_nothing_left(ran, before)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("classifier", "transfer"),
        ("classifier", "backward"),
        ("segmenter", "forward_middle"),
        ("boring", "transfer"),
        ("demo", "forward_middle"),
        ("transformer", "backward"),
    ],
)
def test_memory_runs_out_everywhere_and_the_run_is_that_of_smaller_pieces(
    name: str, point: Any, tmp_path: Path
) -> None:
    module, loader = _build(name)
    stages = ("train",) if point == "backward" else STAGES
    inner = "model.decoder" if name == "transformer" else None
    plan = FaultPlan(point, lambda n, step, micro: n > FITS, stages=stages, inner=inner)
    faults = install(module, plan)
    before = _describe(module)
    callbacks = _make_callbacks(tmp_path / "with", "fp32")
    ran = _run(module, loader, tmp_path / "with", *callbacks)
    smaller = AdaptiveBatchSize(initial_size=FITS, grow_after=None)
    twin = _run(*_build(name), tmp_path / "twin", smaller)
    assert set(faults.refused) == {BATCH}
    _assert_same(ran.module.state_dict(), twin.module.state_dict())
    _assert_same(ran.predictions, twin.predictions, 1e-6)
    assert ran.trainer.global_step == twin.trainer.global_step
    assert callbacks[0].summary()["batch/ooms"] == len(faults.refused)
    _assert_nothing_left(ran, before)


@pytest.mark.parametrize(
    ("name", "precision", "fails"),
    [
        ("classifier", "bf16", True),
        ("segmenter", "fp16", True),
        ("transformer", "bf16", True),
        ("gan", "fp16", False),
        ("manual", "bf16", False),
        ("boring", "fp16", False),
        ("demo", "bf16", False),
    ],
)
def test_they_work_in_mixed_precision(
    name: str, precision: str, fails: bool, tmp_path: Path
) -> None:
    module, loader = _build(name)
    if fails:
        install(module, FaultPlan("backward", lambda n, step, micro: n > FITS))
    before = _describe(module)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    ran = _run(module, loader, tmp_path, *_make_callbacks(tmp_path, precision))
    weights = ran.module.state_dict()
    assert all(value.isfinite().all() for value in weights.values())
    assert any(not torch.equal(value, start[key]) for key, value in weights.items())
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    assert dtypes == {torch.float32}
    _assert_nothing_left(ran, before)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)` but:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": 3},
        {"barebones": True},
        {"overfit_batches": 1},
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 0.5, "val_check_interval": 1},
    ],
    ids=str,
)
def test_they_work_whatever_the_trainer_is_told(options: dict[str, Any], tmp_path: Path) -> None:
    module, loader = _build("classifier")
    install(module, FaultPlan("backward", lambda n, step, micro: n > FITS))
    callbacks = _make_callbacks(tmp_path, "fp32")
    place = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = Trainer(**place, max_epochs=1, **options, callbacks=callbacks)
    trainer.fit(module, loader, loader)
    assert trainer.global_step > 0
    assert callbacks[0].summary() == {"batch/ooms": 1, "batch/size": FITS}


def test_an_error_of_the_module_passes_through_and_nothing_is_left(tmp_path: Path) -> None:
    module, loader = _build("classifier")
    error = ValueError("my own")
    plan = FaultPlan("backward", lambda n, step, micro: step == 2, error=lambda n: error)
    install(module, plan)
    before = _describe(module)
    callbacks = _make_callbacks(tmp_path, "bf16")
    trainer = Trainer(**QUIET, max_epochs=1, log_every_n_steps=1, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"^my own$"):
        trainer.fit(module, loader, loader)
    _assert_nothing_left(Ran(module, trainer, []), before)


def test_a_run_goes_on_from_a_checkpoint_with_all_of_them(tmp_path: Path) -> None:
    def fit(epochs: int, name: str, path: Path | None = None) -> dict[str, Any]:
        module, loader = _build("classifier")
        install(module, FaultPlan("backward", lambda n, step, micro: n > FITS))
        callbacks = _make_callbacks(tmp_path, "fp32")
        saved = ModelCheckpoint(tmp_path, filename=name)
        settings = QUIET | {"enable_checkpointing": True, "log_every_n_steps": 1}
        trainer = Trainer(**settings, max_epochs=epochs, callbacks=[*callbacks, saved])
        torch.manual_seed(epochs)
        trainer.fit(module, loader, ckpt_path=path, weights_only=True)
        return callbacks[0].summary()

    first = fit(1, "one")
    assert first == fit(2, "two", tmp_path / "one.ckpt") == {"batch/ooms": 1, "batch/size": FITS}
