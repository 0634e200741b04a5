"""`mode: resize` with the real loader in a real Trainer: the batch size moves, and every sample is trained once."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.resize import ResizeRules, Resizing
from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import ConfigError
from lit_data.core.size_search import SizeLimits
from lit_data.core.types import Batch, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.testing import QUIET
from tests.helpers.limited_memory import SimulatedDevice, install
from tests.helpers.tally import Meanwhile, Rows, Tally
from tests.loading.rows import KINDS, Indices

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

EAGER = {
    "mode": "resize",
    "grow_after": 1,
    "min_success": 0.01,
    "grow_below": 0.999,
    "shrink_above": 1.0,
}
"""Decides after every step, and uses all memory."""


class Data(BaseDataModule):
    batch_keys = ("index",)

    def __init__(self, samples: int, batch_size: int) -> None:
        super().__init__(loader=_options(batch_size))
        self.samples = samples

    def build_dataset(self, stage: Stage) -> Indices:
        return Indices(self.samples)

    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        return batch

    def finish_batch(self, batch: Batch, stage: Stage) -> Batch:
        return batch


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimulatedDevice], SimulatedDevice]:
    """Let the callback read a device's memory."""

    def on_device(device: SimulatedDevice) -> SimulatedDevice:
        monkeypatch.setattr("lit_data.callbacks.adaptive_batch_size.open_gauge", lambda _: device)
        return device

    return on_device


OnDevice = Callable[[SimulatedDevice], SimulatedDevice]


def _options(batch_size: int, **options: Any) -> LoaderOptions:
    chosen = {"worker_kind": "inline", "resizable": True, "seed": 3} | options
    return LoaderOptions(batch_size=batch_size, **chosen)


def _loader(samples: int, batch_size: int, **options: Any) -> MicroBatchLoader:
    return MicroBatchLoader(Indices(samples), _options(batch_size, **options), shuffle=True)


def _device(fits: int, **options: Any) -> SimulatedDevice:
    """So many samples fit, and none that is there already."""
    return SimulatedDevice(fits * 100, fixed_bytes=0, sample_bytes=100, **options)


def _trainer(*callbacks: Callback, **options: Any) -> Trainer:
    given = {"logger": Rows(), "log_every_n_steps": 1, "max_epochs": 1} | options
    return Trainer(**QUIET | given, callbacks=list(callbacks))


def _run(
    device: SimulatedDevice,
    adaptive: AdaptiveBatchSize,
    loader: Any,
    seen: Meanwhile | None = None,
    **options: Any,
) -> tuple[Tally, Meanwhile, Rows]:
    module, seen = Tally(len(loader.dataset)), seen or Meanwhile()
    install(module, device.plan())
    trainer = _trainer(adaptive, seen, **options)
    trainer.fit(module, loader)
    assert trainer.global_step == len(seen.batches)
    loader.close()
    return module, seen, trainer.logger


def _check_learned_once(module: Tally, batches: list[list[int]]) -> None:
    """In one epoch: by the indices, by the order, and by the gradients."""
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(module.learned)))
    _check_rates(module.learned, batches, [1.0] * len(batches))


def _check_rates(learned: torch.Tensor, batches: list[list[int]], rates: list[float]) -> None:
    """Each sample of a batch was learned once, with the rate of its batch."""
    for batch, rate in zip(batches, rates, strict=True):
        used = learned.detach()[batch] * len(batch)
        assert torch.allclose(used, torch.full_like(used, rate), rtol=1e-12)


def _sizes(seen: Meanwhile) -> list[int]:
    return [len(batch) for batch in seen.batches]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["worker_kind"])
def test_the_batch_grows_within_an_epoch_and_no_sample_is_lost(
    kind: dict[str, Any], on_device: OnDevice
) -> None:
    loader, adaptive = _loader(600, 8, **kind), AdaptiveBatchSize(**EAGER, max_size=100)
    module, seen, rows = _run(on_device(_device(100)), adaptive, loader)
    # One batch is fetched ahead, and the first only tells how large batches are.
    assert _sizes(seen)[:11] == [8, 8, 8, 16, 16, 32, 32, 64, 64, 100, 100]
    assert set(_sizes(seen)[11:-1]) == {100}
    assert rows.sizes() == _sizes(seen)
    _check_learned_once(module, seen.batches)
    fixed = [index for batch in _loader(600, 8) for index in batch["index"].tolist()]
    assert [index for batch in seen.batches for index in batch] == fixed


