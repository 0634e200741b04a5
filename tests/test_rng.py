import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.errors import ConfigError
from lit_data.rng import Stream, philox_4x32, random_words, shuffled, uniform, uniform_torch

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


def test_neighbouring_coordinates_share_no_block() -> None:
    blocks = {
        tuple(random_words(seed, stream, [index], epoch, 4)[0].tolist())
        for seed in (0, 1, 2**32)
        for stream in (0, 1)
        for index in (0, 1, 2**32, 2**32 + 1)
        for epoch in (0, 1)
    }
    assert len(blocks) == 3 * 2 * 4 * 2


def test_uniform_fills_its_range_evenly() -> None:
    draws = uniform(0, Stream.NOISE, np.arange(1000), 0, 100)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    chi_square = ((counts - 6250) ** 2 / 6250).sum()
    assert chi_square < 37.7  # 99.9 % quantile at 15 degrees of freedom; the draws are fixed


def test_shuffled_is_a_permutation_that_needs_no_neighbours() -> None:
    for length in (1, 2, 3, 10, 97, 1000, 4097):
        order = shuffled(np.arange(length), length, seed=7, epoch=3)
        assert sorted(order.tolist()) == list(range(length))
    alone = shuffled([999, 5, 500], 4097, seed=7, epoch=3)
    assert_array_equal(alone, order[[999, 5, 500]])
    others = [shuffled(np.arange(4097), 4097, *at) for at in ((7, 4), (8, 3))]
    assert not any(np.array_equal(order, other) for other in others)


def test_shuffled_prefers_no_order() -> None:
    orders = [tuple(shuffled(np.arange(3), 3, seed, 0).tolist()) for seed in range(3000)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 6
    # 99.9 % quantile at 5 degrees of freedom; the seeds are fixed
    assert ((counts - 500) ** 2 / 500).sum() < 20.5


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="choose a whole number from 0 to"):
        uniform(seed, Stream.ORDER, [0], 0, 1)  # type: ignore[arg-type]
