"""Images that are larger than memory."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from lit_data.core.errors import ConfigError, StoreSpaceError
from lit_data.predict import TiledPredictor
from lit_data.predict.npy_target import FileDtype, encode
from lit_inspect.tiles import Blend
from tests.predict.nets import make_images, make_net

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

IDENTITY = TiledPredictor(nn.Identity(), tile_px=8, overlap_px=0)


@pytest.mark.parametrize(
    ("blend", "size"),
    [
        ("constant", (70, 90)),
        ("gaussian", (33, 17)),
        ("constant", (10, 10)),
        ("gaussian", (16, 100)),
    ],
)
def test_a_file_holds_what_memory_would(
    tmp_path: Path, blend: Blend, size: tuple[int, int]
) -> None:
    image = make_images(size)[0]
    predictor = TiledPredictor(make_net(), tile_px=16, overlap_px=9, blend=blend, batch_size=3)
    found = predictor.predict_to_file(image, tmp_path / "map.npy")
    assert np.array_equal(found, next(predictor.predict([image]))[1].numpy())
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["map.npy"]


class Rows:
    """Notes which rows are read."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.read = pixels, []
        self.shape, self.dtype = pixels.shape, pixels.dtype

    def __getitem__(self, part: tuple[slice, slice, slice]) -> np.ndarray:
        self.read.append((part[1].start, part[1].stop))
        return self.pixels[part]


def test_each_row_of_tiles_is_read_once_and_its_tiles_are_counted(tmp_path: Path) -> None:
    image, tiles = Rows(make_images((40, 40))[0]), list[int]()
    predictor = TiledPredictor(nn.Identity(), tile_px=16, overlap_px=4, batch_size=7)
    predictor.predict_to_file(image, tmp_path / "map.npy", on_tiles=tiles.append)
    assert image.read == [(0, 16), (12, 28), (24, 40)]
    assert tiles == [7, 2]
    assert np.array_equal(np.load(tmp_path / "map.npy"), image.pixels)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", [-0.5, 0, 0.2, 1, 7, np.nan]),
        ("float16", [-0.5, 0, 0.2, 1, 7, np.nan]),
        ("uint8", [0, 0, 51, 255, 255, 0]),
        ("uint16", [0, 0, 13107, 65535, 65535, 0]),
    ],
)
def test_dtypes_of_files(tmp_path: Path, dtype: FileDtype, expected: list[float]) -> None:
    image = torch.tensor([[[-0.5, 0, 0.2, 1, 7, torch.nan]]])
    found = IDENTITY.predict_to_file(image, tmp_path / "map.npy", dtype=dtype)
    assert found.dtype == dtype
    assert_allclose(found[0, 0], np.array(expected, dtype), equal_nan=True)
    assert image[0, 0, 4] == 7  # what is encoded is a copy
    assert encode(image, np.dtype(dtype)).shape == (1, 1, 6)


def test_a_prediction_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "map.npy"
    np.save(path, np.arange(3))

    class Failing(nn.Module):
        calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("no answer")
            return images

    predictor = TiledPredictor(Failing(), tile_px=8, overlap_px=0, batch_size=1)
    with pytest.raises(ValueError, match="no answer"):
        predictor.predict_to_file(np.zeros((1, 32, 8)), path)
    assert np.array_equal(np.load(path), np.arange(3))
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FileNotFoundError):
        IDENTITY.predict_to_file(np.zeros((1, 8, 8), np.uint8), tmp_path / "none" / "map.npy")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    full = r"map\.npy: no space for the prediction .No space left on device., .* free"
    with pytest.raises(StoreSpaceError, match=full):
        IDENTITY.predict_to_file(np.zeros((1, 8, 8), np.uint8), tmp_path / "map.npy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("map.npy", "int8", "dtype='int8' is unknown"),
        ("map.png", "uint8", "map.png: a prediction is written as"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, dtype: FileDtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IDENTITY.predict_to_file(np.zeros((1, 8, 8)), tmp_path / name, dtype=dtype)


_LARGE = """
import resource, sys
import numpy as np, torch
from torch import nn
from lit_data.predict import TiledPredictor

torch.set_num_threads(1)
# What a process allocates: not the pages of mapped files, which the system takes back whenever it
# needs them.
resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9, 2 * 10**9))
folder, side = sys.argv[1], 20_000
image = np.load(f"{folder}/image.npy", mmap_mode="r")
predictor = TiledPredictor(nn.AvgPool2d(3, 1, 1), tile_px=1024, overlap_px=4, batch_size=4)
predictor.predict_to_file(image, f"{folder}/map.npy", dtype="float16")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_image_of_20000_by_20000_px_takes_less_than_2_gb(tmp_path: Path) -> None:
    side = 20_000
    image = np.lib.format.open_memmap(tmp_path / "image.npy", "w+", np.uint8, (1, side, side))
    row = np.arange(side, dtype=np.uint32).astype(np.uint8) * 3
    for top in range(side):
        image[0, top] = row + np.uint8(top * 7 % 256)
    image.flush()
    subprocess.run([sys.executable, "-c", _LARGE, str(tmp_path)], check=True, timeout=280)
    found = np.load(tmp_path / "map.npy", mmap_mode="r")
    assert found.shape == (1, side, side)
    rng = np.random.default_rng(0)
    places = [[0, 0], [side - 64, side - 64], [1000, 990]]
    for top, left in places + rng.integers(1, side - 64, (50, 2)).tolist():
        before = int(top > 0), int(left > 0)
        window = image[0, top - before[0] : top + 65, left - before[1] : left + 65] / 255.0
        means = nn.AvgPool2d(3, 1, 1)(torch.from_numpy(window)[None])[0]
        wanted = means[before[0] :, before[1] :][:64, :64].numpy()
        written = found[0, top : top + 64, left : left + 64]
        assert_allclose(written, wanted, rtol=0, atol=1e-3)
