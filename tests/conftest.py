"""Fixtures shared by all tests."""

import gc
import importlib.metadata
import inspect
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import lit_data
from lit_data.images.store.arrays import ArrayWriter
from lit_data.images.store.index import IMAGE_RECORD, KIND, PIXELS, VERSION, StoreFacts
from lit_data.images.store.sources import SourceTable
from tests.helpers.fork_server import PICTURES, WITHOUT_PICTURES, install, make_starter

CONFIGURATION = str(Path(lit_data.__file__).parent / "conf")

# How many images the pictures of ``predict`` show.
SHOWN_BY_PREDICT = (
    "lit_data.predict.maps.SHOWN",
    "lit_data.predict.worst_images.WORST",
    "lit_data.wings.detection.box_errors.SHOWN",
    "lit_data.wings.detection.predictions.SHOWN",
    "lit_data.wings.watermarks.predictions.SHOWN",
)

LONGEST = (
    "test_kinds",
    "test_all_configs",
    "test_memory_bank",
    "test_guarantees",
    "test_cloud",
    "test_import_path",
    "test_cli",
    "test_compose",
    "test_notebooks",
    "test_elastic",
    "test_predict",
    "test_ranks",
    "test_ranks_nodes",
    "test_predict_ranks",
    "test_remote_runs_s3",
    "test_sweep_launchers",
    "test_learning",
    "test_extend",
    "test_adaptive_ranks",
)

# Processes that share the cores, and small tensors: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts these tests in the background lets them ignore Ctrl-C, which some of them
# send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let a loader of YAML parse each file of the packaged configuration once."""
    contents: dict[str, Any] = {}

    def read(stream: Any, Loader: type) -> Any:
        if not str(getattr(stream, "name", "")).startswith(CONFIGURATION):
            return load(stream, Loader)
        text = stream.read()
        if text not in contents:
            contents[text] = load(text, Loader)
        return deepcopy(contents[text])

    return read


# Hundreds of commands compose the same files, of whose time a fifth is that of the parser.
yaml.load = _read_once(yaml.load)

# Each Trainer would look through all installed packages for callbacks of others.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)

# Commands of tests begin where their imports end.
if sys.platform == "linux":
    install(make_starter())


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A whole run is shared by two processes.

    For a file or a test that is named, starting them takes longer; and the tests that need a GPU
    measure its memory.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 2 if whole and "not gpu" in config.option.markexpr else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread in which no test has a mark that is asked for."""
    asked = re.findall(r"(?<!not )\b(?!and\b|or\b|not\b)\w+", config.option.markexpr)
    if not asked or collection_path.suffix != ".py":
        return None
    sources = [collection_path, collection_path.with_name("conftest.py")]  # which marks a folder
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.exists())
    return None if any(f"mark.{name}" in text for name in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files go to processes in this order: the longest first, or one process would end with them alone."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real sample data beside the checkout, or the one named by LIT_DATA_SAMPLES."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LIT_DATA_SAMPLES", default))
    if not (folder / "MANIFEST.csv").is_file():
        pytest.skip(
            f"no sample data at {folder}; set LIT_DATA_SAMPLES to the folder that holds MANIFEST.csv"
        )
    return folder


@pytest.fixture(autouse=True)
def _draw_the_same_each_time() -> None:
    """What a test draws hangs neither on the tests before it nor on chance."""
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    """A command run inside a test, or inside a fixture of its file, sets up the root logger for its run folder."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    root.setLevel(logging.WARNING)
    yield
    root.setLevel(logging.WARNING)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Fails a test that leaves named shared memory behind; that of tests in the other process goes within seconds."""
    before = _find_orphans()
    yield
    until_s = time.monotonic() + 5
    while (left := _find_orphans() - before) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert left == set()


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what ``fit`` draws, which takes longer than a toy training; others look at that.

    Also in commands that the test starts.
    """
    for name, value in WITHOUT_PICTURES.items():
        monkeypatch.setenv(name, value)
    for name in PICTURES:
        monkeypatch.setattr(name, lambda *args, **options: None)


@pytest.fixture(scope="module")
def few_pictures() -> Iterator[None]:
    """Pictures of ``predict`` show one image of each kind: drawing takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SHOWN_BY_PREDICT:
            patch.setattr(name, 1)
        yield


@pytest.fixture(scope="session")
def write_fake_store() -> Callable[[Path, SourceTable, int], None]:
    """Writes a store of many images of one pixel, without decoding any."""
    return _write_fake_store


def _find_orphans() -> set[Path]:
    """Named shared memory that no living process maps; other programs of this machine have theirs."""
    named = {}
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            named[str(path.stat().st_ino)] = path
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            # A semaphore is mapped under the name that it had before it got its own, so the inode
            # tells.
            for line in path.read_text().splitlines():
                if "/dev/shm/" in line:
                    named.pop(line.split()[4], None)
    return {path for path in named.values() if path.exists()}


def _write_fake_store(folder: Path, table: SourceTable, count: int) -> None:
    images = np.zeros(count, IMAGE_RECORD)
    images["first_source"] = np.arange(count)
    images["height_px"] = images["width_px"] = 1
    writer, pixels = ArrayWriter(folder), np.zeros(count, np.uint8)
    for name, array in (
        (PIXELS, pixels),
        ("images", images),
        ("files", table.files),
        ("names", table.names),
    ):
        writer.add(name, array)
    writer.finish(KIND, VERSION, "k", StoreFacts("uint8", 1, "fake", "error", {}, ()).as_meta())


@pytest.fixture(scope="module")
def small_runs_are_fast() -> Iterator[None]:
    """Threads cost small models more than they give."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage_once() -> None:
    """Loaders that the file before left to the garbage collector end before this one counts threads.

    What is there by then stays, so collections within this file need not visit it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _free_data_loaders() -> Iterator[None]:
    """Let the next file find torch's DataLoader as it is.

    Lightning patches it while it asks for loaders, and leaves it patched where that raises.
    """
    yield
    data = sys.modules.get("torch.utils.data")
    bases = [data.DataLoader, data.BatchSampler] if data else []
    for cls in [*bases, *(part for base in bases for part in base.__subclasses__())]:
        for name in ("__setattr__", "__delattr__", "__init__"):
            method = vars(cls).get(name)
            if hasattr(method, "__wrapped__"):  # once for each time that it raised
                setattr(cls, name, inspect.unwrap(method))
