"""Compressed images read as the same images uncompressed, and what is damaged in them is found and said."""

import json
import pickle
import shutil
import zlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_data.cli import main
from lit_data.datamodules import InspectionDataModule
from lit_data.errors import ConfigError, StoreCorruptError, StoreSpaceError
from lit_data.io import DecodedStore, ImageDecoder, ImageSource, StoreOptions
from lit_data.io.images.writing import write_png
from lit_data.io.store import store as store_module
from lit_data.io.store.arrays import META_NAME, encode_meta, read_meta
from lit_data.io.store.packed import PACKINGS, pack, unpack
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.types import Array

MakeStore = Callable[..., DecodedStore]
SHAPES = ((130, 1100), (64, 64), (63, 2000), (200, 40), (257, 1024), (5, 7))
Usage = namedtuple("Usage", "total used free")


def draw(dtype: str = "uint8", channels: int = 3) -> list[Array]:
    rng = np.random.default_rng(0)
    slopes = [np.add.outer(np.arange(height), np.arange(width)) for height, width in SHAPES]
    return [
        (slope // 4 % 200 + rng.integers(0, 8, (channels, *slope.shape))).astype(dtype)
        for slope in slopes
    ]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(images: list[Array], **options: object) -> DecodedStore:
        sources = []
        for number, image in enumerate(images):
            path = tmp_path / f"{number}.npy"
            if not path.exists():
                np.save(path, image)
            sources.append(ImageSource((str(path),)))
        store = StoreOptions(**options)  # type: ignore[arg-type]
        return DecodedStore.build(sources, tmp_path / "cache", decoder=ImageDecoder(), store=store)

    return make


@pytest.mark.parametrize("compression", PACKINGS)
@pytest.mark.parametrize("band_px", [None, 64, 128])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_every_bit_comes_back(
    make_store: MakeStore, dtype: str, band_px: int | None, compression: str
) -> None:
    images = draw(dtype)
    store = make_store(images, band_px=band_px, compression=compression)
    for number, image in enumerate(images):
        np.testing.assert_array_equal(store[number], image)
        assert store[number].dtype == dtype
    assert store.verify() == []
    assert store.nbytes < 0.9 * sum(image.nbytes for image in images)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store))[-1], images[-1])


