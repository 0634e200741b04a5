"""Volumes of a folder: one for each file or DICOM series, with their labels, and how to open one."""

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from lit_data.core.errors import DataError, Problems, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.core.opening import check_regular, naming, nearest_existing
from lit_data.core.types import PathText
from lit_data.images.discovery import describe_outside, is_hidden, is_inside, name_below
from lit_data.wings.volumes.files.dicom import (
    EXTENSIONS,
    group_series,
    is_dicom_name,
    open_dicom,
    open_segmentation,
)
from lit_data.wings.volumes.files.labels import pair_labels, say_labels
from lit_data.wings.volumes.files.single_files import has_spacing, open_nifti, open_npy, open_npz
from lit_data.wings.volumes.files.volume import Volume
from lit_inspect.counts import counted

Kind = Literal["npy", "npz", "nifti", "dicom"]
SUFFIXES: dict[str, Kind] = {
    ".npy": "npy",
    ".npz": "npz",
    ".nii": "nifti",
    ".nii.gz": "nifti",
}
_ENDINGS = (*reversed(SUFFIXES), *EXTENSIONS)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """Source of a volume.

    Args:
        name: Path below the searched folder, without the extension.
        path: The file, or the folder of a DICOM series; the first file of a series that shares its
            folder.
        kind: Format of the files.
        files: All files of the volume: one, or the slices of a DICOM series.
        labels: File of the labels; None without labels.
    """

    name: str
    path: str
    kind: Kind
    files: tuple[str, ...]
    labels: str | None = None

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of the volume and of its labels."""
        return self.files if self.labels is None else (*self.files, self.labels)

    @property
    def has_spacing(self) -> bool:
        """False if its file does not state the spacing of its voxels, which then count as 1 mm."""
        return self.kind not in ("npy", "npz") or (self.kind == "npz" and has_spacing(self.path))


def find_volumes(
    root: PathText, bad_names: Problems | None = None, leftovers: Leftovers | None = None
) -> list[VolumeSource]:
    """List the volumes of a folder and its subfolders, or the one volume of a file.

    ``.npy``, ``.npz``, ``.nii`` and ``.nii.gz`` files are volumes, and so is each series of the
    DICOM files of a folder (``.dcm``, ``.ima``, no extension, or a UID as name). ``NAME_labels.*``,
    ``NAME_seg.*`` and ``NAME_mask.*`` are the labels of ``NAME`` in the same folder, and
    ``labelsTr/NAME.*`` those of ``imagesTr/NAME.*`` or ``imagesTr/NAME_0000.*``; DICOM files with
    such names are segmentations (SEG). Hidden files and all others are skipped.

    Args:
        root: The folder or file.
        bad_names: Collects bad names, so that they can be listed with the faults of other files;
            their volumes are skipped. Without it, bad names are an error.
        leftovers: Collects files of other types.

    Returns:
        Volumes sorted by name. A series is named by its folder, and also by its first file if the
        folder has several series.

    Raises:
        DataError: The path does not exist or has no volume, two volumes have one name, labels have
            no volume, a link leads outside, or DICOM files cannot be read.
    """
    root = Path(root)
    if root.is_file():
        return [_make_source(root.parent, root.name)]
    if not root.is_dir():
        raise DataError(
            f"{show_path(root)}: no such file or folder; {show_path(nearest_existing(root))} exists; check data.root"
        )
    problems = Problems()
    sources: dict[str, VolumeSource] = {}
    unread: dict[str, list[str]] = {}
    for folder, names in _walk(root, problems):
        for name in names:
            extension = os.path.splitext(name)[1].lower()  # noqa: PTH122 - there may be many
            if _suffix(name) not in SUFFIXES:
                unread.setdefault(extension, []).append(name_below(root, folder / name) or name)
        for source in _list_folder(root, folder, names, problems):
            # a.npy and a.nii would be one volume of two files.
            first = sources.setdefault(source.name, source)
            if first is not source:
                problems.add(source.path, f"the same name as {show_path(first.path)}")
    leftovers = leftovers or Leftovers()
    leftovers.take(root, unread, (*SUFFIXES, *EXTENSIONS))
    volumes = _join_labels(root, sources, problems)
    # Targets of links that lead outside are not read.
    bad_paths = set(problems.skipped)
    volumes = [volume for volume in volumes if bad_paths.isdisjoint(volume.all_files)]
    if bad_names is None or not volumes:
        problems.raise_if_any(f"{counted(len(problems), 'bad name')} under {show_path(root)}")
    else:
        bad_names.extend(problems)
    if not volumes:
        raise DataError(
            f"{show_path(root)}: no volume; .npy, .npz, .nii, .nii.gz and DICOM files are read"
            f"{leftovers.quote()}"
        )
    return sorted(volumes, key=lambda source: source.name)


def guess_kind(path: PathText) -> Kind:
    """Return the kind of a file from its name.

    Raises:
        DataError: It is not the name of a volume.
    """
    kind = SUFFIXES.get(_suffix(os.fspath(path)))
    if kind is None and is_dicom_name(path):
        return "dicom"
    if kind is None:
        raise DataError(
            f"{show_path(path)}: not a volume; {', '.join(SUFFIXES)} and DICOM files are read"
        )
    return kind


def _walk(root: Path, problems: Problems) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder with the names of its files; links that lead outside are problems."""
    real_root = os.path.realpath(root)
    for folder, folders, names in os.walk(root):
        # os.walk continues with what is left in its own list, in this order.
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        files = sorted(name for name in names if not is_hidden(name))
        for name in [*folders, *files]:
            path = Path(folder) / name
            if path.is_symlink():
                target = os.path.realpath(path)
                if not is_inside(target, real_root):
                    problems.add(path, describe_outside(target))
        yield Path(folder), files


