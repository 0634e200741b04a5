import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, philox_4x32, shuffled, uniform, uniform_torch

# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox_4x32(np.array(counter, dtype=np.uint32)[:, None], key)
    assert tuple(int(word) for word in words[:, 0]) == expected


@pytest.mark.parametrize(("seed", "draws"), [(0, 1), (1, 64), (2**32, 4), (2**64 - 1, 7)])
def test_torch_draws_the_same_numbers(seed: int, draws: int) -> None:
    index = np.array([0, 1, 2**31, 2**40 + 3])
    expected = uniform(seed, Stream.DEFECTS, index, 5, draws)
    assert expected.dtype == np.float32
    found = uniform_torch(seed, Stream.DEFECTS, torch.from_numpy(index), 5, draws)
    assert torch.equal(found, torch.from_numpy(expected))


def test_a_number_depends_on_nothing_but_its_coordinates() -> None:
    together = uniform(3, Stream.DEFECTS, np.arange(50), 2, 20)
    alone = np.concatenate([uniform(3, Stream.DEFECTS, [index], 2, 20) for index in range(50)])
    assert_array_equal(together, alone)
    assert_array_equal(together[:, :7], uniform(3, Stream.DEFECTS, np.arange(50), 2, 7))


def test_shuffled_is_a_permutation_that_needs_no_neighbours() -> None:
    for length in (1, 2, 3, 10, 97, 1000, 4097):
        order = shuffled(np.arange(length), length, seed=7, epoch=3)
        assert sorted(order.tolist()) == list(range(length))
    alone = shuffled([999, 5, 500], 4097, seed=7, epoch=3)
    assert_array_equal(alone, order[[999, 5, 500]])
    others = [shuffled(np.arange(4097), 4097, *at) for at in ((7, 4), (8, 3))]
    assert not any(np.array_equal(order, other) for other in others)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="choose a whole number from 0 to"):
        uniform(seed, Stream.ORDER, [0], 0, 1)  # type: ignore[arg-type]
