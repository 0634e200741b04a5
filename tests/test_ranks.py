"""Two ranks (gloo) do together what one process does alone.

As a script this file is what both ranks run: Lightning starts the second one with the same words.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_data.app import predict
from lit_data.app.configuration.compose import compose
from lit_data.callbacks import SampleDigest
from lit_data.core.errors import ConfigError, RankMismatchError
from lit_data.core.grid import PatchGrid
from lit_data.core.rng import uniform
from lit_data.core.types import Array, Batch, FieldSpec, Ints, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.models import CompareNet, SegmentationModule
from lit_data.models.scored import DefectRecall, PixelScores
from lit_data.models.segmentation import whole_masks
from lit_data.models.segmentation.anomaly_metrics import AnomalyMetrics
from lit_data.models.segmentation.whole_masks import WholeMasks
from lit_data.testing import QUIET
from tests.helpers.families import run_family
from tests.outputs import NO_TIMELINES

ROOT = Path(__file__).resolve().parents[1]
# With 17 samples to validate, one rank has a batch more than the other.
LENGTHS = {"train": 21, "val": 17, "test": 21, "predict": 21}
EPOCHS = 2
BATCH = 4
STEPS = 3  # of an epoch with two ranks: 8 + 8 + 5 samples
EVERYTHING = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(LENGTHS["train"]))

LIMIT_S = 240  # of a run that takes 15 s where nothing else does

TOY = [
    "+experiment=stripe",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
    "data.loader.batch_size=4",
    "data.loader.num_workers=0",
    *NO_TIMELINES,
]

pytestmark = pytest.mark.timeout(300)

Seen = list[tuple[int, int]]


class Drawn:
    def __init__(self, length: int) -> None:
        self.length = length
        self.fields = {
            "x": FieldSpec((3,), "float32"),
            "index": FieldSpec((), "int64"),
            "epoch": FieldSpec((), "int64"),
        }

    def __len__(self) -> int:
        return self.length

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["x"][:] = uniform(5, 2, indices, epoch, 3)
        rows["index"][:], rows["epoch"][:] = indices, epoch


class Data(BaseDataModule):
    batch_keys = ("x", "index", "epoch")

    def __init__(self, batch_size: int = BATCH, fewer: int = 0) -> None:
        super().__init__(loader=LoaderOptions(batch_size=batch_size, num_workers=0, seed=3))
        self.fewer = fewer

    def build_dataset(self, stage: Stage) -> Drawn:
        return Drawn(LENGTHS[stage] - self.fewer)

    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        return batch

    def finish_batch(self, batch: Batch, stage: Stage) -> Batch:
        return batch


class Model(LightningModule):
    """Notes what it is given, and where the loader then stands."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
        # DDP sends buffers to the other ranks in each training step.
        self.register_buffer("average", torch.zeros(1))
        self.seen = {"train": [], "val": [], "test": [], "predict": []}
        self.states = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._note("train", batch)
        return self.net(batch["x"]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.states.append(self.trainer.datamodule.state_dict())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("val", batch)
        self.net(batch["x"])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        self._note("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _note(self, stage: str, batch: Batch) -> None:
        self.seen[stage] += list(zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True))


def _trainer(folder: Path, *callbacks: Callback, devices: int) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        max_epochs=EPOCHS,
        strategy="ddp" if devices > 1 else "auto",
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        **QUIET | {"devices": devices, "enable_checkpointing": bool(callbacks)},
    )


def _every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def _score(rank: int, ranks: int) -> dict[str, float]:
    """Metrics of 21 maps, of which this rank sees its share."""
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(21, 1, 32, 32, generator=generator) > 0.998).float()
    scores = (torch.randn(masks.shape, generator=generator) * 2 - 6 + 5 * masks).sigmoid()
    pixels, best, defects = PixelScores(), PixelScores(threshold=None), DefectRecall()
    for metric in (pixels, best, defects):
        metric.update(scores[rank::ranks], masks[rank::ranks])
    anomalies, images = AnomalyMetrics(score_fraction=0.01), torch.arange(21) // 3
    # Patches overlap, and those of an image lie on both ranks.
    positions = torch.stack((torch.arange(21) % 3, torch.zeros(21, dtype=torch.int64)), dim=1)
    masks[images % 2 == 0] = 0
    whole_masks.PIMO_RATES = (1e-2, 1e-1)  # type: ignore[misc]  # of few pixels
    anomalies.whole_masks = WholeMasks(
        PatchGrid([34] * 7, [32] * 7, 32, 1),
        torch.tensor([[34, 32]] * 7),
        lambda image: np.full((34, 32), image % 2, np.uint8),
    )
    anomalies.update(*(values[rank::ranks] for values in (scores, masks, images, positions)))
    found = {**pixels.compute(), "best": best.compute()["dice"], "recall": defects.compute()}
    found |= {f"anomaly_{name}": value for name, value in anomalies.compute().items()}
    return {name: round(float(value), 6) for name, value in found.items()}


