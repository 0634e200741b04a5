"""Datasets of others for ``python -m benchmarks learning``, from copies of repositories.

``python -m benchmarks.learning_sets NAME SOURCE TARGET``, with a NAME of `PREPARE`. Sets of masks are
folders of images ``KIND/NAME.jpg`` with their masks ``KIND/NAME.png`` beside them, and a table
``splits.csv`` with 70 / 15 / 15 % of each kind; for the
others see `prepare_boards`, `prepare_cells`, `prepare_labels` and `prepare_good_parts`. No image is
part of this repository.
"""

import csv
import random
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

THREE_KINDS = ("Blowhole", "Break", "Crack")
SIX_KINDS = (*THREE_KINDS, "Fray", "Uneven")
BOARD_CLASSES = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
BOARD_PX = 640
CELL_CLASSES = ("RBC", "WBC", "Platelets")
STEEL_CLASSES = (
    "crazing",
    "inclusion",
    "patches",
    "pitted_surface",
    "rolled-in_scale",
    "scratches",
)
IMAGE_ENDINGS = (".bmp", ".jpg", ".png")
_BOARD_FRACTIONS = {"train": 0.7, "val": 0.1, "test": 0.2}
_BOARD_LISTS = ("trainval.txt", "test.txt")
_FRACTIONS = (("train", 0.7), ("val", 0.15), ("test", 0.15))
_GOOD_FRACTIONS = (("train", 0.7), ("val", 0.1), ("test", 0.2))
GOOD = "good"


