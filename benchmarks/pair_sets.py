"""Targets with a reference image of others for ``python -m benchmarks learning_pairs``.

``python -m benchmarks.pair_sets NAME SOURCE TARGET``, with a NAME of `PREPARE`. A set has
``target/NAME.png``, ``ref/NAME.png`` and ``masks/NAME.png`` of tiles, and two tables:
``splits.csv`` of all tiles, and ``splits_good.csv``, in which good tiles alone train and validate.
No image is part of this repository.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

Grey = NDArray[np.uint8]
SPLITS, GOOD_SPLITS = "splits.csv", "splits_good.csv"
COUNTS: Mapping[str, int] = {"train": 160, "val": 40, "test": 100}
"""Most good tiles of a split, and most that show a defect."""
_BOARD_SPLITS = {
    "train": ("00041", "13000", "20085", "92000"),
    "val": ("77000", "50600"),
    "test": ("12000", "12100", "12300", "44000", "90100"),
}
_BOARD_TILE_PX, _TUNNEL_TILE_PX, _WAFER_TILE_PX = 320, 256, 120
_LEAST_PX = 100  # of a defect in a tile; less of it may be a part that is cut off
_SPOT_PX = 8  # radius around a defect of which one pixel is known


class Pair(NamedTuple):
    """A target, the reference that it is compared with, and where they differ.

    Attributes:
        name: Of the files of its tiles.
        split: ``train``, ``val`` or ``test``.
        target: [H, W].
        reference: [H, W].
        mask: [H, W], 255 at a defect.
    """

    name: str
    split: str
    target: Grey
    reference: Grey
    mask: Grey


def write_tiles(pairs: Iterable[Pair], target: Path, tile_px: int) -> None:
    """Cut pairs into tiles, and write good and defective ones of each split, `COUNTS` at most.

    Tiles that show less than 100 px of a defect are left out. Tiles are taken in an order drawn from
    a fixed seed.

    Args:
        pairs: The pairs.
        target: The folder to make.
        tile_px: Height and width of a tile.
    """
    tiles: dict[tuple[str, bool], list[Pair]] = {}
    for pair in pairs:
        for tile in _cut(pair, tile_px):
            defect_px = int(np.count_nonzero(tile.mask))
            if defect_px == 0 or defect_px >= _LEAST_PX:
                tiles.setdefault((pair.split, defect_px > 0), []).append(tile)
    rows = []
    for split, count in COUNTS.items():
        for is_defective in (False, True):
            found = tiles.get((split, is_defective), [])
            order = np.random.default_rng(0).permutation(len(found))[:count]
            for number in order.tolist():
                _write_tile(found[number], target)
                rows.append((f"target/{found[number].name}.png", split, is_defective))
    good_rows = [row for row in rows if row[1] == "test" or not row[2]]
    for table, chosen in ((SPLITS, rows), (GOOD_SPLITS, good_rows)):
        with (target / table).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("image", "split"))
            writer.writerows(row[:2] for row in chosen)


def _cut(pair: Pair, tile_px: int) -> Iterator[Pair]:
    height, width = pair.target.shape
    for top in range(0, height - tile_px + 1, tile_px):
        for left in range(0, width - tile_px + 1, tile_px):
            window = np.s_[top : top + tile_px, left : left + tile_px]
            parts = (image[window] for image in (pair.target, pair.reference, pair.mask))
            yield Pair(f"{pair.name}_{top}_{left}", pair.split, *parts)


def _write_tile(tile: Pair, target: Path) -> None:
    images = {"target": tile.target, "ref": tile.reference, "masks": tile.mask}
    for folder, image in images.items():
        (target / folder).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / folder / f"{tile.name}.png"), image)


def list_boards(source: Path) -> Iterator[Pair]:
    """List the circuit boards of DeepPCB with their templates; kinds of boards are kept apart.

    Defects are known as boxes. They are masks here, which are larger than the defects.

    Args:
        source: A copy of ``tangsanli5201/DeepPCB`` (Tang et al., "Online PCB defect detector on a
            new PCB defect dataset", 2019).
    """
    for split, groups in _BOARD_SPLITS.items():
        for group in groups:
            folder = source / "PCBData" / f"group{group}"
            for path in sorted(folder.glob("*/*_test.jpg")):
                stem = path.stem.removesuffix("_test")
                target, reference = read_grey(path), read_grey(path.with_name(f"{stem}_temp.jpg"))
                mask = np.zeros_like(target)
                boxes = folder / f"{path.parent.name}_not" / f"{stem}.txt"
                for line in boxes.read_text().splitlines():
                    left, top, right, bottom = map(int, re.split(r"[ ,]+", line)[:4])
                    mask[top:bottom, left:right] = 255
                yield Pair(stem, split, target, reference, mask)


def list_tunnels(source: Path) -> Iterator[Pair]:
    """List tunnel linings with cracks, and the same places without them.

    Cracks that train and validate are drawn by the authors; all real ones, of 22 pairs, are tested.
    The repaired lining is the reference.

    Args:
        source: A copy of ``HuYi0811/Tunnel_Bi-Temporal_Change_Dataset`` (MIT, academic use).
    """
    for folder, splits in (("synthetic", ("train", "val")), ("real", ("test",))):
        root = source / f"{folder}_crack_changes"
        for number, path in enumerate(sorted((root / "A").glob("*.png"))):
            split = splits[-1] if number % 5 == 0 else splits[0]
            reference, mask = (read_grey(root / name / path.name) for name in ("B", "label"))
            yield Pair(path.stem, split, read_grey(path), reference, mask)


def list_wafers(source: Path) -> Iterator[Pair]:
    """List three sections of wafers with a reference each, which lies up to 24 px off.

    One pixel of each of six defects is known; a disc of 8 px around it is the mask. The reference
    is moved by whole pixels first, and what it does not show is cut off. The good section trains.

    Args:
        source: A copy of ``nadavleh/wafer-defect-detection``, which has no licence.
    """
    text = next(source.glob("defective_examples/*.txt")).read_text()
    places: dict[str, list[tuple[int, int]]] = {}
    case = ""
    for line in text.splitlines():
        numbers = [int(number) for number in re.findall(r"\d+", line)]
        if line.startswith("case"):
            case = f"case{numbers[0]}"
        elif numbers:
            places.setdefault(case, []).append((numbers[1], numbers[2]))
    for path in sorted(source.glob("*/case*_inspected_image.tif")):
        case = path.name.split("_")[0]
        target = read_grey(path)
        reference = read_grey(path.with_name(f"{case}_reference_image.tif"))
        mask = np.zeros_like(target)
        for place in places.get(case, []):
            cv2.circle(mask, place, _SPOT_PX, 255, -1)
        yield from _crop_shared(case, target, reference, mask, is_good=case not in places)


def _crop_shared(
    name: str, target: Grey, reference: Grey, mask: Grey, *, is_good: bool
) -> Iterator[Pair]:
    """Move a reference onto its target, and cut off what one of them does not show."""
    down, right = find_shift(target, reference)
    height, width = target.shape
    inner = np.s_[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    outer = np.s_[max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)]
    shared = target[inner], reference[outer], mask[inner]
    for split in ("train", "val") if is_good else ("test",):
        yield Pair(f"{name}_{split}", split, *shared)


def find_shift(target: Grey, reference: Grey, most_px: int = 40) -> tuple[int, int]:
    """Find by how many whole pixels (down, right) a target lies beside its reference."""
    middle = target[most_px:-most_px, most_px:-most_px]
    matches = cv2.matchTemplate(reference, middle, cv2.TM_CCOEFF_NORMED)
    _, _, _, (x, y) = cv2.minMaxLoc(matches)
    return most_px - y, most_px - x


def read_grey(path: Path) -> Grey:
    """Read an image as [H, W] uint8."""
    return np.asarray(cv2.imread(str(path), cv2.IMREAD_GRAYSCALE))


PREPARE: Mapping[str, tuple[Callable[[Path], Iterable[Pair]], int]] = {
    "boards": (list_boards, _BOARD_TILE_PX),
    "tunnels": (list_tunnels, _TUNNEL_TILE_PX),
    "wafers": (list_wafers, _WAFER_TILE_PX),
}
"""By the names of the command line: what lists the pairs, and the side of a tile."""


def main(words: Sequence[str]) -> None:
    """Write a set."""
    name, source, target = words
    if name not in PREPARE:
        sys.exit(f"{name} is none of {', '.join(PREPARE)}")
    list_pairs, tile_px = PREPARE[name]
    write_tiles(list_pairs(Path(source)), Path(target), tile_px)


if __name__ == "__main__":
    main(sys.argv[1:])
