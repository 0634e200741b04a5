"""Fixtures of the tests of datamodules."""

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of stores that the tests of a file share."""
    return str(tmp_path_factory.mktemp("cache"))