def _find_mismatch(trainer: Trainer, data: Data) -> str:
    try:
        trainer.fit(Model(), datamodule=data)
    except RankMismatchError as error:
        return str(error)
    return ""


def _run_all(folder: Path) -> None:
    model, digest = Model(), SampleDigest()
    trainer = _trainer(folder, _every_step(folder / "two"), digest, devices=2)
    trainer.fit(model, datamodule=Data())
    trainer.validate(model, datamodule=Data(), verbose=False)
    trainer.test(model, datamodule=Data(), verbose=False)
    trainer.predict(model, datamodule=Data(), return_predictions=False)
    again, path = Model(), folder / "one" / "step=4.ckpt"
    second = _trainer(folder, devices=2)
    second.fit(again, datamodule=Data(), ckpt_path=path, weights_only=True)
    fewer = _find_mismatch(_trainer(folder, devices=2), Data(fewer=trainer.global_rank))
    longer = _trainer(folder, devices=2)
    longer.fit_loop.max_epochs = EPOCHS + trainer.global_rank
    noted = {
        "seen": model.seen,
        "states": model.states,
        "digest": digest.summary(),
        "again": again.seen["train"],
        "mismatches": [fewer, _find_mismatch(longer, Data())],
        "scores": _score(trainer.global_rank, 2),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(noted))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Runs(NamedTuple):
    """What one process did, and each of two ranks."""

    folder: Path
    one: Model
    digest: dict[str, Any]
    two: list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    one, digest = Model(), SampleDigest()
    _trainer(folder, _every_step(folder / "one"), digest, devices=1).fit(
        one, datamodule=Data(2 * BATCH)
    )
    code, output = _start([sys.executable, "-W", "ignore", str(Path(__file__)), str(folder)], ROOT)
    assert code == 0, output
    two = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return Runs(folder, one, digest.summary(), two)


