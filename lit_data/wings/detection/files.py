"""Files of a detection dataset: its images, their boxes, and the split of each image."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from lit_data.annotations.coco import (
    COCO_PLACES,
    CocoFile,
    describe_first_image,
    list_coco,
    load_coco_files,
    read_coco_labels,
    split_by_file,
)
from lit_data.annotations.formats import add_label_files, add_unlabelled, sort_by_format
from lit_data.annotations.label_files import list_label_files, match_label_files
from lit_data.annotations.labels import Faults, Frame, LabelTable
from lit_data.annotations.name_index import NameIndex
from lit_data.annotations.voc import Difficult, read_voc_labels
from lit_data.annotations.yolo import (
    CLASS_FILES,
    YAML_FILES,
    DataYaml,
    find_set_yaml,
    read_class_names,
    read_data_yaml,
    read_yolo_labels,
)
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, Problems, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.core.progress import ordered_map, track
from lit_data.core.types import Ints, PathText
from lit_data.datasets.split_lists import find_lists
from lit_data.datasets.split_names import SPLITS, find_split
from lit_data.datasets.splits import (
    DEFAULT_SHARES,
    NamedSplits,
    Splits,
    complete_splits,
    find_named_splits,
    read_fractions,
    share_out,
    split_images,
)
from lit_data.images.discovery import check_inside, find_images
from lit_data.images.header_scan import SKIPPING, OnBad
from lit_data.images.read_options import DEFAULT_READ, ReadOptions
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)


LabelFormat = Literal["auto", "yolo", "coco", "voc", "none"]

_PLACES = {
    "yolo": (".txt", ("labels", "Labels", "LABELS"), "YOLO boxes"),
    "voc": (
        ".xml",
        ("Annotations", "annotations", "ANNOTATIONS", "annotations_voc", "annots", "xmls"),
        "VOC",
    ),
}
"""Extension of label files, their folders, and the name of their format."""
_LIST_FOLDERS = ("ImageSets/Main",)
_READERS = 8  # threads that wait for a disk in the network, or a server
_SIDE_FILES = (*YAML_FILES, *CLASS_FILES, *COCO_PLACES)


@dataclass(frozen=True, slots=True, eq=False)
class DetectionFiles:
    """The images of a detection dataset.

    Args:
        images: Paths of the images, sorted by name.
        labels: Boxes of each image.
        splits: Ascending image numbers for each of train, val, test.
        sizes_px: [I, 2] int64 (height, width) of each image.
        fractions: Fractions of the splits, if images were split by fractions.

    Raises:
        ConfigError: These arguments do not match each other.
    """

    images: tuple[str, ...]
    labels: LabelTable
    splits: dict[str, list[int]]
    sizes_px: Ints
    fractions: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        numbers = sorted(number for split in self.splits.values() for number in split)
        if len(self.labels) != len(self.images) or set(self.splits) != set(SPLITS):
            raise ConfigError(
                f"{len(self.images)} images, labels of {len(self.labels)}, splits {sorted(self.splits)}"
            )
        if numbers != sorted(set(numbers) & set(range(len(self.images)))):
            raise ConfigError(
                f"splits must hold each of the numbers 0 to {len(self.images) - 1} no more than once"
            )


@dataclass(frozen=True, slots=True)
class _Folder:
    root: Path
    names: tuple[str, ...]  # of the images, relative to the root
    excluded: tuple[str, ...]  # lists, COCO files and label files may still name them
    exclude: tuple[str, ...]
    faults: Faults
    index: NameIndex
    yaml: DataYaml
    leftovers: Leftovers

    @property
    def paths(self) -> list[Path]:
        """Paths of the images."""
        return [self.root / name for name in self.names]

    def locate(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Return the paths of some of the images."""
        return tuple(str(self.root / self.names[number]) for number in numbers)


@dataclass(frozen=True, slots=True)
class _Labels:
    label_format: LabelFormat
    coco: tuple[CocoFile, ...]
    files: Mapping[int, Path]  # of images by their number; not for COCO


class Listing(NamedTuple):
    """Names of a dataset, listed without opening an image.

    Attributes:
        folder: Images of the dataset.
        labels: Labels of the images.
        named: Images of each split; None if splits are fractions.
        members: Numbers of the images that belong to the dataset.
    """

    folder: _Folder
    labels: _Labels
    named: NamedSplits | None
    members: Sequence[int]

    def locate_images(self) -> tuple[str, ...]:
        """Return the paths of the images, including unreadable ones.

        Raises:
            DataError: Split lists or label files are bad; all faults are listed.
        """
        self.folder.faults.raise_if_any()
        return self.folder.locate(self.members)


