"""Batches of runs are made again, and runs are compared."""

import csv
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.callbacks.step_record import DIGEST, DIGEST_FILE, ORDER_FILE, STEP, STEP_FILE
from lit_data.cli import main
from lit_data.commands.replay import Record, opening
from lit_data.commands.spike import compare_with_neighbours, find_spikes
from lit_data.commands.why import find_other_batch, find_other_loss, find_other_sample
from lit_data.errors import DataError
from lit_data.lightning_internals import count_batches
from lit_data.modules import SegmentationModule
from lit_data.testing import write_images
from tests.families import run_family
from tests.outputs import NO_TIMELINES

ROOT = Path(__file__).resolve().parents[2]
Saved = dict[int, dict[str, torch.Tensor]]

QUICK = (
    *("trainer=cpu", "trainer.enable_progress_bar=false", "logger=none"),
    *("data.loader.num_workers=0", *NO_TIMELINES),
)


def _record(losses: list[float], **columns: Any) -> Record:
    steps = np.zeros(len(losses), STEP)
    steps["samples"], steps["ranks"], steps["loss"] = 2, 1, losses
    steps["position"] = 2 * np.arange(len(losses))
    for name, values in columns.items():
        steps[name] = values
    digests = np.zeros(2 * len(losses), DIGEST)
    digests["step"] = np.arange(2 * len(losses)) // 2
    digests["digest"] = np.arange(2 * len(losses))
    return Record({}, steps, digests)


def test_spikes_are_the_highest_losses_and_what_is_no_number_comes_first() -> None:
    record = _record([1.0, 3.0, np.nan, 2.0, 3.0, np.inf, 9.0], samples=[2, 2, 2, 2, 2, 2, 0])
    assert find_spikes(record, 4) == [2, 5, 1, 4]
    assert find_spikes(record, 10) == [2, 5, 1, 4, 3, 0]
    assert compare_with_neighbours(record, 1) == 1.2  # of 1, 3, 2 and 3
    with pytest.raises(DataError, match="no step of the run has a loss"):
        find_spikes(_record([np.nan, np.nan]), 1)
    with pytest.raises(DataError, match="the run has no step: it ended before its first batch"):
        find_spikes(_record([]), 1)


