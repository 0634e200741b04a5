"""Sets in shards: written once and gone on with, read back to the bit, within the bytes that they may take here."""

import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import ConfigError, DataError, StoreCorruptError, StoreError
from lit_data.core.files import find_sha256
from lit_data.core.types import Array
from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datasets.near_duplicates import group_similar
from lit_data.images.read_options import ReadOptions
from lit_data.images.store.arrays import ArrayFolder, ArrayWriter
from lit_data.images.store.files import write_tar
from lit_data.images.store.pixels import StoreOptions
from lit_data.images.store.sources import join_paths
from lit_data.images.store.store import DecodedStore
from lit_data.images.writing import write_png
from lit_data.wings.remote.faults import UnreachableError
from lit_data.wings.remote.shards.cache import Prefetch, ShardCache
from lit_data.wings.remote.shards.index import ShardIndex
from lit_data.wings.remote.shards.store import ShardedStore
from lit_data.wings.remote.transport import FolderTransport, open_transport
from tests.wings.remote.servers import WebServer

IMAGES = 24
SHARD_BYTES = 30_000  # five images of 60 x 100 grey pixels
Make = Callable[..., InspectionFiles]


def draw(number: int) -> Array:
    return np.random.default_rng(number).integers(0, 255, (60, 100), np.uint8)


def open_files(root: Path | str, cache_dir: Path, **options: Any) -> InspectionFiles:
    given = {"patterns": ("**/*",), "masks": None, "read": ReadOptions(), "on_bad": "error"}
    given |= {"cache": "store", "cache_bytes": 2**30, "cache_dir": str(cache_dir)}
    remote = RemoteOptions(backoff_s=0.01, retries=2)
    return InspectionFiles(root=str(root), **(given | {"remote": remote} | options))


