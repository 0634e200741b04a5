"""Parts of a snapshot that the runs of `test_adaptive_twins` do not reach."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from lit_data.callbacks.adaptive.snapshot import BufferCopy, NumpyRandom, save_random_state

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
