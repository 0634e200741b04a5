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
from typing import Any, Final, Literal

import numpy as np

from lit_data.datasets.splits import SPLITS
from lit_data.errors import DataError, Problems, show_path
from lit_data.io.discovery import FolderWalk, name_below
from lit_data.io.images.mask_choice import count_values, has_grey_edges
from lit_data.io.images.masks import MaskOptions

log = logging.getLogger(__name__)

Layout = Literal["anomaly", "folder", "beside", "none", "coco", "labelme", "csv", "yolo", "cvat"]

MASK_FOLDERS: Final = re.compile(
    r"((train(ing)?|val(id(ation)?)?|test(ing)?|images?|defects?|binary|pixel)[_-]?)?"
    r"(masks?|gts?|ground[_-]?truths?|labels?|annotations?|annots?|seg(mentations?)?)"
    r"([_-]?(images?|imgs?|png|files?))?|SegmentationClass(PNG)?",
    re.IGNORECASE,
)
_OTHER_FOLDERS: Final = re.compile(
    r"SegmentationObject(PNG)?|Segmentation(Class|Object)Visualization"
)
"""Of VOC and LabelMe: what is in them says again what the masks say."""
_IMAGE_FOLDERS: Final = re.compile(
    r"((train(ing)?|val(id(ation)?)?|test(ing)?)[_-])?(images?|imgs?|JPEGImages|pictures?|photos?|data)",
    re.IGNORECASE,
)
_ENDING: Final = re.compile(
    r"[_.-](masks?|gt|label|labels|seg|segmentation|ground_?truth|anno|annotation)$", re.IGNORECASE
)
_SPLIT_NAMES: Final = {name: name for name in SPLITS} | {"valid": "val", "validation": "val"}
_GOOD: Final = re.compile(
    r".*(^|[_-])(good|ok|normal|free|clean|no_?defects?|pass)$", re.IGNORECASE
)
_MOST_NAMED: Final = 20
_LEAST_TWINS: Final = 3  # files that two folders share the names of
_MOST_FOLDERS: Final = 32  # that are compared by their files
_LOSSLESS: Final = (
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
    """

    layout: Layout
    images: tuple[Path, ...]
    masks: tuple[Path | None, ...]
    kinds: tuple[str, ...]
    where: str = ""
    bad: frozenset[Path] = frozenset()
    parts: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)
    excluded: tuple[Path, ...] = ()

    def describe(self) -> str:
        """Return counts of images and masks in one line."""
        without = sum(mask is None for mask in self.masks)
        counts = Counter(self.kinds)
        kinds = describe_counts(counts) if len(counts) > 1 else ""
        if self.layout == "none":
            return f"{len(self.images)} images without masks" + (f" ({kinds})" if kinds else "")
        none = f", {without} images have none, which counts as no defect" if without else ""
        return f"{len(self.images)} images, masks {self.where}{none}" + (
            f" ({kinds})" if kinds else ""
        )


def describe_counts(counts: Mapping[str, int], nameless: str = "") -> str:
    """``dent 3, good 120``; of many names the first ones."""
    named = [f"{name or nameless} {count}" for name, count in sorted(counts.items())]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more


def find_inspection_set(
    folder: Path,
    masks: str | None = None,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
) -> InspectionSet:
    """Find the images of a folder and the mask of each.

    Args:
        folder: Of the set.
        masks: Folder of the masks, absolute or below that one; None looks for them.
        patterns: Globs of the images.
        exclude: Globs of files that are left out; masks of such images are left out too.

    Raises:
        DataError: There are no images; or a mask has no image, or an image several masks: all of
            them are listed.
    """
    paths, excluded = _list_files(folder, patterns, exclude)
    found = _pair_any(folder, paths, excluded, masks)
    return replace(found, excluded=tuple(excluded))


def _pair_any(
    folder: Path, paths: Sequence[Path], excluded: Sequence[Path], masks: str | None
) -> InspectionSet:
    if masks is not None:
        return _pair_folder(folder, paths, (folder / masks).absolute(), excluded)
    paths = [
        path for path in paths if not any(map(_OTHER_FOLDERS.fullmatch, _parts(folder, path)[:-1]))
    ]
    names = [_parts(folder, path) for path in paths]
    if any(is_anomaly(parts) for parts in names):
        return _pair_anomaly(folder, paths, excluded)
    found = {
        folder.joinpath(*parts[: depth + 1])
        for parts in names
        for depth, part in enumerate(parts[:-1])
        if MASK_FOLDERS.fullmatch(part)
    }
    found = found or find_twin_folders(paths)
    if found:
        return _pair_folders(folder, paths, found, excluded)
    return _pair_beside(folder, paths, excluded)


def leave_out_stray(folder: Path, found: InspectionSet) -> InspectionSet:
    """Return the set without the one picture that lies on top of folders of kinds, such as a
    preview; and name it.

    Args:
        folder: Of the set.
        found: Its images; with masks, or with one kind alone, it is returned as it is.
    """
    on_top = [number for number, path in enumerate(found.images) if path.parent == folder]
    if found.layout != "none" or len(on_top) != 1 or len(set(found.kinds) - {""}) < 2:
        return found
    stray = on_top[0]
    name = show_path(found.images[stray])
    log.warning(
        "%s is left out: it lies beside the folders of kinds; move it into one of them if it belongs",
        name,
    )

    def others(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:stray], *values[stray + 1 :])

    return replace(
        found, images=others(found.images), masks=others(found.masks), kinds=others(found.kinds)
    )


def find_twin_folders(paths: Sequence[Path]) -> set[Path]:
    """Find folders of masks by what they hold: files with the names of those of another folder, in
    black and white.

    Args:
        paths: All files of the set.
    """
    stems: dict[Path, dict[str, Path]] = {}
    for path in paths:
        stems.setdefault(path.parent, {})[path.stem] = path
    twins: set[Path] = set()
    if len(stems) > _MOST_FOLDERS:
        return twins
    for one, other in permutations(stems, 2):
        shared = stems[one].keys() & stems[other].keys()
        if one.parent == other.parent and len(shared) >= max(_LEAST_TWINS, 0.9 * len(stems[one])):
            chosen = [
                stems[one][stem] for stem in sorted(shared)[:: max(1, len(shared) // _LEAST_TWINS)]
            ]
            if all(map(is_black_and_white, chosen)) and not all(
                is_black_and_white(stems[other][path.stem]) for path in chosen
            ):
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
    """Return True for masks of anomaly datasets: ``ground_truth/KIND/NAME`` or ``.../NAME/NUMBER``."""
    return any(
        len(parts) >= depth and parts[-depth].lower().replace("_", "") == "groundtruth"
        for depth in (3, 4)
    )


def _list_files(
    folder: Path, patterns: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[list[Path], list[Path]]:
    """The files, and those that are excluded."""
    if not folder.is_dir():
        raise DataError(
            f"{show_path(folder)}: {'not a folder' if folder.exists() else 'no such folder'}"
        )
    walk = FolderWalk(folder, patterns, exclude, allow_outside=False)
    names = sorted(walk.run())
    walk.tell_excluded()
    walk.problems.raise_if_any(f"{len(walk.problems)} bad names under {show_path(folder)}")
    if not names:
        ignored = (
            ", ".join(f"{count} {reason}" for reason, count in walk.ignored.items()) or "nothing"
        )
        raise DataError(
            f"{show_path(folder)}: no image matches {', '.join(map(repr, patterns))}; found {ignored}"
        )
    return [folder / name for name in names], [folder / name for name in sorted(walk.excluded)]


def _pair_anomaly(folder: Path, paths: Sequence[Path], excluded: Sequence[Path]) -> InspectionSet:
    """``train/good``, ``test/KIND`` and ``ground_truth/KIND``, below the folder or below one for each product."""
    files = [path for path in paths if is_anomaly(_parts(folder, path))]
    images = _without(paths, files)
    of_image: dict[Path, list[Path]] = {}
    for path in files:
        deep = is_anomaly(_parts(folder, path)[:-1])  # a folder of masks for each image
        of_image.setdefault(path.parent if deep else path, []).append(path)
    whole = {parts[0]: place for place, parts in of_image.items()}

    def key(path: Path) -> tuple[str, ...]:
        path = whole.get(path, path)
        parts = _parts(folder, path)  # PRODUCT..., test or ground_truth, KIND, NAME
        return (*parts[:-3], *parts[-2:-1], plain_stem(path.stem))

    def is_test(path: Path) -> bool:
        return "train" not in _parts(folder, path)[:-1]

    tested = _match([path for path in images if is_test(path)], list(whole), key, excluded)
    found = tuple(tested.get(path) for path in images)
    kinds = tuple(
        "good" if _GOOD.fullmatch(path.parent.name) else path.parent.name for path in images
    )
    parts = {masks[0]: tuple(masks) for place, masks in of_image.items() if place != masks[0]}
    return InspectionSet(
        layout="anomaly",
        images=tuple(images),
        masks=found,
        kinds=kinds,
        where="in ground_truth",
        parts=parts,
    )


def _pair_folder(
    folder: Path, paths: Sequence[Path], masks: Path, excluded: Sequence[Path]
) -> InspectionSet:
    if not masks.is_dir():
        raise DataError(f"{show_path(masks)}: no such folder of masks; check data.masks")
    own = [path for path in paths if path.absolute().is_relative_to(masks)]
    return _pair(
        folder, _without(paths, own), own or _list_files(masks, ("**/*",))[0], masks, excluded
    )


def _pair_folders(
    folder: Path, paths: Sequence[Path], mask_folders: set[Path], excluded: Sequence[Path]
) -> InspectionSet:
    inside = tuple(f"{other}/" for other in mask_folders)  # none of them is the root
    masks = [path for path in paths if str(path).startswith(inside)]
    shown = sorted(mask_folders)[0]
    return _pair(folder, _without(paths, masks), masks, shown, excluded)


def _pair(
    folder: Path,
    images: Sequence[Path],
    masks: Sequence[Path],
    where: Path,
    excluded: Sequence[Path],
) -> InspectionSet:
    """Masks of folders: by the stem where stems are unique, else by the folders too."""
    if not images:
        raise DataError(
            f"{show_path(folder)}: no images but the masks in {show_path(where)}; check data.root"
        )
    stems = Counter(plain_stem(path.stem) for path in images)
    unique = max(stems.values()) == 1

    def key(path: Path) -> tuple[str, ...]:
        own = [
            p
            for p in _parts(folder, path)[:-1]
            if not MASK_FOLDERS.fullmatch(p) and not _IMAGE_FOLDERS.fullmatch(p)
        ]
        return (*(() if unique else own), plain_stem(path.stem))

    found = _match(images, masks, key, excluded)
    name = where.relative_to(folder).as_posix() if where.is_relative_to(folder) else str(where)
    return _make(folder, "folder", images, found, f"in {name}")


def _pair_beside(folder: Path, paths: Sequence[Path], excluded: Sequence[Path]) -> InspectionSet:
    """Masks in the folders of their images: by an ending of the name, or of the same name and another type."""
    marked = [path for path in paths if _ENDING.search(path.stem)]
    plain = _without(paths, marked)
    of_name: dict[tuple[Path, str], list[Path]] = {}
    for path in plain:
        of_name.setdefault((path.parent, path.stem), []).append(path)
    twins = {
        key: found
        for key, found in of_name.items()
        if len(found) == 2 and len({_rank(p) for p in found}) == 2
    }
    masks = marked + [min(found, key=_rank) for found in twins.values()]
    images = _without(plain, masks)
    if not masks or not images:
        return _make(folder, "none", list(paths), {}, "")

    def key(path: Path) -> tuple[str, ...]:
        return (str(path.parent), plain_stem(path.stem))

    endings = sorted({match[0].lower() for path in marked if (match := _ENDING.search(path.stem))})
    where = f"beside them ({', '.join(endings) or 'of another type'})"
    return _make(folder, "beside", images, _match(images, masks, key, excluded), where)


def _without(paths: Sequence[Path], others: Sequence[Path]) -> list[Path]:
    left_out = set(others)
    return [path for path in paths if path not in left_out]


def _rank(path: Path) -> int:
    """Return the rank of a file among two with one stem: 0 is the likeliest mask."""
    extension = path.suffix.lower()
    return _LOSSLESS.index(extension) if extension in _LOSSLESS else len(_LOSSLESS)


def _match(
    images: Sequence[Path],
    masks: Sequence[Path],
    key: Callable[[Path], tuple[str, ...]],
    excluded: Sequence[Path],
) -> dict[Path, Path]:
    """The mask of each image that has one, which is that of the same key; those of excluded images
    are passed over.

    Raises:
        DataError: A mask has no image or not one alone, or an image has several masks: all are
            listed.
    """
    problems, by_key, found = Problems(), dict[tuple[str, ...], list[Path]](), dict[Path, Path]()
    for path in images:
        by_key.setdefault(key(path), []).append(path)
    without_owner = {key(path) for path in excluded} - set(by_key)
    for mask in masks:
        owners = by_key.get(key(mask), [])
        if key(mask) in without_owner:
            continue
        if len(owners) != 1:
            several = f"{len(owners)} images have its name: {', '.join(p.name for p in owners[:3])}"
            problems.add(mask, several if owners else "a mask without an image of its name")
        elif owners[0] in found:
            problems.add(
                mask,
                f"a second mask of {show_path(owners[0])}, beside {show_path(found[owners[0]])}",
            )
        else:
            found[owners[0]] = mask
    problems.raise_if_any(
        f"{len(problems)} of {len(masks)} masks do not fit the {len(images)} images"
    )
    return found


def plain_stem(stem: str) -> str:
    """A stem without an ending that says mask, in small letters, a number without leading zeros."""
    stem = _ENDING.sub("", stem).casefold()
    return stem.lstrip("0") or "0" if stem.isdecimal() else stem


def _make(
    folder: Path, layout: Layout, images: Sequence[Path], found: dict[Path, Path], where: str
) -> InspectionSet:
    kinds = [_kind_of(_parts(folder, path)[:-1]) for path in images]
    return InspectionSet(
        layout=layout,
        images=tuple(images),
        masks=tuple(map(found.get, images)),
        kinds=tuple(kinds),
        where=where,
    )


def split_of(name: str) -> str | None:
    """The split that the first such folder of a path with forward slashes is named after, if any."""
    return next((_SPLIT_NAMES[part] for part in name.split("/")[:-1] if part in _SPLIT_NAMES), None)


def _parts(folder: Path, path: Path) -> tuple[str, ...]:
    """Names of the folders on the way to a file, and its own; none where it lies elsewhere."""
    name = name_below(folder, path)
    return () if name is None else tuple(name.split("/"))


def _kind_of(folders: Sequence[str]) -> str:
    """The first of the folders of a path that is no split and does not only say that images are in it."""
    told = [
        part for part in folders if part not in _SPLIT_NAMES and not _IMAGE_FOLDERS.fullmatch(part)
    ]
    return ("good" if _GOOD.fullmatch(told[0]) else told[0]) if told else ""