def write_photos(root: Path) -> None:
    """Write 24 photographs, a third of them with a mask; the last shows the same as the one before."""
    for number in range(IMAGES):
        write_png(root / "images" / f"{number:02}.png", draw(number))
        if number % 3 == 0:
            mask = (draw(number) > 250).astype(np.uint8) * np.uint8(255)
            write_png(root / "masks" / f"{number:02}.png", mask)
    write_png(root / "images/23.png", draw(22))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photographs and of their shards, of which each test has a copy of its own."""
    folder = tmp_path_factory.mktemp("published")
    write_photos(folder / "photos")
    files = open_files(folder / "photos", folder / "cache")
    report = files.publish(str(folder / "set.shards"), SHARD_BYTES)
    counts = {"images": 24, "skipped": 0, "shards": 5, "shards_kept": 0}
    assert report == counts | {"bytes": report["bytes"]}
    return folder


@pytest.fixture
def root(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published / "photos", tmp_path / "photos"))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_files(root: Path | str, place: str = "cache", **options: Any) -> InspectionFiles:
        return open_files(root, tmp_path / place, **options)

    return make_files


@pytest.fixture
def address(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published / "set.shards", tmp_path / "there" / "set.shards"))


def list_shards(address: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (address / "shards").iterdir()}


def open_store(files: InspectionFiles) -> ShardedStore:
    store = files.open_images()
    assert isinstance(store, ShardedStore)
    return store


def test_images_masks_and_names_come_back(make: Make, root: Path, address: Path) -> None:
    here, there = make(root), make(address, "other")
    local, store = here.open_images(), open_store(there)
    assert (len(store), store.channels, store.dtype.name) == (IMAGES, 1, "uint8")
    masks, wanted = there.open_all_masks(store)[0], here.open_all_masks(local)[0]
    assert masks.of_image.tolist() == wanted.of_image.tolist()
    for number in range(IMAGES):
        assert_array_equal(store[number], local[number])
        assert_array_equal(masks[number], wanted[number])
    assert there.names(store) == here.names(local)
    assert len(there.list_images()) == IMAGES
    assert there.image_set.kinds == here.image_set.kinds
    assert store.source_states.tolist() == local.source_states.tolist()
    assert store.verify(progress=False) == []
    rng, rows = np.random.default_rng(0), np.zeros((2, 50, 1, 20, 30), np.uint8)
    places = rng.integers((0, -30, -30), (IMAGES, 60, 100), (50, 3)).T
    for bank, cut in zip((store, local), rows, strict=True):
        bank.cut_into(*places, cut)
    assert_array_equal(*rows)
    copy = pickle.loads(pickle.dumps(store))
    assert_array_equal(copy[5], local[5])
    assert len(pickle.dumps(store)) < 3000


def test_names_must_stay_in_the_folder(make: Make, address: Path, tmp_path: Path) -> None:
    store, folder = open_store(make(address, "other")), tmp_path / "folder"
    folder.mkdir()
    evil = join_paths([["../../outside.png"]] * IMAGES)
    ShardIndex.open(store.path)._replace(sources=evil).write(folder)
    write_tar({file.name: file for file in folder.iterdir()}, tmp_path / "evil.tar")
    with pytest.raises(
        StoreCorruptError, match=r"names a file that leads out of the folder: '../../outside.png'"
    ):
        ShardedStore(tmp_path / "evil.tar", tmp_path, store.cache).name(0)


def test_shards_may_not_exceed_their_stated_size(make: Make, address: Path, tmp_path: Path) -> None:
    store = open_store(make(address))
    cache = store.cache
    small = [shard._replace(nbytes=1000) for shard in cache.shards]
    bounded = ShardCache(tmp_path / "small", small, cache.transport, 4000, DecodedStore.open)
    with pytest.raises(DataError, match="more than the allowed 1000 bytes"):
        bounded.fetch(0)
    assert not list((tmp_path / "small").glob("*.tar"))


def test_servers_may_not_send_more(
    make: Make, address: Path, web: WebServer, tmp_path: Path
) -> None:
    serve(address, web)
    transport = open_transport(f"{web.url}/set.shards", RemoteOptions(backoff_s=0.01, retries=2))
    with pytest.raises(DataError, match="more than the allowed 20 bytes"):
        transport.read("set.json", 20)
    name = f"shards/{next(iter(list_shards(address)))}"
    with pytest.raises(DataError, match="more than the allowed 1000 bytes"):
        transport.get(name, tmp_path / "copy", 1000)


@pytest.mark.parametrize("place", ["set.json", "shards"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(make: Make, address: Path, place: str, kind: str) -> None:
    store = open_store(make(address, "other"))
    path = address / (place if place == "set.json" else store.cache.shards[0].name)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DataError, match=r"not a regular file|cannot be read"):
        open_store(make(address, "new"))[0]


@pytest.mark.parametrize(
    "text",
    [b"[" * 60_000, b"[" * 200_000, b"5", b"null", b'{"format": [1], "index": 5}', b"\xff"],
    ids=range(6),
)
def test_a_hostile_pointer_is_refused(make: Make, address: Path, text: bytes) -> None:
    (address / "set.json").write_bytes(text)
    is_endless = len(text) == 200_000
    error = DataError if is_endless else StoreCorruptError
    with pytest.raises(error, match=r"set\.json|the set has format"):
        open_store(make(address, "new"))


def write_changed(
    tar: Path, kind: tuple[str, int], folder: Path, facts: dict[str, Any], arrays: dict[str, Any]
) -> Path:
    """Write a tar of arrays with other content, its sums included; return where it is.

    Args:
        tar: The one to change.
        kind: What it holds, and the version of that.
        folder: For the new one; it is made.
        facts: In place of its own.
        arrays: In place of its own.
    """
    old = ArrayFolder(tar, *kind)
    folder.mkdir()
    writer = ArrayWriter(folder)
    for name in old.arrays:
        writer.add(name, arrays.get(name, np.array(old.map(name))))
    writer.finish(*kind, old.key, old.facts | facts)
    write_tar({path.name: path for path in folder.iterdir()}, folder / "changed.tar")
    return folder / "changed.tar"


def put_index(address: Path, folder: Path, facts: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Replace the index by one with sums of its own, as a stranger would."""
    pointer = json.loads((address / "set.json").read_text())
    index = address / f"index-{pointer['index']}.tar"
    tar = write_changed(index, ("shards", 2), folder, facts, arrays)
    sum_ = find_sha256(tar)
    tar.rename(address / f"index-{sum_}.tar")
    (address / "set.json").write_text(json.dumps(pointer | {"index": sum_}))


