"""Folders as people have them, each a small tree, and what is understood of them; writes docs/folders.md.

``trees.toml`` is the table. ``python -m tests.datasets.trees`` writes the page anew.
"""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule, StripeDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.image_files import ImageFolder
from lit_data.datasets.split_names import SPLITS
from lit_data.synthesis import DefectSpec
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.gan import GANDataModule
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.watermarks import WatermarkDataModule, WatermarkSpec
from tests.datasets.contents import IMAGES, WRITERS

PAGE = Path(__file__).parents[2] / "docs" / "folders.md"
_TABLE = Path(__file__).with_name("trees.toml")
_APART = {"near_duplicates": "apart"}  # the pictures are noise, and nobody asks what is alike
_KINDS: Mapping[str, tuple[type[BaseDataModule], dict[str, Any]]] = {
    "segmentation": (InspectionDataModule, _APART | {"patch_px": 24}),
    "anomaly": (InspectionDataModule, _APART | {"patch_px": 24, "train_on": "good"}),
    "classification": (LabelledImageDataModule, _APART | {"size_px": 24}),
    "detection": (DetectionDataModule, _APART | {"size_px": 32}),
    "ct_segmentation": (
        CTDataModule,
        {"sample": "windows", "classes": ["tumour"], "processes": 1, "window": [0, 1800]},
    ),
    "gan": (GANDataModule, {"views": "folders", "image_px": 16}),
    "gan_images": (GANDataModule, {"views": "none", "image_px": 16}),
    "stripe": (StripeDataModule, {"patch_px": 16, "stride_px": 16, "synthesis": DefectSpec()}),
    "watermark": (WatermarkDataModule, {"patch_px": 16, "synthesis": WatermarkSpec()}),
}
_HEAD = """# Folders that are understood

Each row is a folder that somebody has, and what becomes of it without any option but `data.root`. Run
`lit-data prepare experiment=NAME data.root=FOLDER prepare.check=true` to see the same for yours.

`{1-3}` stands for three files. A test draws these folders and compares what is understood with this page.

What lies in a folder and is not used is logged in a few lines, by its cause: images without a label file, label files
of a format that is not read, archives, images of other types, splits without labels. Each line has a count, the first
names, and the key or the command that would use these files. The tables below quote such lines.

## Sets of other libraries

`pip install 'lit-data-inspect[imports]'`, and name the folder. It is unpacked once into `paths.cache`, and the log names
what it is: `a dataset of Hugging Face: 120 images, 120 masks`.

| set | `data.root` | what is read |
|---|---|---|
| Hugging Face `datasets` | a folder of `save_to_disk`, of parquet files, or of its cache | columns `image`, `mask`, `label`, and `objects` with `bbox` and `category` |
| WebDataset | a folder of tar files, or `'shards/{000..003}.tar'` | `png` or `jpg`, `mask.png`, `cls`, and `json` with `objects` |
| litData | a folder of `optimize` | dicts with `image`, `mask`, `label`, `objects`, `name` |
| FiftyOne | an export as `FiftyOneDataset`, without the library | `Segmentation` with a path, `Detections`, `Classification`, tags as splits |

Splits of the set stay: of `DatasetDict`, or of files and folders named so. Boxes are `[x, y, width, height]` in pixels,
as in COCO. Pickled values are refused. No server is asked.
"""
_TITLES = {
    "segmentation": "Images with masks or outlines",
    "anomaly": "Good parts, and defects to test on",
    "classification": "A label for each image",
    "detection": "Images with boxes",
    "ct_segmentation": "CT volumes",
    "gan": "Objects to generate",
    "gan_images": "Images to generate",
    "stripe": "Targets with references",
    "watermark": "Pages for watermarks",
}


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A small tree of files.

    Attributes:
        name: As the field calls it.
        experiment: That it is read with.
        files: A line for each group of files: a path with ``{1-3}`` or ``{a,b}``, a content of
            `WRITERS`, and an argument for that.
        understood: Counts of each split and of labels, as `describe_tree` gives them.
        logged: Texts that are logged.
        refused: A text of the message that it is refused with; empty where it is not.
        options: Keys of the datamodule that are typed.
    """

    name: str
    experiment: str
    files: str
    understood: str = ""
    logged: Sequence[str] = ()
    refused: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def list_files(self) -> Iterator[tuple[str, str, str]]:
        """Yield path, content and argument of each file."""
        for line in self.files.strip().splitlines():
            pattern, content, argument = [*line.strip().split(maxsplit=2), ""][:3]
            for path in expand(pattern):
                yield path, content, argument


def read_trees() -> list[Tree]:
    """Read the table."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return [Tree(**entry) for entry in table["tree"]]


