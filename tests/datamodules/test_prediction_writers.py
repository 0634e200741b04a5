"""Lightning's writers of predictions get the samples of each batch."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

from lit_data.loading import MicroBatchLoader

pytestmark = pytest.mark.usefixtures("few_pictures")

SAMPLES = [torch.tensor([float(number)]) for number in range(10)]


def _predict(package: Any, loaders: Any, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Return what a writer gets after each batch and at the end, and the predictions."""
    batches: list[Any] = []
    epochs: list[Any] = []

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch.flatten().long().tolist()

    class Writer(package.callbacks.BasePredictionWriter):  # type: ignore[misc, name-defined]
        def write_on_batch_end(self, trainer: Any, module: Any, *values: Any) -> None:
            batches.append(values[:2])

        def write_on_epoch_end(self, trainer: Any, module: Any, *values: Any) -> None:
            epochs.append(values)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = package.Trainer(
        accelerator="cpu", callbacks=[Writer("batch_and_epoch")], **quiet, **options
    )
    answer = trainer.predict(Module(), loaders)
    return batches, epochs, answer


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_writers_get_the_indices_of_each_batch_of_each_loader(package: Any) -> None:
    loaders = [
        MicroBatchLoader(SAMPLES, batch_size=4, num_workers=0),
        MicroBatchLoader(SAMPLES, batch_size=3, num_workers=0, shuffle=True),
    ]
    batches, epochs, answer = _predict(package, loaders, devices=1)
    assert len(batches) == 7
    for predictions, indices in batches:
        assert predictions == indices
    [(predictions, indices)] = epochs
    assert predictions == indices == answer


def _be_rank(rank: int, store: str, answers: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    loader = MicroBatchLoader(SAMPLES, batch_size=4, num_workers=0, stage="predict")
    batches, _, _ = _predict(lightning.pytorch, loader, devices=1)
    answers.put(batches)
    torch.distributed.destroy_process_group()


def test_a_rank_gets_those_of_its_part(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    start: Callable[[int], Any] = lambda rank: context.Process(  # noqa: E731
        target=_be_rank, args=(rank, str(tmp_path / "store"), answers)
    )
    processes = [start(rank) for rank in range(2)]
    for process in processes:
        process.start()
    batches = answers.get(timeout=60) + answers.get(timeout=60)
    for process in processes:
        process.join(60)
    assert all(predictions == indices for predictions, indices in batches)
    assert sorted(index for _, indices in batches for index in indices) == list(range(10))
