import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.callbacks import SaveOnSignal
from lit_data.testing import QUIET

pytestmark = pytest.mark.timeout(60)

STEPS, VALIDATIONS = 4, 3
Event = tuple[str, int]
Callbacks = Sequence[Callback]


class Model(LightningModule):
    """Notes what happens to it, and does something to itself at one event."""

    def __init__(self, at: Event | None = None, do: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.at, self.do = at, do
        self.events = []

    def note(self, *event: Any) -> None:
        self.events.append(event)
        if event == self.at:
            self.do()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("train", self.global_step)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.note("validate", batch_idx)
        self.log("loss", self.layer(batch).mean())

    def on_train_epoch_end(self) -> None:
        self.note("epoch", self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


def fit(model: Model, path: Path, ckpt: Path | None = None, more: Callbacks = ()) -> Trainer:
    torch.manual_seed(0)
    model.layer.reset_parameters()
    data = torch.arange(4.0 * STEPS).view(STEPS, 1, 4)
    saves = any(isinstance(callback, Checkpoint) for callback in more)
    settings = QUIET | {"max_epochs": 2, "enable_checkpointing": saves}
    trainer = Trainer(**settings, callbacks=[SaveOnSignal(path), *more])
    loaders = DataLoader(data, None), DataLoader(data[:VALIDATIONS], None)
    trainer.fit(model, *loaders, ckpt_path=ckpt, weights_only=True)
    return trainer


def send(*numbers: int) -> Callable[[], None]:
    return lambda: [os.kill(os.getpid(), number) for number in numbers] and None


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    handled = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in handled]
    yield
    after = [signal.getsignal(number) for number in handled]
    for number, handler in zip(handled, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "interrupted.ckpt"


# When a signal comes, what happens last before the end, and the step of the checkpoint.
@pytest.mark.parametrize(
    ("number", "code", "at", "last", "step"),
    [
        (signal.SIGINT, 130, ("train", 0), ("train", 0), 1),
        (signal.SIGTERM, 143, ("train", 2), ("train", 2), 3),
        (signal.SIGINT, 130, ("train", 3), ("epoch", 0), 4),
        (signal.SIGTERM, 143, ("validate", 0), ("epoch", 0), 4),
        (signal.SIGINT, 130, ("validate", 2), ("epoch", 0), 4),
        (signal.SIGTERM, 143, ("epoch", 0), ("train", 4), 5),
        (signal.SIGINT, 130, ("train", 7), ("epoch", 1), 8),
    ],
)
def test_the_step_is_finished_and_the_run_goes_on_from_there(
    path: Path, number: int, code: int, at: Event, last: Event, step: int
) -> None:
    first, second, whole = Model(at, send(number)), Model(), Model()
    with pytest.raises(SystemExit) as stopped:
        fit(first, path)
    assert stopped.value.code == code
    assert first.events[-1] == last
    assert list(path.parent.iterdir()) == [path]
    assert torch.load(path, weights_only=True)["global_step"] == step
    assert fit(second, path, ckpt=path).global_step == 2 * STEPS
    fit(whole, path)
    assert first.events + second.events == whole.events
    if step % STEPS == 0:  # within an epoch only a loader with a state goes on where it was
        assert torch.equal(second.layer.weight, whole.layer.weight)


def test_the_validation_counts_for_other_checkpoints(path: Path, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="loss")
    with pytest.raises(SystemExit):
        fit(Model(("validate", 0), send(signal.SIGINT)), path, more=[best])
    assert Path(best.best_model_path).is_file()


def test_a_signal_during_validation_saves_at_once(path: Path) -> None:
    class Ended(Callback):
        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if path.exists():
                os._exit(torch.load(path, weights_only=True)["global_step"])

    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            fit(Model(("validate", 1), send(signal.SIGTERM)), path, more=[Ended()])
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == STEPS


def test_a_second_ctrl_c_stops_at_once(path: Path) -> None:
    model = Model(("train", 2), send(signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit) as stopped:
        fit(model, path)
    assert isinstance(stopped.value.__context__, KeyboardInterrupt)
    assert model.global_step == 2
    assert not path.parent.exists()


def test_a_second_ctrl_c_while_saving_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer.save_checkpoint

    def save_and_interrupt(trainer: Trainer, target: Path, **options: bool) -> None:
        save(trainer, target, **options)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "save_checkpoint", save_and_interrupt)
    with pytest.raises(SystemExit) as stopped:
        fit(Model(("train", 2), send(signal.SIGINT)), path)
    assert stopped.value.code == 130
    assert list(path.parent.iterdir()) == []


def test_more_sigterms_change_nothing_and_an_earlier_handler_is_called_once(path: Path) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with pytest.raises(SystemExit) as stopped:
            fit(Model(("train", 2), send(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)), path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143
    assert called == [signal.SIGTERM]
    assert torch.load(path, weights_only=True)["global_step"] == 3


def test_an_ignored_signal_stays_ignored(path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert fit(Model(("train", 2), send(signal.SIGINT)), path).global_step == 2 * STEPS
    finally:
        signal.signal(signal.SIGINT, before)
    assert not path.exists()


@pytest.mark.parametrize("fault", ["says nothing", "raises"])
def test_a_checkpoint_that_is_not_there_is_told(
    path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text("of an earlier run")
    if fault == "says nothing":  # as Lightning does in a read-only folder
        monkeypatch.setattr(Trainer, "save_checkpoint", lambda trainer, target, **options: None)
        reason = f"no checkpoint was written to {path.parent}; check its permissions and the disk"
    else:
        (path.parent / ".interrupted.ckpt.part").mkdir()
        reason = ""
    with pytest.raises(SystemExit) as stopped:
        fit(Model(("train", 2), send(signal.SIGINT)), path)
    assert stopped.value.code == 130
    assert f"SIGINT: stopped after step 3; {path} could not be written: {reason}" in caplog.text
    assert path.read_text() == "of an earlier run"


def test_an_error_saves_nothing(path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(Model(("train", 2), lambda: 1 / 0), path)
    assert not path.exists()


def test_a_thread_trains_without_handlers(path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []
    model = Model(("train", 2), lambda: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=fit, args=(model, path))
    thread.start()
    thread.join(60)
    assert seen == [before]
