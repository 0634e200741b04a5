"""References that do not fit their target are told from those that do."""

import numpy as np
import pytest

from lit_inspect.references import Array, describe_misfits, find_limits, measure_fit

ROLES = ("target", "ref1", "ref2")


def _part(seed: int, shift: tuple[int, int] = (0, 0)) -> Array:
    """Draw blocks of random grey, seen with noise of its own."""
    blocks = np.random.default_rng(seed).integers(60, 190, (24, 20))
    part = np.kron(blocks, np.ones((8, 8)))
    noise = np.random.default_rng([seed, *np.abs(shift)]).normal(0, 4, part.shape)
    return (np.roll(part, shift, (0, 1)) + noise).clip(0, 255).astype(np.uint8)


LIMITS = find_limits(
    measure_fit(_part(seed), _part(seed, shift)) for seed in range(5) for shift in ((1, 0), (0, 2))
)


def _describe(*references: Array, limits: tuple[float, float] = LIMITS) -> str:
    return describe_misfits(np.stack((_part(9), *references)), ROLES, limits)


@pytest.mark.parametrize("shift", [(0, 0), (1, 1), (2, -2)])
def test_references_that_lie_a_little_off_fit(shift: tuple[int, int]) -> None:
    assert _describe(_part(9, shift), _part(9)) == ""


def test_another_part_an_empty_file_and_a_large_shift_are_named() -> None:
    assert _describe(_part(9), _part(8)) == "ref2 does not fit"
    assert _describe(np.zeros_like(_part(9)), _part(9)) == "ref1 is empty"
    assert _describe(_part(9)[::-1], _part(8)) == "ref1 does not fit, ref2 does not fit"
    # A shift is found at half the resolution.
    assert _describe(_part(9, (12, -6))).startswith("ref1 is shifted by 12 px down and -6 px right")


def test_a_defect_and_another_exposure_fit() -> None:
    scratched = _part(9, (1, 0))
    scratched[40:60, 30:90] = 255
    darker = (_part(9) * 0.6 + 5).astype(np.uint8)
    assert _describe(scratched, darker) == ""
