import copy
import ctypes
import gc
import logging
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lit_data.callbacks import empty_cache
from lit_data.callbacks.device_memory import open_cache
from lit_data.callbacks.empty_cache import EmptyCache
from lit_data.callbacks.events import Event
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET
from tests.callbacks.clock import Clock
from tests.helpers.notes import Notes

MIB = 2**20
SUMS = {"cache/releases": 4, "cache/freed_bytes": 32 * MIB, "cache/seconds": 16.0}


class Cache:
    """Holds 8 MiB more at each release, and gives them back in 3 s; a collection takes 1 s, a step 10 s."""

    def __init__(self, time: Clock) -> None:
        self.time = time
        self.held = 0
        self.unused = 0.0
        self.looks = 0

    def held_bytes(self) -> int:
        self.held = 0 if self.held else 8 * MIB
        return self.held

    def measure_unused(self) -> float:
        self.looks += 1
        return self.unused

    def empty(self) -> None:
        self.time.now_s += 3


class Listener(Callback):
    def __init__(self) -> None:
        self.events = []

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        assert error is None
        self.events.append(event)

    @property
    def whens(self) -> list[str]:
        texts = [event.text.removeprefix("8 MiB were released ") for event in self.events]
        return [text.rpartition(", in ")[0] for text in texts]


class Model(BoringModel):
    def __init__(self, time: Clock) -> None:
        super().__init__()
        self.time = time

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.time.now_s += 10
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        assert self.sample_images(3) == "3 images"

    def sample_images(self, count: int) -> str:
        return f"{count} images"


class Run:
    """A training of 12 batches on a fake device."""

    def __init__(self, folder: Path, time: Clock, cache: Cache) -> None:
        self.folder, self.cache, self.listener, self.model = folder, cache, Listener(), Model(time)
        self.notes = Notes("cache/")

    def trainer(self, callback: Callback, **options: Any) -> Trainer:
        limits = {"max_epochs": 1, "limit_train_batches": 12, "limit_val_batches": 0}
        steps = {"num_sanity_val_steps": 0, "log_every_n_steps": 4}
        places = {"logger": self.notes, "default_root_dir": self.folder}
        settings = QUIET | limits | steps | places | options
        return Trainer(**settings, callbacks=[callback, self.listener])

    def fit(self, callback: Callback, **options: Any) -> Trainer:
        trainer = self.trainer(callback, **options)
        trainer.fit(self.model)
        return trainer


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    time = Clock()
    cache = Cache(time)

    def collect() -> int:
        time.now_s += 1
        return 0

    monkeypatch.setattr(empty_cache, "time", time)
    monkeypatch.setattr(empty_cache.gc, "collect", collect)
    monkeypatch.setattr(empty_cache, "open_cache", lambda device: cache)
    return Run(tmp_path, time, cache)


def test_every_n_steps(run: Run) -> None:
    callback = EmptyCache(every_n_steps=3, max_cost_fraction=0.9)
    run.fit(callback)
    assert run.listener.whens == ["after 3 training batches"] * 4
    text = "8 MiB were released after 3 training batches, in 4000 ms"
    release = Event("release", text, {"freed_bytes": 8.0 * MIB, "seconds": 4.0})
    assert run.listener.events[0] == release
    assert callback.summary() == SUMS
    one, two = [{"cache/freed_bytes": n * 8.0 * MIB, "cache/seconds": n * 4.0} for n in (1, 2)]
    assert run.notes.rows == [one, one, two]
    assert run.notes.steps == [3, 7, 11]


def test_around_validation_and_in_the_sanity_check(run: Run) -> None:
    run.fit(EmptyCache(max_cost_fraction=0.9), limit_val_batches=1, num_sanity_val_steps=1)
    assert run.listener.whens == ["before validation", "after validation"] * 2
    run.listener.events.clear()
    run.trainer(EmptyCache(), limit_val_batches=1).validate(run.model, verbose=False)
    assert run.listener.whens == ["before validation", "after validation"]
    run.listener.events.clear()
    run.fit(EmptyCache(around_validation=False), limit_val_batches=1)
    assert run.listener.events == []


def test_after_checkpoints_and_methods(run: Run) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *rest: Any) -> None:
            if rest[-1] == 5:
                path = run.folder / "a.ckpt"
                trainer.save_checkpoint(path)
                assert run.listener.whens == ["after checkpoint"]
                states = torch.load(path, weights_only=True)["callbacks"]
                assert states["EmptyCache"]["total"]["releases"] == 0
                assert copy.deepcopy(module).sample_images(2) == "2 images"

    callback = EmptyCache(after=("checkpoint", "sample_images"), max_cost_fraction=0.9)
    trainer = run.trainer(callback)
    trainer.callbacks.append(Saves())
    trainer.fit(run.model)
    # A copy has the method alone.
    assert run.listener.whens == ["after checkpoint", "after sample_images"]
    assert "save_checkpoint" not in vars(trainer)
    assert "sample_images" not in vars(run.model)


