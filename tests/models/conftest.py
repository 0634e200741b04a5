"""Nets of these tests are small, and so are their loaders."""

from pathlib import Path

import pytest

ROOM = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _hurry(small_runs_are_fast: None) -> None:
    """All of these runs are small."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lightning remarks on loaders without workers."""
    remark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
    for item in items:
        if ROOM in item.path.parents:
            item.add_marker(remark)
