import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from lit_data.callbacks import memory_monitor
from lit_data.callbacks.device_memory import MemoryReading
from lit_data.callbacks.events import Event, announce
from lit_data.callbacks.memory import post_mortem
from lit_data.callbacks.memory import record as memory_record
from lit_data.callbacks.memory.record import TreeMemory
from lit_data.callbacks.memory_monitor import MemoryMonitor
from lit_data.callbacks.timeline import SERIES
from lit_data.core.errors import BatchMemoryError
from lit_data.core.types import Summarises
from lit_data.testing import QUIET

MIB = 2**20


class Gauge:
    """Allocated bytes count up by one with each reading; the peak is 100 above."""

    def __init__(self) -> None:
        self.allocated_bytes, self.resets = 1000, 0

    def read(self) -> MemoryReading:
        self.allocated_bytes += 1
        return MemoryReading(self.allocated_bytes, 2000, self.allocated_bytes + 100, 5000)

    def reset_peak(self) -> None:
        self.resets += 1


class Model(BoringModel):
    """Calls `act` with itself and the number of the step, counted from 1."""

    def __init__(
        self, act: Callable[[LightningModule, int], None] = lambda model, step: None
    ) -> None:
        super().__init__()
        self.act, self.steps = act, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.act(self, self.steps)
        return self.layer(batch).sum()


class Rows(CSVLogger):
    """Keeps what is logged of memory, and the steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="n", version="v")
        self.rows = []
        self.steps = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("memory/") for name in metrics):
            self.rows.append(dict(metrics))
            self.steps.append(step)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose memory the test sets; reading it is always due."""
    state = SimpleNamespace(gauge=Gauge(), rss=300, tree=TreeMemory(700, 50, 3), pinned=None)
    monkeypatch.setattr(memory_record, "open_gauge", lambda device: state.gauge)
    monkeypatch.setattr(memory_record, "read_rss_bytes", lambda: state.rss)
    monkeypatch.setattr(memory_record, "read_pinned_bytes", lambda: state.pinned)
    monkeypatch.setattr(
        memory_record, "TreeReader", lambda: SimpleNamespace(read=lambda: state.tree)
    )
    return state


def _trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    limits = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0}
    settings = QUIET | limits | {"log_every_n_steps": 1, "default_root_dir": folder} | options
    return Trainer(**settings, callbacks=list(callbacks))


def _run_out(model: LightningModule, step: int) -> None:
    if step == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_all_metrics_come_every_n_steps(machine: Any, tmp_path: Path) -> None:
    monitor, logger = MemoryMonitor(every_n_steps=3, plot=False), Rows(tmp_path)
    machine.pinned = 64
    options = {"limit_train_batches": 7, "log_every_n_steps": 2}
    _trainer(tmp_path, monitor, logger=logger, **options).fit(Model())
    first, second = logger.rows
    assert logger.steps == [2, 5]
    assert first == {
        "memory/allocated_bytes": 1003,  # after those of the record's start and of the training's
        "memory/reserved_bytes": 2000,
        "memory/peak_bytes": 1103,
        "memory/fragmentation": 1 - 1003 / 2000,
        "memory/free_bytes": 3000,
        "memory/limit_bytes": 5000,
        "memory/rss_bytes": 300,
        "memory/pss_bytes": 700,
        "memory/shared_bytes": 50,
        "memory/pinned_bytes": 64,
    }
    assert second["memory/allocated_bytes"] == 1004
    assert machine.gauge.resets == 2
    assert list(tmp_path.rglob("*.png")) == []


def test_evaluation_is_measured_at_its_start_and_its_end(machine: Any, tmp_path: Path) -> None:
    monitor, logger, model = MemoryMonitor(plot=False), Rows(tmp_path), Model()
    trainer = _trainer(tmp_path, monitor, logger=logger, limit_val_batches=2, limit_test_batches=2)
    trainer.fit(model)
    assert logger.steps == [3, 3]  # as the last training row; nothing from the sanity check
    assert monitor.measured.timeline.marks["validation"].count == 1
    results = trainer.test(model, verbose=False)
    trainer.predict(model, model.test_dataloader())
    assert [row["memory/pss_bytes"] for row in logger.rows] == [700] * 6
    assert not [key for key in results[0] if key.startswith("memory/")]
    assert monitor.summary()["memory/peak_pss_bytes"] == 700
    announce(trainer, Event("oom", "it ran out"))
    assert (tmp_path / "n/v/oom-1.txt").read_text().count("predict batch ") == 5


