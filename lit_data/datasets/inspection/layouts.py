"""Finding single images and their masks, in the ways in which people store them.

A mask belongs to the image of the same stem, with or without an ending such as ``_mask``, and
numbers with or without leading zeros. An image without a mask shows no defect where others have
one.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_data.errors import DataError, Problems, show_path
from lit_data.io.discovery import MATLAB, MATLAB_CURE, FolderWalk, name_below
from lit_data.io.images.mask_choice import count_values, has_grey_edges
from lit_data.io.images.masks import MaskOptions
from lit_data.io.leftovers import Leftovers

log = logging.getLogger(__name__)

Layout = Literal["anomaly", "folder", "beside", "none", "coco", "labelme", "csv", "yolo", "cvat"]

MASK_FOLDERS = re.compile(
    r"((train(ing)?|val(id(ation)?)?|test(ing)?|images?|defects?|binary|pixel)[_-]?)?"
    r"(masks?|gts?|ground[_-]?truths?|labels?|annotations?|annots?|seg(mentations?)?)"
    r"([_-]?(images?|imgs?|png|files?))?|SegmentationClass(PNG)?",
    re.IGNORECASE,
)
_OTHER_FOLDERS = re.compile(
    r"SegmentationObject(PNG)?|Segmentation(Class|Object)(Npy|Visualization)|Visualization"
)
"""Of VOC and LabelMe: what is in them says again what the masks say."""
_IMAGE_FOLDERS = re.compile(
    r"((train(ing)?|val(id(ation)?)?|test(ing)?)[_-])?(images?|imgs?|JPEGImages|pictures?|photos?|data)",
    re.IGNORECASE,
)
_ENDING = re.compile(
    r"[_.-](masks?|gt|label|labels|seg|segmentation|ground_?truth|anno|annotation)$", re.IGNORECASE
)
_SPLIT = re.compile(r"(train|val|test)(?:id|idation|ing)?", re.IGNORECASE)
_GOOD = re.compile(r".*(^|[_-])(good|ok|normal|free|clean|no_?defects?|pass)$", re.IGNORECASE)
_MOST_NAMED = 20
_LEAST_TWINS = 3  # files that two folders share the names of
_MOST_FOLDERS = 32  # that are compared by their files
_LOSSLESS = (
    ".png",
    ".bmp",
    ".tif",
    ".tiff",
    ".npy",
)  # what masks are stored in, the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionSet:
    """The images of a set.

    Attributes:
        layout: `anomaly` for ``train/good``, ``test/KIND`` and ``ground_truth/KIND``, `folder` for
            masks in a folder of their own, `beside` for masks beside their images, `none` without
            masks, and the kinds of annotations.
        images: In the order of their names.
        masks: For each image its mask, or None.
        kinds: For each image the kind of its defect, or ``good``; the first folder of its path
            where that tells.
        where: Where the masks lie, for a message.
        bad: Images that are to be left out.
        parts: For masks that are several files, such as those of MVTec LOCO: for the first all of
            them.
        excluded: Files that were to be left out, which annotations may still name.
        boxes: File with [n, 6] (image, class from 1 or 255, left, top, right, bottom) px of all
            objects, where annotations tell objects apart.
    """

    layout: Layout
    images: tuple[Path, ...]
    masks: tuple[Path | None, ...]
    kinds: tuple[str, ...]
    where: str = ""
    bad: frozenset[Path] = frozenset()
    parts: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)
    excluded: tuple[Path, ...] = ()
    boxes: Path | None = None

    def describe(self) -> str:
        """Return counts of images and masks in one line."""
        counts = Counter(self.kinds)
        kinds = f" ({describe_counts(counts, 'no folder')})" if len(counts) > 1 else ""
        if self.layout == "none":
            return f"{len(self.images)} images without masks{kinds}"
        line = f"{len(self.images)} images, masks {self.where}"
        missing_count = self.masks.count(None)
        if missing_count:
            line += f", {missing_count} images have none, which counts as no defect"
        return line + kinds


def describe_counts(counts: Mapping[str, int], nameless: str = "") -> str:
    """Return counts as ``dent 3, good 120``; of many names the first ones."""
    parts = [f"{name or nameless} {count}" for name, count in sorted(counts.items())]
    line = ", ".join(parts[:_MOST_NAMED])
    hidden_count = len(parts) - _MOST_NAMED
    return f"{line} and {hidden_count} more" if hidden_count > 0 else line


def find_inspection_set(
    folder: Path,
    masks: str | None = None,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> InspectionSet:
    """Find the images of a folder and the mask of each.

    Args:
        folder: Of the set.
        masks: Folder of the masks, absolute or below that one; None looks for them.
        patterns: Globs of the images.
        exclude: Globs of files that are left out; masks of such images are left out too.
        leftovers: Takes what is there and not used.

    Raises:
        DataError: There are no images; or a mask has no image, or an image several masks: all of
            them are listed.
    """
    paths, excluded, matlab_count = _list_files(folder, patterns, exclude, leftovers)
    image_set = _Pairing(folder, paths, excluded).pair(masks)
    if matlab_count and image_set.layout == "none":
        log.warning("%s: %d files of MATLAB; %s", show_path(folder), matlab_count, MATLAB_CURE)
    return replace(image_set, excluded=tuple(excluded))


def leave_out_stray(folder: Path, image_set: InspectionSet) -> InspectionSet:
    """Leave out the one picture that lies on top of folders of kinds, such as a preview; log it.

    Args:
        folder: Of the set.
        image_set: Its images; with masks, or with one kind alone, it is returned as it is.
    """
    on_top = [number for number, path in enumerate(image_set.images) if path.parent == folder]
    kinds = set(image_set.kinds) - {""}
    if image_set.layout != "none" or len(on_top) != 1 or len(kinds) < 2:
        return image_set
    stray = on_top[0]
    log.warning(
        "%s is left out: it lies beside the folders of kinds; move it into one of them if it belongs",
        show_path(image_set.images[stray]),
    )

    def leave_out(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:stray], *values[stray + 1 :])

    return replace(
        image_set,
        images=leave_out(image_set.images),
        masks=leave_out(image_set.masks),
        kinds=leave_out(image_set.kinds),
    )


def find_twin_folders(paths: Sequence[Path]) -> set[Path]:
    """Find folders of black and white files with the names of those of another folder: masks.

    Args:
        paths: All files of the set.
    """
    stems: dict[Path, dict[str, Path]] = {}
    for path in paths:
        stems.setdefault(path.parent, {})[path.stem] = path
    twins: set[Path] = set()
    if len(stems) > _MOST_FOLDERS:
        return twins
    # Each pair both ways: either folder may hold the masks of the other.
    for one, other in permutations(stems, 2):
        shared = stems[one].keys() & stems[other].keys()
        if one.parent != other.parent or len(shared) < max(_LEAST_TWINS, 0.9 * len(stems[one])):
            continue
        # A few files are enough to tell, and reading all of them takes long.
        step = max(1, len(shared) // _LEAST_TWINS)
        some_stems = sorted(shared)[::step]
        own_files = [stems[one][stem] for stem in some_stems]
        other_files = [stems[other][stem] for stem in some_stems]
        is_mask_folder = all(map(is_black_and_white, own_files))
        if is_mask_folder and not all(map(is_black_and_white, other_files)):
            twins.add(one)
    return twins


def is_black_and_white(path: Path) -> bool:
    """Return True if an image has up to two values in one channel, or grey edges between black and white alone."""
    try:
        counts = count_values(path, MaskOptions())
    except DataError:
        return False
    return counts is not None and bool(np.count_nonzero(counts) <= 2 or has_grey_edges(counts))


def is_anomaly(parts: Sequence[str]) -> bool:
    """Return True if a path is a mask of a set for anomaly detection.

    Such are ``ground_truth/KIND/NAME`` and ``ground_truth/KIND/NAME/NUMBER``.
    """
    names = [part.lower().replace("_", "") for part in parts[-4:-2]]
    return "groundtruth" in names


def _list_files(
    folder: Path,
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> tuple[list[Path], list[Path], int]:
    """List the files, and those that are excluded; count those of MATLAB, which may be masks."""
    if not folder.is_dir():
        fault = "not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{show_path(folder)}: {fault}")
    walk = FolderWalk(folder, patterns, exclude)
    names = sorted(walk.run())
    walk.finish(names, leftovers)
    excluded = [folder / name for name in sorted(walk.excluded)]
    return [folder / name for name in names], excluded, walk.ignored[MATLAB]


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Pairing of images and masks.

    Args:
        folder: Of the set.
        paths: Its files.
        excluded: Files that were to be left out, whose masks are no fault.
    """

    folder: Path
    paths: Sequence[Path]
    excluded: Sequence[Path]

    def parts(self, path: Path) -> tuple[str, ...]:
        """Return names of the folders on the way to a file, and its own; none where it lies elsewhere."""
        name = name_below(self.folder, path)
        return () if name is None else tuple(name.split("/"))

    def pair(self, masks: str | None) -> InspectionSet:
        """Pair in the layout that the files are in, or with the masks of a folder."""
        if masks is not None:
            return self._pair_folder((self.folder / masks).absolute())
        # Files in folders that say the same again are neither images nor masks.
        paths = [path for path in self.paths if not self._lies_in_other_folder(path)]
        pairing = replace(self, paths=paths)
        if any(is_anomaly(self.parts(path)) for path in paths):
            return pairing._pair_anomaly()
        mask_folders = pairing._find_mask_folders() or find_twin_folders(paths)
        if mask_folders:
            beginnings = tuple(
                f"{mask_folder}/" for mask_folder in mask_folders
            )  # none is the root
            mask_files = [path for path in paths if str(path).startswith(beginnings)]
            return pairing._pair(_without(paths, mask_files), mask_files, min(mask_folders))
        return pairing._pair_beside()

    def _lies_in_other_folder(self, path: Path) -> bool:
        if any(map(_OTHER_FOLDERS.fullmatch, self.parts(path)[:-1])):
            return True
        # Older exports of LabelMe have arrays in SegmentationClass, and the masks beside it.
        masks = path.parent.with_name("SegmentationClassPNG")
        return path.match("SegmentationClass/*.npy") and masks.is_dir()

    def _find_mask_folders(self) -> set[Path]:
        """Find the folders whose names say that they hold masks."""
        mask_folders = set()
        for path in self.paths:
            parts = self.parts(path)
            for depth, part in enumerate(parts[:-1], 1):
                if MASK_FOLDERS.fullmatch(part):
                    mask_folders.add(self.folder.joinpath(*parts[:depth]))
        return mask_folders

    def _pair_anomaly(self) -> InspectionSet:
        """Pair the layout ``train/good``, ``test/KIND`` and ``ground_truth/KIND``.

        It lies below the folder, or below one for each product.
        """
        mask_files = [path for path in self.paths if is_anomaly(self.parts(path))]
        images = _without(self.paths, mask_files)
        # For an image with a folder of masks that folder, else the mask itself: its mask files.
        parts_of: dict[Path, list[Path]] = {}
        for path in mask_files:
            has_folder = is_anomaly(self.parts(path)[:-1])
            parts_of.setdefault(path.parent if has_folder else path, []).append(path)
        owner_of = {parts[0]: owner for owner, parts in parts_of.items()}

        def key(path: Path) -> tuple[str, ...]:
            owner = owner_of.get(path, path)
            parts = self.parts(owner)
            # PRODUCT..., test or ground_truth, KIND, NAME
            return (*parts[:-3], *parts[-2:-1], plain_stem(owner.stem))

        test_images = [path for path in images if "train" not in self.parts(path)[:-1]]
        mask_of = self._match(test_images, list(owner_of), key)
        kinds = []
        for path in images:
            name = path.parent.name
            kinds.append("good" if _GOOD.fullmatch(name) else name)
        several = {parts[0]: tuple(parts) for owner, parts in parts_of.items() if owner != parts[0]}
        return InspectionSet(
            layout="anomaly",
            images=tuple(images),
            masks=tuple(mask_of.get(path) for path in images),
            kinds=tuple(kinds),
            where="in ground_truth",
            parts=several,
        )

    def _pair_folder(self, masks: Path) -> InspectionSet:
        if not masks.is_dir():
            raise DataError(f"{show_path(masks)}: no such folder of masks; check data.masks")
        mask_files = [path for path in self.paths if path.absolute().is_relative_to(masks)]
        images = _without(self.paths, mask_files)
        if not mask_files:  # the folder lies elsewhere
            mask_files = _list_files(masks, ("**/*",))[0]
        return self._pair(images, mask_files, masks)

    def _pair(self, images: Sequence[Path], masks: Sequence[Path], where: Path) -> InspectionSet:
        """Pair masks of folders: by the stem where stems are unique, else by the folders too."""
        if not images:
            raise DataError(
                f"{show_path(self.folder)}: no images but the masks in {show_path(where)}; "
                "check data.root"
            )
        stems = Counter(plain_stem(path.stem) for path in images)
        # Numbers often begin anew in each folder: folders then tell images apart.
        is_unique = max(stems.values()) == 1

        def key(path: Path) -> tuple[str, ...]:
            if is_unique:
                return (plain_stem(path.stem),)
            parts = []
            for part in self.parts(path)[:-1]:
                if not MASK_FOLDERS.fullmatch(part) and not _IMAGE_FOLDERS.fullmatch(part):
                    parts.append(part)
            return (*parts, plain_stem(path.stem))

        name = name_below(self.folder, where) or str(where)
        return self._make("folder", images, self._match(images, masks, key), f"in {name}")

    def _pair_beside(self) -> InspectionSet:
        """Pair masks in the folders of their images: by an ending of the name, or another type."""
        endings = set()
        marked = []
        for path in self.paths:
            match = _ENDING.search(path.stem)
            if match:
                endings.add(match[0].lower())
                marked.append(path)
        unmarked = _without(self.paths, marked)
        files_of: dict[tuple[Path, str], list[Path]] = {}
        for path in unmarked:
            files_of.setdefault((path.parent, path.stem), []).append(path)
        masks = list(marked)
        for files in files_of.values():
            # Of two files with one name, the one of the type that loses nothing is the mask.
            if len(files) == 2 and _rank(files[0]) != _rank(files[1]):
                masks.append(min(files, key=_rank))
        images = _without(unmarked, masks)
        if not masks or not images:
            return self._make("none", self.paths, {}, "")

        def key(path: Path) -> tuple[str, ...]:
            return (str(path.parent), plain_stem(path.stem))

        where = f"beside them ({', '.join(sorted(endings)) or 'of another type'})"
        return self._make("beside", images, self._match(images, masks, key), where)

    def _match(
        self,
        images: Sequence[Path],
        masks: Sequence[Path],
        key: Callable[[Path], tuple[str, ...]],
    ) -> dict[Path, Path]:
        """Return the mask of each image that has one, by their keys; pass over those of excluded images.

        Raises:
            DataError: A mask has no image or not one alone, or an image has several masks: all are
                listed.
        """
        problems = Problems()
        images_of: dict[tuple[str, ...], list[Path]] = {}
        mask_of: dict[Path, Path] = {}
        for path in images:
            images_of.setdefault(key(path), []).append(path)
        # A mask of an excluded image is no fault.
        excluded_keys = {key(path) for path in self.excluded} - set(images_of)
        for mask in masks:
            mask_key = key(mask)
            if mask_key in excluded_keys:
                continue
            owners = images_of.get(mask_key, [])
            if not owners:
                problems.add(mask, "a mask without an image of its name")
            elif len(owners) > 1:
                names = ", ".join(path.name for path in owners[:3])
                problems.add(mask, f"{len(owners)} images have its name: {names}")
            elif owners[0] in mask_of:
                image, first_mask = show_path(owners[0]), show_path(mask_of[owners[0]])
                problems.add(mask, f"a second mask of {image}, beside {first_mask}")
            else:
                mask_of[owners[0]] = mask
        problems.raise_if_any(
            f"{len(problems)} of {len(masks)} masks do not fit the {len(images)} images",
            "correct their names, or leave files out with data.exclude",
        )
        return mask_of

    def _make(
        self, layout: Layout, images: Sequence[Path], mask_of: dict[Path, Path], where: str
    ) -> InspectionSet:
        kinds = [_kind_of(self.parts(path)[:-1]) for path in images]
        return InspectionSet(
            layout=layout,
            images=tuple(images),
            masks=tuple(map(mask_of.get, images)),
            kinds=tuple(kinds),
            where=where,
        )


def _without(paths: Sequence[Path], others: Sequence[Path]) -> list[Path]:
    left_out = set(others)
    return [path for path in paths if path not in left_out]


def _rank(path: Path) -> int:
    """Return the rank of a file among two with one stem: 0 is the likeliest mask."""
    extension = path.suffix.lower()
    return _LOSSLESS.index(extension) if extension in _LOSSLESS else len(_LOSSLESS)


def plain_stem(stem: str) -> str:
    """Return a stem without an ending that says mask, in small letters, a number without leading zeros."""
    stem = _ENDING.sub("", stem).casefold()
    if not stem.isdecimal():
        return stem
    return stem.lstrip("0") or "0"


def split_of(name: str) -> str | None:
    """Return the split that the first such folder of a path is named after, if any."""
    for part in name.split("/")[:-1]:
        split = _SPLIT.fullmatch(part)
        if split:
            return split[1].lower()
    return None


def _kind_of(folders: Sequence[str]) -> str:
    """Return the first folder of a path that is no split and does not only say that images are in it."""
    for part in folders:
        if not _SPLIT.fullmatch(part) and not _IMAGE_FOLDERS.fullmatch(part):
            return "good" if _GOOD.fullmatch(part) else part
    return ""
