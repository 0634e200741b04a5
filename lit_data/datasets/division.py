"""Division of the files of a dataset into images and masks, by the names of files and folders."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np

from lit_data.core.errors import DataError, show_path
from lit_data.core.names import (
    IMAGE_WORDS,
    MASK_WORDS,
    compose,
    find_mask_ending,
    find_mask_start,
    is_instance_folder,
    is_mask_folder,
    is_side_folder,
    repeats_masks,
    split_words,
    strip_repeating,
)
from lit_data.images.discovery import find_images, name_below
from lit_data.images.mask_choice import count_values, has_grey_edges, may_be_mask
from lit_data.images.masks import MaskOptions

MaskPlace = Literal["anomaly", "folder", "beside", "none"]

_LEAST_TWINS = 3  # names of files that two folders must share
_MOST_FOLDERS = 32  # folders that are compared by their files
_LOSSLESS = (
    ".png",
    ".bmp",
    ".tif",
    ".tiff",
    ".npy",
)  # types that masks are stored in, the most likely first
_LABELME_MASKS = "SegmentationClassPNG"
_SEPARATOR = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Files of a dataset, divided into images and masks.

    Attributes:
        place: Place of the masks; see `InspectionSet.layout`.
        images: The images, in the order of their names.
        masks: The masks.
        folders: Folders of the masks; empty if masks are beside their images.
        where: Place of the masks, for a message.
    """

    place: MaskPlace
    images: Sequence[Path]
    masks: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    where: str = ""


