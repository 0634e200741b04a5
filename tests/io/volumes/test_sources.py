"""Which volumes a folder holds."""

from pathlib import Path

import numpy as np
import pytest

from lit_data.errors import DataError
from lit_data.io.volumes import VolumeSource, find_volumes, open_volume


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def test_volumes_are_sorted_by_name_and_know_their_labels(tmp_path: Path) -> None:
    _touch(
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
    assert [(source.name, source.kind) for source in sources] == [
        ("a", "npy"),
        ("b/two", "nifti"),
        ("c", "npz"),
    ]
    assert [source.labels for source in sources] == [
        str(tmp_path / "a_seg.nii"),
        str(tmp_path / "b" / "two_labels.npz"),
        None,
    ]
    assert sources[0].all_files == (str(tmp_path / "a.npy"), str(tmp_path / "a_seg.nii"))


def test_a_file_is_a_volume_of_its_own(tmp_path: Path) -> None:
    _touch(tmp_path, "a.nii.gz", "b.npy")
    assert find_volumes(tmp_path / "a.nii.gz") == [
        VolumeSource("a", str(tmp_path / "a.nii.gz"), "nifti", (str(tmp_path / "a.nii.gz"),))
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.npy", "a.nii"], "the same name as"),
        (["a_mask.npy"], "labels without a volume a"),
        (["a.npy", "a_mask.npy", "a_seg.npy"], "labels of a volume that has"),
        (["notes.txt"], "no volume; .npy"),
    ],
)
def test_names_that_contradict_each_other_are_listed(
    tmp_path: Path, names: list[str], message: str
) -> None:
    _touch(tmp_path, *names)
    with pytest.raises(DataError, match=message):
        find_volumes(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    with pytest.raises(DataError, match=r"empty\.npy: 0 bytes"):
        find_volumes(tmp_path)
    with pytest.raises(DataError, match=r"no such file or folder; .* exists"):
        find_volumes(tmp_path / "nowhere")


def test_links_that_lead_outside_are_refused(tmp_path: Path) -> None:
    _touch(tmp_path, "other/a.npy", "root/b.npy")
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
