"""Damaged files of every kind: read, or refused with a DataError, and nothing else."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_data.core.errors import DataError
from lit_data.core.types import Array
from lit_data.wings.volumes import open_volume
from lit_data.wings.volumes.files import volume as volume_module
from tests.wings.volumes.files.scans import write_nifti, write_nii, write_npy, write_npz

MUTANTS = 60
VOLUME = np.random.default_rng(0).integers(-1000, 2000, (3, 6, 5), dtype=np.int16)


def _write_npz(path: Path, volume: Array) -> Path:
    return write_npz(path, volume, spacing_mm=np.ones(3))


def _write_dicom(path: Path, volume: Array) -> Path:
    pydicom = pytest.importorskip("pydicom")
    slice_ = pydicom.dcmread(pydicom.data.get_testdata_file("CT_small.dcm"))
    slice_.PixelData = slice_.pixel_array[:6, :5].tobytes()
    slice_.Rows, slice_.Columns = 6, 5
    slice_.save_as(path / "v.dcm")
    return path / "v.dcm"


def _mutate(raw: bytes, draws: random.Random) -> bytes:
    mutant = bytearray(raw)
    head = min(len(raw), 400) if draws.random() < 0.7 else len(raw)
    for _ in range(draws.choice([1, 1, 2, 8])):
        mutant[draws.randrange(head)] = draws.choice([0, 1, 127, 255, draws.randrange(256)])
    return bytes(mutant[: draws.randrange(len(raw))] if draws.random() < 0.2 else mutant)


@pytest.mark.parametrize("write", [write_npy, _write_npz, write_nii, write_nifti, _write_dicom])
def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, write: Callable[[Path, Array], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_module, "SLAB_BYTES", 1)
    path, draws, refused = write(tmp_path, VOLUME), random.Random(0), list[str]()
    raw = path.read_bytes()
    for _ in range(MUTANTS):
        path.write_bytes(_mutate(raw, draws))
        try:
            with warnings.catch_warnings():
                # Libraries warn of what they see in damaged headers.
                warnings.simplefilter("ignore")
                with open_volume(path) as volume:
                    for begin, end in volume.slabs():
                        assert volume.read(begin, end).shape == (end - begin, *volume.shape[1:])
                        if end > 5:
                            break
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > MUTANTS // 10
    assert all(message.startswith(str(path)) for message in refused)
