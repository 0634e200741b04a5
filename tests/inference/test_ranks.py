"""Images shared by several processes.

As a script this file is what each of two processes (gloo) runs.
"""

import itertools

import numpy as np
import pytest
from torch import nn

from lit_data.errors import ConfigError, RankMismatchError
from lit_data.inference import TiledPredictor, gather_in_order, merge_shares, rank_share
from lit_data.testing import run_on_ranks

IMAGES = 21


@pytest.mark.parametrize("length", [0, 1, 2, 20, 21])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_image_belongs_to_one_rank_and_comes_back_in_order(
    length: int, world_size: int
) -> None:
    shares = [list(rank_share(length, rank, world_size)) for rank in range(world_size)]
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(length))
    assert merge_shares(shares, length) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=2 is out of range for world_size=2"):
        rank_share(5, 2, 2)


def test_a_share_with_a_gap_is_refused() -> None:
    with pytest.raises(
        RankMismatchError, match=r"predicted \[2, 2\] of 5 images, and their shares are \[3, 2\]"
    ):
        merge_shares([[0, 2], [1, 3]], 5)


def test_without_other_processes_there_is_nothing_to_exchange() -> None:
    assert gather_in_order(["a", "b"], 2) == ["a", "b"]
    with pytest.raises(RankMismatchError):
        gather_in_order(["a"], 2)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_processes_predict_each_image_once() -> None:
    found = run_on_ranks(_predict_share, 2)
    assert found[0][1] == found[1][1] == [(number, number + 1) for number in range(IMAGES)]
    assert found[0][0] == list(range(0, IMAGES, 2))
    assert found[1][0] == list(range(1, IMAGES, 2))


def _predict_share(rank: int) -> tuple[list[int], list[tuple[int, int]]]:
    share = rank_share(IMAGES, rank, 2)
    predictor = TiledPredictor(nn.Identity(), tile_px=8, overlap_px=2, batch_size=4)
    images = [
        np.full((1, 5 + number, 30 - number), number + 1, np.float32) for number in range(IMAGES)
    ]
    found = predictor.predict(images[number] for number in share)
    mine = [(share[place], round(float(values.mean()))) for place, values in found]
    return [number for number, _ in mine], gather_in_order(mine, IMAGES)
