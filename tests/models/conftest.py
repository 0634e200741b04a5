"""Nets of these tests are small."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _hurry(small_runs_are_fast: None) -> None:
    """All of these runs are small."""