@dataclass(frozen=True)
class FileDivider:
    """Divider of files by their names.

    Args:
        folder: Folder of the dataset.
        paths: Files of the dataset, in order.
    """

    folder: Path
    paths: Sequence[Path]

    @cached_property
    def folders(self) -> list[Path]:
        """Folders of the files, each once, in order."""
        return list(dict.fromkeys(path.parent for path in self.paths))

    def divide(self) -> Division:
        """Find the masks by the layout of the files."""
        divider = self._leave_out_repeating()
        paths = divider.paths
        mask_folders = {p for p in divider.folders if is_anomaly(self.parts(p / "x"))}
        if mask_folders:
            mask_files = _list_below(paths, mask_folders)
            images = without(paths, mask_files)
            return Division(
                place="anomaly", images=images, masks=mask_files, where="in ground_truth"
            )
        folders = divider._find_folders(is_mask_folder) or find_twin_folders(paths)
        folders = folders or divider._find_folders(is_instance_folder)
        return divider._divide_folders(folders) if folders else divider._divide_beside()

    def divide_named(self, masks: str) -> Division:
        """Take the masks from a folder, or from the folders of that name in all parts of the dataset.

        Args:
            masks: The folder, absolute or below the folder of the dataset.

        Raises:
            DataError: There is no such folder.
        """
        divider = self._leave_out_repeating()
        paths = divider.paths
        folder = (self.folder / masks).absolute()
        if not folder.is_dir():
            folders = divider._find_named(Path(masks).parts)
            if not folders:
                raise DataError(f"{show_path(folder)}: no such folder of masks; check data.masks")
            return divider._divide_folders(folders)
        mask_files = [path for path in paths if path.absolute().is_relative_to(folder)]
        # Without any, the folder is outside the dataset.
        return divider._take(mask_files or find_images(folder).paths, [folder])

    def name(self, path: Path) -> str:
        """Return the path of a file below the folder, with forward slashes, or its own path if it is outside."""
        return name_below(self.folder, path) or str(path)

    def parts(self, path: Path) -> tuple[str, ...]:
        """Return the parts of the path of a file below the folder; none if it is outside."""
        name = name_below(self.folder, path)
        return () if name is None else tuple(name.split("/"))

    def _leave_out_repeating(self) -> "FileDivider":
        """Return a divider of the files without those in folders that repeat others."""
        repeating = set()
        repeated_arrays = set()
        for folder in self.folders:
            if any(map(repeats_masks, self.parts(folder / "x")[:-1])):
                repeating.add(folder)
            # Older exports of LabelMe have arrays in SegmentationClass, and the masks beside it.
            if folder.match("SegmentationClass") and folder.with_name(_LABELME_MASKS).is_dir():
                repeated_arrays.add(folder)
        if not repeating and not repeated_arrays:
            return self
        paths = []
        for path in self.paths:
            is_array = path.suffix == ".npy" and path.parent in repeated_arrays
            if path.parent not in repeating and not is_array:
                paths.append(path)
        return replace(self, paths=paths)

    def _find_folders(self, is_wanted: Callable[[str], bool]) -> set[Path]:
        """Find the folders of masks by their names."""
        mask_folders = set()
        for folder in self.folders:
            parts = self.parts(folder / "x")
            for depth, part in enumerate(parts[:-1], 1):
                if is_wanted(part):
                    mask_folders.add(self.folder.joinpath(*parts[:depth]))
        return mask_folders

    def _find_named(self, names: tuple[str, ...]) -> set[Path]:
        """Find the folders with a name, or with several nested names, in all parts of the dataset."""
        folders = set()
        for folder in self.folders:
            parts = self.parts(folder / "x")[:-1]
            for depth in range(len(names), len(parts) + 1):
                if parts[depth - len(names) : depth] == names:
                    folders.add(self.folder.joinpath(*parts[:depth]))
        return folders

    def _divide_folders(self, folders: Collection[Path]) -> Division:
        beginnings = tuple(f"{folder}/" for folder in folders)  # none is the root
        return self._take(
            [path for path in self.paths if str(path).startswith(beginnings)], sorted(folders)
        )

    def _take(self, masks: Sequence[Path], folders: Sequence[Path]) -> Division:
        """Divide the files, given the masks."""
        where = name_below(self.folder.absolute(), folders[0].absolute()) or str(folders[0])
        images = without(self.paths, masks)
        side_folders = set()
        for parent in self.folders:
            if any(map(is_side_folder, self.parts(parent / "x")[:-1])):
                side_folders.add(parent)
        in_side_folders = _list_below(images, side_folders)
        if len(in_side_folders) < len(images):
            images = without(images, in_side_folders)
        return Division(
            place="folder",
            images=_without_repeating(images, self.paths),
            masks=_without_repeating(masks, masks),
            folders=folders,
            where=f"in {where}",
        )

    def _divide_beside(self) -> Division:
        """Find masks in the folders of their images, by a word in the name or another type of file."""
        words = self._find_words()
        paths = _without_repeating(self.paths, self.paths) if words else self.paths
        masks = [path for path in paths if path in words]
        files_of: dict[tuple[Path, str], list[Path]] = {}
        for path in without(paths, masks):
            files_of.setdefault((path.parent, path.stem), []).append(path)
        for files in files_of.values():
            # Of two files with the same name, the one of a lossless type is the mask.
            if len(files) == 2 and _rank(files[0]) != _rank(files[1]):
                masks.append(min(files, key=_rank))
        images = without(paths, masks)
        is_complete = len(paths) == len(self.paths)
        if not masks or (not images and is_complete):
            return Division(place="none", images=self.paths)
        listed = ", ".join(sorted(set(words.values()))) or "of another type"
        where = f"beside them ({listed})"
        return Division(place="beside", images=images, masks=masks, where=where)

    def _find_words(self) -> dict[Path, str]:
        """Return the word that marks a file as a mask, for each file whose name has one."""
        words = _map_words(self.paths, find_mask_ending) or _map_words(self.paths, find_mask_start)
        if words:
            return words
        if not any(_may_have_image(path.stem) for path in self.paths):
            return {}
        stems = {(path.parent, path.stem) for path in self.paths}
        # There is a folder for each image, with img.png and label.png.
        imaged = {parent for parent, stem in stems if stem.lower() in IMAGE_WORDS}
        for path in self.paths:
            if path.stem.lower() in MASK_WORDS and path.parent in imaged:
                words[path] = path.stem
            elif path.stem.endswith("_m") and (path.parent, path.stem[:-2]) in stems:
                words[path] = "_m"
        return words


def _may_have_image(stem: str) -> bool:
    """Return True if a file with this stem is a mask, provided that its image exists."""
    return stem.endswith("_m") or stem.lower() in MASK_WORDS


