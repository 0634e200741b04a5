import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.datasets.gan import (
    Labels,
    SampleTable,
    ViewLayout,
    lie_in_splits,
    read_layout,
    tabulate,
)
from lit_data.errors import ConfigError, DataError

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
    np.testing.assert_allclose(poses[:, 0], [90, 180, 270] * 3, rtol=1e-6)
    np.testing.assert_allclose(poses[:, 1], np.repeat([-10, 20, 50], 3), rtol=1e-6)
    np.testing.assert_allclose(np.degrees(ViewLayout().poses(1)), [[0, 0]])


def test_a_sheet_is_an_object_with_a_sample_for_each_tile() -> None:
    table = tabulate(["x.png", "y.png"], SHEET, "views")
    assert (table.tiles, table.num_labels) == (2, 4)
    assert table.images.tolist() == table.object.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert table.label.tolist() == table.view.tolist() == [0, 1, 2, 3] * 2
    assert table.poses is not None
    assert table.poses.shape == (4, 2)


@pytest.mark.parametrize(
    ("labels", "expected", "count", "classes"),
    [
        ("none", [0] * 8, 0, ()),
        ("folders", [0] * 4 + [1] * 4, 2, ("red", "red/dark")),
        ("views", [0, 1, 2, 3] * 2, 4, ()),
        ("objects", [0] * 4 + [1] * 4, 2, ()),
    ],
)
def test_a_label_is_what_was_asked_for(
    labels: Labels, expected: list[int], count: int, classes: Any
) -> None:
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
    with pytest.raises(DataError, match=r"1\.png: lies in no folder(.|\n)*2 lie in none"):
        tabulate(["1.png", "2.png", "a/3.png"], ViewLayout(), "folders")
    with pytest.raises(ConfigError, match="labels=views needs objects with views"):
        tabulate(names, ViewLayout(), "views")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"a": 16, "b": 15, "c": 16, "d": 9},
            "  b: 15 views; the nearest squares are 9 and 16"
            "\n  d: 9 views\n2 of 4 objects do not have 16 views as the others have",
        ),
        (
            {"a": 8, "b": 8},
            "  a: 8 views; the nearest squares are 4 and 9\n  b: 8 views; the nearest squares are 4 and 9\n"
            "2 of 2 objects do not have the same square number of views",
        ),
    ],
)
def test_other_numbers_of_views_are_listed_with_the_nearest_squares(
    counts: dict[str, int], message: str
) -> None:
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
    assert _rows(tabulate(["x.png"], SHEET, "none", skipped=["y.png"])) == 4


def _rows(table: SampleTable) -> int:
    return len(table.label)


@pytest.mark.parametrize(
    ("names", "splits", "expected"),
    [
        (["train/a.png", "val/b.png"], "auto", True),
        (["train/a.png", "box/b.png"], "auto", False),
        (["train/a.png", "b.png"], "auto", False),
        (["train/a.png"], {"train": 1.0}, False),
    ],
)
def test_the_first_folder_is_a_split_where_all_are(
    names: list[str], splits: object, expected: bool
) -> None:
    assert lie_in_splits(names, splits) is expected


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
