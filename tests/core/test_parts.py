"""Parts of some work: every item is in one of them, and wrong options are refused."""

import pytest

from lit_data.core.errors import ConfigError
from lit_data.core.parts import Part


@pytest.mark.parametrize("total", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_parts_have_each_item_once(total: int, count: int) -> None:
    ranges = [Part(number, count).take(total) for number in range(count)]
    assert [item for part in ranges for item in part] == list(range(total))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_both_spellings_are_the_same() -> None:
    assert Part.read("prepare", None, None) is None
    assert Part.read("prepare", 3, 64) == Part.read("prepare", "3/64", None) == Part(3, 64)
    assert str(Part(3, 64)) == "3/64"


@pytest.mark.parametrize(
    ("part", "of", "message"),
    [
        (None, 4, r"prepare.part=None prepare.of=4 do not name a part"),
        (1, None, r"give its number, from 0, and how many parts"),
        ("1/4", 4, r"do not name a part"),
        ("1/4/2", None, r"do not name a part"),
        ("one", 4, r"do not name a part"),
        (-1, 4, r"do not name a part"),
        (True, 4, r"do not name a part"),
        (0, 0, r"prepare.of=0 is not usable: choose a whole number of at least 1"),
        ("0/0", None, r"prepare.of=0 is not usable"),
        (4, 4, r"prepare.part=4 is not usable: 4 parts are numbered from 0 to 3"),
        ("4/4", None, r"4 parts are numbered from 0 to 3"),
    ],
)
def test_wrong_parts_are_refused(part: int | str | None, of: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Part.read("prepare", part, of)