@pytest.mark.parametrize(
    ("samples", "batch_size", "fits", "accumulate"),
    [(64, 8, 4, 3), (64, 8, 16, 1), (128, 16, 100, 3), (61, 8, 5, 1)],
)
def test_all_samples_are_used_and_validation_runs(
    samples: int, batch_size: int, fits: int, accumulate: int, on_device: OnDevice
) -> None:
    """F27: a loader with a length would leave out samples, or validation."""
    loader, device = _loader(samples, batch_size), on_device(_device(fits))
    module, seen = Tally(samples), Meanwhile()
    install(module, device.plan())
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}
    trainer = _trainer(AdaptiveBatchSize(**EAGER), seen, **options)
    trainer.fit(module, loader, DataLoader([{"index": torch.arange(3)}], batch_size=None))
    order = [index for batch in seen.batches for index in batch]
    for epoch in range(3):
        assert sorted(order[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert seen.validated == 3
    assert _sizes(seen)[3] != batch_size


@pytest.mark.parametrize("fits", [255, 129, 100, 7, 1])
def test_from_256_it_settles_within_15_steps_at_nine_tenths_of_what_fits(
    fits: int, on_device: OnDevice
) -> None:
    adaptive, loader = AdaptiveBatchSize(**EAGER), _loader(256 * 20, 256)
    _, seen, rows = _run(on_device(_device(fits)), adaptive, loader, limit_train_batches=20)
    assert set(_sizes(seen)[14:]) == {rows.sizes()[14]}
    assert 0.9 * fits <= rows.sizes()[14] <= fits
    assert rows.pieces()[14:] == [1] * 6


def test_it_follows_when_memory_goes_and_comes(on_device: OnDevice) -> None:
    device, adaptive = on_device(_device(100)), AdaptiveBatchSize(**EAGER)
    events = {}
    for step, fits in {20: 50, 40: 10, 60: 90, 80: 400}.items():
        events[step] = lambda fits=fits: setattr(device, "limit_bytes", fits * 100)
    loader = _loader(30000, 100)
    _, seen, rows = _run(device, adaptive, loader, Meanwhile(events), limit_train_batches=100)
    for step, fits in {19: 100, 39: 50, 59: 10, 79: 90, 99: 400}.items():
        assert 0.9 * fits <= rows.sizes()[step] == _sizes(seen)[step] <= fits


def test_by_default_memory_decides_between_its_two_shares(on_device: OnDevice) -> None:
    """Up below 0.7 of the memory, down above 0.9."""

    def settle(fits: int) -> int:
        adaptive, loader = AdaptiveBatchSize("resize", grow_after=2), _loader(3000, 64)
        _, seen, _ = _run(on_device(_device(fits)), adaptive, loader, limit_train_batches=12)
        return _sizes(seen)[-1]

    assert settle(64 * 2) == 96  # 128 is all of it, and 96 is 0.75
    assert settle(92) == 64  # 0.696 of it, but 128 was tried and failed
    assert settle(90) == 64  # 0.711
    assert settle(72) == 64  # 0.889
    assert settle(70) == 56  # 64 is 0.914 of it, 48 is 0.686, and half way is 56, 0.8


@pytest.mark.parametrize(
    ("first", "limits", "expected"),
    [
        (16, {"max_size": 40}, [16, 16, 32, 40, 40, 40]),
        (64, {"max_size": 40}, [40] * 6),
        (4, {"min_size": 10, "max_size": 10}, [10] * 6),
        (16, {"initial_size": 8, "max_size": 16}, [16, 8, 16, 16, 16, 16]),
    ],
    ids=str,
)
def test_the_size_stays_between_its_limits(
    first: int, limits: dict[str, int], expected: list[int], on_device: OnDevice
) -> None:
    adaptive = AdaptiveBatchSize(**EAGER | limits)
    seen = _run(on_device(_device(1000)), adaptive, _loader(3000, first), limit_train_batches=6)[1]
    assert _sizes(seen) == expected


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_thousand_steps_under_random_pressure(
    seed: int, on_device: OnDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    device = on_device(_device(40, pressure_bytes=3500, seed=seed))
    adaptive = AdaptiveBatchSize("resize", grow_after=3, min_success=0.3)
    module, seen, rows = _run(device, adaptive, _loader(20000, 32), max_steps=1000, max_epochs=-1)
    assert rows.rows[-1]["batch/ooms"] > 50
    assert len(set(_sizes(seen))) > 5
    order = [index for batch in seen.batches for index in batch]
    assert len(seen.batches) == 1000
    learned = torch.zeros(20000, dtype=torch.float64)
    for batch in seen.batches:
        learned[batch] += 1 / len(batch)
    assert torch.allclose(module.learned.detach(), learned, rtol=0, atol=1e-9)
    for first in range(0, len(order) - 20000 + 1, 20000):
        assert sorted(order[first : first + 20000]) == list(range(20000))


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 12),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.8, total_steps=60, cycle_momentum=False),
}
FACTORS = {"none": lambda r: 1.0, "linear": float, "sqrt": math.sqrt}