def _start(words: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command that starts other ranks; none of them outlives its time."""
    return run_family(words, cwd=cwd, limit_s=LIMIT_S, OMP_NUM_THREADS="1")


def _together(runs: Runs, stage: str) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for rank in runs.two for epoch, index in rank["seen"][stage])


@pytest.mark.slow
def test_training_takes_each_sample_once_in_equally_many_steps(runs: Runs) -> None:
    assert _together(runs, "train") == EVERYTHING == Counter(runs.one.seen["train"])
    states = runs.two[0]["states"]
    assert states == runs.two[1]["states"]
    for stands in (states, runs.one.states):
        assert [each["train_loader"]["position"] for each in stands] == [8, 16, 21] * EPOCHS


@pytest.mark.slow
def test_evaluation_takes_each_sample_once(runs: Runs) -> None:
    stages = {"val": EPOCHS + 1, "test": 1, "predict": 1}
    for stage, times in stages.items():
        assert _together(runs, stage) == {(0, index): times for index in range(LENGTHS[stage])}


@pytest.mark.slow
def test_metrics_are_those_of_one_process(runs: Runs) -> None:
    alone = _score(0, 1)
    assert 0 < alone["recall"] < 1
    assert alone["dice"] < alone["best"]
    assert 0 < alone["anomaly_image_auroc"] < 1
    assert [rank["scores"] for rank in runs.two] == [alone, alone]


@pytest.mark.slow
def test_the_digest_is_that_of_one_process(runs: Runs) -> None:
    assert runs.digest["train/samples_hashed"] == EPOCHS * LENGTHS["train"]
    assert [rank["digest"] for rank in runs.two] == [runs.digest] * 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_one_process_goes_on_where_two_ranks_stopped(runs: Runs, tmp_path: Path, step: int) -> None:
    again, digest = Model(), SampleDigest()
    trainer = _trainer(tmp_path, digest, devices=1)
    path = runs.folder / "two" / f"step={step}.ckpt"
    trainer.fit(again, datamodule=Data(), ckpt_path=path, weights_only=True)
    epoch, steps = divmod(step, STEPS)
    trained = runs.one.seen["train"][: epoch * LENGTHS["train"] + [0, 8, 16][steps]]
    assert Counter(trained + again.seen["train"]) == EVERYTHING
    assert digest.summary() == runs.digest


@pytest.mark.slow
def test_two_ranks_go_on_where_one_process_stopped(runs: Runs) -> None:
    again = [(epoch, index) for rank in runs.two for epoch, index in rank["again"]]
    assert Counter(runs.one.seen["train"][: LENGTHS["train"] + 8] + again) == EVERYTHING
    assert {len(rank["again"]) for rank in runs.two} == {7, 6}


@pytest.mark.slow
def test_each_rank_says_what_they_disagree_on(runs: Runs) -> None:
    epochs = f"trainer.max_epochs (rank 0: {EPOCHS}, rank 1: {EPOCHS + 1})"
    cure = "give all of them the same data and options"
    for case, message in enumerate(("samples (rank 0: 21, rank 1: 20)", epochs)):
        said = f"the ranks disagree on {message}: {cure}"
        assert [rank["mismatches"][case] for rank in runs.two] == [said] * 2


def _call(command: str, folder: Path, *words: str) -> tuple[int, str]:
    places = [f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"]
    lit_data = [sys.executable, "-W", "ignore", "-m", "lit_data"]
    return _start([*lit_data, command, *TOY, *places, *words], folder)


MEASURED = re.compile(r"(seconds|samples_per_s|data_wait_fraction|peak_rss_bytes)$|memory/|batch/")


def _settled(summary: dict[str, Any]) -> dict[str, Any]:
    """What does not change from run to run; in training also the number of samples alone."""
    kept = {key: value for key, value in summary.items() if not MEASURED.match(key)}
    return {key: kept[key] for key in kept if not key.startswith("train/") or "samples" in key}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_gives_with_two_ranks_what_it_gives_with_one(tmp_path: Path) -> None:
    found = {}
    ranked, alone = ("ddp_cpu", 4, ("fit", "test", "predict")), ("cpu", 8, ("fit", "test"))
    for name, batch_size, commands in (ranked, alone):
        for command in commands:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            words = (f"trainer={name}", f"data.loader.batch_size={batch_size}")
            code, output = _call(command, folder, *words, "callbacks.amp.precision=fp32")
            assert code == 0, output
            said = re.findall("^(.* loader|.* has no masks):", output, re.MULTILINE)
            assert said.count("val has no masks") == (command == "fit")
            assert sorted(said) == sorted(set(said))  # by one rank alone
            assert output.count("summary.json") == 1
            (path,) = (folder / "runs" / command).rglob("summary.json")
            found.setdefault(command, []).append(json.loads(path.read_text()))
    for command in ("fit", "test"):
        two, one = (_settled(summary) for summary in found[command])
        assert two == pytest.approx(one, abs=1e-4), command
    assert found["fit"][0]["samples_sha256"] == found["fit"][1]["samples_sha256"]
    assert found["fit"][0]["train/samples_hashed"] == 16
    (fitted,) = (tmp_path / "ddp_cpu/runs/fit").rglob("summary.json")
    for name in ("samples.png", "predictions.png", "checkpoints/best.ckpt", "csv/metrics.csv"):
        assert (fitted.parent / name).is_file()
    assert found["predict"][0]["predict/images"] == 6
    (maps,) = (tmp_path / "ddp_cpu/runs/predict").rglob("maps")
    assert len(list(maps.rglob("*.png"))) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer=cpu"], "torchrun started 2 processes, but this trainer predicts in one"),
        (["predict.part=0/2"], "predict.part=0/2 runs in one process, but 2 were started"),
        (["predict.finish=true"], "predict.finish=true runs in one process, but 2 were started"),
    ],
)
def test_predict_refuses_processes_that_would_all_do_the_same(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    checkpoint = tmp_path / "model.ckpt"
    torch.save({"state_dict": SegmentationModule(CompareNet()).state_dict()}, checkpoint)
    words = [*words, f"predict.folder={tmp_path}/results", f"ckpt={checkpoint}"]
    cfg = compose("predict", [*TOY, *words, f"paths.run={tmp_path}"])
    with pytest.raises(ConfigError, match=message):
        predict.run(cfg)


if __name__ == "__main__":
    _run_all(Path(sys.argv[1]))
