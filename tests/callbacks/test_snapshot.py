"""Parts of a snapshot that the runs of `test_adaptive_twins` do not reach."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_data.callbacks.adaptive.snapshot import (
    BufferCopy,
    MetricCopy,
    NumpyRandom,
    save_random_state,
)

CPU = torch.device("cpu")


def draw() -> list[float]:
    numbers = np.random.randn(), np.random.rand()  # noqa: NPY002
    return [torch.rand(()).item(), random.random(), random.gauss(), *numbers]


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
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
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


class Seen(Metric):
    """A sum that is written to or replaced, and all values."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()))
        self.add_state("values", [])

    def update(self, value: Tensor) -> None:
        self.total += value
        self.values.append(value)

    def compute(self) -> Tensor:
        return self.total


def test_states_of_a_metric_are_copied_only_if_they_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metric, copies = Seen(), []
    detach = Tensor.detach
    monkeypatch.setattr(
        Tensor, "detach", lambda tensor: copies.append(tensor is metric.total) or detach(tensor)
    )
    copy = MetricCopy(metric)
    copy.take()
    copy.take()
    assert copies.count(True) == 1
    changes = [
        lambda: metric.update(torch.ones(())),
        lambda: metric.total.add_(1),
        lambda: setattr(metric, "total", torch.zeros(())),
        lambda: metric.values.__setitem__(0, torch.zeros(())),
        metric.reset,
    ]
    for count, change in enumerate(changes, start=2):
        change()
        copy.take()
        assert copies.count(True) == count


@pytest.mark.parametrize("inference", [False, True])
def test_states_of_a_metric_go_back_again_and_again(*, inference: bool) -> None:
    metric = Seen()
    with torch.inference_mode(inference):
        metric.update(torch.ones(()))
        copy = MetricCopy(metric)
        for _ in range(2):
            copy.take()
            for _ in range(2):
                metric.update(torch.ones(()))
                metric.reset()
                metric.update(torch.full((), 5.0))
                copy.restore()
                assert (metric.total.item(), metric._update_count) == (1, 1)
                assert [value.item() for value in metric.values] == [1]


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
