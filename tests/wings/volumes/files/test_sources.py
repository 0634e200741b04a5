"""Which volumes a folder holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.wings.volumes import (
    WINDOWS,
    VolumeSource,
    Window,
    find_volumes,
    open_volume,
    read_window,
)
from lit_data.wings.volumes.files.hounsfield import StoredScale
from tests.helpers.files import touch


def test_volumes_are_sorted_by_name_and_know_their_labels(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "b/two.nii.gz",
        "a.npy",
        "a_seg.nii",
        "b/two_labels.npz",
        "c.NPZ",
        "notes.txt",
        ".hidden.npy",
    )
    sources = find_volumes(tmp_path)
    kinds = {source.name: source.kind for source in sources}
    assert kinds == {"a": "npy", "b/two": "nifti", "c": "npz"}
    assert [source.labels for source in sources] == [
        str(tmp_path / "a_seg.nii"),
        str(tmp_path / "b" / "two_labels.npz"),
        None,
    ]
    assert sources[0].all_files == (str(tmp_path / "a.npy"), str(tmp_path / "a_seg.nii"))


def test_a_file_is_a_volume_of_its_own(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii.gz", "b.npy")
    assert find_volumes(tmp_path / "a.nii.gz") == [
        VolumeSource("a", str(tmp_path / "a.nii.gz"), "nifti", (str(tmp_path / "a.nii.gz"),))
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.npy", "a.nii"], "the same name as"),
        (["a_mask.npy"], "labels without a volume of their name"),
        (["a.npy", "a_mask.npy", "a_seg.npy"], "second labels of .*a.npy"),
        (["notes.txt"], "no volume; .npy"),
        (["imagesTr/1.npy", "labelsTr/2.npy"], "labelsTr/2.npy: labels without a volume"),
        (["labelsTr/2.npy"], "labels without a volume of their name"),
        (
            ["imagesTr/1_0000.npy", "imagesTr/1_0001.npy", "labelsTr/1.npy"],
            "channel 0001 of a case",
        ),
        (
            ["imagesTr/1.npy", "imagesTr/1_seg.npy", "labelsTr/1.npy"],
            "second labels of 1.npy, beside 1_seg",
        ),
    ],
)
def test_contradicting_names_are_listed(tmp_path: Path, names: list[str], message: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match=message):
        find_volumes(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    with pytest.raises(DataError, match=r"empty\.npy: 0 bytes"):
        find_volumes(tmp_path)
    with pytest.raises(DataError, match=r"no such file or folder; .* exists"):
        find_volumes(tmp_path / "nowhere")


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "other/a.npy", "root/b.npy")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match="leads out of the data folder"):
        find_volumes(tmp_path / "root")


def test_a_path_opens_without_a_search(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4), np.int16))
    with open_volume(tmp_path / "a.npy") as volume:
        assert volume.shape == (2, 3, 4)
    np.save(tmp_path / "b.npy", np.zeros((2, 3, 4), np.int16))
    with pytest.raises(DataError, match="2 volumes; use find_volumes"):
        open_volume(tmp_path)


def test_a_window_scales_its_edges_to_0_and_1_and_clips() -> None:
    window = WINDOWS["lung"]
    assert window.low_hu == -1350
    scaled = window.scale(np.array([-2000, -1350, -600, 150, 3000], np.int16))
    assert scaled.dtype == np.float32
    assert scaled.tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("value", ["brain", (40, 80), [40, 80.0], Window(40, 80)])
def test_windows_are_read_by_name_or_numbers(value: object) -> None:
    assert read_window(value) == Window(40, 80)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("liver", "give one of lung, bone"),
        ((1, 2, 3), "center, width"),
        (7, "center, width"),
        ((40, 0), "above 0"),
    ],
)
def test_wrong_windows_are_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_window(value)


@pytest.mark.parametrize(
    ("scale", "stored", "expected", "dtype"),
    [
        (StoredScale(np.dtype(bool)), [0, 1], [0, 1], "bool"),
        (StoredScale(np.dtype("u1")), [0, 255], [0, 255], "uint8"),
        (StoredScale(np.dtype("i1")), [-3], [-3], "int16"),
        (StoredScale(np.dtype(">i2")), [-1024, 3071], [-1024, 3071], "int16"),
        (StoredScale(np.dtype("u2"), 1, -1024, bits=12), [0, 4095], [-1024, 3071], "int16"),
        (StoredScale(np.dtype("u2"), 1, -1024), [0, 65535], [-1024, 64511], "float32"),
        (StoredScale(np.dtype("i2"), 0.5, 0), [3], [1.5], "float32"),
        (StoredScale(np.dtype("i4")), [-1000, 70000], [-1000, 70000], "float32"),
        (StoredScale(np.dtype("f8")), [0.25], [0.25], "float32"),
    ],
)
def test_hounsfield_units_take_two_bytes_where_that_is_exact(
    scale: StoredScale, stored: list[Any], expected: list[Any], dtype: str
) -> None:
    values = scale.apply(np.array(stored, scale.stored))
    assert (values.dtype, scale.dtype) == (np.dtype(dtype), np.dtype(dtype))
    assert values.tolist() == expected


def test_numbers_that_are_no_hounsfield_units_are_refused() -> None:
    with pytest.raises(DataError, match="dtype complex64"):
        StoredScale(np.dtype("c8"))
    with pytest.raises(DataError, match="slope 0"):
        StoredScale(np.dtype("i2"), 0.0)
    with pytest.raises(DataError, match="not Hounsfield units"):
        StoredScale(np.dtype("i4")).apply(np.array([2**25], np.int32))
    with pytest.raises(DataError, match="more than its header allows"):
        StoredScale(np.dtype("u2"), 1, 0, bits=12).apply(np.array([40000], np.uint16))


LABELLED = {
    "Decathlon": ("imagesTr/spleen_{n}.nii.gz", "labelsTr/spleen_{n}.nii.gz"),
    "nnU-Net": ("imagesTr/s_{n}_0000.nii.gz", "labelsTr/s_{n}.nii.gz"),
    "below a task": ("Task09/imagesTr/{n}.nii.gz", "Task09/labelsTr/{n}.nii.gz"),
    "folders": ("images/{n}.npy", "labels/{n}.npy"),
    "LiTS": ("volume-{n}.nii", "segmentation-{n}.nii"),
    "KiTS": ("case_{n}/imaging.nii.gz", "case_{n}/segmentation.nii.gz"),
    "starts": ("img/img000{n}.nii.gz", "label/label000{n}.nii.gz"),
    "a hyphen": ("{n}.nii.gz", "{n}-seg.nii.gz"),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", LABELLED)
def test_labels_lie_where_the_field_puts_them(name: str, count: int, tmp_path: Path) -> None:
    volume, labels = LABELLED[name]
    pairs = {volume.format(n=n): labels.format(n=n) for n in range(1, count + 1)}
    touch(tmp_path, *pairs, *pairs.values(), "._1.nii.gz", "dataset.json")
    sources = find_volumes(tmp_path)
    assert {source.path: source.labels for source in sources} == {
        str(tmp_path / image): str(tmp_path / mask) for image, mask in pairs.items()
    }
