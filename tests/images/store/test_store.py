"""Reading a decoded store: what went in comes out, nothing can be changed, and damage is found."""

import gc
import os
import pickle
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from lit_data.core.errors import StoreCorruptError, StoreError
from lit_data.core.grid import cut_patch
from lit_data.images.store.arrays import META_NAME
from lit_data.images.store.sources import SourceTable, join_paths
from lit_data.images.store.store import DecodedStore

EQUAL = ((3, 5, 7),) * 4
MIXED = ((3, 5, 7), (3, 1, 3), (3, 8, 4), (3, 2, 9))
Image = NDArray[np.generic]
MakeStore = Callable[[Sequence[Image]], DecodedStore]
FILES = [META_NAME, "images.npy", "files.npy", "names.npy", "pixels.npy"]


def make_images(shapes: Sequence[tuple[int, ...]], dtype: str = "uint8") -> list[Image]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [(EQUAL, "uint8"), (MIXED, "uint16"), (EQUAL[:1], "int16"), (MIXED, "float32")],
)
def test_round_trip(make_store: MakeStore, shapes: Sequence[tuple[int, ...]], dtype: str) -> None:
    images = make_images(shapes, dtype)
    store = make_store(images)
    assert len(store) == len(images)
    for number, image in enumerate(images):
        assert store[number].dtype == dtype
        assert_array_equal(store[number], image)
        assert_array_equal(store[number - len(images)], image)
        assert Path(store.name(number)).name == f"{number}.npy"
    assert store.heights_px.tolist() == [shape[1] for shape in shapes]
    assert store.widths_px.tolist() == [shape[2] for shape in shapes]
    assert store.heights_px.dtype == store.widths_px.dtype == np.int64
    assert (store.channels, store.dtype) == (3, np.dtype(dtype))
    assert store.nbytes == sum(image.nbytes for image in images)
    assert store.path.name == store.key
    assert store.verify() == []
    for wrong in (len(images), -len(images) - 1):
        with pytest.raises(IndexError):
            store[wrong]
        with pytest.raises(IndexError):
            store.name(wrong)


@pytest.mark.parametrize("shapes", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_views_are_read_only(make_store: MakeStore, shapes: Sequence[tuple[int, ...]]) -> None:
    store = make_store(make_images(shapes))
    with pytest.raises(ValueError, match="read-only"):
        store[0][...] += 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        store[0].flags.writeable = True
    assert store.verify() == []


def test_copies_and_threads_read_the_same(make_store: MakeStore) -> None:
    images = make_images(MIXED)
    store = make_store(images)
    pickled = pickle.dumps(store)
    assert len(pickled) < 1024
    copy = pickle.loads(pickled)
    order = [number % len(images) for number in range(400)]
    with ThreadPoolExecutor(8) as pool:
        for number, view in zip(order, pool.map(copy.__getitem__, order), strict=True):
            assert_array_equal(view, images[number])
    size = sum(image.nbytes for image in images)
    assert repr(store) == f"DecodedStore(4 images, 3 channels, uint8, {size} bytes, {store.path})"


@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint8", 1), ("uint8", 3), ("uint16", 2), ("int16", 1), ("float32", 3)]
)
@pytest.mark.parametrize(
    "sizes", [[(30, 40)] * 4, [(30, 40), (1, 50), (25, 4), (64, 21)], [(1, 3)]]
)
def test_many_patches_cut_in_one_call_are_those_cut_one_by_one(
    make_store: MakeStore, dtype: str, channels: int, sizes: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 1000, (channels, *size)).astype(dtype) for size in sizes]
    store, numbers = make_store(images), rng.integers(0, len(sizes), 60)
    tops, lefts = rng.integers(-50, 80, 60), rng.integers(-70, 70, 60)
    places = list(zip(numbers.tolist(), tops.tolist(), lefts.tolist(), strict=True))
    for height, width in [(1, 1), (16, 20), (9, 60)]:
        patches = [cut_patch(images[n], top, left, (height, width)) for n, top, left in places]
        rows = np.zeros((60, channels, height, width), dtype)
        store.cut_into(numbers, tops, lefts, rows)
        assert_array_equal(rows, np.stack(patches))
        larger = np.zeros((60, channels, height + 2, width + 3), dtype)
        store.cut_into(numbers, tops, lefts, larger[..., :height, :width])
        assert_array_equal(larger[..., :height, :width], rows)
        assert not larger[..., height:, :].any()
        assert not larger[..., width:].any()


