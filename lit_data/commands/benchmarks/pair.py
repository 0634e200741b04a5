"""`Pair`: one quantity, measured of the usual way and of ours."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of which less is better.

    Attributes:
        unit: Of both.
        usual: Of the way that people have.
        ours: Of ours.
    """

    unit: str
    usual: float
    ours: float
