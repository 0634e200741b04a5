"""DICOM series: their files, the order of the slices, and their values in Hounsfield units."""

import io
import logging
import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.core.errors import DataError, show_path
from lit_data.core.opening import naming, open_binary, open_filled
from lit_data.core.progress import ordered_map
from lit_data.core.types import Array, Doubles, PathText, Spacing, Triple
from lit_data.wings.volumes.files.hounsfield import StoredScale
from lit_data.wings.volumes.files.volume import FileVolume, Volume, import_medical, wrap_array

GAP_TOLERANCE = 0.02
"""Distances of neighboring slices that differ from the median by a larger fraction are uneven."""
MAX_INFLATED_BYTES = 2**28
"""Maximum inflated size of a deflated file, which has one slice."""
EXTENSIONS = (".dcm", ".dicom", ".ima")
_GREY = "MONOCHROME"
_TILT_DEG = 0.5  # above which the shift of slices exceeds rounding
_READERS = 8  # threads that wait for a network disk or a server

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Facts of one file that are needed to stack the slices."""

    path: str
    size: tuple[int, int]
    spacing_mm: tuple[float, float]
    orientation: tuple[float, ...]
    origin_mm: tuple[float, ...]
    thickness_mm: float
    scale: StoredScale

    @property
    def normal(self) -> Doubles:
        # Direction cosines of a row and of a column of pixels.
        along_row, along_column = np.array(self.orientation).reshape(2, 3)
        return np.cross(along_row, along_column)

    @property
    def height_mm(self) -> float:
        return float(self.normal @ np.array(self.origin_mm))


def is_dicom_name(path: PathText) -> bool:
    """Return True if a file is DICOM by its extension, or by its preamble if it has none.

    The last number of a name such as ``1.2.840.10008`` is not an extension.
    """
    path = Path(path)
    extension = path.suffix.lower()
    if extension and not extension[1:].isdecimal():
        return extension in EXTENSIONS
    try:
        with open_binary(path) as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def group_series(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """Group files by their SeriesInstanceUID, skipping those without pixels (reports).

    Args:
        paths: DICOM files of one folder.

    Returns:
        The files of each series, sorted; the series in the order of their first files.

    Raises:
        DataError: A file cannot be read, or pydicom is not installed.
    """
    series: defaultdict[str, list[str]] = defaultdict(list)
    ordered_paths = sorted(paths)
    heads = ordered_map(_find_series, ordered_paths, _READERS)
    for path, name in zip(ordered_paths, heads, strict=True):
        if name is not None:
            series[name].append(os.fspath(path))
    return [tuple(files) for files in series.values()]


def _find_series(path: Path) -> str | None:
    """Return the SeriesInstanceUID of a file; None without pixels."""
    with naming(path):
        head = _read_head(path, ["SeriesInstanceUID", "Rows"])
        return str(head.get("SeriesInstanceUID", "")) if "Rows" in head else None


def open_dicom(files: Sequence[str], name: str, nan_fill: float | None) -> FileVolume:
    """Open a series as a volume, with slices sorted by position along the normal of their planes.

    Args:
        files: The slices, in any order.
        name: Name for messages.
        nan_fill: See ``FileVolume``.

    Raises:
        DataError: A file cannot be read; the slices differ in size, spacing or direction; slices
            are missing, duplicated or unevenly spaced; a file has several frames or colors.
    """
    slices = sorted(map(_describe, files), key=lambda item: item.height_mm)
    first = slices[0]
    for item in slices[1:]:
        _check_alike(first, item)
    step_mm = _find_step(slices)
    shift_mm = _find_shift(slices, step_mm)
    dtype = np.result_type(*{item.scale.dtype for item in slices})
    if dtype.itemsize > 4:  # NumPy joins int16 and float32 to float64
        dtype = np.dtype(np.float32)
    reader = _SeriesReader(slices, dtype)
    spacing_mm: Spacing = (step_mm, *first.spacing_mm)
    affine = _make_affine(first, spacing_mm, shift_mm)
    return FileVolume(
        name,
        reader,
        StoredScale(reader.dtype),
        spacing_mm=spacing_mm,
        affine=affine,
        nan_fill=nan_fill,
    )


def open_segmentation(path: str, volume: Volume) -> Volume:
    """Open a DICOM segmentation (SEG) as labels on the grid of its volume, numbered by segment.

    Each frame shows one segment in one slice, given by its position. If segments overlap, the
    highest number wins.

    Args:
        path: The file.
        volume: The series that it was drawn on.

    Raises:
        DataError: The file is not a binary segmentation, or a frame matches no slice.
    """
    with naming(path):
        dataset = _read_dataset(path)
        if dataset.get("SegmentationType") != "BINARY":
            raise DataError("not a binary DICOM segmentation; export one, or a NIfTI file")
        if volume.affine is None:
            raise DataError("its series has no ImagePositionPatient; the slices are unknown")
        # One frame at a time: all of them would take a byte for each voxel and segment.
        frames = import_medical("pydicom").pixels.iter_pixels(dataset)
        to_voxels = np.linalg.inv(volume.affine)
        labels = np.zeros(volume.shape, np.uint8)
        for frame, facts in zip(frames, dataset.PerFrameFunctionalGroupsSequence, strict=True):
            position_mm = facts.PlanePositionSequence[0].ImagePositionPatient
            # DICOM's own axes are left, posterior, superior.
            corner = to_voxels @ [-position_mm[0], -position_mm[1], position_mm[2], 1]
            # Position of the first pixel, in voxels of the series: (0, 0, number of the slice).
            x, y, z = corner[:3].tolist()
            slice_number = round(z)
            apart = max(abs(x), abs(y), abs(z - slice_number))
            if frame.shape != volume.shape[1:] or apart > 0.5 or not 0 <= z < len(labels):
                raise DataError(
                    f"a frame of {frame.shape} px at voxel ({x:.1f}, {y:.1f}, {z:.1f}) "
                    f"is on no slice of {show_path(volume.name)}, {volume.shape[1:]} px"
                )
            segment = int(facts.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
            plane = labels[slice_number]
            # A frame contains 0 and 1; NumPy refuses the product if the segment does not fit into a
            # byte.
            np.maximum(plane, frame * np.uint8(segment), out=plane)
    return wrap_array(labels, name=path, spacing_mm=volume.spacing_mm, affine=volume.affine)


class _SeriesReader:
    """Reader of slices in Hounsfield units, because each file has its own slope and intercept."""

    def __init__(self, slices: Sequence[_Slice], dtype: "np.dtype[Any]") -> None:
        # Slopes differ between slices of PET, for example, so each is scaled by itself.
        self._slices, self.dtype = slices, dtype
        self.shape: Triple = (len(slices), *slices[0].size)

    def read(self, begin: int, end: int) -> Array:
        slab = np.empty((end - begin, *self.shape[1:]), self.dtype)
        for row, item in zip(slab, self._slices[begin:end], strict=True):
            with naming(item.path):
                row[:] = item.scale.apply(_read_pixels(item))
        return slab

    def close(self) -> None:
        """Do nothing, because no file stays open."""


def _describe(path: str) -> _Slice:
    with naming(path):
        head = _read_head(path)
        is_grey = str(head.get("PhotometricInterpretation", _GREY)).startswith(_GREY)
        has_frames = int(head.get("NumberOfFrames", 1)) != 1
        if has_frames or int(head.get("SamplesPerPixel", 1)) != 1 or not is_grey:
            raise DataError(
                "several frames or colors in one file; "
                "export one gray frame a file, or a NIfTI file"
            )
        needed = ("Rows", "Columns", "PixelSpacing", "BitsAllocated")
        missing = [name for name in needed if head.get(name) is None]
        if missing:
            raise DataError(f"without {', '.join(missing)}; such a file is not a slice of a volume")
        # The distance of rows comes first.
        row_mm, column_mm = map(float, head.PixelSpacing)
        orientation = head.get("ImageOrientationPatient") or (1, 0, 0, 0, 1, 0)
        origin_mm = head.get("ImagePositionPatient") or (np.nan, np.nan, np.nan)
        thickness_mm = head.get("SpacingBetweenSlices") or head.get("SliceThickness") or 1
        return _Slice(
            path=path,
            size=(int(head.Rows), int(head.Columns)),
            spacing_mm=(row_mm, column_mm),
            orientation=tuple(map(float, orientation)),
            origin_mm=tuple(map(float, origin_mm)),
            thickness_mm=float(thickness_mm),
            scale=_read_scale(head),
        )


def _read_scale(head: Any) -> StoredScale:  # noqa: ANN401 - pydicom's data set
    kind = "i" if int(head.get("PixelRepresentation", 0)) else "u"
    return StoredScale(
        stored=np.dtype(f"{kind}{int(head.BitsAllocated) // 8}"),
        slope=float(head.get("RescaleSlope", 1)),
        intercept=float(head.get("RescaleIntercept", 0)),
        bits=int(head.get("BitsStored", head.BitsAllocated)),
    )


def _check_alike(first: _Slice, other: _Slice) -> None:
    for what in ("size", "spacing_mm", "orientation"):
        one, two = getattr(first, what), getattr(other, what)
        if not np.allclose(one, two, atol=1e-3):
            raise DataError(
                f"{show_path(other.path)}: {what} {two}, but {show_path(first.path)} has {one}; "
                "a volume needs slices of one kind; put the others into another folder"
            )


def _find_step(slices: Sequence[_Slice]) -> float:
    """Return the distance of neighboring slices in mm.

    Raises:
        DataError: The distance varies, or is unknown.
    """
    if len(slices) == 1:
        return abs(slices[0].thickness_mm)
    heights_mm = np.array([item.height_mm for item in slices])
    if not np.isfinite(heights_mm).all():
        bad = slices[int((~np.isfinite(heights_mm)).argmax())].path
        raise DataError(
            f"{show_path(bad)}: no ImagePositionPatient; the order of the slices is unknown"
        )
    gaps_mm = np.diff(heights_mm)
    step_mm = float(np.median(gaps_mm))
    uneven = np.flatnonzero(np.abs(gaps_mm - step_mm) > GAP_TOLERANCE * step_mm)
    if step_mm > 0 and len(uneven) == 0:
        return step_mm
    # With a step of 0 most slices are duplicated, and no gap is a reference for the others.
    row = int(np.argmin(gaps_mm)) if step_mm <= 0 else int(uneven[0])
    gap_mm = float(gaps_mm[row])
    if gap_mm < 0.01:
        fault = "doubled"
    elif gap_mm > 1.5 * step_mm:
        fault = "missing"
    else:
        fault = "unevenly spaced"
    raise DataError(
        f"slices are {fault}: {show_path(slices[row].path)} and "
        f"{show_path(slices[row + 1].path)} are {gap_mm:.3f} mm apart, but others {step_mm:.3f} "
        f"mm ({max(1, len(uneven))} such places); complete the series, or put one acquisition "
        "into a folder"
    )


def _find_shift(slices: Sequence[_Slice], step_mm: float) -> Doubles:
    """Return how far each slice is shifted from the one before, (x, y, z) mm within its plane.

    A scanner with a tilted gantry shifts slices along the table instead of along their normal.

    Raises:
        DataError: The shift varies.
    """
    origins_mm = np.array([item.origin_mm for item in slices])
    if len(slices) == 1:
        return np.zeros(3)
    numbers = np.arange(len(slices))[:, None]
    shift_mm: Doubles = (origins_mm[-1] - origins_mm[0]) / (len(slices) - 1)
    apart_mm = np.linalg.norm(origins_mm - origins_mm[0] - numbers * shift_mm, axis=1)
    worst = int(apart_mm.argmax())
    # Uneven distances along the normal were refused before.
    if apart_mm[worst] > GAP_TOLERANCE * step_mm + 0.5 * max(slices[0].spacing_mm):
        raise DataError(
            f"{show_path(slices[worst].path)}: {apart_mm[worst]:.2f} mm off the line through the "
            "first pixels of the others; a volume needs slices on one grid: resample the series"
        )
    shift_mm -= step_mm * slices[0].normal
    tilt_deg = float(np.degrees(np.arctan2(np.linalg.norm(shift_mm), step_mm)))
    if tilt_deg > _TILT_DEG:
        _note_tilt(str(Path(slices[0].path).parent), round(tilt_deg, 1))
    return shift_mm


@lru_cache(maxsize=256)  # once for each series, which is opened several times
def _note_tilt(folder: str, tilt_deg: float) -> None:
    log.warning(
        "%s: slices are shifted along a line %g degrees from their normal, as by a tilted "
        "gantry: voxels stay sheared as they are, and results get the same affine",
        show_path(folder),
        tilt_deg,
    )


def _make_affine(first: _Slice, spacing_mm: Spacing, shift_mm: Doubles) -> Array | None:
    """Return the affine [4, 4] to right, anterior, superior; None if there is no origin."""
    if not np.isfinite(first.origin_mm).all():
        return None
    along_row, along_column = np.array(first.orientation).reshape(2, 3)
    affine = np.eye(4)
    columns = (
        along_row * spacing_mm[2],
        along_column * spacing_mm[1],
        first.normal * spacing_mm[0] + shift_mm,
        first.origin_mm,
    )
    # DICOM's own axes are left, posterior, superior.
    affine[:3] = np.stack(columns, axis=1) * [[-1], [-1], [1]]
    return affine


class _CheckedReader(io.BufferedReader):
    """A DICOM file that checks its remainder before returning it.

    pydicom reads the whole remainder at once only if it is deflated, and inflates it in one piece.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Read; return the remainder only if it does not inflate to more than a slice can have.

        Raises:
            DataError: It inflates to more.
        """
        packed = super().read(size)
        if size is None or size < 0:
            _check_inflated(packed)
        return packed


def _check_inflated(packed: bytes) -> None:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    size_bytes, tail = 0, packed
    while tail and not inflater.eof:
        size_bytes += len(inflater.decompress(tail, 2**20))
        tail = inflater.unconsumed_tail
        if size_bytes > MAX_INFLATED_BYTES:
            raise DataError(
                f"{len(packed)} deflated bytes inflate to more than {MAX_INFLATED_BYTES}; that "
                "is not a slice"
            )


def _read_head(path: PathText, tags: list[str] | None = None) -> Any:  # noqa: ANN401 - pydicom's data set
    return _read_dataset(path, stop_before_pixels=True, specific_tags=tags)


def _read_dataset(path: PathText, **options: Any) -> Any:  # noqa: ANN401
    with open_filled(path) as file, _CheckedReader(file) as stream:  # type: ignore[arg-type]
        pydicom = import_medical("pydicom")
        try:
            return pydicom.dcmread(stream, **options)
        except pydicom.errors.InvalidDicomError as error:
            raise DataError(
                "not a DICOM file, despite its name: export it again, or remove it"
            ) from error


def _read_pixels(item: _Slice) -> Array:
    dataset = _read_dataset(item.path)
    try:
        pixels: Array = dataset.pixel_array
    # These are pydicom's errors if it has no decoder.
    except (RuntimeError, NotImplementedError, ImportError) as error:
        syntax = dataset.file_meta.TransferSyntaxUID
        if not syntax.is_compressed:
            raise
        if str(error).startswith("Unable to decode"):  # by the installed decoders
            raise DataError(
                f"damaged: its pixels are not {syntax.name}; export it again"
            ) from error
        raise DataError(
            f"compressed as {syntax.name}; "
            "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg to read it"
        ) from error
    if pixels.shape != item.size or pixels.dtype.itemsize != item.scale.stored.itemsize:
        raise DataError(
            f"pixels {pixels.dtype} {pixels.shape}, but its header states {item.scale.stored} "
            f"{item.size}"
        )
    return pixels
