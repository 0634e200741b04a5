import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.errors import ConfigError
from lit_data.samples import ct as ct_samples
from lit_data.samples.ct import TUMOUR, CTSampleSpec, render_volume

SMALL: dict[str, Any] = {"count": 4, "shape": [24, 32, 40]}


def digests(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_equal_arguments_give_equal_bytes_and_another_seed_other_volumes(tmp_path: Path) -> None:
    one = digests(CTSampleSpec(**SMALL).ensure(tmp_path / "a"))
    assert one == digests(CTSampleSpec(**SMALL).ensure(tmp_path / "b"))
    other = digests(CTSampleSpec(**SMALL, seed=1).ensure(tmp_path / "a"))
    more = digests(CTSampleSpec(**SMALL | {"count": 5}).ensure(tmp_path))
    volumes = [name for name in one if name.endswith(".npy") and "labels" not in name]
    assert len(volumes) == 4
    assert all(one[name] != other[name] for name in volumes)
    assert one["train/ct_0001.npy"] == more["train/ct_0001.npy"]


def test_the_set_is_what_was_drawn_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = CTSampleSpec(**SMALL).ensure(tmp_path)
    assert root == tmp_path / "ct-4x24x32x40-seed0"
    stored = np.load(root / "train" / "ct_0001.npy")
    scene = render_volume(0, 1, (24, 32, 40))
    assert stored.dtype == np.int16
    np.testing.assert_array_equal(stored, scene.volume)
    np.testing.assert_array_equal(np.load(root / "train" / "ct_0001_labels.npy"), scene.labels)
    assert [len(list((root / split).glob("*.npy"))) for split in ("train", "val", "test")] == [
        4,
        2,
        2,
    ]
    monkeypatch.setattr(ct_samples, "render_volume", lambda *_: pytest.fail("drawn again"))
    assert CTSampleSpec(**SMALL).ensure(tmp_path) == root
    assert "CC0" in (root / "README.txt").read_text(encoding="utf-8")


def test_a_volume_holds_air_fat_muscle_lung_bone_and_tumours() -> None:
    scenes = [render_volume(0, number, (48, 48, 48)) for number in range(6)]
    for scene in scenes:
        shares = (
            np.histogram(scene.volume, (-1100, -950, -700, -150, -50, 0, 90, 250, 900))[0]
            / scene.volume.size
        )
        assert shares[[0, 1, 3, 5, 7]].min() > 0.002  # air, lung, fat, muscle, bone
        assert 0.005 < (scene.volume > 250).mean() < 0.05
        assert set(np.unique(scene.labels)) <= {0, TUMOUR}
    labelled = [scene.volume[scene.labels == TUMOUR] for scene in scenes if scene.labels.any()]
    assert len(labelled) >= 4
    assert min(part.max() for part in labelled) > 100


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"count": 2}, "count=2 is not usable: choose a whole number from 3"),
        ({"shape": 64}, r"shape is 64; allowed: \(z, y, x\)"),
        ({"shape": [8, 64, 64]}, "a side of shape=8"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_is_not_allowed_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        CTSampleSpec(**SMALL | change).ensure(tmp_path)


@pytest.mark.parametrize(
    ("count", "splits"), [(3, (1, 1, 1)), (32, (22, 5, 5)), (100, (70, 15, 15))]
)
def test_splits(count: int, splits: tuple[int, int, int]) -> None:
    spec = CTSampleSpec(count=count)
    names = [spec.split_of(number) for number in range(count)]
    assert names == ["train"] * splits[0] + ["val"] * splits[1] + ["test"] * splits[2]
