"""Building a decoded store while processes are killed, race each other, or run out of room."""

import faulthandler
import gc
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lit_data.core import temp as lock
from lit_data.images.decoders import DecodedSource, ImageSource
from lit_data.images.store.store import DecodedStore
from lit_inspect.npy import NPY_LOCK

# Children are forked, so that they begin in a millisecond; they run no thread that was there
# before.
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

LIMIT_S = 60
IMAGES = 40
Run = Callable[[Callable[[], object]], "Child"]


class NpyDecoder:
    """Reads .npy files and notes each decoding as a new file in a folder."""

    def __init__(self, log: Path, fingerprint: str = "npy") -> None:
        self.fingerprint = fingerprint
        self.log = log

    def header(self, source: ImageSource) -> tuple[int, int, int, str]:
        with NPY_LOCK:
            array = np.load(source.paths[0])
        return (*array.shape, array.dtype.name)

    def __call__(self, source: ImageSource) -> DecodedSource:
        raw = Path(source.paths[0]).read_bytes()
        name = Path(source.paths[0]).stem
        (self.log / f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()
        with NPY_LOCK:
            return DecodedSource(np.load(io.BytesIO(raw)), (), (zlib.crc32(raw),))


class Child:
    """A forked process that does one task and ends with 0 if it did not raise."""

    def __init__(self, task: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()
            gc.disable()  # what earlier tests left behind must not be finalized here too, nor counted as calls
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            code = 1
            try:
                task()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self._fd = os.pidfd_open(self.pid)
        self._code = None

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        if self._code is None:
            if not select.select([self._fd], [], [], LIMIT_S)[0]:
                self.kill()
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._fd)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


@pytest.fixture
def run() -> Iterator[Run]:
    children = []

    def start(task: Callable[[], object]) -> Child:
        children.append(Child(task))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


class Place:
    """Forty images of 3 x 4 x 5 pixels, a cache folder, and a folder that counts decodings."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.log = folder / "cache", folder / "log"
        self.log.mkdir()
        self.sources = [
            ImageSource((str(folder / f"{number:02}.npy"),)) for number in range(IMAGES)
        ]
        for number, source in enumerate(self.sources):
            np.save(source.paths[0], np.full((3, 4, 5), number, np.uint8))

    def build(self, decoder: NpyDecoder | None = None, **options: object) -> DecodedStore:
        decoder = decoder or NpyDecoder(self.log)
        return DecodedStore.build(
            self.sources, self.cache, decoder=decoder, progress=False, **options
        )

    def names(self) -> set[str]:
        return {path.name for path in self.cache.iterdir()} - {".lock"}

    def decodings(self) -> list[int]:
        return sorted(int(path.name.split("-")[0]) for path in self.log.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def check_whole(store: DecodedStore) -> None:
    assert [int(store[number].min()) for number in range(len(store))] == list(range(IMAGES))
    assert [int(store[number].max()) for number in range(len(store))] == list(range(IMAGES))
    assert store.verify(progress=False) == []


class Killer:
    """Ends this process at the n-th call that changes the disk."""

    WRITES = ("posix_fallocate", "write", "pwrite", "ftruncate", "fsync")
    CALLS = (*WRITES, "rename", "unlink", "rmdir")

    def __init__(self, last: int) -> None:
        self.left = last
        for name in self.CALLS:
            setattr(os, name, self._count(getattr(os, name)))

    def _count(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted


def check_after_kill(place: Place, old: DecodedStore, more: int = 0) -> None:
    """The old store is whole, others are whole or not there, and a build leaves these two and so many more."""
    check_whole(DecodedStore.open(old.path))
    for name in place.names() - {old.key}:
        if not name.startswith(".build-"):
            check_whole(DecodedStore.open(place.cache / name))
    new = place.build()
    check_whole(new)
    assert {old.key, new.key} <= place.names()
    assert len([name for name in place.names() if not name.startswith(".build-")]) == 2 + more


# reservation, pixels, index, meta, rename
HANDFUL = (1, 2, 25, 43, 44, 45, 46, 47, 48, 57, 62, 63, 64, 65)


@pytest.mark.parametrize(
    "nth", [pytest.param(n, marks=() if n in HANDFUL else pytest.mark.slow) for n in range(1, 66)]
)
def test_kill_at_any_call_leaves_the_old_store_or_the_new(place: Place, run: Run, nth: int) -> None:
    old = place.build(NpyDecoder(place.log, "old"))
    assert run(lambda: (Killer(nth), place.build())).wait() == -signal.SIGKILL
    check_after_kill(place, old)


@pytest.mark.parametrize("nth", range(66, 73))
def test_kill_while_an_old_store_is_removed(place: Place, run: Run, nth: int) -> None:
    for variant in range(2):
        old = place.build(NpyDecoder(place.log, f"variant {variant}"))
        os.utime(old.path, ns=(variant, variant))
    assert run(lambda: (Killer(nth), place.build())).wait() == -signal.SIGKILL
    check_after_kill(place, old, more=1 if nth == 66 else 0)
    latest = place.build(NpyDecoder(place.log, "latest"))
    assert place.names() == {place.build().key, latest.key}


def test_four_processes_decode_each_image_once(place: Place, run: Run) -> None:
    read_end, write_end = os.pipe()

    def build_at_the_signal() -> None:
        os.close(write_end)
        os.read(read_end, 1)  # ends when the parent closes its end
        check_whole(place.build())

    children = [run(build_at_the_signal) for _ in range(4)]
    os.close(write_end)
    assert [child.wait() for child in children] == [0, 0, 0, 0]
    os.close(read_end)
    assert place.decodings() == list(range(IMAGES))
    assert place.names() == {place.build().key}


class StuckDecoder(NpyDecoder):
    """Says that it has begun, and never ends."""

    def __init__(self, log: Path, begun: int) -> None:
        super().__init__(log)
        self.begun = begun

    def __call__(self, source: ImageSource) -> DecodedSource:
        os.write(self.begun, b"!")
        select.select([], [], [])
        raise AssertionError


@pytest.fixture
def stuck(place: Place, run: Run) -> Iterator[Child]:
    """A process in the middle of a build."""
    read_end, write_end = os.pipe()
    child = run(lambda: place.build(StuckDecoder(place.log, write_end)))
    assert os.read(read_end, 1) == b"!"
    yield child
    os.close(read_end)
    os.close(write_end)


def test_holder_that_is_killed_while_another_waits(place: Place, run: Run, stuck: Child) -> None:
    read_end, write_end = os.pipe()

    def wait_and_build() -> None:
        lock.log.warning = lambda *_: os.write(write_end, b"!")
        check_whole(place.build(wait_s=10))

    waiter = run(wait_and_build)
    assert os.read(read_end, 1) == b"!"
    stuck.kill()
    assert waiter.wait() == 0
    os.close(read_end)
    os.close(write_end)
    assert len(place.names()) == 1


def test_reader_keeps_its_map_while_others_rebuild(place: Place, run: Run) -> None:
    old = place.build()

    def rebuild_thrice() -> None:
        for variant in range(3):
            place.build(NpyDecoder(place.log, f"variant {variant}"))

    assert run(rebuild_thrice).wait() == 0
    assert not old.path.exists()
    old.check_size()
    check_whole(old)


def test_store_opens_in_a_process_that_started_afresh(place: Place) -> None:
    """The pickle holds all that another interpreter needs, and reading needs no library of images."""
    store = pickle.dumps(place.build())
    script = (
        "import pickle, sys; store = pickle.load(sys.stdin.buffer); print(len(store), int(store[7].min()), "
        "*{'cv2', 'tifffile', 'PIL', 'torch', 'rich.progress'}.intersection(sys.modules))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        input=store,
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert child.stdout.split() == [b"40", b"7"]