def test_real_runs_of_every_kind_work_without_a_logger(tmp_path: Path) -> None:
    monitor, model = MemoryMonitor(every_n_steps=1), BoringModel()
    limits = {f"limit_{stage}_batches": 1 for stage in ("val", "test", "predict")}
    trainer = _trainer(tmp_path, monitor, **limits)
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(model)
    summary = monitor.summary()
    assert isinstance(monitor, Summarises)
    peak_bytes = float(summary["memory/peak_rss_bytes"])
    assert 10 * MIB < peak_bytes == summary["memory/peak_reserved_bytes"]
    assert summary["memory/ooms"] == 0
    with Image.open(tmp_path / "memory.png") as picture:
        assert picture.size == (1210, 484)


@pytest.mark.parametrize(
    ("leak_bytes", "alarms", "knows_pss"),
    [(60 * MIB, 0, True), (39 * MIB, 1, True), (39 * MIB, 1, False)],
)
def test_growth_is_logged_and_warned_of_once(
    leak_bytes: int,
    alarms: int,
    knows_pss: bool,
    machine: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def grow(model: LightningModule, step: int) -> None:
        machine.rss += 10 * MIB
        machine.tree = TreeMemory(machine.rss + 7, 50, 3) if knows_pss else None

    machine.tree = None
    monitor, logger = MemoryMonitor(leak_bytes_per_epoch=leak_bytes, plot=False), Rows(tmp_path)
    _trainer(tmp_path, monitor, max_epochs=7, logger=logger).fit(Model(grow))
    growth = {"growth_bytes_per_epoch": 40 * MIB, "allocated_growth_bytes_per_epoch": 1}
    assert logger.rows == [{f"memory/{name}": value for name, value in growth.items()}] * 3
    assert logger.steps == [20, 24, 28]
    assert monitor.summary()["memory/growth_bytes_per_epoch"] == 40 * MIB
    told = [record for record in caplog.records if record.name == memory_monitor.__name__]
    assert [record.levelname for record in told] == ["WARNING"] * alarms
    for record in told:
        assert record.message.startswith(
            "host memory grows by 40.0 MiB per epoch, of which the main process 40.0 MiB (80.0 MiB "
            "after epoch 1, 200.0 MiB after epoch 4): it will run out; keep x.detach()"
        )


def test_running_out_of_memory_leaves_a_post_mortem_and_a_picture(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_mortem, "ROWS", 10_000)  # other tests may have left larger tensors
    monitor = MemoryMonitor()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _trainer(tmp_path, monitor).fit(Model(_run_out))
    text = (tmp_path / "oom-1.txt").read_text()
    assert text.startswith("out of memory: step 2, epoch 0, train\n")
    assert " in _run_out\n" in text
    assert "parameter layer.weight" in text
    assert "train batch 2: 1 sample: [1, 32] float32" in text
    note = f"out of memory number 1 of this run: {tmp_path / 'oom-1.txt'} lists what held it"
    assert caught.value.__notes__ == [f"MemoryMonitor: {note}"]
    assert monitor.summary()["memory/ooms"] == 1
    assert monitor.measured.timeline.marks["oom"].count == 1
    assert (tmp_path / "memory.png").is_file()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, BatchMemoryError])
def test_other_ends_leave_a_picture_alone(
    kind: type[BaseException], machine: Any, tmp_path: Path
) -> None:
    def end(model: LightningModule, step: int) -> None:
        raise kind("end")

    with pytest.raises(BaseException, match=r"end|1") as caught:
        _trainer(tmp_path, MemoryMonitor()).fit(Model(end))
    assert isinstance(caught.value, SystemExit if kind is KeyboardInterrupt else kind)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]


def test_a_recovered_error_is_told_once_even_if_it_ends_the_run_later(
    machine: Any, tmp_path: Path
) -> None:
    def recover(model: LightningModule, step: int) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory")
        try:
            raise error
        except torch.OutOfMemoryError:
            announce(model.trainer, Event("oom", "it ran out", {"size": 8.0}), error)
        announce(model.trainer, Event("batch_size", "smaller", {"size": 4.0, "pieces": 2.0}))
        if step == 2:
            raise BatchMemoryError("one sample does not fit") from error

    monitor = MemoryMonitor()
    with pytest.raises(BatchMemoryError):
        _trainer(tmp_path, monitor).fit(Model(recover))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["memory.png", "oom-1.txt", "oom-2.txt"]
    assert monitor.summary()["memory/ooms"] == 2
    timeline = monitor.measured.timeline
    assert timeline.marks["oom"].count == 2
    _, rows = timeline.read()
    sizes = rows[:, 1, SERIES.index("batch_size")].tolist()
    assert math.isnan(sizes[0])
    assert sizes[1:] == [1, 4, 4, 4, 4]  # samples of the batch until another callback tells a size