@pytest.mark.parametrize(
    ("policy", "schedule"), [("none", "step"), ("linear", "cosine"), ("sqrt", "one cycle")]
)
def test_the_rate_follows_the_batch_and_no_schedule_sees_it(
    policy: str, schedule: str, on_device: OnDevice
) -> None:
    device, loader = on_device(_device(100)), _loader(1000, 8)

    def configure(parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
        optimizer = SGD(parameters, lr=0.4)
        scheduler = {"scheduler": SCHEDULES[schedule](optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Shown(Meanwhile):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    module, seen, rates = Tally(1000, configure), Shown(), []
    install(module, device.plan())
    adaptive = AdaptiveBatchSize(**EAGER, learning_rate=policy, max_size=100)
    _trainer(adaptive, seen).fit(module, loader)

    alone = configure(list(Tally(1).parameters()))
    expected = []
    for _ in seen.batches:
        expected.append(alone["optimizer"].param_groups[0]["lr"])
        alone["optimizer"].step()
        alone["lr_scheduler"]["scheduler"].step()
    assert rates == expected
    assert module.optimizers().param_groups[0]["lr"] == alone["optimizer"].param_groups[0]["lr"]
    sizes = _sizes(seen)
    assert sizes[:10] == [8, 8, 8, 16, 16, 32, 32, 64, 64, 100]
    assert sizes.pop() not in sizes
    sizes.append(100)  # the short last batch has the rate of a full one
    used = [rate * FACTORS[policy](size / 8) for rate, size in zip(expected, sizes, strict=True)]
    _check_rates(module.learned, seen.batches, used)


class Stop(Exception):
    """The power goes off."""


class Save(Callback):
    """Saves after some steps, and stops."""

    def __init__(self, steps: int, path: Path) -> None:
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
            raise Stop


@pytest.mark.parametrize("steps", [3, 6])
def test_a_run_goes_on_with_its_size(steps: int, on_device: OnDevice, tmp_path: Path) -> None:
    path, device = tmp_path / "some.ckpt", on_device(_device(60))

    def start() -> tuple[Tally, Meanwhile, AdaptiveBatchSize]:
        module = Tally(400)
        install(module, device.plan())
        return module, Meanwhile(), AdaptiveBatchSize(**EAGER, learning_rate="linear", max_size=60)

    module, before, adaptive = start()
    with pytest.raises(Stop):
        _trainer(adaptive, before, Save(steps, path)).fit(module, datamodule=Data(400, 8))
    size = adaptive.state_dict()["batch_size"]
    assert len(before.batches) == steps
    assert size > 8
    module, after, adaptive = start()
    _trainer(adaptive, after).fit(module, datamodule=Data(400, 8), ckpt_path=path)
    # Lightning fetches the first batch before anybody can set a size.
    assert _sizes(after)[:2] == [8, size]
    assert max(_sizes(after)) == 60
    batches = before.batches + after.batches
    assert sorted(index for batch in batches for index in batch) == list(range(400))
    rates = [len(batch) / 8 for batch in batches[:-1]]  # the rate belongs to batches of 8 still
    _check_rates(module.learned, batches[:-1], rates)


def test_another_batch_size_of_the_loader_takes_effect(
    on_device: OnDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, device = tmp_path / "some.ckpt", on_device(_device(60))
    module = Tally(400)
    install(module, device.plan())
    adaptive = AdaptiveBatchSize(**EAGER, learning_rate="linear", max_size=60)
    with pytest.raises(Stop):
        _trainer(adaptive, Save(4, path)).fit(module, datamodule=Data(400, 8))
    caplog.set_level("INFO", "lit_data")
    seen, adaptive = Meanwhile(), AdaptiveBatchSize(**EAGER | {"grow_after": 1000}, max_size=60)
    _trainer(adaptive, seen).fit(Tally(400), datamodule=Data(400, 5), ckpt_path=path)
    assert set(_sizes(seen)[:-1]) == {5}
    assert adaptive.state_dict()["base"] == 5
    assert "batch size 5 as configured now" in caplog.text


def test_all_callbacks_are_told_of_a_new_size(on_device: OnDevice) -> None:
    adaptive = AdaptiveBatchSize(**EAGER, max_size=40)
    seen = _run(on_device(_device(40)), adaptive, _loader(500, 16))[1]
    told = [(event.text, dict(event.values)) for event in seen.told if event.name == "batch_size"]
    assert told == [
        ("the loader's batches have 32 samples instead of 16", {"size": 32, "pieces": 1}),
        ("the loader's batches have 40 samples instead of 32", {"size": 40, "pieces": 1}),
    ]


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (lambda: DataLoader([{"index": torch.arange(3)}], batch_size=None), "DataLoader"),
        (lambda: _loader(64, 8, resizable=False), "MicroBatchLoader"),
        (lambda: [_loader(64, 8)], "list"),
    ],
)
def test_a_loader_that_cannot_change_is_refused(loader: Callable[[], Any], name: str) -> None:
    message = (
        rf"\(mode='resize'\) needs a loader whose batch_size can change .*, and this one is a {name}"
        ": set data.loader.resizable=true with a lit_data loader, or use mode='split'"
    )
    with pytest.raises(ConfigError, match=message):
        _trainer(AdaptiveBatchSize("resize")).fit(Tally(64), loader())


def test_several_ranks_are_refused() -> None:
    trainer = SimpleNamespace(
        world_size=2, optimizers=[], strategy=SimpleNamespace(root_device=torch.device("cpu"))
    )
    replay = Replay(trainer, Tally(1), SizeLimits(), _device(1))
    text = r"works on one device and this run has 2 ranks.*use mode='split'"
    with pytest.raises(ConfigError, match=text):
        Resizing(_loader(64, 8), ResizeRules(), replay)