@pytest.mark.parametrize(
    ("facts", "places"),
    [
        ({"dtype": "object"}, {}),
        ({"channels": 2**70}, {}),
        ({"channels": True}, {}),
        ({"decoder": None}, {}),
        ({"skipped": [["a", 1]]}, {}),
        ({"skipped": 5}, {}),
        ({}, {"shard": 7}),
        ({}, {"row": 2**31}),
        ({}, {"height_px": 0}),
        ({}, {"first_source": 2**62}),
    ],
)
def test_a_hostile_index_is_refused(
    make: Make, address: Path, tmp_path: Path, facts: dict[str, Any], places: dict[str, int]
) -> None:
    pointer = json.loads((address / "set.json").read_text())
    images = ShardIndex.open(address / f"index-{pointer['index']}.tar").places.copy()
    for field, value in places.items():
        images[field][3] = value
    put_index(address, tmp_path / "index", facts, {"images": images})
    with pytest.raises((DataError, StoreError)) as caught:
        open_store(make(address, "new"))[3]
    assert "\n" not in str(caught.value)


def test_files_named_like_folders_are_refused(make: Make, address: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    write_tar({"a": tmp_path / "text", "a/b": tmp_path / "text"}, tmp_path / "files.tar")
    sum_ = find_sha256(tmp_path / "files.tar")
    (tmp_path / "files.tar").rename(address / f"files-{sum_}.tar")
    pointer = json.loads((address / "set.json").read_text())
    (address / "set.json").write_text(json.dumps(pointer | {"files": sum_}))
    with pytest.raises(StoreCorruptError, match="a file has the name of a folder: 'a/b'"):
        open_store(make(address, "new"))


def test_leftovers_of_a_killed_writer_are_removed(make: Make, root: Path, address: Path) -> None:
    left = [
        folder / ".build-999999999-1-00000000-gone-0123456789abcdef"
        for folder in (address, address / "shards")
    ]
    for folder in left:
        folder.mkdir()
        (folder / "x.tar").write_bytes(b"half")
        os.utime(folder / "x.tar", (0, 0))
        os.utime(folder, (0, 0))
    write_png(root / "images/00.png", draw(100))
    make(root, "next").publish(str(address), SHARD_BYTES)
    assert not any(folder.exists() for folder in left)


def test_near_duplicates_are_known_without_reading(make: Make, root: Path, address: Path) -> None:
    store = open_store(make(address, "other"))
    groups = group_similar(store, None)
    assert groups.tolist() == group_similar(make(root).open_images(), None).tolist()
    assert groups[22] == groups[23]
    assert not list(store.cache.folder.glob("*.tar"))


def test_a_run_that_was_ended_goes_on(
    make: Make, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, put, left = tmp_path / "set.shards", FolderTransport.put, iter([True] * 3)

    def stop(self: FolderTransport, path: Path, name: str) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        put(self, path, name)

    monkeypatch.setattr(FolderTransport, "put", stop)
    with pytest.raises(KeyboardInterrupt):
        make(root).publish(str(address), SHARD_BYTES)
    first = list_shards(address)
    assert len(first) == 3
    with pytest.raises(DataError, match=r"set.json: not found; check data.root"):
        make(address, "other").open_images()
    monkeypatch.setattr(FolderTransport, "put", put)
    for cache in ("cache", "another machine"):
        assert make(root, cache).publish(str(address), SHARD_BYTES)["shards_kept"] == (
            3 if cache == "cache" else 5
        )
        assert first.items() <= list_shards(address).items()
    assert len(open_store(make(address, "other"))) == IMAGES


def test_a_server_that_does_not_answer_is_no_bad_image(
    make: Make, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FolderTransport, path: Path, name: str) -> None:
        raise UnreachableError("no answer")

    monkeypatch.setattr(FolderTransport, "put", fail)
    with pytest.raises(UnreachableError, match="no answer"):
        make(root, on_bad="skip").publish(str(tmp_path / "set.shards"), SHARD_BYTES)


def test_only_shards_of_changes_are_written_anew(make: Make, root: Path, address: Path) -> None:
    reader, before = make(address, "other"), list_shards(address)
    assert not (reader.open_images()[7] == 9).all()
    write_png(root / "images/07.png", np.full((60, 100), 9, np.uint8))
    assert make(root).publish(str(address), SHARD_BYTES)["shards_kept"] == 4
    assert len(list_shards(address).keys() - before.keys()) == 1
    assert before.items() <= list_shards(address).items()  # who reads the old set goes on
    newer = make(address, "other")
    assert not (newer.open_images()[7] == 9).all()  # what is here is taken as it is
    newer = make(address, "other")
    newer.refresh()
    assert (newer.open_images()[7] == 9).all()


def test_shards_may_be_in_bands(make: Make, tmp_path: Path) -> None:
    for number in range(3):
        write_png(tmp_path / "wide" / f"{number}.png", np.tile(draw(number), (1, 12)))
    here = make(tmp_path / "wide", store=StoreOptions())
    here.publish(str(tmp_path / "wide.shards"), 150_000)
    store = open_store(make(tmp_path / "wide.shards", "other"))
    for number in range(3):
        assert_array_equal(store[number], here.open_images()[number])
    rows = np.zeros((1, 1, 20, 30), np.uint8)
    store.cut_into(np.array([2]), np.array([5]), np.array([600]), rows)
    assert_array_equal(rows[0], store[2][:, 5:25, 600:630])


def test_copies_stay_in_their_bound(
    make: Make, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, taken, asked = 170_000, [], count_gets(monkeypatch)
    store = open_store(make(address, "other", cache_bytes=most))
    asked.clear()
    for number in [*range(IMAGES), 0]:
        store[number]
        files = [path for path in store.cache.folder.rglob("*") if path.is_file()]
        taken.append(sum(path.stat().st_size for path in files))
    assert most // 2 < max(taken) <= most
    assert len(asked) == 6  # each shard once, and the first again, which had to go
    store.cache.release(4)
    times = sorted(path.stat().st_mtime for path in store.cache.folder.glob("*.tar"))
    assert times[0] == 0  # goes first
    for number in (0, 1, 2):
        assert_array_equal(store[number][0], draw(number))
    image = store[0]
    for path in store.cache.folder.glob("*.tar"):
        path.unlink()
    assert_array_equal(image[0], draw(0))  # stays readable to its readers
    again = open_store(make(address, "other", cache_bytes=most))
    assert_array_equal(again[0][0], draw(0))


def count_gets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked, get = [], FolderTransport.get

    def count(self: FolderTransport, name: str, path: Path, most_bytes: int) -> None:
        asked.append(name)
        get(self, name, path, most_bytes)

    monkeypatch.setattr(FolderTransport, "get", count)
    return asked


@pytest.mark.parametrize(("removals", "succeeds"), [(4, True), (5, False)])
def test_a_shard_that_others_remove_before_it_is_opened_is_fetched_again(
    make: Make, address: Path, monkeypatch: pytest.MonkeyPatch, removals: int, succeeds: bool
) -> None:
    store = open_store(make(address, "other"))
    fetches, fetch = [], store.cache.fetch

    def fetch_and_remove(number: int) -> Path:
        path = fetch(number)
        fetches.append(path)
        if len(fetches) <= removals:
            path.unlink()
        return path

    monkeypatch.setattr(store.cache, "fetch", fetch_and_remove)
    if succeeds:
        assert_array_equal(store[0][0], draw(0))
        return
    with pytest.raises(
        StoreError, match=r"removed it 5 times before it was opened: .* raise data.cache_bytes"
    ):
        store[0]


def test_too_small_a_bound_is_refused(make: Make, address: Path) -> None:
    message = r"data.cache_bytes=50000 .* must hold at least four shards, .* raise it to"
    with pytest.raises(ConfigError, match=message):
        make(address, "other", cache_bytes=50_000).open_images()


def test_damaged_shards_and_copies_are_named(make: Make, address: Path) -> None:
    store = open_store(make(address, "other"))
    store.cache.fetch(0).write_bytes(b"x" * 1000)
    with pytest.raises(StoreCorruptError, match="no tar of a store"):
        store[0]
    for path in (address / "shards").iterdir():
        path.write_bytes(path.read_bytes()[:20_000] + path.read_bytes()[20_001:] + b" ")
    store = open_store(make(address, "new"))
    message = r"set.shards/shards/[0-9a-f-]*.tar: its SHA-256 sum is wrong, twice"
    with pytest.raises(DataError, match=message):
        store[0]
    assert not list(store.cache.folder.glob("*.tar"))


def test_other_options_of_reading_are_refused(make: Make, address: Path) -> None:
    files = make(address, "other", read=ReadOptions(invert=True))
    with pytest.raises(ConfigError, match=r"decoded with other options: .*invert False -> True"):
        files.open_images()
    for cache in ("lru", "none"):
        message = f"cache={cache}: a set of shards is read with data.cache=store"
        with pytest.raises(ConfigError, match=message):
            make(address, cache=cache)


def test_addresses_that_are_no_sets(make: Make, root: Path, address: Path, tmp_path: Path) -> None:
    there = str(tmp_path / "b.shards")
    for source, name, shard_bytes, message in (
        (root, "set", SHARD_BYTES, r"whose name ends with .shards"),
        (root, "https://host/set", SHARD_BYTES, r"whose name ends with .shards"),
        (address, there, SHARD_BYTES, r"whose name ends with .shards"),
        (root, there, 0, r"prepare\.shard_bytes"),
        (root, "https://127.0.0.1:1/b.shards", SHARD_BYTES, r"web servers are read-only"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(source).publish(name, shard_bytes)
    with pytest.raises(ConfigError, match=r"has none: set prepare\.verify=true"):
        make(address).check()


def fetch_all(store: ShardedStore, barrier: Any) -> None:
    barrier.wait()
    for number in range(len(store)):
        store[number]


@pytest.mark.slow
def test_processes_and_threads_share_fetched_shards(
    make: Make, address: Path, web: WebServer
) -> None:
    serve(address, web)
    store = open_store(make(f"{web.url}/set.shards", "other"))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=fetch_all, args=(store, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(4) as pool:
        barrier.wait()
        list(pool.map(store.__getitem__, range(IMAGES)))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    shards = {key: times for key, times in web.asked.items() if "/shards/" in key[1]}
    asked = {path: times for (method, path), times in shards.items() if method == "GET"}
    assert len(asked) == 5
    assert set(asked.values()) == {1}


def serve(address: Path, web: WebServer) -> None:
    for path in address.rglob("*"):
        if path.is_file():
            web.files[f"set.shards/{path.relative_to(address).as_posix()}"] = path.read_bytes()


def test_lost_connections_are_tried_again(make: Make, address: Path, web: WebServer) -> None:
    serve(address, web)
    shards = [path for path in web.files if "/shards/" in path]
    web.faults |= {path: ["cut", 503] for path in shards}
    store = open_store(make(f"{web.url}/set.shards", "other"))
    assert_array_equal(store[3][0], draw(3))
    web.faults |= {path: ["wrong"] for path in shards}  # is fetched again, as its sum says
    assert_array_equal(store[20][0], draw(20))


def test_a_server_that_is_gone(make: Make, address: Path, web: WebServer) -> None:
    serve(address, web)
    files = make(f"{web.url}/set.shards", "other")
    files.open_images()[0]
    web.faults["set.shards/set.json"] = [503] * 9
    again = make(f"{web.url}/set.shards", "other")
    again.refresh()  # goes on with what is known here
    assert_array_equal(again.open_images()[0][0], draw(0))
    web.faults["set.shards/set.json"] = [503] * 9
    strict = make(
        f"{web.url}/set.shards", "other", remote=RemoteOptions(retries=0, offline="error")
    )
    with pytest.raises(DataError, match="the server returns 503"):
        strict.refresh()
    never = make(f"{web.url}/set.shards", "other", remote=RemoteOptions(offline="always"))
    never.refresh()
    assert_array_equal(never.open_images()[0][0], draw(0))
    with pytest.raises(DataError, match="offline=always, but not all of it is on this machine"):
        never.open_images()[IMAGES - 1]


def test_what_cannot_be_fetched_ahead_is_told_where_it_is_needed(make: Make, address: Path) -> None:
    store = open_store(make(address, "other"))
    for path in (address / "shards").iterdir():
        path.unlink()
    Prefetch(store.cache, [0, 1], [3, 5])
    with pytest.raises(DataError, match="not found"):
        store[0]
