"""What a person sees: short names beside the bar, lines above it, and one table at the end."""

import csv
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lit_data.app.terminal import (
    Forecast,
    LogInterval,
    RunBar,
    describe_duration,
    print_end,
    quieten,
)
from lit_data.testing import QUIET


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(("every", "rows"), [(10, [2, 5]), (2, [1, 3, 5]), (0, [])])
def test_a_small_set_is_logged_once_an_epoch(tmp_path: Path, every: int, rows: list[int]) -> None:
    class Model(BoringModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss["loss"])
            return loss

    logger = CSVLogger(tmp_path)
    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 0}
    settings = QUIET | limits | {"logger": logger, "log_every_n_steps": every}
    Trainer(**settings, callbacks=[LogInterval()]).fit(Model())
    path = Path(logger.log_dir) / "metrics.csv"
    written = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    assert [int(row["step"]) for row in written if row.get("loss")] == rows


@pytest.fixture
def handlers() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    root.handlers[:] = before


@pytest.mark.usefixtures("handlers")
def test_lines_go_where_a_live_bar_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    quieten()
    live = io.StringIO()
    monkeypatch.setattr(sys, "stdout", live)  # as rich does while a bar is shown
    logging.getLogger("lit_data").warning("a line")
    logging.getLogger("lightning.pytorch").warning("💡 Tip: install this")
    assert live.getvalue() == "a line\n"


def test_the_end_is_one_table_and_repeats_no_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("")
    print_end(
        {
            "seconds": 61.2, "samples_per_s": 170.3, "train/limited_by": "the model takes 83% of the time",
            "val/dice": 0.84, "test/dice": 0.85, "test/dice_baseline": 0.28, "valid_iou": 0.5, "loss": 0.7,
            "test/loss": 0.8, "memory/ooms": 0, "samples_sha256": "ab",
        },
        tmp_path,
    )  # fmt: skip
    out = capsys.readouterr().out
    lines = [line.split("│")[1:-1] for line in out.splitlines() if line.count("│") > 2]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert rows == [
        ["dice", "0.84", "0.85", "0.28"],
        ["iou", "0.5", "", ""],
        ["loss", "0.7", "0.8", ""],
    ]
    assert "time: 61 s, 170 samples/s in training\nspeed: the model takes 83% of the time\n" in out
    assert out.endswith(f"report: {tmp_path / 'report.html'}\n")
    assert "chance" not in out


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 4}, "about 64 s per epoch, 4 min in total"),
        ({"max_epochs": 1}, "about 64 s in total"),
        ({"max_epochs": 4, "max_steps": 4}, "about 43 s in total"),
        ({"max_epochs": 4, "max_time": {"seconds": 50}}, "about 54 s in total"),
        ({"max_epochs": -1, "max_time": {"hours": 2}}, "about 64 s per epoch, 2.0 h in total"),
        ({"max_epochs": 4, "limit_val_batches": 0}, "about 60 s per epoch, 4 min in total"),
    ],
)
def test_the_time_of_a_training_heeds_every_limit(
    options: dict[str, object], expected: str
) -> None:
    texts = []

    class Ask(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
            texts.append(describe_duration(trainer, 10.0, 1.0))
            trainer.should_stop = True

    stopping = EarlyStopping("x", check_on_train_epoch_end=False, strict=False)
    limits = {"limit_train_batches": 6, "limit_val_batches": 1}
    Trainer(**QUIET | limits | options, callbacks=[Ask()]).fit(BoringModel())
    assert texts[0] == expected
    Trainer(**QUIET | limits | options, callbacks=[Ask(), stopping]).fit(BoringModel())
    assert texts[-1] == f"{expected}, less with early stopping,"


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_time_is_said_once_and_a_short_training_has_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = QUIET | {"max_epochs": 3, "limit_train_batches": 6, "limit_val_batches": 1}
    with caplog.at_level("INFO"):
        Trainer(**limits, callbacks=[Forecast()]).fit(BoringModel())
        assert "training takes" not in caplog.text
        clock = iter(range(0, 10_000, 60))
        monkeypatch.setattr("lit_data.app.terminal.time.monotonic", lambda: float(next(clock)))
        Trainer(**limits, callbacks=[Forecast()]).fit(BoringModel())
    (line,) = (message for message in caplog.messages if message.startswith("training takes"))
    assert line == "training takes about 6 min per epoch, 19 min in total on this machine"


def test_scores_beside_the_bar_fit_into_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(BoringModel):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for name in ("average_precision", "dice", "defect_recall", "image_auroc", "f1"):
                self.log(f"val/{name}", 0.5, prog_bar=True)

    rows = {}
    for columns in ("80", "100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        bar = RunBar()
        options = QUIET | {"enable_progress_bar": True, "max_epochs": 1, "limit_train_batches": 1}
        trainer = Trainer(**options, limit_val_batches=1, callbacks=[bar])
        trainer.fit(Model())
        rows[columns] = list(bar.get_metrics(trainer, trainer.lightning_module))
    assert rows["80"] == ["ap"]
    assert rows["100"] == ["ap", "dice"]
    assert len(rows["200"]) == 5