def find_detection_files(
    root: PathText,
    *,
    label_format: LabelFormat = "auto",
    classes: Sequence[str] | None = None,
    annotations: PathText | None = None,
    difficult: Difficult = "ignore",
    splits: Splits = "auto",
    seed: int = 0,
    on_bad: OnBad = "error",
    read: ReadOptions = DEFAULT_READ,
    exclude: Sequence[str] = (),
    examine: Callable[[Sequence[str]], Problems] | None = None,
    leftovers: Leftovers | None = None,
) -> DetectionFiles:
    """Find images, boxes and splits of a detection dataset, without decoding an image.

    Images are in ``images`` or ``JPEGImages``, in ``train/images`` and so on, or anywhere. YOLO
    text is in ``labels``, in the same subfolders as the images in ``images``. COCO JSON is
    ``annotations/instances_*.json``, ``annotations/train.json`` and so on, or
    ``_annotations.coco.json`` beside the images or in ``train`` and so on. VOC XML is in
    ``Annotations``, ``annotations``, ``annotations_voc``, ``annots`` or ``xmls``. Without these
    folders, ``a.txt`` or ``a.xml`` is read beside ``a.jpg``, or else in any other folder. If a
    dataset has lists or COCO files, images that they do not name are skipped.

    Args:
        root: Folder of the dataset.
        label_format: `auto` takes the first of yolo, coco, voc that exists, or no labels if
            `classes` are given; `none` takes the images alone.
        classes: Names of the classes in the order of their numbers. By default those of
            ``data.yaml`` or ``classes.txt``, otherwise those of the labels, as always for COCO.
        annotations: The only COCO file to read, relative to the root.
        difficult: VOC objects marked as difficult: True keeps them, False skips them, `ignore`
            makes them regions in which nothing is learned or scored.
        splits: `auto` takes the first of these that exists: ``data.yaml``, lists such as
            ``train.txt`` or those of ``ImageSets``, names or folders of the COCO files, folders
            such as ``images/train``, otherwise 70 / 15 / 15 %. Without images for val, it takes
            part of train. Else as in `split_images`, with names relative to the root.
        seed: Seed of splits by fractions.
        on_bad: ``skip`` skips and lists bad boxes and images, and label files without an image.
        read: Options for reading images, which decide the size of an image.
        exclude: Globs of images and label files to skip; a folder stands for everything in it.
        examine: Finds faults of images that their headers do not show.
        leftovers: Collects files that exist but are not used.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: Lists, images or labels are bad; all faults are listed.
    """
    if difficult not in (True, False, "ignore"):
        raise ConfigError(f"difficult={difficult!r} is not allowed; give true, false or ignore")
    listing = list_dataset(
        root, label_format, classes, annotations, splits, on_bad, exclude, leftovers
    )
    folder, named = listing.folder, listing.named
    _add_unlabelled(listing)
    members, frames = _measure(folder, listing.members, read)
    damaged = Problems() if examine is None else examine(folder.locate(members))
    if len(damaged):
        heading = counted_of(len(damaged), len(members), "image", "is bad", "are bad")
        folder.faults.take(damaged.make_error(heading, SKIPPING))
    try:
        labels = _read_labels(folder, listing.labels, members, frames, classes, difficult)
    except DataError as error:
        folder.faults.take(error)
    folder.faults.raise_if_any()
    fractions: Mapping[str, float] | None = DEFAULT_SHARES
    if named is not None:
        fractions = named.fractions
    elif splits != "auto":
        fractions = read_fractions(splits)
    numbered_splits = _number_splits(np.array(members), named, splits, seed)
    sizes_px = np.array([frame.size_px for frame in frames], np.int64)
    return DetectionFiles(folder.locate(members), labels, numbered_splits, sizes_px, fractions)


def list_dataset(
    root: PathText,
    label_format: LabelFormat,
    classes: Sequence[str] | None,
    annotations: PathText | None,
    splits: Splits,
    on_bad: OnBad,
    exclude: Sequence[str],
    leftovers: Leftovers | None = None,
) -> Listing:
    """List the images and labels of a detection dataset, without opening an image.

    Arguments are those of `find_detection_files`.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: There are no labels, or no images.
    """
    check_choice("label_format", label_format, get_args(LabelFormat))
    path = Path(os.path.abspath(root))  # noqa: PTH100 - keeps links
    folder = _open_folder(path, exclude, Faults(path, on_bad), leftovers or Leftovers())
    label_files = _find_labels(folder, label_format, annotations, unlabelled=bool(classes))
    named = None
    try:
        named = _find_splits(folder, splits, label_files.coco)
    except DataError as error:
        folder.faults.take(error)
    return Listing(folder, label_files, named, _list_members(folder, label_files.coco, named))