def test_when_much_is_unused_before_a_backward(run: Run) -> None:
    run.cache.unused = 0.5
    run.fit(EmptyCache(unused_fraction=0.4, max_cost_fraction=0.9), limit_train_batches=21)
    assert run.cache.looks == 3
    assert run.listener.whens == ["because more than 40% of it was in no tensor"] * 3
    run.listener.events.clear()
    run.fit(EmptyCache(unused_fraction=0.6))
    assert run.listener.events == []


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_releases_stay_within_their_share_of_the_time(run: Run, share: float) -> None:
    callback = EmptyCache(every_n_steps=1, after=(), max_cost_fraction=share)
    run.fit(callback, limit_train_batches=200)
    spent_s, share_s = float(callback.summary()["cache/seconds"]), share * run.cache.time.now_s
    # They go on as soon as they can be afforded.
    assert 0.8 * share_s <= spent_s <= share_s


def test_a_checkpoint_keeps_the_sums(run: Run) -> None:
    first, second = (EmptyCache(every_n_steps=5, after=(), max_cost_fraction=0.9) for _ in range(2))
    trainer = run.fit(first)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.trainer(second, max_epochs=2).fit(run.model, ckpt_path=run.folder / "a.ckpt")
    assert second.summary() == SUMS
    assert EmptyCache().summary() == {}


def test_a_method_that_is_not_there_is_refused_with_those_that_are(run: Run) -> None:
    text = r"after='draw': Model has no such method; give one of 'checkpoint', .*'sam"
    with pytest.raises(ConfigError, match=text):
        run.fit(EmptyCache(after=["checkpoint", "draw"]))


def test_the_cpu_is_told_that_it_has_no_reserved_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = Run(tmp_path, Clock(), Cache(Clock()))
    callback = EmptyCache(unused_fraction=0.1, around_validation=False)
    run.fit(callback, fast_dev_run=2)
    assert "unused_fraction has no effect on the CPU" in caplog.text
    assert callback.summary() == {}


def test_free_heap_goes_back_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    cache, process = open_cache(torch.device("cpu")), psutil.Process()
    blocks = [bytes(100_000) for _ in range(800)]
    kept = blocks[-1]
    blocks.clear()
    full = process.memory_info().rss
    cache.empty()
    assert len(kept) == 100_000
    assert full - process.memory_info().rss > 40 * MIB
    assert cache.measure_unused() == 0


@pytest.mark.parametrize(
    ("device", "module", "reserved", "allocated"),
    [
        ("cuda:0", torch.cuda, "memory_reserved", "memory_allocated"),
        ("mps", torch.mps, "driver_allocated_memory", "current_allocated_memory"),
        ("xpu:0", torch.accelerator, "memory_reserved", "memory_allocated"),
    ],
)
def test_each_accelerator_has_its_allocator(
    monkeypatch: pytest.MonkeyPatch, device: str, module: Any, reserved: str, allocated: str
) -> None:
    emptied = []
    monkeypatch.setattr(module, reserved, lambda *device: 100)
    monkeypatch.setattr(module, allocated, lambda *device: 75)
    monkeypatch.setattr(module, "empty_cache", lambda: emptied.append(device))
    cache = open_cache(torch.device(device))
    assert (cache.held_bytes(), cache.measure_unused()) == (100, 0.25)
    cache.empty()
    assert emptied == [device]
    monkeypatch.setattr(module, reserved, lambda *device: 0)
    assert open_cache(torch.device(device)).measure_unused() == 0


@pytest.mark.gpu
def test_a_real_device_gives_back_what_no_tensor_uses(tmp_path: Path) -> None:
    class Wastes(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            del_me = torch.empty(256 * MIB, dtype=torch.uint8, device=self.device)
            del del_me
            return super().training_step(batch, batch_idx)

    gc.collect()
    callback = EmptyCache(unused_fraction=0.5)
    settings = QUIET | {"accelerator": "gpu", "max_steps": 2, "default_root_dir": tmp_path}
    trainer = Trainer(**settings, limit_val_batches=0, callbacks=[callback])
    trainer.fit(Wastes(), DataLoader(RandomDataset(32, 64), 4))
    assert int(callback.summary()["cache/freed_bytes"]) >= 255 * MIB  # what is rounded up aside
