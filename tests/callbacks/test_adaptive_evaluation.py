from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassRecall,
)

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import BatchMemoryError
from lit_data.testing import QUIET
from tests.callbacks.test_adaptive_twins import assert_same
from tests.helpers.limited_memory import FaultPlan, Faults, Point, install
from tests.helpers.stock_modules import STOCK

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets"),  # of one piece
    pytest.mark.filterwarnings("ignore:predict returned None"),
]

SAMPLES = 19
BATCH = 8


class Judge(LightningModule):
    """Judges samples one by one, in whole numbers, so that sums do not depend on their order."""

    def __init__(self, predict: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.predict = predict
        self.auroc = MulticlassAUROC(3)
        rates = {"accuracy": MulticlassAccuracy(3), "recall": MulticlassRecall(3)}
        self.scores = MetricCollection(rates | {"table": MulticlassConfusionMatrix(3)})
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(-6, 6).view(3, 4))
            self.layer.bias.copy_(torch.arange(3))
        self.tables = []
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        logits, labels = self(batch["image"]), batch["label"]
        self.scores.update(logits, labels)
        self.auroc(logits.softmax(1), labels)
        self.log("error", (logits.argmax(1) != labels).double().mean())
        self.log("weighted", logits.double().mean(), batch_size=len(labels))
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("auroc", self.auroc)
        return {"logits": logits, "mean": logits.double().mean()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self.judge(batch)

    def test_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.judge(batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.calls += 1
        return self.predict(batch, self(batch["image"]))

    def on_validation_epoch_end(self) -> None:

        scores = self.scores.compute()
        self.tables.append(scores.pop("table"))
        self.log_dict(scores)

    on_test_epoch_end = on_validation_epoch_end


class Outputs(Callback):
    """Keeps what each step returned."""

    def __init__(self) -> None:
        self.found = []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any
    ) -> None:
        self.found.append(outputs)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def make_loader(batch_size: int = BATCH) -> DataLoader[Any]:
    images = torch.randint(-3, 4, (SAMPLES, 4), generator=torch.Generator().manual_seed(2)).float()
    return DataLoader(
        [{"image": image, "label": torch.tensor(n % 3)} for n, image in enumerate(images)],
        batch_size,
    )


def run(
    stage: str,
    module: LightningModule,
    *callbacks: Callback,
    plan: FaultPlan | None = None,
    **options: Any,
) -> tuple[Any, Trainer, Faults]:
    faults = install(module, plan or FaultPlan("forward_start", lambda n, step, micro: False))
    trainer = Trainer(**QUIET, callbacks=list(callbacks))
    return getattr(trainer, stage)(module, make_loader(), **options), trainer, faults


def limit(size: int, stage: str, point: Point = "forward_middle") -> FaultPlan:
    return FaultPlan(point, lambda n, step, micro: n > size, stages=(stage,), inner=inner(point))


def inner(point: Point) -> str | None:
    return "layer" if point == "forward_middle" else None


def adaptive(size: int | None = None) -> AdaptiveBatchSize:
    return AdaptiveBatchSize(initial_size=size, grow_after=None)


@pytest.mark.parametrize(
    ("stage", "size", "point"),
    [
        ("validate", 1, "transfer"),
        ("test", 2, "augment"),
        ("validate", 3, "forward_start"),
        ("test", 5, "forward_middle"),
        ("validate", 5, "forward_middle"),
    ],
)
def test_what_is_measured_is_what_the_whole_batch_would_show(
    stage: str, size: int, point: Point
) -> None:
    kept, whole = Outputs(), Outputs()
    failing, plain = Judge(), Judge()
    (pieces,), _, faults = run(stage, failing, kept, adaptive(), plan=limit(size, stage, point))
    (expected,), _, _ = run(stage, plain, whole)
    assert faults.refused
    assert expected.keys() == {"error", "weighted", "largest", "auroc", "accuracy", "recall"}
    assert pieces == pytest.approx(expected, rel=1e-12)
    assert torch.equal(failing.tables[0], plain.tables[0])
    assert int(plain.tables[0].sum()) == SAMPLES
    for one, other in zip(kept.found, whole.found, strict=True):
        assert torch.equal(one["logits"], other["logits"])
        assert_close(one["mean"], other["mean"], rtol=1e-12, atol=1e-15)


def _as_tensor(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    return logits


def _as_dict(batch: dict[str, Tensor], logits: Tensor) -> dict[str, Any]:
    return {"logits": logits, "names": [f"{value:.0f}" for value in batch["image"][:, 0]]}


def _as_tuple(batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits, logits.argmax(1)


def _as_names(batch: dict[str, Tensor], logits: Tensor) -> list[str]:
    return [f"{row.tolist()}" for row in logits]


def _as_nothing(batch: dict[str, Tensor], logits: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("predict", "size"),
    [(_as_tensor, 1), (_as_dict, 3), (_as_tuple, 5), (_as_names, 3), (_as_nothing, 5)],
)
def test_predictions_come_in_order(predict: Callable[..., Any], size: int) -> None:
    found, _, faults = run("predict", Judge(predict), adaptive(), plan=limit(size, "predict"))
    expected, _, _ = run("predict", Judge(predict))
    assert faults.refused
    assert len(found) == len(expected) == 3
    assert_same(found, expected)


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder
        self.all = None

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *_: Any
    ) -> None:
        assert len(prediction) == len(batch_indices) == len(batch["image"])
        for index, row in zip(batch_indices, prediction, strict=True):
            torch.save(row.clone(), self.folder / f"{index}.pt")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        self.all = batch_indices


def test_a_writer_gets_the_right_indices(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    run("predict", Judge(_as_tensor), writer, adaptive(), plan=limit(3, "predict"))
    expected = torch.cat(run("predict", Judge(_as_tensor))[0])
    assert writer.all == [[list(range(8)), list(range(8, 16)), [16, 17, 18]]]
    assert len(list(tmp_path.iterdir())) == SAMPLES
    for index, row in enumerate(expected):
        assert torch.equal(torch.load(tmp_path / f"{index}.pt"), row)


@dataclass
class Judged:
    """A batch that a step writes its results into, as those of anomalib."""

    image: Tensor
    score: Tensor | None = None


class Writes(Judge):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            batch["score"] = self(batch["image"])
        else:
            batch.score = self(batch.image)
        return batch

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs is batch


@pytest.mark.parametrize("kind", [Judged, lambda image: {"image": image}])
def test_hooks_find_what_a_step_has_written_into_its_batch(kind: Callable[..., Any]) -> None:
    images = DataLoader(
        torch.rand(SAMPLES, 4), BATCH, collate_fn=lambda row: kind(torch.stack(row))
    )
    answers = []
    for callbacks in ([], [AdaptiveBatchSize(initial_size=3)]):
        predicted = Trainer(**QUIET, callbacks=callbacks).predict(Writes(), images) or []
        answers.append([one if isinstance(one, dict) else vars(one) for one in predicted])
    assert_close(*answers)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_one_sample_that_does_not_fit(stage: str) -> None:
    text = r"batch 0: one sample of image 4 float32, label 1 int64 does not fit into memory"
    callback = adaptive()
    with pytest.raises(BatchMemoryError, match=text):
        run(stage, Judge(_as_tensor), callback, plan=limit(0, stage))
    assert callback.state_dict()["ooms"] == 4


def test_each_stage_has_a_size_of_its_own() -> None:
    stock, callback = STOCK["classifier"], adaptive()
    module = stock.build()
    faults = install(module, limit(4, "validate", "forward_start"))
    trainer = Trainer(**(QUIET | {"max_epochs": 2}), callbacks=[callback])
    trainer.fit(module, stock.loader(), stock.loader(12))
    assert faults.refused == [8]
    assert faults.entered == [8, 4, 4, 4, 4, 4, 4]
    searches = callback.state_dict()["searches"].items()
    sizes = {key.split(":")[0]: search["fails"] for key, search in searches}
    assert sizes == {"sanity_check": None, "train": None, "validate": 8}


def test_validation_within_training_changes_nothing_in_it() -> None:
    def train(*callbacks: Callback, size: int = 99) -> tuple[LightningModule, Trainer]:
        torch.manual_seed(0)
        stock = STOCK["classifier"]
        module = stock.build()
        plan = FaultPlan("forward_middle", lambda n, step, micro: n > size, stages=("validate",))
        install(module, plan)
        options = QUIET | {"max_epochs": 2, "val_check_interval": 1}
        trainer = Trainer(**options, callbacks=list(callbacks))
        trainer.fit(module, stock.loader(), stock.loader(12))
        return module, trainer

    first, trainer = train(adaptive(), size=3)
    second, twin = train()
    assert_same(first.state_dict(), second.state_dict())
    shown, expected = trainer.callback_metrics, twin.callback_metrics
    for key in ("val/loss", "val/accuracy"):
        assert_close(shown[key], expected[key], rtol=1e-6, atol=0)
    assert torch.equal(shown["train/loss_epoch"], expected["train/loss_epoch"])


def test_several_loaders() -> None:
    class Twice(Judge):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            logits = self(batch["image"])
            wrong = (logits.argmax(1) != batch["label"]).double()
            self.log("error", wrong.mean(), batch_size=len(logits))

        on_validation_epoch_end = LightningModule.on_validation_epoch_end

    def measure(module: LightningModule, *callbacks: Callback) -> Any:
        trainer = Trainer(**QUIET, callbacks=list(callbacks))
        return trainer.validate(module, [make_loader(), make_loader(5)])

    failing = Twice()
    install(failing, limit(3, "validate"))
    for one, other in zip(measure(failing, adaptive()), measure(Twice()), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
        assert len(one) == 1