def _open_folder(
    root: Path, exclude: Sequence[str], faults: Faults, leftovers: Leftovers
) -> _Folder:
    patterns = [f"{name}/**/*" for name in ("images", "JPEGImages") if (root / name).is_dir()]
    if not patterns:
        patterns = ["*/images/**/*" if _has_image_folders(root) else "**/*"]
    listing = find_images(root, patterns=patterns, exclude=exclude, leftovers=leftovers)
    leftovers.add(
        "[image is|images are] outside of the folders of images",
        leftovers.outside,
        "move [it|them] there",
    )
    for pattern in _SIDE_FILES:
        for path in root.glob(pattern):
            check_inside(path, root)
    yaml = DataYaml((), ".", {})  # no names, no lists
    yaml_path = find_set_yaml(root)
    if yaml_path is not None:
        yaml = read_data_yaml(yaml_path)
    return _Folder(
        root=root,
        names=tuple(path.relative_to(root).as_posix() for path in listing.paths),
        excluded=tuple(path.relative_to(root).as_posix() for path in listing.excluded),
        exclude=tuple(exclude),
        faults=faults,
        index=NameIndex(listing.paths, listing.excluded),
        yaml=yaml,
        leftovers=leftovers,
    )


def _has_image_folders(root: Path) -> bool:
    """Return True if some folder has a subfolder ``images``, and each folder of a split has one."""
    if not any(path.is_dir() for path in root.glob("*/images")):
        return False
    splits = [path for path in root.iterdir() if path.is_dir() and find_split(path.name)]
    return all((path / "images").is_dir() for path in splits)


def _find_labels(
    folder: _Folder,
    wanted: LabelFormat,
    annotations: PathText | None,
    *,
    unlabelled: bool,
) -> _Labels:
    """Find the labels of a format, or of the first format that exists; none if that is allowed."""
    if annotations is not None and wanted not in ("auto", "coco"):
        raise ConfigError(
            f"annotations= is a COCO file, but label_format={wanted!r}; set it to 'coco'"
        )
    if wanted == "none":
        return _Labels("none", (), {})
    # A given COCO file determines the format.
    is_open = wanted == "auto" and annotations is None
    formats: tuple[LabelFormat, ...] = ("yolo", "coco", "voc") if is_open else (wanted,)
    for where in ("folders", "beside", "anywhere"):
        for label_format in formats:
            if label_format in _PLACES:
                label_files = _match_files(folder, label_format, where)
                if label_files:
                    return _Labels(label_format, (), label_files)
            elif where == "folders" and (paths := list_coco(folder.root, annotations)):
                return _Labels("coco", load_coco_files(paths, folder.root, folder.faults), {})
    if is_open and unlabelled:
        images = counted(len(folder.names), "image")
        log.info("%s: %s without labels", show_path(folder.root), images)
        return _Labels("none", (), {})
    folder.faults.raise_if_any()  # such as labels that match no image
    add_label_files(folder.leftovers, folder.root, "boxes", with_unknown=True)
    raise DataError(
        f"{show_path(folder.root)}: no labels (data.label_format={wanted}): docs/detection.md lists "
        f"the places where YOLO text, COCO JSON and VOC XML are read{folder.leftovers.quote()}"
    )


def _match_files(folder: _Folder, label_format: LabelFormat, where: str) -> dict[int, Path]:
    """Return the label file of each image that has one: in folders of labels, beside images, or anywhere."""
    suffix, parents, name = _PLACES[label_format]
    is_beside = where == "beside"
    if where == "anywhere":
        of_format = sort_by_format(folder.root, folder.leftovers.unread).get(name, ())
        names = [path for path in of_format if set(path.split("/")[:-1]).isdisjoint(parents)]
    else:
        folders = () if is_beside else parents
        names = list_label_files(folder.root, suffix, folders, folder.exclude, folder.faults)
    files, problems = match_label_files(
        folder.root, folder.index, names, parents, is_beside=is_beside
    )
    # Other text files may be beside images too; XML without an image has lost it.
    if not is_beside or (files and suffix == ".xml"):
        unmatched = counted(len(problems), "label file matches", "label files match")
        images = f"{counted(len(folder.names), 'image')}, such as {show_path(folder.names[0])}"
        heading = f"{unmatched} none of {images}"
        folder.faults.add(problems, heading)
    return files


def _find_splits(folder: _Folder, splits: Splits, coco: Sequence[CocoFile]) -> NamedSplits | None:
    """Return the images of each split; None if splits are fractions."""
    is_by_file = splits == "auto" and any(file.split for file in coco)
    if is_by_file and not find_lists(folder.root, folder.names, _LIST_FOLDERS):
        numbers = split_by_file(coco, folder.index)
        rule = "not in the COCO file of any split"
        return complete_splits(numbers, len(folder.names), rule, is_open=True)
    return find_named_splits(
        folder.names,
        splits,
        root=folder.root,
        others=folder.excluded,
        list_folders=_LIST_FOLDERS,
    )


