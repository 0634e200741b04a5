import random

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAUROC

from lit_data.callbacks.adaptive.snapshot import (
    BufferCopy,
    NumpyRandom,
    StepSnapshot,
    renew,
    save_random_state,
)

CPU = torch.device("cpu")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.mean, self.auroc = MeanMetric(), MulticlassAUROC(3)
        self.register_buffer("late", None)
        self.count, self.notes = 0, ["old"]


def draw() -> list[float]:
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    ]


@pytest.mark.parametrize("skipped", range(4))
def test_random_generators_go_back(skipped: int) -> None:
    for _ in range(skipped):  # normal values come in pairs
        draw()
    restore = save_random_state(CPU)
    first = draw()
    restore()
    assert draw() == first
    restore()
    assert draw() == first


def test_numpy_is_read_only_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = np.random.get_state, []
    monkeypatch.setattr(
        np.random, "get_state", lambda **options: calls.append(1) or read(**options)
    )
    np.random.seed(1)  # noqa: NPY002
    keeper = NumpyRandom()
    first = keeper.save()
    assert keeper.save() is first
    assert len(calls) == 1
    np.random.randn()  # noqa: NPY002 - the second of the pair is at hand now
    second = keeper.save()
    np.random.randn()  # noqa: NPY002 - and taken, which changes no bits
    third = keeper.save()
    assert (second["has_gauss"], third["has_gauss"]) == (1, 0)
    assert np.array_equal(second["state"]["key"], third["state"]["key"])
    assert len(calls) == 3
    keeper.restore(second)
    assert keeper.save()["has_gauss"] == 1


def test_tensors_of_all_kinds_go_back() -> None:
    kinds = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ]
    shapes = [(), (3,), (0,), (2, 3), (2, 1, 3)]
    tensors = [
        torch.randint(0, 2, shape).to(kind) for kind in kinds for shape in shapes for _ in range(2)
    ]
    tensors += [torch.rand(6)[::2], torch.rand(3, 2).T, nn.Parameter(torch.rand(3))]
    before = [tensor.detach().clone() for tensor in tensors]
    copy = BufferCopy(tensors)
    for _ in range(2):
        copy.take()
        for tensor in tensors:
            tensor.data.fill_(7)
        copy.restore()
        assert all(map(torch.equal, tensors, before))
    BufferCopy([]).take()


def test_another_generator_of_numpy_is_read_each_time() -> None:
    before = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(3))
        restore = save_random_state(CPU)
        first = draw()
        restore()
        assert draw() == first
    finally:
        np.random.mtrand.set_bit_generator(before)


def test_everything_of_a_module_goes_back() -> None:
    module = Module()
    module.norm(torch.randn(4, 2))
    module.mean.update(3.0)
    module.auroc.update(torch.rand(4, 3), torch.arange(4) % 3)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    snapshot = StepSnapshot(module, None)
    for _ in range(2):
        module.norm(torch.randn(4, 2))
        module.mean(5.0)
        module.auroc.update(torch.rand(2, 3), torch.arange(2))
        module.late = torch.ones(2)
        module.count += 1
        module.notes.append("new")
        module.fresh = 1
        snapshot.restore()
        assert {key: value.tolist() for key, value in module.state_dict().items()} == {
            key: value.tolist() for key, value in before.items()
        }
        assert (module.count, module.notes, module.late, hasattr(module, "fresh")) == (
            0,
            ["old"],
            None,
            False,
        )
        assert module.mean.compute() == 3
        assert (module.mean.update_count, module.auroc.update_count) == (1, 1)
        assert [len(part) for part in module.auroc.preds] == [4]


def test_a_snapshot_is_used_again_while_the_buffers_are_the_same() -> None:
    module, results = Module(), {"a": MeanMetric()}
    first = renew(None, module, results)
    assert renew(first, module, results) is first
    assert renew(first, module, {}) is not first
    assert renew(first, Module(), results) is not first
    module.late = torch.ones(1)
    second = renew(first, module, results)
    assert second is not first
    module.register_buffer("another", torch.ones(1))
    assert renew(second, module, results) is not second
