"""DICOM series written slice by slice, in any order, and what is wrong with some."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import DataError
from lit_data.core.types import Array
from lit_data.wings.volumes import find_volumes, open_volume
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.files.sources import open_labels
from lit_data.wings.volumes.files.writing import pack_nifti

pydicom = pytest.importorskip("pydicom")
nibabel = pytest.importorskip("nibabel")


def _write(path: Path, pixels: Array, z_mm: float, series: str = "1.2.3", **tags: Any) -> None:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    slice_ = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    slice_.SOPClassUID = meta.MediaStorageSOPClassUID
    slice_.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    slice_.SeriesInstanceUID = series
    slice_.Rows, slice_.Columns = pixels.shape
    slice_.SamplesPerPixel, slice_.PhotometricInterpretation = 1, "MONOCHROME2"
    slice_.BitsAllocated, slice_.BitsStored, slice_.HighBit = 16, 12, 11
    slice_.PixelRepresentation = 0
    slice_.PixelSpacing = [0.8, 0.5]
    slice_.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    slice_.ImagePositionPatient = [-10, -20, z_mm]
    slice_.RescaleSlope, slice_.RescaleIntercept = 1, -1024
    slice_.PixelData = pixels.astype("<u2").tobytes()
    for name, value in tags.items():
        setattr(slice_, name, value)
    path.parent.mkdir(exist_ok=True, parents=True)
    slice_.save_as(path)


def _write_series(folder: Path, heights_mm: list[float], **tags: Any) -> Array:
    """Slices whose file names are in another order than their positions; returns them sorted by position, in HU."""
    stored = np.random.default_rng(0).integers(0, 4096, (len(heights_mm), 4, 6), dtype=np.uint16)
    for number, (pixels, z_mm) in enumerate(zip(stored, heights_mm, strict=True)):
        _write(folder / f"i{number}.dcm", pixels, z_mm, **tags)
    return stored[np.argsort(heights_mm)].astype(np.int16) - 1024


def test_slices_are_sorted_along_their_normal_and_given_in_hounsfield_units(tmp_path: Path) -> None:
    expected = _write_series(tmp_path / "scan", [5.0, -2.5, 2.5, 0.0])
    (source,) = find_volumes(tmp_path)
    assert (source.name, source.kind, len(source.files)) == ("scan", "dicom", 4)
    with open_volume(source) as volume:
        assert (volume.shape, volume.dtype) == ((4, 4, 6), np.int16)
        assert volume.spacing_mm == (2.5, 0.8, 0.5)
        assert_array_equal(volume.read(0, 2), expected[:2])
        assert_array_equal(volume.read(1, 4), expected[1:])
        # DICOM counts to the left and to the back, NIfTI to the right and to the front.
        place = [10 - 2 * 0.5, 20 - 0.8, -2.5 + 3 * 2.5, 1]
        assert_allclose(volume.affine @ [2, 1, 3, 1], place)
    turned = _write_series(
        tmp_path / "turned", [0.0, 1.0, 2.0], ImageOrientationPatient=[1, 0, 0, 0, -1, 0]
    )
    with open_volume(tmp_path / "turned") as volume:  # a series on its head
        assert_array_equal(volume.read(0, 3), turned[::-1])
    halved = _write_series(tmp_path / "halved", [0.0, 1.0], RescaleSlope=0.5)
    with open_volume(tmp_path / "halved" / "i0.dcm") as volume:  # not whole any more
        assert volume.dtype == np.float32
        scaled = (halved[:1] + 1024) * np.float32(0.5) - 1024
        assert_allclose(volume.read(0, 1), scaled)


def test_each_series_of_a_folder_is_a_volume(tmp_path: Path) -> None:
    for number in range(3):
        _write(tmp_path / "scan" / f"a{number}", np.zeros((4, 6)), number)
        _write(tmp_path / "scan" / f"b{number}.IMA", np.zeros((4, 6)), number, series="1.2.4")
    names = [(source.name, len(source.files)) for source in find_volumes(tmp_path)]
    assert names == [("scan/a0", 3), ("scan/b0", 3)]


@pytest.mark.parametrize(
    ("heights_mm", "message"),
    [
        (
            [0, 1, 2, 4, 5],
            r"missing: .*i2.dcm and .*i3.dcm are 2.000 mm apart, but others 1.000 mm",
        ),
        ([0, 1, 1, 2, 3, 4], r"doubled: .*i1.dcm and .*i2.dcm are 0.000 mm"),
        ([0, 1, 2, 3.3, 4.3, 5.3], r"unevenly spaced: .*i2.dcm and .*i3.dcm are 1.300 mm"),
        ([0, 0], r"doubled: "),
    ],
)
def test_uneven_slices_are_named(tmp_path: Path, heights_mm: list[float], message: str) -> None:
    _write_series(tmp_path / "scan", heights_mm)
    with pytest.raises(DataError, match=f"scan: slices are {message}"):
        open_volume(tmp_path / "scan")


def test_slices_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _write_series(tmp_path / "scan", [0.0, 1.0])
    for name, value, message in (
        ("PixelSpacing", [0.9, 0.5], r"spacing_mm \(0.9, 0.5\), but .*i0.dcm has \(0.8, 0.5\)"),
        ("ImagePositionPatient", None, "no ImagePositionPatient"),
        ("NumberOfFrames", 3, "several frames"),
        ("PixelSpacing", None, "without PixelSpacing"),
    ):
        _write(tmp_path / "scan" / "b.dcm", np.zeros((4, 6)), 2.0, **{name: value})
        with pytest.raises(DataError, match=f"b.dcm: {message}"):
            open_volume(tmp_path / "scan")


def test_a_compressed_slice_says_what_to_install(tmp_path: Path) -> None:
    from pydicom.uid import JPEGLSLossless

    path = tmp_path / "a.dcm"
    _write(path, np.zeros((4, 6)), 0.0)
    dataset = pydicom.dcmread(path)
    dataset.file_meta.TransferSyntaxUID = JPEGLSLossless
    dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(path)
    message = r"a.dcm: compressed as JPEG-LS .*pip"
    with open_volume(path) as volume, pytest.raises(DataError, match=message):
        volume.read(0, 1)
    path.write_bytes(b"no dicom" * 100)
    with pytest.raises(DataError, match=r"a\.dcm"):
        find_volumes(tmp_path)


def test_slices_of_a_tilted_gantry_lie_where_they_were_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    angle = np.radians(20)
    along_column = [0, np.cos(angle), -np.sin(angle)]
    stored = np.zeros((5, 4, 6), np.uint16)
    for number in range(5):
        place = {"ImageOrientationPatient": [1, 0, 0, *along_column]}
        place["ImagePositionPatient"] = [-10, -20, 2.0 * number]
        _write(tmp_path / "tilt" / f"{number}.dcm", stored[number], 0.0, **place)
    with caplog.at_level("WARNING"), open_volume(tmp_path / "tilt") as volume:
        affine = volume.affine
        assert_allclose(affine[:3, 2], [0, 0, 2], atol=1e-9)
        assert_allclose(affine @ [0, 0, 3, 1], [10, 20, 6, 1], atol=1e-9)
        # A voxel is as large as the slices are apart.
        assert_allclose(volume.spacing_mm, (2 * np.cos(angle), 0.8, 0.5))
        assert_allclose(abs(np.linalg.det(affine)), np.prod(volume.spacing_mm))
        (tmp_path / "a.nii.gz").write_bytes(pack_nifti(np.ones(volume.shape, np.uint8), affine))
    assert "20 degrees" in caplog.text
    assert_allclose(nibabel.load(tmp_path / "a.nii.gz").affine, affine, atol=1e-5)
    with open_volume(tmp_path / "a.nii.gz") as written:
        assert_allclose(written.spacing_mm, volume.spacing_mm, rtol=1e-5)
    finer = Resolution(spacing_mm=(1.0, 0.5, 0.5)).apply(volume, fill=0)
    # Both grids begin at the edge of the first voxel.
    assert_allclose(finer.affine @ [-0.5, -0.5, -0.5, 1], affine @ [-0.5, -0.5, -0.5, 1])
    assert_allclose(finer.affine[:3, 2], np.array([0, 0, 2]) / (2 * np.cos(angle)), atol=1e-9)


def test_slices_beside_the_line_of_the_others_are_refused(tmp_path: Path) -> None:
    for number in range(5):
        place = {"ImagePositionPatient": [-10 + 3 * (number == 2), -20, 2.0 * number]}
        _write(tmp_path / f"{number}.dcm", np.zeros((4, 6), np.uint16), 0.0, **place)
    with pytest.raises(DataError, match=r"2\.dcm: 3\.00 mm off the line"):
        open_volume(tmp_path)


@pytest.mark.parametrize(
    "names", ["1.2.840.10008.{}", "1.2.840.10008.{}.dcm", "IM-0001-000{}", "CT.1.2.840.{}", "{}"]
)
def test_dicom_files_are_known_by_their_preamble(tmp_path: Path, names: str) -> None:
    folder = tmp_path / "scan"
    for number in range(6):
        # Every second file has an ending, as after a partial renaming.
        name = names.format(number) if number % 2 else f"{number}.dcm"
        _write(folder / name, np.zeros((4, 6), np.uint16), 2.5 * number)
    for name in ("LOCKFILE", "VERSION", "notes.1", "report.pdf", "README.txt"):
        (folder / name).write_bytes(b"no slices here")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    listing = pydicom.dataset.FileDataset("DICOMDIR", {}, file_meta=meta, preamble=bytes(128))
    listing.FileSetID = "DISC"
    listing.save_as(folder / "DICOMDIR")
    (source,) = find_volumes(folder)
    assert len(source.files) == 6
    with open_volume(source) as volume:
        assert volume.shape == (6, 4, 6)
        assert volume.spacing_mm[0] == 2.5


def _write_segmentation(path: Path, frames: list[tuple[int, float, Array]], **tags: Any) -> None:
    """Segment, height in mm and mask of each frame."""
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    seg = pydicom.dataset.FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    seg.SegmentationType = "BINARY"
    seg.Rows, seg.Columns = frames[0][2].shape
    seg.NumberOfFrames = len(frames)
    seg.SamplesPerPixel = seg.BitsAllocated = seg.BitsStored = 1
    seg.PhotometricInterpretation = "MONOCHROME2"
    seg.HighBit = seg.PixelRepresentation = 0
    facts = []
    for segment, z_mm, _ in frames:
        frame, place, number = pydicom.Dataset(), pydicom.Dataset(), pydicom.Dataset()
        place.ImagePositionPatient = [-10, -20, z_mm]
        number.ReferencedSegmentNumber = segment
        frame.PlanePositionSequence = [place]
        frame.SegmentIdentificationSequence = [number]
        facts.append(frame)
    seg.PerFrameFunctionalGroupsSequence = facts
    masks = np.stack([mask for _, _, mask in frames])
    seg.PixelData = np.packbits(masks.ravel(), bitorder="little").tobytes()
    if len(seg.PixelData) % 2:
        seg.PixelData += b"\0"
    for name, value in tags.items():
        setattr(seg, name, value)
    seg.save_as(path)


def test_a_segmentation_labels_the_slices_that_its_frames_name(tmp_path: Path) -> None:
    stored = _write_series(tmp_path / "p", [4.0, 0.0, 2.0])
    side = stored.shape[1:]
    rng = np.random.default_rng(0)
    first, second = rng.random((2, *side)) < 0.5
    frames = [(2, 4.0, second), (1, 4.0, first), (1, 0.0, first)]
    _write_segmentation(tmp_path / "p_seg.dcm", frames)
    (source,) = find_volumes(tmp_path)
    assert source.name == "p"
    with open_volume(source) as volume:
        labels = open_labels(source, volume, aligned=True)
        expected = np.stack([first, np.zeros(side, bool), np.where(second, 2, first)])
        assert_array_equal(labels.read(0, 3), expected)
        for faults, message in (
            ([(1, 9.0, first)], "is on no slice of"),
            ([(1, 1.0, first[1:])], "is on no slice of"),
            ([(300, 0.0, first)], "300"),
        ):
            _write_segmentation(tmp_path / "p_seg.dcm", faults)
            with pytest.raises(DataError, match=message):
                open_labels(source, volume)
        _write_segmentation(tmp_path / "p_seg.dcm", frames, SegmentationType="FRACTIONAL")
        with pytest.raises(DataError, match="not a binary DICOM segmentation"):
            open_labels(source, volume)
