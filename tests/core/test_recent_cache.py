"""The bounded cache, and images decoded when they are asked for."""

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError
from lit_data.core.recent_cache import LruCache
from lit_data.core.types import Array
from lit_data.images.bank import DecodedFiles
from lit_data.images.decoders import DecodedSource, ImageDecoder, ImageSource
from lit_data.images.store.store import DecodedStore


def make(size_bytes: int, value: int = 0) -> Callable[[], Array]:
    return lambda: np.full(size_bytes, value, np.uint8)


def fail() -> Array:
    raise AssertionError("loaded again")


def test_least_recently_used_goes_first() -> None:
    cache = LruCache(10)
    for key in "abc":
        cache.get_or_load(key, make(4))
    assert (len(cache), cache.nbytes, cache.hits, cache.misses) == (2, 8, 0, 3)
    cache.get_or_load("b", fail)
    cache.get_or_load("d", make(4))
    cache.get_or_load("b", fail)
    assert (len(cache), cache.nbytes, cache.hits, cache.misses) == (2, 8, 2, 4)
    with pytest.raises(AssertionError, match="loaded again"):
        cache.get_or_load("c", fail)


def test_threads_share_one_load() -> None:
    cache = LruCache(1000)
    waiting, loads = threading.Event(), []

    def load() -> Array:
        loads.append(1)
        assert waiting.wait(30)
        return np.zeros(4, np.uint8)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.get_or_load, 1, load) for _ in range(4)]
        while cache.hits < 3:
            os.sched_yield()
        waiting.set()
        arrays = [result.result() for result in results]
    assert all(array is arrays[0] for array in arrays)
    assert (len(loads), cache.hits, cache.misses, cache.nbytes) == (1, 3, 1, 4)


def test_a_number_of_values_is_a_bound_too_and_a_copy_has_the_bounds_alone() -> None:
    cache = LruCache(max_items=2)
    for key in "abac":
        cache.get_or_load(key, make(4))
    cache.get_or_load("a", fail)
    with pytest.raises(AssertionError, match="loaded again"):
        cache.get_or_load("b", fail)
    assert (len(cache), cache.nbytes) == (2, 8)
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.max_bytes, copy.max_items) == (cache.max_bytes, 2)
    assert (len(copy), copy.nbytes, copy.misses) == (0, 0, 0)


@pytest.mark.parametrize("bound", ["max_bytes", "max_items"])
def test_wrong_bound(bound: str) -> None:
    with pytest.raises(ConfigError, match=f"{bound}=-1 of a cache must be 0 or more"):
        LruCache(**{bound: -1})


@pytest.fixture
def sources(tmp_path: Path) -> list[ImageSource]:
    """Four arrays of two sizes, whose pixels are their number."""
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    for number, path in enumerate(paths):
        np.save(path, np.full((3, 20 + number % 2, 25), number, np.uint8))
    return [ImageSource((str(path),)) for path in paths]


class Counting:
    """Counts what the real decoder decodes."""

    def __init__(self) -> None:
        self.decoded = []
        self.fingerprint = ImageDecoder().fingerprint
        self.header = ImageDecoder().header

    def __call__(self, source: ImageSource) -> DecodedSource:
        self.decoded.append(Path(source.paths[0]).name)
        return ImageDecoder()(source)


def test_files_read_like_a_store(sources: list[ImageSource], tmp_path: Path) -> None:
    files = DecodedFiles(sources, ImageDecoder(), cache_bytes=0)
    store = DecodedStore.build(sources, tmp_path / "cache", decoder=ImageDecoder())
    assert len(files) == len(store) == 4
    for number in (0, 1, 2, 3, -1, -4):
        assert_array_equal(files[number], store[number])
        assert files[number].flags.writeable is False
        assert files.name(number) == store.name(number) == sources[number].paths[0]
    for name in ("heights_px", "widths_px"):
        assert_array_equal(getattr(files, name), getattr(store, name))
        assert getattr(files, name).dtype == getattr(store, name).dtype == np.int64
    for name in ("channels", "dtype", "skipped"):
        assert getattr(files, name) == getattr(store, name)
    for bank in (files, store):
        with pytest.raises(IndexError):
            bank[4]


def test_cached_files_are_decoded_once_and_others_each_time(sources: list[ImageSource]) -> None:
    decoder, uncached = Counting(), Counting()
    files = DecodedFiles(sources, decoder, cache_bytes=10_000)
    assert decoder.decoded == []
    for number in (0, 1, 0, -4, 1):
        assert int(files[number].max()) == number % 4
    assert decoder.decoded == ["0.npy", "1.npy"]
    assert (files.cache.hits, files.cache.misses, files.cache.nbytes) == (3, 2, 1500 + 1575)
    assert repr(files) == "DecodedFiles(4 images, 3 channels, uint8, cache 10.0 kB)"
    files = DecodedFiles(sources, uncached, cache_bytes=0)
    assert [int(files[2].max()) for _ in range(3)] == [2, 2, 2]
    assert (uncached.decoded, files.cache.nbytes) == (["2.npy"] * 3, 0)
