from typing import Any

import pytest

from lit_data.datasets.patch_source import ProgressiveSize
from lit_data.errors import ConfigError


def test_the_size_is_that_of_the_last_stage_begun() -> None:
    sizes = ProgressiveSize(((0, 96), (10, 128), (20, 64)))
    assert [sizes.size_at(epoch) for epoch in (0, 9, 10, 19, 20, 999)] == [96, 96, 128, 128, 64, 64]
    assert sizes.largest_px == 128
    listed: Any = [[0, 96], [10, 128], [20, 64]]
    assert ProgressiveSize(listed) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "must be a list of"),
        ([[0, 0]], "must be a list of"),
        ([[0, 96, 1]], "must be a list of"),
        ([96], "must be a list of"),
        ([[1, 96]], "the first must be 0"),
        ([[0, 96], [5, 128], [5, 192]], "the epochs must ascend"),
    ],
)
def test_other_stages_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProgressiveSize(sizes)
