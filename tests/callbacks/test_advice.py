import logging
import warnings
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lit_data.callbacks.memory import advice
from lit_data.callbacks.memory.advice import (
    Adviser,
    advise_shared_memory,
    count_transport_bytes,
    find_advice,
    find_kept_graphs,
)
from lit_data.loading import LoaderOptions, MicroBatchLoader

GIB = 2**30
DATA = RandomDataset(32, 8)


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "count_cores", lambda ranks: 4 // ranks)


def _load(**options: Any) -> DataLoader[Any]:
    with warnings.catch_warnings(
        action="ignore"
    ):  # torch has an opinion about this machine's cores
        return DataLoader(DATA, **options)


def _trainer(train: Any = None, val: Any = None, device: str = "cpu", world_size: int = 1) -> Any:
    return SimpleNamespace(
        train_dataloader=train,
        val_dataloaders=val,
        world_size=world_size,
        strategy=SimpleNamespace(
            root_device=torch.device(device), batch_to_device=lambda batch: batch
        ),
    )


class Zeroing(BoringModel):
    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=False)


class Inheriting(Zeroing):
    pass


class ManualZeroing(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad( False )  # fmt: skip


class Cautious(BoringModel):
    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=True)


def test_a_usual_run_gets_no_advice() -> None:
    loader = _load(num_workers=4, persistent_workers=True)
    assert find_advice(_trainer(loader, [_load()]), BoringModel()) == []
    assert find_advice(_trainer(), Cautious()) == []


def test_our_own_loader_gets_no_advice() -> None:
    loader = MicroBatchLoader(DATA, LoaderOptions(batch_size=4, num_workers=64))
    trainer = _trainer(loader)
    assert find_advice(trainer, BoringModel()) == []
    assert count_transport_bytes(trainer, torch.ones(1000)) == 0


def test_a_default_device_is_seen() -> None:
    with torch.device("meta"):
        (sentence,) = find_advice(_trainer(), BoringModel())
    assert sentence.startswith(
        "the default device is meta: every tensor that names no device is made there"
    )
    assert "Remove torch.set_default_device or torch.set_default_tensor_type" in sentence


@pytest.mark.parametrize(
    ("loaders", "world_size", "found"),
    [
        (_load(num_workers=5), 1, ["num_workers=5 and this process has 4 cores"]),
        ({"a": [_load(num_workers=9)]}, 1, ["num_workers=9 and this process has 4 cores"]),
        (_load(num_workers=3), 2, ["num_workers=3 and this process has 2 cores"]),
        ([_load(num_workers=6), _load(num_workers=6)], 1, ["num_workers=6 and"]),  # said once
        (_load(num_workers=4), 1, []),
        (SimpleNamespace(num_workers="auto"), 1, []),
        (iter([1]), 1, []),
    ],
)
def test_more_workers_than_cores_are_seen(loaders: Any, world_size: int, found: list[str]) -> None:
    sentences = find_advice(_trainer(None, loaders, world_size=world_size), BoringModel())
    assert len(sentences) == len(found)
    assert all(text in sentence for text, sentence in zip(found, sentences, strict=True))
    assert all(sentence.startswith("a DataLoader has") for sentence in sentences)


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("mps", 1), ("cuda", 0)])
def test_pinning_without_cuda_is_seen(device: str, count: int) -> None:
    sentences = find_advice(_trainer(_load(pin_memory=True), device=device), BoringModel())
    assert len(sentences) == count
    assert all(
        "pin_memory=True and this run is on" in s and "Set pin_memory=False" in s for s in sentences
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [(Zeroing(), "Zeroing"), (Inheriting(), "Zeroing"), (ManualZeroing(), "ManualZeroing")],
)
def test_gradients_set_to_zero_are_seen(model: BoringModel, name: str) -> None:
    (sentence,) = find_advice(_trainer(), model)
    assert sentence.startswith(f"{name} calls zero_grad(set_to_none=False)")
    assert sentence.endswith("call zero_grad() or leave out optimizer_zero_grad")