@pytest.mark.parametrize("compression", PACKINGS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_noise_and_all_values_come_back(dtype: str, compression: str) -> None:
    rng = np.random.default_rng(3)
    for shape in ((1, 1, 1), (3, 64, 64), (2, 17, 1), (1, 1, 300)):
        block = np.frombuffer(
            rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
        ).reshape(shape)
        found = unpack(
            np.frombuffer(pack(block, compression), np.uint8), shape, block.dtype, compression
        )
        assert found.tobytes() == block.tobytes()


@pytest.mark.parametrize("compression", PACKINGS)
def test_black_images_save_most_and_are_believed(make_store: MakeStore, compression: str) -> None:
    image = np.zeros((3, 64, 200_000), np.uint8)
    store = make_store([image], band_px=None, compression=compression)
    assert store.nbytes < image.nbytes / 200
    np.testing.assert_array_equal(store[0], image)


@pytest.mark.parametrize("compression", PACKINGS)
def test_patches_are_those_of_the_image(make_store: MakeStore, compression: str) -> None:
    images = draw()
    packed, whole = make_store(images, compression=compression), make_store(images, band_px=None)
    rng = np.random.default_rng(1)
    for height, width in ((1, 1), (64, 64), (100, 70), (128, 300), (300, 30)):
        numbers, tops, lefts = (
            rng.integers(0, 5, 40),
            rng.integers(-200, 250, 40),
            rng.integers(-200, 1200, 40),
        )
        found, wanted = np.zeros((2, 40, 3, height, width), np.uint8)
        packed.cut_into(numbers, tops, lefts, found)
        whole.cut_into(numbers, tops, lefts, wanted)
        np.testing.assert_array_equal(found, wanted)
    opened = packed.open_image(0)
    for part in (np.s_[:, 3:70, :], np.s_[:1, :, 900:], np.s_[:, -5:, 64:128], np.s_[1:, 10:10, :]):
        np.testing.assert_array_equal(opened[part], images[0][part])


def test_a_patch_reads_only_its_blocks(make_store: MakeStore) -> None:
    store = make_store(draw(), compression="lz4")
    spans = list(store.open_image(0).find_spans(70, 60, (30, 30)))  # type: ignore[union-attr]
    assert len(spans) == 2  # of 18 columns and 3 rows
    assert sum(count for _, count in spans) < 2 * 3 * 64 * 64


def test_another_compression_makes_another_store(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    images = draw()
    plain, packed = make_store(images), make_store(images, compression="zstd")
    assert plain.key != packed.key
    assert "building the decoded store anew: store.compression none -> zstd" in caplog.text
    assert make_store(images).path == plain.path
    assert (
        "compression" not in read_meta(plain.path / META_NAME)["facts"]
    )  # as versions before wrote it


def test_narrow_images_have_one_compressed_store(make_store: MakeStore) -> None:
    images = [np.zeros((3, 200, 1000), np.uint8)]
    assert (
        len(
            {
                make_store(images, band_px=band_px, compression="lz4").path
                for band_px in (64, None, 32)
            }
        )
        == 1
    )


@pytest.mark.parametrize("compression", PACKINGS)
def test_damaged_blocks_are_found(make_store: MakeStore, compression: str) -> None:
    store = make_store(draw()[:2], compression=compression)
    path = store.path / "pixels.npy"
    data = bytearray(path.read_bytes())
    data[128:1000] = bytes(872)
    path.write_bytes(data)
    damaged = DecodedStore.open(store.path)
    (problem,) = damaged.verify()
    assert "0.npy: " in problem
    with pytest.raises(
        StoreCorruptError,
        match=r"pixels.npy: a block of it cannot be decompressed .* prepare` again",
    ):
        damaged.cut_into(
            np.array([0]), np.array([0]), np.array([0]), np.zeros((1, 3, 64, 64), np.uint8)
        )


@pytest.mark.parametrize("change", ["order", "count", "past", "facts", "kind"])
def test_blocks_that_no_version_writes(make_store: MakeStore, change: str) -> None:
    store = make_store(draw(), compression="lz4")
    meta = store.path / META_NAME
    fields = read_meta(meta)
    if change == "facts":
        del fields["facts"]["compression"]
    elif change == "kind":
        fields["facts"]["compression"] = "gzip"
    else:
        path = store.path / "blocks.npy"
        ends = np.load(path)
        ends = {"order": ends[::-1], "count": ends[:-1], "past": ends + np.uint64(1)}[change]
        np.save(path, ends)
        fields["arrays"]["blocks"] |= {"shape": list(ends.shape), "crc32": store_crc(ends)}
    meta.write_bytes(encode_meta(fields))
    with pytest.raises(StoreCorruptError):
        DecodedStore.open(store.path)


def store_crc(ends: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(ends).tobytes())


def test_a_full_disk_is_told_what_compression_needs(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 2_400_000))
    with pytest.raises(
        StoreSpaceError,
        match=r"or set data.store.compression=(lz4|zstd), which needs about \d.\d MB",
    ):
        make_store(draw("uint16"))
    assert make_store(draw("uint16"), compression="zstd").verify() == []


def test_what_it_would_save_is_measured(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = draw("uint16")
    store, packed = make_store(images), make_store(images, compression="zstd")
    assert store.describe_compression() == ""
    assert packed.describe_compression().startswith("zstd, ")
    monkeypatch.setattr(store_module, "WORTH_BYTES", 1000)
    told = store.describe_compression()
    assert told.startswith("none, 3.3 MB; data.store.compression=lz4 would save ")
    said = float(told.rpartition("zstd would save ")[2].split()[0]) * 1e6
    assert said == pytest.approx(store.nbytes - packed.nbytes, rel=0.15)


@pytest.mark.parametrize("cache", ["lru", "none"])
def test_without_a_store_nothing_is_compressed(cache: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"store.compression=lz4 needs data.cache=store, not {cache}"
    ):
        InspectionDataModule(str(tmp_path), cache=cache, store=StoreOptions(compression="lz4"))
    with pytest.raises(ConfigError, match="'gzip'"):
        StoreOptions(compression="gzip")  # type: ignore[arg-type]


def test_compression_changes_no_batch(tmp_path: Path) -> None:
    rng, taken = np.random.default_rng(0), []
    for number in range(6):
        write_png(
            tmp_path / "images" / f"{number}.png", rng.integers(0, 256, (160, 1100, 3), np.uint8)
        )
    for compression in ("none", "lz4", "zstd"):
        loader = LoaderOptions(batch_size=8, num_workers=2, worker_kind="process")
        store = StoreOptions(compression=compression)  # type: ignore[arg-type]
        data = InspectionDataModule(
            str(tmp_path / "images"), cache_dir=str(tmp_path), store=store, loader=loader, patch_px=96,
            synthesis=DefectSpec(),
        )  # fmt: skip
        data.prepare_data()
        data.setup("fit")
        taken.append([data.transform(batch, "train") for batch in data.train_dataloader()])
    for other in taken[1:]:
        for batch, wanted in zip(other, taken[0], strict=True):
            torch.testing.assert_close(batch, wanted, rtol=0, atol=0)


def test_prepare_says_what_compression_saved(tmp_path: Path) -> None:
    words = ["prepare", "+experiment=stripe", "data.samples.count=6", "data.store.compression=zstd"]
    assert main([*words, f"paths.cache={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())[
        "prepare/compression"
    ].startswith("zstd")
