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
    save_random_state,
)

CPU = torch.device("cpu")


def draw() -> list[float]:
    numbers = np.random.randn(), np.random.rand()  # noqa: NPY002
    return [torch.rand(()).item(), random.random(), random.gauss(), *numbers]


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
