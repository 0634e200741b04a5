"""Search for single images and their masks in common layouts.

If some images have masks, an image without one shows no defect. See `division` and
`lit_data.images.pairing`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Literal, NamedTuple

from lit_data.core.errors import DataError, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.core.names import is_image_folder
from lit_data.core.types import Size
from lit_data.datasets.division import Division, FileDivider, is_anomaly, show_masks, without
from lit_data.datasets.good_names import name_kinds, tells_quality
from lit_data.datasets.split_names import find_split, find_split_folder, split_of
from lit_data.images.discovery import MATLAB, MATLAB_CURE, FolderWalk, check_root
from lit_data.images.header import read_header
from lit_data.images.pairing import Matching, Pairing
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)

Layout = Literal["anomaly", "folder", "beside", "none", "coco", "labelme", "csv", "yolo", "cvat"]

_MOST_NAMED = 20
_MOST_STRAYS = 3
_MOST_COMPARED = 64  # images whose headers are read


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionSet:
    """Images of a dataset.

    Attributes:
        layout: `anomaly` for ``train/good``, ``test/KIND`` and ``ground_truth/KIND``, `folder` for
            masks in a folder of their own, `beside` for masks beside their images, `none` without
            masks, or the kind of annotations.
        images: Images, in the order of their names.
        masks: Mask of each image, or None.
        kinds: Kind of defect of each image, or ``good``, by the folders of its path if these tell.
        where: Place of the masks, for a message.
        bad: Images to leave out.
        parts: All files of each mask with several files, as in MVTec LOCO, by the first file.
        excluded: Excluded files, which annotations may still name.
        boxes: File with [n, 6] (image, class from 1 or 255, left, top, right, bottom) px of all
            objects, if annotations tell objects apart.
        categories: Names of the categories of its annotations.
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
    categories: frozenset[str] = frozenset()

    def keep(self, numbers: Sequence[int]) -> "InspectionSet":
        """Return the set with only the given images; the others become excluded."""
        left_out = sorted(set(range(len(self.images))) - set(numbers))
        if not left_out:
            return self
        return replace(
            self,
            images=tuple(self.images[number] for number in numbers),
            masks=tuple(self.masks[number] for number in numbers),
            kinds=tuple(self.kinds[number] for number in numbers),
            excluded=(*self.excluded, *(self.images[number] for number in left_out)),
        )

    @property
    def masked_kinds(self) -> frozenset[str]:
        """Kinds of the images that have a mask."""
        return frozenset(compress(self.kinds, self.masks))

    def describe(self) -> str:
        """Return one line with the numbers of images and masks."""
        kinds = self._describe_kinds()
        if self.layout == "none":
            return f"{counted(len(self.images), 'image')} without masks{kinds}"
        line = f"{counted(len(self.images), 'image')}, masks {self.where}"
        missing_count = self.masks.count(None)
        if missing_count:
            line += f", {counted(missing_count, 'image has none', 'images have none')}"
        return line + kinds

    def _describe_kinds(self) -> str:
        """Return the counts of kinds, and the names of a few images outside folders of kinds."""
        counts = Counter(self.kinds)
        if len(counts) == 1:
            return ""
        strays = [path for path, kind in zip(self.images, self.kinds, strict=True) if not kind]
        line = describe_counts(counts, "no folder")
        if 0 < len(strays) <= _MOST_STRAYS:
            names = ", ".join(show_path(path.name) for path in strays)
            line += f"; data.exclude skips {names} if it shows no part"
        return f" ({line})"


def describe_counts(counts: Mapping[str, int], nameless: str = "") -> str:
    """Return counts as ``dent 3, good 120``, only the first ones if there are many."""
    parts = [f"{name or nameless} {count}" for name, count in sorted(counts.items())]
    line = ", ".join(parts[:_MOST_NAMED])
    hidden_count = len(parts) - _MOST_NAMED
    return f"{line} and {hidden_count} more" if hidden_count > 0 else line


def find_inspection_set(
    folder: Path,
    masks: str | None = None,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
    *,
    good: Sequence[str] | None = None,
    leftovers: Leftovers | None = None,
) -> InspectionSet:
    """Find the images of a folder and the mask of each.

    Args:
        folder: Folder of the dataset.
        masks: Folder of the masks, absolute or below `folder`, or its name in each part of the
            dataset; None searches for them.
        patterns: Globs of the images.
        exclude: Globs of files to leave out; masks of such images are left out too.
        good: Globs of the names of folders with good parts; None recognizes them by their words.
        leftovers: Receives files that are not used.

    Raises:
        DataError: There are no images, or masks have no image, or images have several masks; all
            of them are listed.
    """
    paths, excluded, matlab_count = _list_files(folder, patterns, exclude, leftovers)
    divider = FileDivider(folder, paths)
    division = divider.divide() if masks is None else divider.divide_named(masks)
    image_set = _pair(divider, division, excluded)
    if leftovers is not None:
        _add_repeating(leftovers, divider, division)
    if matlab_count and image_set.layout == "none":
        files = counted(matlab_count, "file")
        log.warning("%s: %s of MATLAB; %s", show_path(folder), files, MATLAB_CURE)
    kinds = name_kinds(_list_kinds(divider, division), good)
    return replace(image_set, kinds=kinds)


