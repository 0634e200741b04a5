"""What watermarks say: stock phrases, names, dates, numbers and addresses."""

from collections.abc import Callable
from typing import Final

import numpy as np

from lit_data.rng import Stream, uniform

_EPOCH: Final = 2**32 - 1
"""No run has as many epochs, so that texts share no number with samples."""
_DRAWS: Final = 32
_PHRASES: Final = (
    "CONFIDENTIAL", "DRAFT", "SAMPLE", "COPY", "DO NOT COPY", "PREVIEW", "SPECIMEN", "VOID", "PROOF", "INTERNAL",
    "ORIGINAL", "NOT FOR SALE", "RESTRICTED", "EVALUATION", "TRIAL VERSION", "UNPAID", "ARCHIVE", "For review only",
    "Personal use", "All rights reserved", "watermark", "stock photo", "demo", "licensed to",
)  # fmt: skip
_STARTS: Final = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "v",
    "w",
)
_MIDDLES: Final = ("a", "e", "i", "o", "u", "ai", "ea", "io")
_ENDS: Final = ("", "", "l", "n", "r", "s", "t", "nd", "rk", "x")
_TAILS: Final = ("com", "net", "org", "photo", "info")


class _Draws:
    """Random numbers, taken one after the other."""

    def __init__(self, seed: int, number: int) -> None:
        self._left = iter(uniform(seed, Stream.WATERMARK, np.array([number]), _EPOCH, _DRAWS)[0].tolist())

    def below(self, count: int) -> int:
        return int(next(self._left) * count)

    def choose(self, choices: tuple[str, ...]) -> str:
        return choices[self.below(len(choices))]


def draw_texts(count: int, seed: int) -> tuple[str, ...]:
    """Draw texts; each is a pure function of (seed, its number).

    Args:
        count: How many.
        seed: 0 <= seed < 2**64.
    """
    return tuple(_draw_text(_Draws(seed, number)) for number in range(count))


def _draw_text(draws: _Draws) -> str:
    makers: tuple[Callable[[_Draws], str], ...] = (
        _write_phrase, _write_phrase, _write_phrase, _write_name, _write_name, _write_date, _write_number,
        _write_address, _write_owner,
    )  # fmt: skip
    text = makers[draws.below(len(makers))](draws)
    return (text, text, text.upper(), text.title())[draws.below(4)]


def _write_phrase(draws: _Draws) -> str:
    return draws.choose(_PHRASES)


def _write_word(draws: _Draws, syllables: int) -> str:
    return "".join(draws.choose(_STARTS) + draws.choose(_MIDDLES) for _ in range(syllables)) + draws.choose(_ENDS)


def _write_name(draws: _Draws) -> str:
    first, second = _write_word(draws, 1 + draws.below(2)), _write_word(draws, 2)
    return f"{first} {second}".title()


def _write_date(draws: _Draws) -> str:
    year, month, day = 1995 + draws.below(36), 1 + draws.below(12), 1 + draws.below(28)
    return (f"{year}-{month:02}-{day:02}", f"{day:02}.{month:02}.{year}", f"{month}/{day}/{year}")[draws.below(3)]


def _write_number(draws: _Draws) -> str:
    before = draws.choose(("No. ", "#", "ID ", "Copy ", "", "Ref "))
    return f"{before}{draws.below(10 ** (3 + draws.below(5))):03}"


def _write_address(draws: _Draws) -> str:
    word = _write_word(draws, 2)
    return draws.choose((f"www.{word}.{draws.choose(_TAILS)}", f"@{word}", f"{word}.{draws.choose(_TAILS)}"))


def _write_owner(draws: _Draws) -> str:
    return f"\N{COPYRIGHT SIGN} {_write_word(draws, 2).title()} {2005 + draws.below(26)}"
