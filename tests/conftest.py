"""Fixtures shared by all tests."""

import gc
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lit_data.io.store_header import HEADER_NAME, INDEX_NAME, PIXELS_NAME, StoreHeader
from lit_data.io.store_index import IMAGE_RECORD
from lit_data.io.store_sources import SourceTable


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


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Fails a test that leaves named shared memory behind."""
    before = _find_orphans()
    yield
    assert _find_orphans() <= before


@pytest.fixture(scope="session")
def write_fake_store() -> Callable[[Path, SourceTable, int], None]:
    """Writes a store of many images of one pixel, without decoding any."""
    return _write_fake_store


def _find_orphans() -> set[Path]:
    """Named shared memory that no living process maps; other programs of this machine have theirs."""
    named = list(Path("/dev/shm").iterdir())
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            maps += path.read_text()
    return {path for path in named if str(path) not in maps and path.exists()}


def _write_fake_store(folder: Path, table: SourceTable, count: int) -> None:
    images = np.zeros(count, IMAGE_RECORD)
    images["offset"] = images["first_source"] = np.arange(count)
    images["channels"] = images["height_px"] = images["width_px"] = 1
    index = images.tobytes() + table.files.tobytes() + table.names.tobytes()
    header = StoreHeader(
        key="k",
        dtype="uint8",
        channels=1,
        images=count,
        sources=count,
        pixels_bytes=count,
        names_bytes=table.names.nbytes,
        index_crc32=zlib.crc32(index),
        decoder="fake",
        on_bad="error",
        notes={},
        skipped=(),
    )
    for name, content in ((HEADER_NAME, header.encode()), (INDEX_NAME, index), (PIXELS_NAME, bytes(count))):
        (folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def small_runs_are_fast() -> Iterator[None]:
    """Threads cost small models more than they give, and each error is followed by a collection of garbage."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