def expand(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern, such as ``{a,b}/{1-3}.png``."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [_list_choices(part) if index % 2 else [part] for index, part in enumerate(parts)]
    for chosen in product(*choices):
        yield "".join(chosen)


def _list_choices(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal():
        return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return text.split(",")


def draw_tree(tree: Tree, folder: Path) -> None:
    """Write the files of a tree into a folder."""
    files = list(tree.list_files())
    images = [path for path, content, _ in files if content in IMAGES]
    for path, content, argument in files:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        names = [os.path.relpath(folder / image, target.parent) for image in images]
        WRITERS[content](target, argument, sorted(names))


def describe_tree(tree: Tree, root: Path, cache: Path) -> str:
    """Return what is understood of a folder, in one line, by the code that `prepare.check=true` calls."""
    kind, defaults = _KINDS[tree.experiment]
    datamodule = kind(root, cache_dir=cache, **(defaults | dict(tree.options)))
    if isinstance(datamodule.source, ImageFolder):
        datamodule = datamodule.renew(datamodule.source.unstored())
    else:
        datamodule.setup("fit")
    return describe_counts(datamodule.describe(), datamodule.list_splits())


def describe_counts(report: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> str:
    """Return ``train 3 (crack 1, good 2), val 1, test 1; 4 masks``."""
    classes = {
        split: Counter(row.get("class", "") for row in rows if row["split"] == split)
        for split in SPLITS
    }
    parts = []
    for split in SPLITS:
        keys = (f"{split}_{unit}" for unit in ("images", "volumes", "samples"))
        count = next((report[key] for key in keys if key in report), 0)
        named = ", ".join(f"{name} {n}" for name, n in sorted(classes[split].items()) if name)
        parts.append(f"{split} {count} ({named})" if named else f"{split} {count}")
    line = ", ".join(parts)
    units = {"images_with_masks": "masks", "labelled": "labeled"}
    for key in ("images_with_masks", "boxes", "objects", "labelled"):
        if key in report:
            line += f"; {report[key]} {units.get(key, key)}"
    return f"{line} of {report['classes']}" if "boxes" in report else line


def write_page(trees: Sequence[Tree]) -> str:
    """Return the page: for each experiment a table of its folders."""
    text = _HEAD
    for experiment, title in _TITLES.items():
        rows = [_write_row(tree) for tree in trees if tree.experiment == experiment]
        if rows:
            text += f"\n## {title}\n\n`experiment={experiment}`\n\n"
            text += (
                "| folder | files | what is understood |\n|---|---|---|\n" + "\n".join(rows) + "\n"
            )
    return text


def _write_row(tree: Tree) -> str:
    patterns = [f"`{line.split()[0]}`" for line in tree.files.strip().splitlines()]
    understood = tree.understood
    if tree.refused:
        understood = f"refused: `{tree.refused}`"
    notes = [f"“{text}”" for text in tree.logged]
    options = [f"`data.{key}={_to_word(value)}`" for key, value in tree.options.items()]
    name = ", ".join([tree.name, *options])
    return f"| {name} | {', '.join(patterns)} | {'; '.join([understood, *notes])} |"


def _to_word(value: object) -> str:
    """Return an option as it is typed."""
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    if not isinstance(value, Mapping):
        return str(value)
    return "{" + ", ".join(f"{key}: {text}" for key, text in value.items()) + "}"


if __name__ == "__main__":
    PAGE.write_text(write_page(read_trees()), encoding="utf-8")