def find_labelled_set(
    folder: Path,
    patterns: Sequence[str] = ("**/*",),
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> InspectionSet:
    """Find the images of a folder with one label each, the name of their folder.

    Files with names such as ``label`` and ``p0_mask.jpg`` count as masks only if they look like
    masks. If there is one kind, masks tell which images are ``good`` and which show a ``defect``.

    Args:
        folder: Folder of the dataset.
        patterns: As in `find_inspection_set`.
        exclude: As in `find_inspection_set`.
        leftovers: As in `find_inspection_set`.

    Raises:
        DataError: As in `find_inspection_set`.
    """
    paths, excluded, _ = _list_files(folder, patterns, exclude, leftovers)
    divider = FileDivider(folder, paths)
    division = divider.divide()
    if division.place in ("folder", "beside") and not show_masks(division):
        division = Division(place="none", images=paths)
    kinds = tuple(next(iter(names), "") for names in _list_kinds(divider, division))
    image_set = InspectionSet(
        layout="none",
        images=tuple(division.images),
        masks=(None,) * len(division.images),
        kinds=kinds,
        excluded=tuple(excluded),
    )
    if len(set(kinds)) < 2 and division.masks:
        masks = _pair(divider, division, excluded).masks
        labels = tuple("good" if mask is None else "defect" for mask in masks)
        image_set = replace(image_set, kinds=labels)
    return image_set


def _add_repeating(leftovers: Leftovers, divider: FileDivider, division: Division) -> None:
    paths = without(divider.paths, [*division.images, *division.masks])
    leftovers.add(
        "[image is a rendering of a mask or of another image"
        "|images are renderings of masks or of other images]",
        list(map(divider.name, paths)),
        "[it is skipped; move it elsewhere if it is a separate image"
        "|they are skipped; move them elsewhere if they are separate images]",
    )


def _pair(divider: FileDivider, division: Division, excluded: Sequence[Path]) -> InspectionSet:
    """Return the set of images, each with its mask."""
    if not division.images:
        raise DataError(
            f"{show_path(divider.folder)}: no images but the masks {division.where}; check data.root"
        )
    if division.place == "anomaly":
        return _pair_anomaly(divider, division, excluded)
    mask_of: Mapping[Path, Path] = {}
    where = division.where
    if division.masks:
        pairing = Pairing(
            divider.folder, division.images, division.masks, excluded, division.folders
        )
        matching = _match(pairing)
        mask_of = matching.mask_of
        where += f" ({matching.pair})" if matching.pair else ""
    return InspectionSet(
        layout=division.place,
        images=tuple(division.images),
        masks=tuple(map(mask_of.get, division.images)),
        kinds=(),
        where=where,
        excluded=tuple(excluded),
    )


def _match(pairing: Pairing) -> Matching:
    """Match all masks with their images.

    Raises:
        DataError: Some masks do not fit; all of them are listed.
    """
    matching = pairing.match()
    matching.problems.raise_if_any(
        counted_of(len(matching.problems), len(pairing.masks), "mask", "does", "do")
        + f" not fit the {counted(len(pairing.images), 'image')}",
        "correct their names, skip files with data.exclude, or rename an image folder whose "
        "name suggests masks",
    )
    return matching


def _pair_anomaly(
    divider: FileDivider, division: Division, excluded: Sequence[Path]
) -> InspectionSet:
    """Pair images and masks in the layout ``train/good``, ``test/KIND`` and ``ground_truth/KIND``.

    The layout begins in the folder, or in a folder for each product.
    """
    parts_of: dict[Path, list[Path]] = {}
    for path in division.masks:
        has_folder = is_anomaly(divider.parts(path)[:-1])
        parts_of.setdefault(path.parent if has_folder else path, []).append(path)

    def name_folders(path: Path) -> tuple[str, ...]:
        parts = divider.parts(path)
        # PRODUCT..., test or ground_truth, KIND, NAME
        return (*parts[:-3], *parts[-2:-1])

    images = [path for path in division.images if split_of(divider.name(path)) != "train"]
    pairing = Pairing(divider.folder, images, list(parts_of), excluded, folders_of=name_folders)
    owner_of = _match(pairing).mask_of
    masks = [parts_of[owner_of[path]][0] if path in owner_of else None for path in division.images]
    several = {parts[0]: tuple(parts) for owner, parts in parts_of.items() if owner != parts[0]}
    return InspectionSet(
        layout="anomaly",
        images=tuple(division.images),
        masks=tuple(masks),
        kinds=(),
        where=division.where,
        parts=several,
        excluded=tuple(excluded),
    )


def _list_kinds(divider: FileDivider, division: Division) -> list[list[str]]:
    """Return the folders of each image that may be its kind, the outermost first."""
    if division.place == "anomaly":
        names_above = (path.parent.name for path in division.images)
        return [[] if find_split(name) else [name] for name in names_above]
    folders = [divider.parts(path)[:-1] for path in division.images]
    # A folder such as photos is a kind if it is beside folders of other kinds.
    parents = set[tuple[str, ...]]()
    if division.place == "none":
        for parts in folders:
            for depth, part in enumerate(parts):
                if not _is_neutral(part):
                    parents.add(parts[:depth])
    kinds = []
    for parts in folders:
        names = []
        for depth, part in enumerate(parts):
            if not _is_neutral(part) or (is_image_folder(part) and parts[:depth] in parents):
                names.append(part)
        kinds.append(names)
    if any(kinds):
        _add_lone_split([divider.name(path) for path in division.images], kinds)
    return kinds


def _add_lone_split(names: Sequence[str], kinds: Sequence[list[str]]) -> None:
    """Add a folder such as ``valid``, the only one named after a split among folders of kinds."""
    folder_of = [find_split_folder(name) for name in names]
    folders = set(filter(None, folder_of))
    in_split = [number for number, folder in enumerate(folder_of) if folder]
    if len(folders) == 1 and not any(kinds[number] for number in in_split):
        for number in in_split:
            kinds[number].append(*folders)


@lru_cache(maxsize=4096)
def _is_neutral(part: str) -> bool:
    """Return True for folders that only name a split, or say that they contain images."""
    return is_image_folder(part) or (find_split(part) is not None and not tells_quality(part))


def leave_out_stray(folder: Path, image_set: InspectionSet) -> InspectionSet:
    """Leave out a single picture above the folders of kinds, such as a preview, and log it.

    Args:
        folder: Folder of the dataset.
        image_set: Images of the dataset; a set with masks, or with one kind, is returned unchanged.
    """
    on_top = [number for number, path in enumerate(image_set.images) if path.parent == folder]
    kinds = set(image_set.kinds) - {""}
    if image_set.layout != "none" or len(on_top) != 1 or len(kinds) < 2:
        return image_set
    stray = on_top[0]
    log.warning(
        "%s is skipped, because it is not in a folder like the other images; move it into one if it "
        "belongs there",
        show_path(image_set.images[stray]),
    )
    return image_set.keep([*range(stray), *range(stray + 1, len(image_set.images))])


def leave_out_unlike(folder: Path, image_set: InspectionSet, leftovers: Leftovers) -> InspectionSet:
    """Leave out a few pictures above folders of images that differ from all of these, such as a contact sheet.

    They differ in channels or dtype, or in size if all other images have the same size.

    Args:
        folder: Folder of the dataset.
        image_set: Images of the dataset; images with a mask stay.
        leftovers: Receives the pictures that are left out.
    """
    on_top: list[int] = []
    others: list[Path] = []
    for number, (image, mask) in enumerate(zip(image_set.images, image_set.masks, strict=True)):
        if image.parent == folder and mask is None:
            on_top.append(number)
        else:
            others.append(image)
    if not 0 < len(on_top) <= _MOST_STRAYS < len(others):
        return image_set
    step = max(1, len(others) // _MOST_COMPARED)
    known = list(filter(None, map(_read_form, others[::step])))
    strays = [number for number in on_top if not _is_alike(image_set.images[number], known)]
    names = [image_set.images[number].name for number in strays]
    leftovers.add(
        "[image at the top level is|images at the top level are] unlike all images in the folders",
        names,
        "[it is skipped; move it into a folder if it belongs there"
        "|they are skipped; move them into a folder if they belong there]",
    )
    return image_set.keep(sorted(set(range(len(image_set.images))).difference(strays)))


class _Form(NamedTuple):
    channels: int
    dtype: str
    size_px: Size


def _is_alike(path: Path, known: Sequence[_Form]) -> bool:
    form = _read_form(path)
    if form is None:
        return True
    if len({other.size_px for other in known}) != 1:  # sizes differ anyway
        return form[:2] in {other[:2] for other in known}
    return form in known


def _read_form(path: Path) -> _Form | None:
    """Return the form of a file, or None if it cannot be read."""
    try:
        stored = read_header(path).stored
    except DataError:
        return None
    channels = stored.colors + len(stored.alpha)
    return _Form(channels, stored.dtype.str, (stored.height_px, stored.width_px))


def _list_files(
    folder: Path,
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    leftovers: Leftovers | None = None,
) -> tuple[list[Path], list[Path], int]:
    """List the files and the excluded files, and count MATLAB files, which may be masks."""
    check_root(folder)
    walk = FolderWalk(folder, patterns, exclude)
    names = sorted(walk.run())
    walk.finish(names, leftovers)
    excluded = [folder / name for name in sorted(walk.excluded)]
    return [folder / name for name in names], excluded, walk.ignored[MATLAB]