@pytest.mark.parametrize("change_bytes", [-1, 1])
@pytest.mark.parametrize("name", FILES[1:])
def test_wrong_length_is_refused(make_store: MakeStore, name: str, change_bytes: int) -> None:
    path = make_store(make_images(MIXED)).path / name
    size_bytes = path.stat().st_size
    os.truncate(path, size_bytes + change_bytes)
    message = f"expected {size_bytes} bytes, found {size_bytes + change_bytes}; delete the folder"
    with pytest.raises(StoreCorruptError, match=f"{name}: {message} .* prepare"):
        DecodedStore.open(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_missing_and_irregular_files_are_refused(make_store: MakeStore, name: str) -> None:
    path = make_store(make_images(EQUAL)).path
    (path / name).unlink()
    with pytest.raises(StoreCorruptError, match=f"{name}: expected a file, found nothing"):
        DecodedStore.open(path)
    os.mkfifo(path / name)
    with pytest.raises(StoreCorruptError, match=f"{name}: not a regular file"):
        DecodedStore.open(path)


def test_no_store_and_no_permission(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"no store of images at .*nowhere; run .*lit-data"):
        DecodedStore.open(tmp_path / "nowhere")
    path = make_store(make_images(EQUAL)).path

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    message = r"meta.json cannot be read: Permission denied; check its permissions"
    with pytest.raises(StoreError, match=message):
        DecodedStore.open(path)


def test_every_flipped_byte_is_found(make_store: MakeStore) -> None:
    store = make_store(make_images(MIXED))
    rng = random.Random(0)
    files = [store.path / name for name in FILES]
    found = 0
    for flip in range(200):
        path = files[flip % len(files)]
        content = path.read_bytes()
        place = rng.randrange(len(content))
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([content[place] ^ (1 << rng.randrange(8))]))
        try:
            found += bool(DecodedStore.open(store.path).verify())
        except StoreError:
            found += 1
        with path.open("r+b") as file:
            file.write(content)
    assert found == 200
    assert DecodedStore.open(store.path).verify() == []


def test_verify_names_images_and_sources(make_store: MakeStore) -> None:
    store = make_store(make_images(EQUAL))
    pixels = bytearray((store.path / "pixels.npy").read_bytes())
    pixels[-420] ^= 1
    (store.path / "pixels.npy").write_bytes(pixels)
    Path(store.name(1)).unlink()
    changed = Path(store.name(2))
    status = changed.stat()
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    lines = DecodedStore.open(store.path).verify()
    assert len(lines) == 3
    assert lines[0].startswith(f"{store.name(0)}: the stored pixels have CRC-32 ")
    assert lines[1].startswith(f"{store.name(1)}: ")
    assert lines[2].startswith(f"{changed}: the source has CRC-32 ")


def test_many_images_are_flat_arrays(
    tmp_path: Path, write_fake_store: Callable[[Path, SourceTable, int], None]
) -> None:
    count = 200_000
    table = join_paths((f"folder/{number:06}.png",) for number in range(count))
    write_fake_store(tmp_path, table, count)
    objects = len(gc.get_objects())
    store = DecodedStore.open(tmp_path)
    assert len(gc.get_objects()) - objects < 150
    assert store.name(count - 1) == "folder/199999.png"
    assert (len(store), store[count - 1].shape) == (count, (1, 1, 1))
    assert len(pickle.dumps(store)) < 1024


def test_patches_are_cut_in_one_thread_and_leave_the_number_of_torch_alone(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    select = torch.index_select

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return select(*args, **kwargs)

    monkeypatch.setattr(torch, "index_select", note)
    store, zeros = make_store(make_images(EQUAL)), np.zeros(2, np.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        store.cut_into(zeros, zeros, zeros, np.zeros((2, 3, 2, 2), np.uint8))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