def _list_members(
    folder: _Folder, coco: Sequence[CocoFile], named: NamedSplits | None
) -> list[int]:
    """Return the numbers of the images that belong to the dataset."""
    numbers = set(range(len(folder.names)))
    if coco:
        numbers &= {number for file in coco for number in file.match(folder.index)[0].values()}
    # Images that no list names are skipped; splits by fractions take all.
    if named is not None:
        numbers -= set(named.left_out.tolist())
    if not numbers:
        folder.faults.raise_if_any()
        raise DataError(
            f"{show_path(folder.root)}: none of its {counted(len(folder.names), 'image')}, such as "
            f"{show_path(folder.names[0])}, is in a list or COCO file{describe_first_image(coco)}"
        )
    unnamed = set(range(len(folder.names))) - numbers
    if named is not None:
        named.add_left_out(folder.leftovers, folder.names)
        unnamed -= set(named.left_out.tolist())
    left_out = [folder.names[number] for number in sorted(unnamed)]
    cause = "[image is|images are] not in any COCO file"
    folder.leftovers.add(cause, left_out, "[it is|they are] skipped")
    return sorted(numbers)


def _add_unlabelled(listing: Listing) -> None:
    """Report images without a label file, and label files of other formats, as unused."""
    folder, labels = listing.folder, listing.labels
    used = [*labels.files.values(), *(Path(file.path) for file in labels.coco)]
    add_label_files(folder.leftovers, folder.root, "boxes", used)
    if labels.files:  # COCO lists its images
        members = {number: folder.names[number] for number in listing.members}
        add_unlabelled(
            folder.leftovers,
            members,
            labels.files,
            {} if listing.named is None else listing.named.numbers,
        )


def _measure(
    folder: _Folder, members: Sequence[int], read: ReadOptions
) -> tuple[list[int], list[Frame]]:
    """Return the readable images, and the frame of each."""
    good: dict[int, Frame] = {}
    problems = Problems()

    def measure(number: int) -> Frame | DataError:
        try:
            return Frame.read(folder.root / folder.names[number], read)
        except DataError as error:
            return error

    frames = track(ordered_map(measure, members, _READERS), "reading headers", len(members))
    for number, frame in zip(members, frames, strict=True):
        if isinstance(frame, DataError):
            problems.add(folder.root / folder.names[number], str(frame))
        else:
            good[number] = frame
    heading = counted_of(len(problems), len(members), "image", "is bad", "are bad")
    if not good:  # without a readable image, nothing can continue
        folder.faults.take(problems.make_error(heading))
        folder.faults.raise_if_any()
    folder.faults.add(problems, heading)
    return list(good), list(good.values())


def _read_labels(
    folder: _Folder,
    label_files: _Labels,
    members: Sequence[int],
    frames: Sequence[Frame],
    classes: Sequence[str] | None,
    difficult: Difficult,
) -> LabelTable:
    paths, on_bad = folder.paths, folder.faults.on_bad
    images = [paths[number] for number in members]
    if label_files.label_format == "coco":
        return read_coco_labels(
            images,
            frames,
            label_files.coco,
            others=[paths[number] for number in sorted(set(range(len(paths))) - set(members))],
            excluded=[folder.root / name for name in folder.excluded],
            classes=classes,
            on_bad=on_bad,
        )
    are_numbered = label_files.label_format == "yolo"
    class_names = read_class_names(folder.root, are_numbered=are_numbered)
    names = classes or class_names or None
    if label_files.label_format == "none" and names:
        no_boxes = np.zeros((0, 5), np.float32)
        return LabelTable(tuple(names), no_boxes, np.zeros(len(images), np.int64))
    files = [label_files.files.get(number) for number in members]
    if label_files.label_format == "voc":
        return read_voc_labels(
            images, frames, files, classes=names, difficult=difficult, on_bad=on_bad
        )
    return read_yolo_labels(
        images, frames, files, names=class_names, classes=classes, on_bad=on_bad
    )


def _number_splits(
    members: Ints, named: NamedSplits | None, splits: Splits, seed: int
) -> dict[str, list[int]]:
    """Return the splits, renumbered for the images that remain."""
    if named is None and splits == "auto":
        parts = share_out(np.arange(len(members)), DEFAULT_SHARES, seed)
    elif named is None:
        parts = split_images([""] * len(members), splits, seed=seed)
    else:
        parts = {split: np.flatnonzero(np.isin(members, named.numbers[split])) for split in SPLITS}
        if named.fractions is not None:
            parts |= share_out(parts["train"], named.fractions, seed)
    return {split: part.tolist() for split, part in parts.items()}