@pytest.mark.parametrize(
    ("module", "broken", "file"),
    [
        (memory_record, "draw_memory", "no memory.png"),
        (post_mortem, "describe_failure", "no post-mortem"),
    ],
)
def test_files_that_cannot_be_written_do_not_hide_the_error(
    module: Any, broken: str, file: str, machine: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, broken, _fail)
    with pytest.raises(torch.OutOfMemoryError):
        _trainer(tmp_path, MemoryMonitor()).fit(Model(_run_out))
    told = [message for message in caplog.messages if "could be written" in message]
    assert told == [f"{file} could be written: OSError: disk full"]


def _fail(*args: Any, **options: Any) -> None:
    raise OSError("disk full")


def test_other_ranks_write_and_warn_of_nothing(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leak(model: LightningModule, step: int) -> None:
        machine.tree = TreeMemory(machine.tree.pss_bytes + 100 * MIB, 0, 1)
        if step == 28:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "is_global_zero", False)
    monitor = MemoryMonitor()
    with pytest.raises(torch.OutOfMemoryError) as caught, caplog.at_level(logging.INFO, "lit_data"):
        _trainer(tmp_path, monitor, max_epochs=7).fit(Model(leak))
    assert list(tmp_path.iterdir()) == []
    assert [record.message for record in caplog.records if record.name.startswith("lit_data")] == []
    assert caught.value.__notes__ == ["MemoryMonitor: out of memory number 1 of this run"]
    assert monitor.summary()["memory/ooms"] == 1


def test_without_a_folder_of_its_own_a_run_writes_nothing_and_says_what_to_do(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_out_twice(model: LightningModule, step: int) -> None:
        announce(model.trainer, Event("oom", "it ran out"))
        _run_out(model, step)

    with pytest.raises(torch.OutOfMemoryError):
        _trainer(tmp_path, MemoryMonitor()).fit(Model(run_out_twice))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("out of memory: path=FOLDER gives a report of what held it;") == 1


def test_a_snapshot_of_cuda_is_recorded_and_written_beside_the_report(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)),
        is_global_zero=True,
        log_dir=None,
        default_root_dir=tmp_path,
        loggers=[],
        callbacks=[monitor := MemoryMonitor(snapshot=True, plot=False, path=tmp_path)],
        lightning_module=BoringModel(),
        optimizers=[],
        global_step=1,
        current_epoch=0,
        state=SimpleNamespace(stage=None),
        save_checkpoint=lambda path: None,
    )
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: "")
    monitor.setup(trainer, BoringModel(), "fit")
    announce(trainer, Event("oom", "it ran out"))
    monitor.on_exception(trainer, BoringModel(), ValueError("end"))
    monitor.teardown(trainer, BoringModel(), "fit")
    assert calls == [{"max_entries": 100_000}, {"enabled": None}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oom-1.pickle", "oom-1.txt"]


def test_peaks_and_counts_go_on_after_a_resume(machine: Any, tmp_path: Path) -> None:
    def tell(model: LightningModule, step: int) -> None:
        if step == 1:
            announce(model.trainer, Event("oom", "x"))

    path, before = tmp_path / "last.ckpt", MemoryMonitor(every_n_steps=3, plot=False)
    machine.tree = TreeMemory(9000, 50, 3)
    trainer = _trainer(tmp_path, before)
    trainer.fit(Model(tell))
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["callbacks"]["MemoryMonitor"]
    assert saved == before.state_dict()
    assert saved["peaks"]["peak_pss_bytes"] == 9000
    machine.tree = TreeMemory(700, 50, 3)
    after, logger = MemoryMonitor(every_n_steps=3, plot=False), Rows(tmp_path)
    _trainer(tmp_path, after, max_epochs=2, logger=logger).fit(Model(), ckpt_path=path)
    assert after.summary()["memory/peak_pss_bytes"] == 9000
    assert after.summary()["memory/ooms"] == 1
    assert after.state_dict()["steps"] == 8
    assert logger.steps == [5]  # the sixth batch
