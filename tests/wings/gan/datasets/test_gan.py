import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array, read_rows
from lit_data.testing import check_dataset
from lit_data.wings.gan import GANDataset
from lit_data.wings.gan.dataset import Labels, SampleTable, ViewLayout, read_layout, tabulate
from tests.datasets.banks import MemoryBank

SHEETS = ViewLayout(views="sheet", tiles=2)


def _bank(sizes: list[tuple[int, int]]) -> MemoryBank:
    """Images whose every pixel is another number."""
    images = []
    for number, (height, width) in enumerate(sizes):
        pixels = 1000 * number + np.arange(2 * height * width, dtype=np.uint16)
        images.append(pixels.astype(np.uint16).reshape(2, height, width))
    return MemoryBank(images)


def _table(count: int, layout: ViewLayout | None = None, labels: Any = "none") -> SampleTable:
    return tabulate([f"{number}.png" for number in range(count)], layout or ViewLayout(), labels)


def _sheets(**options: Any) -> GANDataset:
    table = _table(3, SHEETS, "objects")
    return GANDataset(_bank([(8, 12)] * 3), table, image_px=(4, 6), **options)


def _rows(dataset: GANDataset, indices: list[int], epoch: int = 0) -> dict[str, Array]:
    return read_rows(dataset, np.array(indices), epoch)


def test_a_view_is_its_tile_of_the_sheet_with_pose_object_and_label() -> None:
    dataset = _sheets(samples=np.arange(4, 12))
    assert len(dataset) == 8
    rows = _rows(dataset, [0, 3, 6], epoch=5)
    assert_array_equal(rows["image"][1], dataset.bank[1][:, 4:, 6:])
    assert_array_equal(rows["image"][2], dataset.bank[2][:, 4:, :6])
    expected = {"index": [4, 7, 10], "image_index": [1, 1, 2], "object": [1, 1, 2]}
    expected |= {"label": [1, 1, 2], "view": [0, 3, 2], "epoch": [5] * 3}
    assert {name: rows[name].tolist() for name in expected} == expected
    assert_array_equal(rows["pose"], SHEETS.poses(2)[[0, 3, 2]])
    assert rows["image"].dtype == np.uint16


