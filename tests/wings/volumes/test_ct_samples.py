from pathlib import Path

import numpy as np
from numpy.testing import assert_array_equal

from lit_data.wings.volumes.sample_set import TUMOUR, CTSampleSpec, render_volume

SMALL = {"count": 4, "shape": [24, 32, 40]}


def test_the_set_is_what_was_drawn(tmp_path: Path) -> None:
    root = CTSampleSpec(**SMALL).ensure(tmp_path)
    assert root == tmp_path / "ct-4x24x32x40-seed0"
    stored = np.load(root / "train" / "ct_0001.npy")
    scene = render_volume(0, 1, (24, 32, 40))
    assert stored.dtype == np.int16
    assert_array_equal(stored, scene.volume)
    assert_array_equal(np.load(root / "train" / "ct_0001_labels.npy"), scene.labels)
    files = [len(list((root / split).glob("*.npy"))) for split in ("train", "val", "test")]
    assert files == [4, 2, 2]
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
