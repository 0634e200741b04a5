"""Windows cut of dense copies, and the classes that lie in their middle."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.types import read_rows
from lit_data.wings.volumes.datasets.dataset import CTDataset
from lit_data.wings.volumes.datasets.dense import DenseVolumes
from lit_data.wings.volumes.datasets.points import WindowRows
from lit_data.wings.volumes.datasets.windows import (
    WindowSpec,
    choose_labelled,
    draw_start,
    draw_words,
)
from lit_data.wings.volumes.files.hounsfield import Window
from lit_data.wings.volumes.files.indexing import IndexOptions
from lit_data.wings.volumes.files.sources import find_volumes
from lit_data.wings.volumes.files.sparse_store import SparseStore

WINDOW = Window(0, 1000)


def _store(folder: Path, dtype: str, low_hu: float) -> SparseStore:
    (folder / "set").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(2):
        values = rng.integers(-1000 if dtype != "uint8" else 0, 255, (9, 14, 11)).astype(dtype)
        np.save(folder / "set" / f"{number}.npy", values)
    labels = np.zeros((9, 14, 11), np.uint8)
    labels[2:6, 3:9, 4:8] = 2
    labels[0, 0, 0] = 1
    np.save(folder / "set" / "0_labels.npy", labels)
    options = IndexOptions(low_hu=low_hu, high_hu=200, classes=2)
    return SparseStore.build(find_volumes(folder / "set"), folder / "cache", options=options)


@pytest.mark.parametrize("dtype", ["int16", "float32", "uint8"])
@pytest.mark.parametrize("low_hu", [-500, -800, 10])
def test_dense_windows_are_those_of_the_sparse_volume(
    dtype: str, low_hu: float, tmp_path: Path
) -> None:
    store = _store(tmp_path, dtype, low_hu)
    rows, writers = [], []
    for dense in (None, DenseVolumes(store, tmp_path / "dense", WINDOW.low_hu)):
        writer = WindowRows(
            store,
            np.arange(2),
            window=WINDOW,
            spec=WindowSpec(size=(4, 6, 16), label_bias=0.5, balanced=True),
            draws=True,
            has_labels=True,
            sdf=False,
            most_mm=None,
            seed=5,
            dense=dense,
        )
        writers.append(writer)
        rows.append(read_rows(CTDataset(writer), np.arange(16), epoch=3))
    sparse, dense_rows = rows
    for name, values in sparse.items():
        assert_array_equal(values, dense_rows[name], name)
    assert sparse["occupied"].any()
    assert (sparse["mask"][8:] == -1).all()
    stale = {name: np.ones_like(values) for name, values in dense_rows.items()}
    CTDataset(writers[1]).write_into(stale, np.arange(16), epoch=3)
    for name, values in stale.items():  # rows are written again and again
        assert_array_equal(values, dense_rows[name], name)
    for number in range(16):  # alone as in a batch
        single = read_rows(CTDataset(writers[1]), np.array([number]), epoch=3)
        for name, values in single.items():
            assert_array_equal(values[0], dense_rows[name][number], name)
    for number in range(2):
        in_memory, mapped = (writer.densify(number) for writer in writers)
        assert in_memory.empty == mapped.empty
        assert_array_equal(in_memory.values, mapped.values)
        assert_array_equal(in_memory.labels, mapped.labels)


def test_each_class_is_in_the_middle_of_as_many_windows(tmp_path: Path) -> None:
    store = _store(tmp_path, "int16", -500)
    index = store[0].label_index
    spec = WindowSpec(size=1, label_bias=1.0, balanced=True)
    labels = []
    words = draw_words(1, np.arange(400), epoch=0)
    for drawn in words:
        positions = choose_labelled(index, spec, drawn)
        start = draw_start(index.shape, spec, positions, drawn)
        labels.append(int(index.window(start, (1, 1, 1))[0, 0, 0]))
    # One voxel of the first class, 96 of the second.
    assert np.bincount(labels).tolist() == [0, 203, 197]
    assert choose_labelled(index, WindowSpec(size=1), words[0]) is index.positions
