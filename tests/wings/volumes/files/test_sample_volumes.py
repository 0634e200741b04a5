"""The real volumes beside the checkout."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.wings.volumes import find_volumes, open_volume

pytestmark = pytest.mark.data
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

EXPECTED = {
    "abdomen_20x512x512_hu_int16": ((20, 512, 512), (1, 1, 1)),
    "body_3mm_122x101x30": ((30, 101, 122), (3, 3, 3)),
    "chest_1p5mm_122x102x112": ((112, 102, 122), (1.5, 1.5, 1.5)),
    "dicom/phantom_ub1mm": ((1, 512, 512), (1, 0.451, 0.451)),
    "dicom/phantom_ub5mm": ((1, 512, 512), (5, 0.451, 0.451)),
    "dicom/phantom_ya1mm": ((1, 512, 512), (1, 0.451, 0.451)),
    "phantom_512x512x16_hu_int16": ((16, 512, 512), (1, 0.451, 0.451)),
}


def test_all_are_found_and_read_as_int16(shared_data: Path) -> None:
    sources = find_volumes(shared_data / "ct")
    assert [source.name for source in sources] == list(EXPECTED)
    assert [source.name for source in sources if source.labels] == ["body_3mm_122x101x30"]
    for source in sources:
        with open_volume(source) as volume:
            shape, spacing_mm = EXPECTED[source.name]
            assert (volume.shape, volume.dtype) == (shape, np.int16)
            assert volume.spacing_mm == pytest.approx(spacing_mm, abs=1e-3)
            values = volume.read(0, 1)
            assert -1200 <= values.min() < -800  # air is in the picture


def test_nifti_agrees_with_nibabel_voxel_by_voxel(shared_data: Path) -> None:
    import nibabel

    path = shared_data / "ct" / "body_3mm_122x101x30.nii.gz"
    image = nibabel.load(path)
    with open_volume(path) as volume:
        slabs = [volume.read(begin, end) for begin, end in volume.slabs()]
        assert_array_equal(np.concatenate(slabs).T, np.asarray(image.dataobj))
        assert_allclose(volume.affine, image.affine)
