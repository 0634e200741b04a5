"""What tests of all wings share: a cache for a file, and nets that are small."""

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of stores that the tests of a file share."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def _hurry(small_runs_are_fast: None) -> None:
    """All of these runs are small."""
