import numpy as np
import pytest
import torch

from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.windows import LEAST_NOISE, Surroundings
from tests.synthesis.placing import GREY

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")
ROWS, COLUMNS = np.mgrid[:96, :96]
PATTERNS = {
    "flat": np.full((96, 96), 120.0),
    "ramp": 60 + ROWS + COLUMNS / 3,
    "down": 80 + 80.0 * (COLUMNS % 12 < 6),
    "across": 80 + 80.0 * (ROWS % 12 < 6),
    "slanted": 80 + 80.0 * ((COLUMNS + ROWS // 7) % 18 < 9),
    "smooth": 120 + 60 * np.sin((COLUMNS + ROWS / 3) / 4),
}


def _look(pixels: np.ndarray, count: int = 300) -> Surroundings:
    """The surroundings of many places."""
    images = torch.from_numpy(np.broadcast_to(pixels, (1, 2, 96, 96)).astype(np.float32).copy())
    y, x = np.random.default_rng(1).uniform(0, 95, (2, count)).astype(np.float32)
    rows = torch.zeros(count, dtype=torch.int64)
    return Surroundings(Canvas(images, GREY), rows, torch.from_numpy(y), torch.from_numpy(x))


@pytest.mark.parametrize("sigma", [3.0, 8.0, 20.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_noise_is_told_from_stripes(pattern: str, sigma: float) -> None:
    noise = np.random.default_rng(0).normal(0, sigma, (96, 96))
    found = _look(PATTERNS[pattern] + noise).noise * 255
    assert 0.85 < float(found.mean()) / sigma < 1.15
    # Where a few places in 64 see an edge; each estimate has an error of its own of some 15 %.
    assert 0.8 < float(found.quantile(0.25)) / sigma < float(found.quantile(0.75)) / sigma < 1.25


@pytest.mark.parametrize("pattern", ["flat", "ramp", "down", "across"])
def test_there_is_a_least_noise(pattern: str) -> None:
    assert (_look(PATTERNS[pattern]).noise == LEAST_NOISE).all()


@pytest.mark.parametrize(
    ("pattern", "down"), [("down", True), ("across", False), ("slanted", True), ("smooth", True)]
)
def test_the_way_of_stripes_is_found(pattern: str, down: bool) -> None:
    found = _look(PATTERNS[pattern] + np.random.default_rng(0).normal(0, 4, (96, 96))).runs_down
    assert (found == down).float().mean() > 0.98
