"""What the options of `CTDataModule` may be."""

from collections.abc import Sequence
from typing import Literal

from lit_data.errors import ConfigError
from lit_data.io.volumes.hounsfield import Window

SampleKind = Literal["points", "windows"]


def read_range(given: Sequence[float | None] | None, window: Window) -> tuple[float, float | None]:
    """Which Hounsfield units are occupied: above the first number, and not above the second one if there is one.

    Raises:
        ConfigError: Not two numbers.
    """
    if given is None:
        return window.low_hu, None
    pair = (given,) if isinstance(given, str | float | int) else tuple(given)
    if len(pair) != 2 or not all(value is None or _is_number(value) for value in pair):
        raise ConfigError(f"occupied_hu={given!r} is not allowed: [low, high] in HU or null is; null for no limit")
    low, high = pair
    return (window.low_hu if low is None else low), high


def read_most(most: int | None) -> int | None:
    """Check the largest number of points.

    Raises:
        ConfigError: No number that allows any.
    """
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError(f"max_points={most!r} is not allowed: a whole number of at least 1, or null")
    return most


def read_sdf(sdf: float | str | None) -> float | None:
    """The largest signed distance in mm; none where there is no limit, or there are no distances.

    Raises:
        ConfigError: No distance.
    """
    if sdf is None or sdf == "exact":
        return None
    if not _is_number(sdf) or not float(sdf) > 0:
        raise ConfigError(f"sdf={sdf!r} is not allowed: the largest distance in mm, exact, or null")
    return float(sdf)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