def test_the_first_step_and_sample_that_differ_are_named() -> None:
    first = _record([1.0, np.nan, 3.0])
    assert find_other_batch(first, first) is None
    assert find_other_sample(first, first) is None
    assert find_other_loss(first, first) is None
    assert find_other_loss(first, _record([1.0, np.nan, 2.5, 4.0])) == 2
    assert find_other_batch(first, _record([1.0, np.nan, 3.0], position=[0, 3, 6])) == 1
    # Steps that one of the two has not recorded are not compared.
    assert find_other_loss(first, _record([7.0, 7.0, 3.0], samples=[0, 0, 2])) is None
    other = _record([1.0, np.nan, 3.0])
    other.digests["digest"][3] = 99
    assert find_other_sample(first, other) == (1, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay"], "replay needs the folder of a run"),
        (["replay", "x"], "replay needs step=N"),
        (["replay", "x", "step=-1"], "step=-1 is no number"),
        (["spike", "x", "count=0"], "count=0 is not usable: choose a whole number from 1 to 1000"),
        (["spike", "s3://bucket/run"], "is at an address: give out=FOLDER"),
        (["why", "x"], "why needs the folders of two runs"),
    ],
)
def test_words_are_checked(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def _put_record(folder: Path) -> None:
    (folder / ORDER_FILE).write_text("{}")
    (folder / STEP_FILE).write_bytes(_record([1.0]).steps.tobytes() + b"cut")
    (folder / DIGEST_FILE).write_bytes(b"")


def test_folders_of_strangers_are_read_within_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spike", str(tmp_path)]) == 3
    assert "has no steps.json: it is no folder of a fit" in capsys.readouterr().err
    _put_record(tmp_path)
    assert len(Record.read(tmp_path).steps) == 1
    assert main(["replay", str(tmp_path), "step=0"]) == 3
    assert "is no run and no sweep of lit_data" in capsys.readouterr().err
    (tmp_path / STEP_FILE).unlink()
    os.mkfifo(tmp_path / STEP_FILE)
    with pytest.raises(DataError, match="not a regular file"):
        Record.read(tmp_path)
    (tmp_path / ORDER_FILE).write_text("{")
    with pytest.raises(DataError, match="does not say which samples it trained"):
        Record.read(tmp_path)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Saved:
    """The batches of a run as the model gets them, by their steps; 4 samples fit at once."""
    batches = {}
    training_step = SegmentationModule.training_step

    def limited(self: SegmentationModule, batch: Any, batch_idx: int) -> Any:
        step = count_batches(self.trainer)
        if step == 170 and 171 not in batches and len(batches) == 170:
            os.kill(os.getpid(), signal.SIGINT)
        if len(batch["image"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        before = batches.setdefault(step, {key: value[:0] for key, value in batch.items()})
        batches[step] = {key: torch.cat((before[key], value)) for key, value in batch.items()}
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(SegmentationModule, "training_step", limited)
    return batches


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_batches_of_a_run_that_was_split_and_resumed_are_made_again(
    tmp_path: Path,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *("fit", "+experiment=stripe", *QUICK, "hydra.run.dir=run", "resume=auto"),
        *("data.patch_px=32", "data.samples.count=12", "data.loader.batch_size=6"),
        *("trainer.max_steps=300", "trainer.max_epochs=-1", "paths.cache=cache"),
        "callbacks.digest.max_samples=1000",
    ]
    assert main(words) == 130
    assert len(Record.read(tmp_path / "run").steps) == 171
    assert main(words) == 0
    assert sorted(saved) == list(range(300))
    record = Record.read(tmp_path / "run")
    assert len(record.steps) == 300
    assert np.isfinite(record.steps["loss"]).all()
    rng = np.random.default_rng(0)
    with opening("run", tmp_path / "run") as replay:
        for step in rng.integers(0, 300, 100).tolist():
            replayed = replay.make(step)
            row = int(rng.integers(len(replayed.names)))
            assert replayed.batch.keys() == saved[step].keys()
            for key, tensor in replayed.batch.items():
                assert tensor[row].numpy().tobytes() == saved[step][key][row].numpy().tobytes()
            assert len(replayed.names) == len(saved[step]["index"])
        assert replay.make(0).differing == []  # its batch was whole before memory ran out
    capsys.readouterr()
    assert main(["replay", "run", "step=171"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == f"{tmp_path}/run/replay/step-000171.png"
    arrays = np.load("run/replay/step-000171.npz")
    assert np.array_equal(arrays["image"], saved[171]["image"].numpy())
    assert arrays["before.image"].shape == arrays["image"].shape
    assert main(["replay", "run", "step=300"]) == 2
    assert "step=300 is not recorded: the run has steps 0 to 299" in capsys.readouterr().err
    assert main(["replay", "run", "step=3", "data.samples.count=6"]) == 3
    assert "the run trained an order of samples with length=" in capsys.readouterr().err
    assert main(["spike", "run", "count=2"]) == 0
    with Path("run/spike/spike.csv").open(newline="") as file:
        spikes = [int(line["step"]) for line in csv.DictReader(file)]
    assert spikes == np.argsort(-record.steps["loss"], kind="stable")[:2].tolist()


SAVER = """
import os
import signal
from pathlib import Path

import lightning as L
import torch

from lit_data.lightning_internals import count_batches


class Saver(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        step = count_batches(trainer)
        torch.save(dict(batch), f"{step}-{trainer.global_rank}.pt")
        if step == 3 and trainer.is_global_zero and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [("ddp_cpu", "cpu"), ("cpu", "ddp_cpu")])
def test_batches_of_each_rank_are_made_again_after_a_resume_with_other_ranks(
    tmp_path: Path, trainers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saver.py").write_text(SAVER)
    words = [
        *("fit", "--package", "saver", "+experiment=stripe", *QUICK, "hydra.run.dir=run"),
        *("data.patch_px=32", "data.samples.count=6", "data.loader.global_batch_size=6"),
        *("+callbacks.saver._target_=saver.Saver", "report=false", "resume=auto"),
        *("trainer.max_epochs=-1", "trainer.max_steps=9", "trainer.check_val_every_n_epoch=100"),
    ]
    ranks = {"cpu": 1, "ddp_cpu": 2}
    for trainer, expected in zip(trainers, (143, 0), strict=True):
        code, output = run_family(
            [sys.executable, "-W", "ignore", "-m", "lit_data", *words, f"trainer={trainer}"],
            cwd=tmp_path,
            limit_s=120,
            OMP_NUM_THREADS="1",
            LIT_DATA_CACHE=str(tmp_path / "cache"),
            PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))),
        )
        assert code == expected, output
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    record = Record.read(tmp_path / "run")
    first, second = (ranks[trainer] for trainer in trainers)
    assert record.steps["ranks"].tolist() == [first] * 4 + [second] * 5
    with opening("run", tmp_path / "run", packages=["saver"]) as replay:
        for step, rank_count in enumerate(record.steps["ranks"].tolist()):
            for rank in range(rank_count):
                replayed = replay.make(step, rank)
                trained = torch.load(f"{step}-{rank}.pt", weights_only=True)
                assert replayed.batch.keys() == trained.keys()
                for key, tensor in replayed.batch.items():
                    assert tensor.numpy().tobytes() == trained[key].numpy().tobytes()
                assert replayed.differing == ([] if rank == 0 else None)
    assert len(list(tmp_path.glob("*.pt"))) == record.steps["ranks"].sum()


@pytest.mark.slow
def test_a_changed_pixel_is_found_with_its_file_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images/good", 40)
    write_images(tmp_path / "images/bad", 12, (60, 60))
    words = [
        *("fit", "+experiment=classification", *QUICK, "data.root=images", "trainer.max_epochs=2"),
        *("data.loader.batch_size=4", "data.size_px=32", "paths.cache=cache", "model=classifier"),
    ]
    assert main([*words, "hydra.run.dir=first"]) == 0
    with opening("first", tmp_path / "first") as replay:
        step, row, name = 6, 2, replay.make(6).names[2]
    path = tmp_path / "images" / name.partition(", patch at")[0]
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    image[30, 30] = 255 - image[30, 30]
    shutil.copytree("images", "original")
    cv2.imwrite(str(path), image)
    assert main([*words, "hydra.run.dir=second"]) == 0
    capsys.readouterr()
    assert main(["why", "first", "second"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"sample: the first that differs is row {row} of step {step}: {name}" in lines
    assert [line for line in lines if line.startswith("loss: from step ")]
    assert not [line for line in lines if line.startswith(("option ", "split ", "order ", "batch"))]
    assert main(["replay", "first", f"step={step}"]) == 0
    assert f"1 of 4 samples differ from those that were trained, the first is {name}" in (
        capsys.readouterr().err
    )
    assert main(["replay", "first", f"step={step}", "data.root=original"]) == 0
    assert "equal to the byte in all 4 samples" in capsys.readouterr().err
    assert main(["why", "first", "first"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "the runs do not differ"