def test_patches_are_cut_at_random_or_from_a_grid_and_small_images_are_mirrored() -> None:
    bank, table = _bank([(20, 30), (9, 40), (5, 5)]), _table(3)
    given = {"samples": np.array([0, 2]), "image_px": 8}
    random = GANDataset(bank, table, cut="random", samples_per_image=5, seed=1, **given)
    check_dataset(random)
    assert len(random) == 10
    first, later = (_rows(random, [*range(10)], epoch) for epoch in (0, 1))
    assert (first["image"] != later["image"]).any()
    assert first["image_index"].tolist() == [0] * 5 + [2] * 5
    for patch in first["image"][:5]:
        y, x = divmod(int(patch[0, 0, 0]), 30)
        assert_array_equal(patch, bank[0][:, y : y + 8, x : x + 8])
    mirrored = np.pad(bank[2], ((0, 0), (0, 3), (0, 3)), mode="reflect")
    assert_array_equal(first["image"][5], mirrored)
    grid = GANDataset(bank, table, cut="grid", **given)
    assert len(grid) == 3 * 4 + 1
    assert_array_equal(_rows(grid, [5])["image"][0], bank[0][:, 8:16, 8:16])
    assert grid.describe_sample(5) == "folder/0.png, patch at (y 8, x 8) px"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cut": "random"}, ConfigError, "patches of images with views would have no pose"),
        ({"cut": "halves"}, ConfigError, "cut='halves' is unknown: choose one of whole, random, g"),
        ({"image_px": 5}, DataError, r"0.png(.|\n)*3 images are not of \[5, 5\] px for each view"),
        ({"image_px": 0}, ConfigError, "image_px=0 is not usable"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GANDataset(_bank([(8, 12)] * 3), _table(3, SHEETS), **({"image_px": (4, 6)} | options))


FOLDERS = ViewLayout(views="folders")
SHEET = ViewLayout(views="sheet", tiles=2)


def _objects(**counts: int) -> list[str]:
    return [f"{name}/{view}.png" for name, count in counts.items() for view in range(1, count + 1)]


def test_views_are_in_the_order_of_their_names_with_2_before_10() -> None:
    names = sorted(_objects(b=16, a=16))
    assert names[1] == "a/10.png"
    table = tabulate(names, FOLDERS, "none")
    assert table.objects == ("a", "b")
    assert [names[number] for number in table.images] == [
        f"{n}/{view}.png" for n in "ab" for view in range(1, 17)
    ]
    assert table.view.tolist() == [*range(16)] * 2
    assert table.object.tolist() == [0] * 16 + [1] * 16
    assert table.tiles == 1
    assert table.samples_of(np.array([1])).tolist() == [*range(16, 32)]


def test_poses_are_a_grid_of_azimuths_and_elevations() -> None:
    poses = np.degrees(ViewLayout(azimuth_deg=(90, 360), elevation_deg=(-10, 50)).poses(3))
    assert poses.dtype == np.float32
    assert_allclose(poses[:, 0], [90, 180, 270] * 3, rtol=1e-6)
    assert_allclose(poses[:, 1], np.repeat([-10, 20, 50], 3), rtol=1e-6)
    assert_allclose(np.degrees(ViewLayout().poses(1)), [[0, 0]])


@pytest.mark.parametrize(
    ("labels", "expected", "count", "classes"),
    [
        ("none", [0] * 8, 0, ()),
        ("folders", [0] * 4 + [1] * 4, 2, ("red", "red/dark")),
        ("views", [0, 1, 2, 3] * 2, 4, ()),
        ("objects", [0] * 4 + [1] * 4, 2, ()),
    ],
)
def test_each_kind_of_label(labels: Labels, expected: list[int], count: int, classes: Any) -> None:
    names = [
        f"train/{folder}/{view}.png" for folder in ("red/a", "red/dark/b") for view in range(4)
    ]
    table = tabulate(names, FOLDERS, labels, in_splits=True)
    assert table.label.dtype == np.int64
    assert (table.label.tolist(), table.num_labels, table.classes) == (expected, count, classes)


def test_images_without_views_are_samples_by_themselves() -> None:
    names = ["b/1.png", "b/2.png", "a/3.png"]
    table = tabulate(names, ViewLayout(), "folders")
    assert table.objects == tuple(names)
    assert table.label.tolist() == [1, 1, 0]
    assert table.poses is None
    with pytest.raises(DataError, match=r"1\.png: is not in a folder(.|\n)*2 are not in any"):
        tabulate(["1.png", "2.png", "a/3.png"], ViewLayout(), "folders")
    with pytest.raises(ConfigError, match="labels=views needs objects with views"):
        tabulate(names, ViewLayout(), "views")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"a": 16, "b": 15, "c": 16, "d": 9},
            "  b: 15 views; the nearest squares are 9 and 16"
            "\n  d: 9 views\n2 of 4 objects do not have 16 views like the others",
        ),
        (
            {"a": 8, "b": 8},
            "  a: 8 views; the nearest squares are 4 and 9\n  b: 8 views; the nearest squares are 4 and 9\n"
            "2 of 2 objects do not have the same square number of views",
        ),
    ],
)
def test_other_numbers_of_views_are_listed(counts: dict[str, int], message: str) -> None:
    with pytest.raises(DataError) as caught:
        tabulate(_objects(**counts), FOLDERS, "none")
    assert str(caught.value) == message


def test_an_object_that_lacks_a_bad_view_is_left_out() -> None:
    names = _objects(a=4, b=4, c=4)
    bad = names.pop(5)
    table = tabulate(names, FOLDERS, "objects", skipped=[bad])
    assert table.objects == ("a", "c")
    assert [names[number] for number in table.images] == _objects(a=4, c=4)
    assert table.label.tolist() == table.object.tolist() == [0] * 4 + [1] * 4
    assert table.num_labels == 2
    assert len(tabulate(["x.png"], SHEET, "none", skipped=["y.png"]).label) == 4


def test_a_file_in_the_root_says_how_views_lie(tmp_path: Path) -> None:
    assert read_layout(tmp_path) == ViewLayout()
    path = tmp_path / "views.json"
    path.write_text(
        json.dumps({"views": "sheet", "tiles": 3, "elevation_deg": [10, 20], "author": "me"})
    )
    assert read_layout(tmp_path) == ViewLayout(views="sheet", tiles=3, elevation_deg=(10, 20))
    for text in ("{", "[]", '{"views": "films"}', '{"tiles": 3}', '{"azimuth_deg": 3}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"views\.json: .*it must hold views"):
            read_layout(tmp_path)