def test_a_class_without_source_is_passed_over() -> None:
    assert find_advice(_trainer(), type("Nameless", (BoringModel,), {})()) == []


def test_outputs_with_their_graph_are_seen() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    model = BoringModel()
    assert find_kept_graphs(model, {"loss": loss.detach(), "extra": [1, loss.detach()]}) == []
    assert find_kept_graphs(model, None) == []
    (sentence,) = find_kept_graphs(model, {"loss": loss.detach(), "extra": {"logits": (loss,)}})
    assert sentence.startswith("training_step returns tensors with their graph beside the loss")
    assert sentence.endswith("return x.detach()")


def test_lists_that_keep_graphs_are_seen() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    model = BoringModel()
    model.losses = [loss.detach()] * 5
    assert find_kept_graphs(model, None) == []
    model.losses.append({"loss": loss})
    (sentence,) = find_kept_graphs(model, None)
    assert sentence.startswith("BoringModel.losses keeps tensors with their graph")


def test_waiting_batches_must_fit_into_shared_memory() -> None:
    batch = {"image": torch.ones(256), "names": ["a"], "boxes": [torch.ones(2, dtype=torch.uint8)]}
    loaders = [_load(num_workers=4, prefetch_factor=3), _load()]
    assert count_transport_bytes(_trainer(loaders), batch) == 4 * 3 * 1026
    assert advise_shared_memory(GIB, GIB) == []
    assert advise_shared_memory(GIB, None) == []  # a system without /dev/shm
    (sentence,) = advise_shared_memory(GIB, GIB // 2)
    assert "need up to 1.0 GiB of /dev/shm and 512.0 MiB were free" in sentence
    assert "docker run --shm-size" in sentence


def test_free_shared_memory_is_that_of_the_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(
        advice.shutil, "disk_usage", lambda path: SimpleNamespace(free=len(str(path)))
    )
    assert advice.free_shared_bytes() == len("/dev/shm")
    monkeypatch.setattr(advice.shutil, "disk_usage", refuse)
    assert advice.free_shared_bytes() is None


def test_the_adviser_says_each_thing_once_and_takes_its_wrapper_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(advice, "free_shared_bytes", lambda: 7)
    trainer = _trainer(_load(num_workers=2, pin_memory=True))
    transfer, adviser, model = trainer.strategy.batch_to_device, Adviser(), BoringModel()
    kept = {"extra": torch.ones(1, requires_grad=True).exp()}
    with caplog.at_level(logging.WARNING, advice.__name__):
        adviser.start(trainer, model)
        assert trainer.strategy.batch_to_device is not transfer
        assert trainer.strategy.batch_to_device(torch.ones(2)).tolist() == [1, 1]
        assert trainer.strategy.batch_to_device is transfer
        assert adviser.looks == 3
        adviser.look(model, kept)
        adviser.look(model, kept)
        assert adviser.looks == 1
        adviser.start(trainer, model)
        adviser.stop()
    assert trainer.strategy.batch_to_device is transfer
    assert [message.split(":")[0] for message in caplog.messages] == [
        "a DataLoader has pin_memory=True and this run is on cpu",
        "batches that wait for training need up to 32 B of /dev/shm and 7 B were free",
        "training_step returns tensors with their graph beside the loss, which keeps it alive after the step",
    ]


def test_a_real_run_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(Zeroing):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            out = self.layer(batch)
            return {"loss": out.sum(), "out": out}

    class Advised(L.Callback):
        def __init__(self) -> None:
            self.adviser = Adviser()

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.adviser.start(trainer, pl_module)

        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any
        ) -> None:
            self.adviser.look(pl_module, outputs)

    L.Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        callbacks=[Advised()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Keeping(), _load())
    told = [
        record.message.split(":")[0] for record in caplog.records if record.name == advice.__name__
    ]
    assert told == [
        "Zeroing calls zero_grad(set_to_none=False), which keeps the memory of all gradients between steps",
        "training_step returns tensors with their graph beside the loss, which keeps it alive after the step",
    ]
