import random

import numpy as np
import pytest
import torch

from lit_data.augment.external import seeded

CPU = torch.device("cpu")


def _draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -1, -(2**63), 2**63])
def test_draws_depend_on_the_seed_alone(seed: int) -> None:
    found = []
    for _ in range(2):
        with seeded(seed, CPU):
            found.append(_draw())
        _draw()
    with seeded(seed + 1, CPU):
        found.append(_draw())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[1], found[2], strict=True))


def test_states_are_put_back_after_an_error_too() -> None:
    with seeded(5, CPU):
        expected = _draw()
    with seeded(5, CPU):
        with pytest.raises(ZeroDivisionError), seeded(6, CPU):
            _draw()[0] / 0
        assert _draw() == expected


@pytest.mark.gpu
def test_the_generator_of_the_device_is_seeded_and_put_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state, found = torch.cuda.get_rng_state(device), []
    for _ in range(2):
        with seeded(7, device):
            found.append(torch.rand(3, device=device))
        assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert torch.equal(*found)
