"""Counter-based randomness: each number is a pure function of its seed and its place.

The place is (stream, index, epoch, draw number). Philox 4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) turns a 128-bit counter and a 64-bit key into 128 random bits
without any state, so a sample comes out the same in whichever worker, batch or rank it is made. The
key is the seed; the counter holds (block, index, epoch, stream | index >> 32), so two different
samples, epochs, streams or draws can never share a number: nothing is added to a seed.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, Floats, Ints

if TYPE_CHECKING:
    import torch

_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_WORD = 0xFFFFFFFF
_FEISTEL_ROUNDS = 8
CROP_DRAWS = 4
"""Numbers of a sample's stream for its crop, which come first; a watermark takes those behind them."""

_States = tuple["torch.Tensor", tuple[Any, ...], tuple[Any, ...]]
"""States of torch's generator of the CPU, NumPy's, and that of `random`."""


class Stream(IntEnum):
    """Purpose of a number. A stream keeps its number for ever: another one changes every sample."""

    ORDER = 0
    SPLIT = 1
    DEFECTS = 2
    NUISANCE = 3
    GEOMETRY = 4
    PHOTOMETRY = 5
    NOISE = 6
    USER = 7
    SHAPES = 8
    COLOUR = 9
    MOSAIC = 10
    POINTS = 11
    MIXUP = 12
    QUERIES = 13
    WATERMARK = 14
    LATENT = 15
    RAYS = 16
    POSITIVES = 17
    PASTES = 18
    WINDOWS = 19
    SAMPLER = 20


def find_streams(batch: Batch) -> Ints:
    """[B] numbers whose streams the samples of a batch on the host draw from.

    They are the ``index`` of samples, or their number in the split, under ``draw``, where they are
    chosen anew in each epoch.
    """
    numbers: Ints = batch.get("draw", batch["index"]).numpy()
    return numbers


def check_seed(seed: int) -> int:
    """Return the seed if it is an integer in [0, 2**64).

    Raises:
        ConfigError: It is not; negative seeds would alias large ones.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ConfigError(f"seed={seed!r} is not usable: choose a whole number from 0 to 2**64 - 1")
    return int(seed)


def philox_4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return Philox 4x32-10 of many counters under one key.

    Args:
        counter: [4, N] uint32, the four words of each counter.
        key: The two 32-bit words of the key.

    Returns:
        [4, N] uint32 random words.
    """
    multipliers = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    keys = rounds * np.array(_KEY_STEPS, np.uint64) + np.array(key, np.uint64)
    round_keys = (keys & np.uint64(_WORD)).astype(np.uint32)[:, :, None]
    # Words 0 and 2 are multiplied, 1 and 3 are mixed in; the products are read as two halves.
    even = np.ascontiguousarray(counter[::2])
    odd: NDArray[np.uint32] = counter[1::2]
    for round_key in round_keys:
        product = np.multiply(even[::-1], multipliers, dtype=np.uint64)
        halves = product.view(np.uint32).reshape(2, -1, 2)
        even = halves[..., _HIGH] ^ odd
        even ^= round_key
        odd = halves[..., _LOW]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def random_words(
    seed: int, stream: int, index: ArrayLike, epoch: int, words: int
) -> NDArray[np.uint32]:
    """Return random 32-bit words of each index.

    Args:
        seed: 0 <= seed < 2**64.
        stream: Purpose of the words, see `Stream`.
        index: [B] sample indices, 0 <= index < 2**48.
        epoch: 0 <= epoch < 2**32.
        words: Number of words of each index.

    Returns:
        [B, words] uint32.
    """
    indices = np.atleast_1d(np.asarray(index, dtype=np.int64))
    blocks = -(-words // 4)
    counter = np.empty((4, indices.size, blocks), dtype=np.uint32)
    counter[0] = np.arange(blocks, dtype=np.uint32)
    counter[1] = (indices & _WORD)[:, None]
    counter[2] = epoch
    counter[3] = ((indices >> 32) | (stream << 16))[:, None]
    random = philox_4x32(counter.reshape(4, -1), _key_of(seed))
    by_index = random.reshape(4, indices.size, blocks).transpose(1, 2, 0)
    return by_index.reshape(indices.size, 4 * blocks)[:, :words]


def uniform(seed: int, stream: int, index: ArrayLike, epoch: int, draws: int) -> Floats:
    """Return uniform numbers of each index.

    They are `random_words` scaled to [0, 1) with 24 bits, which are exact in float32.

    Returns:
        [B, draws] float32 in [0, 1).
    """
    words = random_words(seed, stream, index, epoch, draws) >> np.uint32(8)
    return words.astype(np.float32) * np.float32(2.0**-24)


def uniform_torch(
    seed: int, stream: int, index: "torch.Tensor", epoch: int, draws: int
) -> "torch.Tensor":
    """Return the numbers of `uniform`, bit for bit, computed on the device of the index.

    Args:
        seed: 0 <= seed < 2**64.
        stream: Purpose of the numbers, see `Stream`.
        index: [B] int64 sample indices.
        epoch: 0 <= epoch < 2**32.
        draws: Number of numbers of each index.

    Returns:
        [B, draws] float32 in [0, 1) on the device of `index`.
    """
    import torch

    blocks = -(-draws // 4)
    block = torch.arange(blocks, device=index.device).expand(index.shape[0], blocks)
    # The four words of the counter.
    x0 = block
    x1 = (index & _WORD)[:, None].expand_as(block)
    x2 = torch.full_like(block, epoch)
    x3 = ((index >> 32) | (stream << 16))[:, None].expand_as(block)
    k0, k1 = _key_of(seed)
    for _ in range(_ROUNDS):
        # int64 products wrap, which leaves the 64 bits right; the shift is arithmetic, hence the
        # mask after it.
        p0, p1 = x0 * _MULTIPLIERS[1], x2 * _MULTIPLIERS[0]
        x0, x1 = ((p1 >> 32) & _WORD) ^ x1 ^ k0, p1 & _WORD
        x2, x3 = ((p0 >> 32) & _WORD) ^ x3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    words = torch.stack((x0, x1, x2, x3), dim=-1).reshape(index.shape[0], -1)[:, :draws]
    return (words >> 8).to(torch.float32) * 2.0**-24


def shuffled(positions: ArrayLike, length: int, seed: int, epoch: int) -> Ints:
    """Return the sample at each position of the epoch's random order, which is never in memory.

    A Feistel network over a * b >= length cells with addition modulo a and b; a value that falls
    outside is sent through again (cycle walking), which keeps it a permutation (Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002). Any position costs the same, so resuming
    inside an epoch needs no replay.

    Args:
        positions: [N] positions, 0 <= position < length.
        length: Number of samples in the epoch.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**32.

    Returns:
        [N] int64 sample indices; over all positions each index occurs once.
    """
    values = np.array(positions, dtype=np.uint64, ndmin=1)
    keys = _draw_round_keys(seed, epoch)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], length, keys)
        outside = values >= length
    return values.astype(np.int64)