def prepare_tiles(
    source: Path, target: Path, kinds: Sequence[str] = THREE_KINDS, good_images: int = 250
) -> None:
    """Copy magnetic tiles with some kinds of defects and a number of good ones.

    Args:
        source: A copy of ``abin24/Magnetic-tile-defect-datasets.`` (Huang et al., "Surface defect
            saliency of magnetic tile", The Visual Computer 2020), which has folders such as
            ``MT_Crack/Imgs``.
        target: The folder to make.
        kinds: Kinds of defects.
        good_images: Images without a defect, chosen evenly.
    """
    for kind in (*kinds, "Free"):
        images = sorted((source / f"MT_{kind}" / "Imgs").glob("*.jpg"))
        if kind == "Free":
            images = images[:: max(1, len(images) // good_images)][:good_images]
        (target / kind).mkdir(parents=True, exist_ok=True)
        for image in images:
            for path in (image, image.with_suffix(".png")):
                shutil.copy(path, target / kind / path.name)
    write_splits(target)


def prepare_labels(
    source: Path, target: Path, list_parts: Callable[[Path], Iterable["Part"]]
) -> None:
    """Copy images into a folder for each class, and split them.

    Args:
        source: What `list_parts` reads.
        target: The folder to make; the name of a class stands before those of its images, which
            differ then from all others.
        list_parts: Lists the images.
    """
    for part in list_parts(source):
        (target / part.kind).mkdir(parents=True, exist_ok=True)
        shutil.copy(part.image, target / part.kind / f"{part.kind}_{part.image.name}")
    write_splits(target, "*")


def list_classes(source: Path) -> Iterator["Part"]:
    """List images that lie in a folder for each class.

    Args:
        source: ``CLASS/NAME``, such as a copy of X-SDD (Feng et al., "X-SDD: a new benchmark for hot
            rolled steel strip surface defects detection", Symmetry 2021).
    """
    for image in sorted(source.glob("*/*")):
        if image.suffix.lower() in IMAGE_ENDINGS:
            yield Part(image, image.parent.name)


def write_splits(root: Path, pattern: str = "*.jpg") -> None:
    """Write ``splits.csv``: of each kind 70 / 15 / 15 %, in an order drawn from a fixed seed."""
    rows = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        names = [f"{folder.name}/{path.name}" for path in sorted(folder.glob(pattern))]
        rows += _split(names, _FRACTIONS)
    _write_rows(root, rows)


def _split(names: Sequence[str], fractions: Sequence[tuple[str, float]]) -> list[dict[str, str]]:
    """Give each name a split, in an order drawn from a fixed seed."""
    shuffled = np.array(names)[np.random.default_rng(0).permutation(len(names))]
    ends = (np.cumsum([fraction for _, fraction in fractions]) * len(names)).round().astype(int)
    rows = []
    for (split, _), part in zip(fractions, np.split(shuffled, ends[:-1]), strict=True):
        rows += [{"image": name, "split": split} for name in part.tolist()]
    return rows


def _write_rows(root: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with (root / "splits.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("image", "split"))
        writer.writeheader()
        writer.writerows(rows)


def read_split(root: Path, split: str) -> list[str]:
    """List the images ``KIND/NAME`` that ``splits.csv`` gives to a split."""
    with (root / "splits.csv").open(newline="") as file:
        return [row["image"] for row in csv.DictReader(file) if row["split"] == split]


def copy_images(images: Iterable[Path], target: Path) -> None:
    """Copy images alone, as those of a line come: without masks or boxes and in one folder."""
    target.mkdir(parents=True, exist_ok=True)
    for image in images:
        shutil.copy(image, target / image.name)


class Part(NamedTuple):
    """An image of a part.

    Attributes:
        image: Its file.
        kind: `GOOD`, or the kind of its defect.
        mask: Marks the defect, where there are masks.
    """

    image: Path
    kind: str
    mask: Path | None = None


def prepare_good_parts(
    source: Path,
    target: Path,
    list_parts: Callable[[Path], Iterable[Part]],
    train_images: int | None = None,
) -> None:
    """Copy images of which good ones alone train: 70 % of them, and 10 % validate.

    The rest of them and all defective ones are tested. Numbers become names, which are unique in
    the set: ``KIND/KIND_0000.jpg``, with a mask ``KIND/KIND_0000.png`` where there is one.

    Args:
        source: What `list_parts` reads.
        target: The folder to make.
        list_parts: Lists the images of a copy of a repository.
        train_images: Good images that train, at most; what is over is in no split.
    """
    names: dict[str, list[str]] = {}
    for part in list_parts(source):
        of_kind = names.setdefault(part.kind, [])
        (target / part.kind).mkdir(parents=True, exist_ok=True)
        stem = target / part.kind / f"{part.kind}_{len(of_kind):04}"
        copied = Path(shutil.copy(part.image, stem.with_suffix(part.image.suffix)))
        of_kind.append(f"{part.kind}/{copied.name}")
        if part.mask is not None:
            mask = np.asarray(cv2.imread(str(part.mask), cv2.IMREAD_GRAYSCALE))
            cv2.imwrite(str(stem.with_suffix(".png")), (mask > 0).astype(np.uint8) * 255)
    of_good = _split(names.pop(GOOD), _GOOD_FRACTIONS)
    train = [row for row in of_good if row["split"] == "train"][:train_images]
    rows = train + [row for row in of_good if row["split"] != "train"]
    for of_kind in names.values():
        rows += [{"image": name, "split": "test"} for name in of_kind]
    _write_rows(target, rows)


def list_tiles(source: Path) -> Iterator[Part]:
    """List all magnetic tiles, see `prepare_tiles`."""
    for kind in ("Free", *SIX_KINDS):
        for image in sorted((source / f"MT_{kind}" / "Imgs").glob("*.jpg")):
            yield Part(image, GOOD if kind == "Free" else kind, image.with_suffix(".png"))


def list_fabrics(source: Path) -> Iterator[Part]:
    """List the strips of fabric of AITEX (Silvestre-Blanes et al., Autex Research Journal 2019).

    Args:
        source: A copy of ``mhzobaer26/TextileAI_Dataset``, which has no masks.
    """
    for image in sorted(source.glob("no_defect/*/*.png")):
        yield Part(image, GOOD)
    for image in sorted(source.glob("defect/*.png")):
        yield Part(image, "defect")


def list_commutators(source: Path) -> Iterator[Part]:
    """List the commutators of KolektorSDD (Tabernik et al., J. of Intelligent Manufacturing 2020).

    Args:
        source: Has ``kos01/Part0.jpg`` and ``kos01/Part0_label.bmp``.
    """
    for image in sorted(source.glob("kos*/Part?.jpg")):
        mask = image.with_name(f"{image.stem}_label.bmp")
        is_defective = np.asarray(cv2.imread(str(mask), cv2.IMREAD_GRAYSCALE)).any()
        yield Part(image, "crack" if is_defective else GOOD, mask)


def list_solar_cells(source: Path) -> Iterator[Part]:
    """List the solar cells of ELPV (Deitsch et al., Solar Energy 2019); they have no masks.

    Args:
        source: A copy of ``zae-bayern/elpv-dataset``; a probability above 0.5 is a defect.
    """
    folder = source / "src/elpv_dataset/data"
    for line in (folder / "labels.csv").read_text().splitlines():
        image, probability, _ = line.split()
        yield Part(folder / image, GOOD if float(probability) <= 0.5 else "defect")


def prepare_boards(
    source_folder: Path, out_folder: Path, *, count: int = 200, seed: int = 0
) -> Path:
    """Write a small dataset of circuit boards with fixed splits: images, YOLO text, list files.

    The source is DeepPCB (Tang et al., "Online PCB defect detector on a new PCB defect dataset",
    2019): images ``*_test.jpg`` of 640 px, and one text file for each with lines of ``left top
    right bottom class``.

    Args:
        source_folder: A copy of DeepPCB; the folder ``PCBData`` or the one that holds it.
        out_folder: Is made; 70 % of the images train, 10 % validate, 20 % test.
        count: Number of images, spread over the lists of the source.
        seed: Chooses them and their splits.

    Returns:
        `out_folder`.

    Raises:
        FileNotFoundError: The source has not the lists of DeepPCB.
        ValueError: It lists fewer images than are asked for.
    """
    source = source_folder
    if not (source / _BOARD_LISTS[0]).is_file():
        source = source_folder / "PCBData"
    rows = []
    for name in _BOARD_LISTS:
        lines = (source / name).read_text().splitlines()
        rows += [line.split() for line in lines if line.strip()]
    if count > len(rows):
        raise ValueError(
            f"count={count}, but {source} lists {len(rows)} images: ask for at most as many"
        )
    chooser = random.Random(seed)
    chosen = [rows[number] for number in sorted(chooser.sample(range(len(rows)), count))]
    chooser.shuffle(chosen)
    for name in ("images", "labels"):
        (out_folder / name).mkdir(parents=True, exist_ok=True)
    (out_folder / "classes.txt").write_text("\n".join(BOARD_CLASSES) + "\n")
    first = 0
    for split, fraction in _BOARD_FRACTIONS.items():
        last = count if split == "test" else first + round(fraction * count)
        listing = ""
        for image, labels in chosen[first:last]:
            listing += f"images/{_copy_board(source, image, labels, out_folder)}.jpg\n"
        (out_folder / f"{split}.txt").write_text(listing)
        first = last
    return out_folder


def prepare_cells(source: Path, target: Path) -> None:
    """Write photographs of blood cells with the splits of their authors: images, YOLO text, list files.

    Boxes without an area are left out.

    Args:
        source: A copy of ``Shenggan/BCCD_Dataset`` (MIT), which has the folder ``BCCD`` in the
            layout of Pascal VOC.
        target: The folder to make.
    """
    for split in ("train", "val", "test"):
        stems = (source / "BCCD/ImageSets/Main" / f"{split}.txt").read_text().split()
        images = [source / "BCCD/JPEGImages" / f"{stem}.jpg" for stem in stems]
        _copy_boxes(images, source / "BCCD/Annotations", CELL_CLASSES, target, split)


def prepare_steel(source: Path, target: Path) -> None:
    """Write images of steel as `prepare_cells` does, 70 / 10 / 20 % of each kind of defect.

    Args:
        source: A copy of NEU-DET (He et al., IEEE TIM 69, 2020) with ``IMAGES/KIND_1.jpg`` and
            ``ANNOTATIONS/KIND_1.xml``.
        target: The folder to make.
    """
    images: dict[str, list[Path]] = {split: [] for split, _ in _GOOD_FRACTIONS}
    for kind in STEEL_CLASSES:
        names = [path.name for path in sorted((source / "IMAGES").glob(f"{kind}_*.jpg"))]
        for row in _split(names, _GOOD_FRACTIONS):
            images[row["split"]].append(source / "IMAGES" / row["image"])
    for split, of_split in images.items():
        _copy_boxes(of_split, source / "ANNOTATIONS", STEEL_CLASSES, target, split)


def _copy_boxes(
    images: Sequence[Path], annotations: Path, classes: Sequence[str], target: Path, split: str
) -> None:
    """Copy the images of one split, and write their boxes as YOLO text and the list file."""
    for name in ("images", "labels"):
        (target / name).mkdir(parents=True, exist_ok=True)
    (target / "classes.txt").write_text("\n".join(classes) + "\n")
    for image in images:
        shutil.copy(image, target / "images" / image.name)
        lines = _read_boxes(annotations / f"{image.stem}.xml", classes)
        (target / "labels" / f"{image.stem}.txt").write_text("".join(lines))
    (target / f"{split}.txt").write_text("".join(f"images/{image.name}\n" for image in images))


def _read_boxes(path: Path, classes: Sequence[str]) -> list[str]:
    """Read the boxes of one image in the layout of Pascal VOC as lines of YOLO text."""
    root = ET.parse(path).getroot()
    width, height = (int(root.findtext(f"size/{side}", "0")) for side in ("width", "height"))
    lines = []
    for element in root.iter("object"):
        edges = (
            element.findtext(f"bndbox/{edge}", "0") for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        left, top, right, bottom = map(int, edges)
        if right > left and bottom > top:
            number = classes.index(element.findtext("name", ""))
            x, y = (left + right) / 2 / width, (top + bottom) / 2 / height
            size = f"{(right - left) / width:.6f} {(bottom - top) / height:.6f}"
            lines.append(f"{number} {x:.6f} {y:.6f} {size}\n")
    return lines


def _copy_board(source: Path, image: str, labels: str, out_folder: Path) -> str:
    """Copy one image, write its labels as YOLO text, and return its stem."""
    listed = source / image
    tested = listed.with_name(f"{listed.stem}_test{listed.suffix}")
    shutil.copy(tested, out_folder / "images" / listed.name)
    lines = []
    for line in (source / labels).read_text().splitlines():
        if not line.strip():
            continue
        left, top, right, bottom, number = map(int, line.replace(",", " ").split())
        x, y = (left + right) / 2 / BOARD_PX, (top + bottom) / 2 / BOARD_PX
        width, height = (right - left) / BOARD_PX, (bottom - top) / BOARD_PX
        lines.append(f"{number - 1} {x:.6f} {y:.6f} {width:.6f} {height:.6f}\n")
    (out_folder / "labels" / f"{listed.stem}.txt").write_text("".join(lines))
    return listed.stem


PREPARE: Mapping[str, Callable[[Path, Path], object]] = {
    "tiles": prepare_tiles,
    "tiles6": partial(prepare_tiles, kinds=SIX_KINDS),
    "boards": prepare_boards,
    "cells": prepare_cells,
    "steel": prepare_steel,
    "labels": partial(prepare_labels, list_parts=list_classes),
    "solar_cells": partial(prepare_labels, list_parts=list_solar_cells),
    "good_tiles": partial(prepare_good_parts, list_parts=list_tiles),
    "few_good_tiles": partial(prepare_good_parts, list_parts=list_tiles, train_images=120),
    "good_fabrics": partial(prepare_good_parts, list_parts=list_fabrics),
    "good_commutators": partial(prepare_good_parts, list_parts=list_commutators),
    "good_solar_cells": partial(prepare_good_parts, list_parts=list_solar_cells),
}
"""By the names of the command line."""


if __name__ == "__main__":
    name, source_folder, target_folder = sys.argv[1:]
    if name not in PREPARE:
        sys.exit(f"{name} is none of {', '.join(PREPARE)}")
    PREPARE[name](Path(source_folder), Path(target_folder))