def _list_folder(
    root: Path, folder: Path, names: Iterable[str], problems: Problems
) -> Iterator[VolumeSource]:
    """Yield the volumes of one folder, including labels."""
    dicom: list[Path] = []
    for name in names:
        path = folder / name
        try:
            if _suffix(name) in SUFFIXES:
                check_regular(path)
                yield _make_source(root, path.relative_to(root).as_posix())
            elif is_dicom_name(path) and say_labels(_stem(name)):
                check_regular(path)  # a segmentation, which belongs to no series of slices
                relative = path.relative_to(root).as_posix()
                yield VolumeSource(_stem(relative), os.fspath(path), "dicom", (os.fspath(path),))
            elif is_dicom_name(path):
                dicom.append(path)
        except DataError as error:
            problems.add(path, str(error))
    try:
        series = group_series(dicom) if dicom else []
    except DataError as error:
        problems.add(folder, str(error))
        return
    base = "" if folder == root else folder.relative_to(root).as_posix()
    if len(series) == 1:
        name = base or root.resolve().name
        yield VolumeSource(name, os.fspath(folder), "dicom", series[0])
        return
    for files in series:
        name = f"{base}/{_stem(Path(files[0]).name)}".lstrip("/")
        yield VolumeSource(name, files[0], "dicom", files)


def _make_source(root: Path, relative: str) -> VolumeSource:
    path = os.fspath(root / relative)
    kind = guess_kind(path)
    return VolumeSource(_stem(relative), path, kind, (path,))


def _join_labels(
    root: Path, sources: Mapping[str, VolumeSource], problems: Problems
) -> list[VolumeSource]:
    """Return the volumes with their labels; labels alone are not volumes."""
    source_of = {Path(source.path): source for source in sources.values()}
    labels = pair_labels(root, list(source_of), lambda path: _stem(path.name), problems)
    volumes = []
    for path, label_path in labels.items():
        label_file = None if label_path is None else os.fspath(label_path)
        volumes.append(replace(source_of[path], labels=label_file))
    return volumes


def _suffix(name: str) -> str:
    """Return the extension of a volume; empty for a name such as ``1.2.840``."""
    low = name.lower()
    return next((ending for ending in _ENDINGS if low.endswith(ending)), "")


def _stem(name: str) -> str:
    return name[: len(name) - len(_suffix(name))]


def open_volume(
    source: VolumeSource | str | os.PathLike[str],
    *,
    nan_fill: float | None = None,
) -> Volume:
    """Open a volume for reading slab by slab; close it, or use it in a ``with`` block.

    Args:
        source: A result of ``find_volumes``, or the path of a file or of the folder of one DICOM
            series.
        nan_fill: Replaces NaN and infinite voxels; None makes them an error.

    Raises:
        DataError: The volume cannot be read; the message says why and what to do.
        ConfigError: The library that reads it is not installed.
    """
    if not isinstance(source, VolumeSource):
        source = _find_one(source)
    with naming(source.path):
        if source.kind == "dicom":
            return open_dicom(source.files, source.path, nan_fill)
        if source.kind == "nifti":
            return open_nifti(source.files[0], nan_fill)
        if source.kind == "npy":
            return open_npy(source.files[0], nan_fill)
        return open_npz(source.files[0], nan_fill)


def open_labels(source: VolumeSource, volume: Volume, *, aligned: bool = False) -> Volume | None:
    """Open the labels beside a volume.

    Args:
        source: Source of the volume.
        volume: The opened volume.
        aligned: Refuse labels whose header gives another position, instead of warning.

    Returns:
        The labels, of the shape of the volume; None if there are none.

    Raises:
        DataError: The labels cannot be read, have another shape, or another position.
    """
    if source.labels is None:
        return None
    kind = guess_kind(source.labels)
    if kind == "dicom":
        return open_segmentation(source.labels, volume)
    labels = open_volume(VolumeSource(source.name, source.labels, kind, (source.labels,)))
    if labels.shape != volume.shape:
        labels.close()
        with naming(source.labels):
            check_same_shape(labels, volume)
    if not _lie_alike(labels, volume):
        if aligned:
            labels.close()
            raise DataError(
                f"{show_path(source.labels)}: the affine of its header differs from that of its "
                "volume by more than half a voxel; save both on one grid"
            )
        log.warning(
            "%s: its header gives another position than that of its volume; are its axes rotated?",
            show_path(source.labels),
        )
    return labels


def check_same_shape(labels: Volume, volume: Volume) -> None:
    """Refuse labels whose shape differs from that of their volume.

    Raises:
        DataError: The shapes differ.
    """
    if labels.shape != volume.shape:
        turned = " (turned?)" if sorted(labels.shape) == sorted(volume.shape) else ""
        raise DataError(
            f"labels of shape {labels.shape}{turned}, "
            f"but {show_path(volume.name)} has {volume.shape}"
        )


def _lie_alike(labels: Volume, volume: Volume) -> bool:
    """Return True if the corners of labels and volume are within half a voxel of each other.

    It also returns True if the position of one of them is unknown.
    """
    if labels.affine is None or volume.affine is None:
        return True
    z, y, x = (length - 1 for length in volume.shape)
    corners = np.array([(*corner, 1) for corner in itertools.product((0, x), (0, y), (0, z))])
    apart_mm = np.linalg.norm(corners @ (labels.affine - volume.affine).T, axis=1)
    return bool(apart_mm.max() <= 0.5 * max(volume.spacing_mm))


def _find_one(path: PathText) -> VolumeSource:
    sources = find_volumes(path)
    if len(sources) != 1:
        raise DataError(
            f"{show_path(path)}: {len(sources)} volumes; use find_volumes and open each"
        )
    return sources[0]