def _list_below(paths: Sequence[Path], folders: Collection[Path]) -> list[Path]:
    """List the files in the given folders."""
    return [path for path in paths if path.parent in folders] if folders else []


def _map_words(paths: Sequence[Path], find: Callable[[str], str]) -> dict[Path, str]:
    """Return the word that is found in the stem of each path, without paths that have none."""
    words = {path: find(path.stem) for path in paths}
    return {path: word for path, word in words.items() if word}


def _without_repeating(paths: Sequence[Path], known: Sequence[Path]) -> list[Path]:
    """Remove files whose names show that they are another view of a known file beside them."""
    repeated = {path: strip_repeating(path.stem) for path in paths}
    if not any(repeated.values()):
        return list(paths)
    stems = set[tuple[Path, str]]()
    for path in known:
        if strip_repeating(path.stem) is None:
            stems.update((path.parent, stem) for stem in _list_beginnings(compose(path.stem)))
    remaining = []
    for path in paths:
        stem = repeated[path]
        if stem is None or stems.isdisjoint(((path.parent, stem), (path.parent.parent, stem))):
            remaining.append(path)
    return remaining


def _list_beginnings(stem: str) -> list[str]:
    """List a stem, and the part before each of its words."""
    return [stem, *(stem[: match.start()] for match in _SEPARATOR.finditer(stem))]


def find_twin_folders(paths: Sequence[Path]) -> set[Path]:
    """Find folders of masks: black and white files with the names of those in another folder.

    Args:
        paths: All files of the dataset.
    """
    stems: dict[Path, dict[str, Path]] = {}
    for path in paths:
        stems.setdefault(path.parent, {})[path.stem] = path
    twins: set[Path] = set()
    if len(stems) > _MOST_FOLDERS:
        return twins
    # Each pair in both orders, since either folder may have the masks of the other.
    for one, other in permutations(stems, 2):
        shared = stems[one].keys() & stems[other].keys()
        if one.parent != other.parent or len(shared) < max(_LEAST_TWINS, 0.9 * len(stems[one])):
            continue
        # A few files are enough to decide, and reading all of them takes long.
        step = max(1, len(shared) // _LEAST_TWINS)
        some_stems = sorted(shared)[::step]
        own_files = [stems[one][stem] for stem in some_stems]
        other_files = [stems[other][stem] for stem in some_stems]
        is_mask_folder = all(map(is_black_and_white, own_files))
        if is_mask_folder and not all(map(is_black_and_white, other_files)):
            twins.add(one)
    return twins


def is_black_and_white(path: Path) -> bool:
    """Return True if an image has one channel of up to two values, or is black and white except for gray edges."""
    try:
        counts = count_values(path, MaskOptions())
    except DataError:
        return False
    return counts is not None and bool(np.count_nonzero(counts) <= 2 or has_grey_edges(counts))


def show_masks(division: Division) -> bool:
    """Return True if a few files show that masks have few values or colors, and images do not."""
    masks, images = (_take_some(files) for files in (division.masks, division.images))
    return all(map(may_be_mask, masks)) and not all(map(may_be_mask, images))


def _take_some(paths: Sequence[Path]) -> Sequence[Path]:
    return paths[:: max(1, len(paths) // _LEAST_TWINS)]


def is_anomaly(parts: Sequence[str]) -> bool:
    """Return True if a path is a mask of a dataset for anomaly detection.

    Such paths are ``ground_truth/KIND/NAME`` and ``ground_truth/KIND/NAME/NUMBER``.
    """
    return any("".join(split_words(part)) == "groundtruth" for part in parts[-4:-2])


def without(paths: Sequence[Path], others: Collection[Path]) -> list[Path]:
    """Return paths without the others, in order."""
    left_out = set(others)
    return [path for path in paths if path not in left_out]


def _rank(path: Path) -> int:
    """Return the rank of a file among two with the same stem; 0 is the most likely mask."""
    extension = path.suffix.lower()
    return _LOSSLESS.index(extension) if extension in _LOSSLESS else len(_LOSSLESS)
