"""Fixtures shared by all tests."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real sample data beside the checkout, or the one named by LIT_DATA_SAMPLES."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LIT_DATA_SAMPLES", default))
    if not (folder / "MANIFEST.csv").is_file():
        pytest.skip(f"no sample data at {folder}; set LIT_DATA_SAMPLES to the folder that holds MANIFEST.csv")
    return folder


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    """A command run inside a test sets up the root logger for its run folder."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
