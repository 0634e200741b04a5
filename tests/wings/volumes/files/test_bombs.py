"""Small files that unpack to large volumes, and headers that lie about where voxels begin."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import DataError
from lit_data.wings.volumes import open_volume
from lit_data.wings.volumes.files import volume as volume_module


def _read_all(path: Path) -> np.ndarray[Any, Any]:
    with open_volume(path) as volume:
        return np.concatenate([volume.read(begin, end) for begin, end in volume.slabs()])


def _nifti_header(shape: tuple[int, int, int], offset: float = 352) -> bytes:
    """Of int16 voxels; (x, y, z)."""
    nib = pytest.importorskip("nibabel")
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape(shape)
    header.set_zooms((1, 1, 1))
    header["magic"] = b"n+1\0"
    header["vox_offset"] = offset
    return bytes(header.binaryblock) + b"\0" * 4


def test_nifti_that_would_unpack_to_gigabytes_is_refused_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.nii.gz"
    path.write_bytes(gzip.compress(_nifti_header((1000, 1000, 1500))))
    with pytest.raises(DataError, match="bytes that unpack to 3000000352 or more"):
        open_volume(path)
    # An empty mask may be packed to a thousandth.
    path.write_bytes(gzip.compress(_nifti_header((64, 64, 64)) + bytes(2 * 64**3)))
    assert path.stat().st_size < 2 * 64**3 / 500
    assert not _read_all(path).any()


def test_what_follows_the_last_voxel_is_not_unpacked_without_end(tmp_path: Path) -> None:
    path = tmp_path / "rest.nii.gz"
    voxels = _nifti_header((2, 2, 2)) + bytes(16)
    path.write_bytes(gzip.compress(voxels + bytes(1000)))
    assert _read_all(path).shape == (2, 2, 2)
    path.write_bytes(gzip.compress(voxels + bytes(volume_module.MAX_REST_BYTES + 1), 1))
    with pytest.raises(DataError, match="bytes follow the last voxel"):
        _read_all(path)


def test_voxels_cannot_begin_in_the_header_or_far_behind_it(tmp_path: Path) -> None:
    path, voxels = tmp_path / "v.nii", np.arange(8, dtype=np.int16)
    for offset in (1, 100, 348, 351, -1, 1e9):
        path.write_bytes(_nifti_header((2, 2, 2), offset) + voxels.tobytes())
        message = f"vox_offset {offset:.0f}; voxels of a single file begin at 352"
        with pytest.raises(DataError, match=message):
            open_volume(path)
    header = _nifti_header((2, 2, 2), 0)  # right behind it
    path.write_bytes(header + voxels.tobytes())
    assert _read_all(path).ravel().tolist() == voxels.tolist()
    path.write_bytes(header[:-4] + b"\1\0\0\0" + voxels.tobytes())  # an extension would follow
    with pytest.raises(DataError, match="vox_offset 0"):
        open_volume(path)


@pytest.mark.parametrize("order", ["C", "F"])
def test_archives_that_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    path = tmp_path / "v.npz"
    np.savez_compressed(path, volume=np.asarray(np.zeros((64, 64, 64), np.int16), order=order))
    assert _read_all(path).shape == (64, 64, 64)
    monkeypatch.setattr(volume_module, "FREE_BYTES", 2**18)
    with pytest.raises(DataError, match=r"above 262144 bytes, a factor of more than 200"):
        open_volume(path)


def test_a_deflated_slice_is_inflated_only_as_far_as_a_slice_can_go(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    slice_ = pydicom.dcmread(pydicom.data.get_testdata_file("CT_small.dcm"))
    pixels = slice_.pixel_array
    slice_.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    path = tmp_path / "v.dcm"
    slice_.save_as(path)
    assert _read_all(path).shape == (1, *pixels.shape)
    raw = path.read_bytes()
    begin = 144 + struct.unpack("<I", raw[140:144])[0]
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    zeros = [packer.compress(bytes(2**20)) for _ in range(257)]
    path.write_bytes(raw[:begin] + b"".join(zeros) + packer.flush())
    with pytest.raises(DataError, match="deflated bytes inflate to more than 268435456"):
        open_volume(path)