@lru_cache(maxsize=16)
def _draw_round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    words = random_words(seed, Stream.ORDER, 0, epoch, _FEISTEL_ROUNDS)
    keys: NDArray[np.uint64] = words[0].astype(np.uint64)
    return keys


def _key_of(seed: int) -> tuple[int, int]:
    seed = check_seed(seed)
    return seed & _WORD, seed >> 32


def _feistel(
    values: NDArray[np.uint64], length: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    rows = np.uint64(max(int(np.ceil(np.sqrt(length))), 1))
    columns = np.uint64(-(-length // int(rows)))
    left, right = values // columns, values % columns
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ first)) % rows
        right = (right + _mix(left ^ second)) % columns
    return left * columns + right


def sample_crops(seed: int, epoch: int, index: ArrayLike, room_px: Ints) -> Ints:
    """Draw the corners of crops, one for each sample.

    Args:
        seed: 0 <= seed < 2**64.
        epoch: The epoch.
        index: [M] sample indices.
        room_px: [M, 2] (vertical, horizontal) last corner that is allowed; the first is 0.

    Returns:
        [M, 2] (y, x) px.
    """
    draws = uniform(seed, Stream.WATERMARK, index, epoch, CROP_DRAWS)[:, :2].astype(np.float64)
    corners: Ints = np.floor(draws * (room_px + 1)).astype(np.int64)
    return corners


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits as the finaliser of splitmix64 does (Steele, Lea, Flood, OOPSLA 2014).

    The result is cut to 48 bits, so that the sum above cannot wrap.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(16)


def seed_generators(words: NDArray[np.uint32]) -> None:
    """Seed the global generators of torch, NumPy and `random`.

    Args:
        words: Two random words.
    """
    import torch

    low, high = int(words[0]), int(words[1])
    torch.default_generator.manual_seed(low | high << 32)
    np.random.seed(low)  # noqa: NPY002
    random.seed(high)


@contextmanager
def unchanged_generators() -> Iterator[Callable[[], bool]]:
    """Put the global generators back at the end.

    Yields:
        A function that returns True if they have moved so far.
    """
    before = _take_states()
    try:
        yield lambda: not _are_equal(before, _take_states())
    finally:
        _put_states(before)


def _take_states() -> _States:
    import torch

    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # type: ignore[return-value]  # noqa: NPY002


def _put_states(states: _States) -> None:
    import torch

    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def _are_equal(before: _States, after: _States) -> bool:
    _, key, *position = before[1]
    _, key_after, *position_after = after[1]
    # The cheap comparisons first: this is asked for each micro-batch.
    if position != position_after or before[2] != after[2]:
        return False
    return np.array_equal(key, key_after) and before[0].equal(after[0])
