import itertools

import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.loading.order import EpochOrder


def _walk(
    length: int, world: int, sizes: "itertools.cycle[int] | list[int]", **options: bool
) -> list[list[list[int]]]:
    """For each rank the sample indices of each step; the batch size of each step comes from `sizes`."""
    orders = [
        EpochOrder(length, options.get("shuffle", True), 7, rank, world) for rank in range(world)
    ]
    position, steps = 0, []
    for size in sizes:
        taken = orders[0].take(position, size)
        if not taken:
            break
        steps.append([order.indices(position, taken, 3).tolist() for order in orders])
        position += taken
    return [list(step) for step in zip(*steps, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [2, 3, 8, 40])
@pytest.mark.parametrize("length", [4, 21, 40, 41, 57])
def test_training_ranks_step_equally_often_and_no_sample_is_missing(
    world: int, batch_size: int, length: int
) -> None:
    ranks = _walk(length, world, itertools.cycle([batch_size]))
    assert len({len(steps) for steps in ranks}) == 1
    assert all(1 <= len(step) <= batch_size for steps in ranks for step in steps)
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(length))
    assert EpochOrder(length, True, 7, 0, world).steps(0, batch_size) == len(ranks[0])


def test_single_samples_leave_out_fewer_than_there_are_ranks_and_others_in_each_epoch() -> None:
    assert EpochOrder(21, True, 7, 0, 4).steps(0, 1) == 5
    missing = set()
    for epoch in range(20):
        orders = [EpochOrder(21, True, 7, rank, 4) for rank in range(4)]
        seen = {int(order.indices(step * 4, 4, epoch)[0]) for step in range(5) for order in orders}
        assert len(seen) == 20
        missing |= set(range(21)) - seen
    assert len(missing) > 5


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 8, 40])
def test_evaluation_gives_each_sample_once(world: int, batch_size: int) -> None:
    orders = [EpochOrder(21, False, 0, rank, world) for rank in range(world)]
    seen = []
    for order in orders:
        position = steps = 0
        while order.count(taken := order.take(position, batch_size)):
            seen += order.indices(position, taken, 0).tolist()
            position, steps = position + taken, steps + 1
        assert steps == order.steps(0, batch_size)
    assert sorted(seen) == list(range(21))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_last_leaves_whole_batches(world: int) -> None:
    order = EpochOrder(57, True, 0, 0, world, drop_last=True)
    full = world * 8
    assert [order.take(step * full, 8) for step in range(57 // full)] == [full] * (57 // full)
    assert order.take(57 // full * full, 8) == 0
    assert order.steps(0, 8) == 57 // full


def test_the_global_order_is_the_same_for_any_number_of_ranks() -> None:
    single = EpochOrder(40, True, 7).indices(0, 40, 3)
    for world in (2, 4):
        shares = [EpochOrder(40, True, 7, rank, world).indices(0, 40, 3) for rank in range(world)]
        assert np.stack(shares, axis=1).reshape(-1).tolist() == single.tolist()


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(ConfigError, match="1 sample cannot be split over 2 ranks"):
        EpochOrder(1, True, 0, 0, 2)
    with pytest.raises(ConfigError, match="rank=2 is out of range for world_size=2"):
        EpochOrder(9, True, 0, 2, 2)
