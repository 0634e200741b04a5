"""``prepare``: check the files and build the decoded store ahead of the first run, or write its samples out."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from lit_data.annotations.marks import run_lengths
from lit_data.app.build import build_datamodule
from lit_data.app.configuration.names import to_plain
from lit_data.app.configuration.targets import read_options
from lit_data.app.result import print_table
from lit_data.core.checks import check_count, check_outside_root
from lit_data.core.errors import ConfigError, StoreCorruptError
from lit_data.core.parts import Part
from lit_data.core.progress import limit_threads, track
from lit_data.core.types import Array, Batch, Bools, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datasets.split_names import SPLITS
from lit_data.images.roots import Encoding
from lit_data.images.writing import write_image
from lit_data.loading import MicroBatchLoader
from lit_data.synthesis import FAMILIES
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


Split = Literal["train", "val", "test"]


_MOST_DAMAGED = 100  # that a message lists
_NO_MASKS = (
    "no image has a mask, so fit has nothing to learn: name their folder with "
    "data.masks=FOLDER, draw defects with synthesis=library, train on good parts alone with "
    "experiment=anomaly, or use folders as labels with experiment=classification"
)

_BATCH = 32
README = """A set of samples rendered by lit_data.

images/            [H, W, 3] target, ref1, ref2: whole pixel values as PNG or TIFF, or 0..1 as float32 TIFF
masks/             the same stems; 255 where a true defect visibly changes the target, 0 elsewhere;
                   class numbers, and 255 for ignored pixels, if the source masks have them
annotations.json   COCO: true defects; bbox [x, y, width, height] px, uncompressed RLE, `change` (mean, as fraction of
                   the value range) and `severity` (the same in standard deviations of the noise around the defect)
distractors.json   the same for distractors, which look like defects, with the images that show them (`channels`)
export.json        what the dataset was made from
"""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``prepare``; conf/prepare.yaml has one line for each.

    Args:
        workers: Threads that read and decode files; auto: one for each core of this process.
        check: Only decode every file and list the bad ones.
        verify: Compare the store and its sources with their checksums.
        shards: Write the dataset in shards to this folder or address.
        shard_bytes: Decoded bytes of the images of a shard.
        part: Write only this part of the shards: a number from 0 on, with `of`, or both as
            ``0/4``.
        of: How many parts there are.
        finish: Make a dataset of the shards of all parts, which are there.
        encoding: Whether shards hold decoded pixels or the source files.
        export: Write samples as training sees them into this folder.
        export_stage: Whose samples.
        export_epoch: The epoch they are drawn for.
    """

    workers: int | Literal["auto"]
    check: bool
    verify: bool
    shards: str | None
    shard_bytes: int
    part: int | str | None
    of: int | None
    finish: bool
    encoding: Encoding
    export: str | None
    export_stage: Split
    export_epoch: int

    def __post_init__(self) -> None:
        for name, least in (("shard_bytes", 1), ("export_epoch", 0)):
            check_count(f"prepare.{name}", getattr(self, name), least)
        if self.workers != "auto":
            check_count("prepare.workers", self.workers, 1)
        defaults = {"part": None, "of": None, "finish": False, "encoding": "decoded"}
        for name, default in defaults.items():
            if self.shards is None and getattr(self, name) != default:
                raise ConfigError(
                    f"prepare.{name} is for datasets in shards: set prepare.shards=ADDRESS"
                )


def run(cfg: DictConfig) -> dict[str, Any]:
    """Decode every file strictly, into the store; with ``prepare.check=true`` nothing is stored.

    ``prepare.shards=ADDRESS`` writes it in shards to another place instead, see
    `lit_data.wings.remote.shards`. ``prepare.export=FOLDER`` then writes the samples of a stage with their
    defects, see `export_set`.

    Returns:
        Images, patches of each split and bytes of the store; samples, defects and distractors of an
        export.

    Raises:
        DataError: Files are bad; all of them are listed.
        StoreCorruptError: With ``prepare.verify=true``: the store or a source is not what it was.
    """
    options = read_options(PrepareOptions, cfg.prepare, "prepare")
    with limit_threads(None if options.workers == "auto" else options.workers):
        figures = _prepare(cfg, options)
    return {f"prepare/{name}": value for name, value in figures.items()}


def _prepare(cfg: DictConfig, options: PrepareOptions) -> Mapping[str, Any]:
    # Both read the sources themselves: a store on this machine is not needed for it.
    datamodule = build_datamodule(cfg, prepared=not (options.check or options.shards))
    data = to_plain(cfg.data)
    if options.check:
        report: dict[str, Any] = datamodule.check_sources()
        log.info("%s", _describe_readable(report))
        _print_counts(report)
    elif options.shards:
        return _publish(datamodule, options, data.get("root"))
    else:
        report = _open(datamodule, options)
        if options.export:
            source = {"name": cfg.name, "seed": cfg.seed, "data": data}
            report |= _export(datamodule, options, source)
        for key, value in report.items():
            log.info("%s: %s", key.replace("_", " "), value)
    # Models of good parts learn without defects.
    needs_masks = data.get("synthesis") is None and data.get("train_on") != "good"
    if needs_masks and report.get("images_with_masks") == 0:
        unused = "" if datamodule.source is None else datamodule.source.leftovers.quote()
        log.warning("%s%s", _NO_MASKS, unused)
    return report


def _open(datamodule: BaseDataModule, options: PrepareOptions) -> dict[str, Any]:
    """Open the store, verify it if that is asked for, and return what is in it."""
    datamodule.setup("fit")
    if options.verify:
        damaged = datamodule.verify_sources()
        if damaged:
            entries = "\n  ".join(damaged[:_MOST_DAMAGED])
            count = counted(len(damaged), "entry is", "entries are")
            raise StoreCorruptError(f"{count} damaged:\n  {entries}")
    return datamodule.describe()


def _print_counts(counts: Mapping[str, Any]) -> None:
    """Print two tables of what was counted: of the set, and of each split."""
    of_set: dict[str, Any] = {}
    of_split: dict[str, dict[str, Any]] = {}
    for key, value in counts.items():
        # Such as train_images; keys of the whole dataset begin with no split.
        split, _, name = key.partition("_")
        if split in SPLITS and name:
            of_split.setdefault(split, {})[name] = value
        else:
            of_set[key] = value
    counts_of_set = [(key.replace("_", " "), value) for key, value in of_set.items()]
    if counts_of_set:
        print_table(["found", ""], counts_of_set, texts=["found"])
    columns = list(dict.fromkeys(name for row in of_split.values() for name in row))
    rows = []
    for split in SPLITS:
        if split in of_split:
            rows.append((split, *(of_split[split].get(name, "") for name in columns)))
    if rows:
        headings = ["split", *(name.replace("_", " ") for name in columns)]
        print_table(headings, rows, texts=["split"])


def _publish(datamodule: BaseDataModule, options: PrepareOptions, root: object) -> dict[str, int]:
    """Write the set in shards to a server or a network disk."""
    address = str(options.shards)
    if datamodule.source is None:
        raise ConfigError("prepare.shards is for kinds of data with a `Source`")
    check_outside_root(Path(address), root, "prepare.shards")
    part = Part.read("prepare", options.part, options.of)
    report = datamodule.source.publish(
        address,
        options.shard_bytes,
        part=part,
        finish=options.finish,
        encoding=options.encoding,
    )
    if part is None:
        log.info("read it with data.root=%s", address)
    else:
        log.info("when all %d parts are written, run it with prepare.finish=true", part.count)
    return report


def _describe_readable(report: Mapping[str, Any]) -> str:
    """Return ``44 images readable; 30 / 7 / 7 train, val, test``, or what else was counted."""
    unit = next((unit for unit in ("images", "volumes") if unit in report), "files")
    text = f"{report.get(unit, 'all')} {unit} readable"
    if report.get("skipped"):
        text += f", {report['skipped']} skipped"
    splits = [split for split in SPLITS if f"{split}_{unit}" in report]
    if splits:
        counts = " / ".join(str(report[f"{split}_{unit}"]) for split in splits)
        text += f"; {counts} {', '.join(splits)}"
    return text


def _export(
    datamodule: BaseDataModule, options: PrepareOptions, source: dict[str, Any]
) -> dict[str, int]:
    folder = Path(str(options.export))
    check_outside_root(folder, source["data"].get("root"), "prepare.export")
    counts = export_set(
        datamodule,
        folder,
        stage=options.export_stage,
        epoch=options.export_epoch,
        origin=source,
    )
    return {f"exported_{key}": value for key, value in counts.items()}


def export_set(
    datamodule: BaseDataModule, folder: Path, *, stage: Stage, epoch: int, origin: dict[str, Any]
) -> dict[str, int]:
    """Write all samples of a stage as they are drawn for an epoch.

    Args:
        datamodule: A prepared and opened datamodule.
        folder: An empty or new folder.
        stage: Whose samples.
        epoch: The epoch they are drawn for.
        origin: What `export.json` holds beside that.

    Returns:
        Numbers of samples, defects and distractors.

    Raises:
        ConfigError: The folder holds files already, or samples have no mask.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"prepare.export={folder} is not empty: name a new folder")
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    book = _Book(datamodule, folder, stage)
    for batch in _read_in_order(datamodule, stage, epoch):
        book.add(batch)
    book.write_lists()
    (folder / "README.txt").write_text(README, encoding="utf-8")
    origin = origin | {"stage": stage, "epoch": epoch}
    (folder / "export.json").write_text(json.dumps(origin, indent=1), encoding="utf-8")
    log.info("exported %s to %s", counted(len(book.images), "sample"), folder)
    return {
        "samples": len(book.images),
        "defects": len(book.lists[True]),
        "distractors": len(book.lists[False]),
    }


class _Book:
    """The files of an export, and the lists that are written at its end."""

    def __init__(self, datamodule: BaseDataModule, folder: Path, stage: Stage) -> None:
        self.datamodule, self.folder, self.stage = datamodule, folder, stage
        mask_read = getattr(datamodule.source, "mask_read", None)
        ignored_value = getattr(mask_read, "ignore", None)
        holds_numbers = bool(getattr(datamodule, "classes", None)) or ignored_value is not None
        self.mask_scale = 1 if holds_numbers else 255
        self.inspection = datamodule.inspect(stage)
        self.images: list[dict[str, Any]] = []
        self.lists: dict[bool, list[dict[str, Any]]] = {True: [], False: []}

    def add(self, batch: Batch) -> None:
        """Write the samples of a batch that the loader gave."""
        # In the order of training: what is synthetic is planned on the host, then drawn.
        planned = self.datamodule.plan_batch(batch, self.stage)
        annotated = self.inspection.annotate(planned)
        finished = self.datamodule.finish_batch(planned, self.stage)
        if "mask" not in finished or finished["mask"].ndim > 4:  # of windows of volumes
            raise ConfigError(f"the {self.stage} samples have no masks: there is nothing to export")
        first = len(self.images)
        for row in range(len(finished["index"])):
            self._write_sample(finished, row)
        if annotated is None:  # defects are those of the files, whose masks are written
            return
        plan, annotations = annotated
        for number in range(len(plan)):
            row = int(plan.row[number])
            is_shown = annotations.labels[row] == number + 1  # 0 is the background
            entry = _outline(is_shown)
            if not entry["area"]:  # another defect lies over it, or it changes no pixel
                continue
            entry["image_id"] = first + row
            family = plan.spec.members[int(plan.family[number])].name
            entry["category_id"] = list(FAMILIES).index(family) + 1
            entry["change"] = round(float(annotations.change[number]), 5)
            entry["severity"] = round(float(annotations.severity[number]), 3)
            is_true = bool(plan.is_true[number])
            if not is_true:
                channels = is_shown.flatten(1).any(1).nonzero()
                entry["channels"] = channels.flatten().tolist()
            self.lists[is_true].append(entry)

    def write_lists(self) -> None:
        """Write the annotations."""
        categories = [{"id": number, "name": name} for number, name in enumerate(FAMILIES, start=1)]
        for is_true, name in ((True, "annotations.json"), (False, "distractors.json")):
            numbered = enumerate(self.lists[is_true], start=1)
            entries = [{"id": number} | entry for number, entry in numbered]
            content = {"images": self.images, "categories": categories, "annotations": entries}
            (self.folder / name).write_text(json.dumps(content), encoding="utf-8")

    def _write_sample(self, finished: Batch, row: int) -> None:
        index = int(finished["index"][row])
        image, mask = finished["image"][row], finished["mask"][row]
        name = write_image(self.folder / "images" / f"{index:08d}", self._to_pixels(image))
        numbers = (mask.numpy() * self.mask_scale).astype(np.uint8)
        write_image(self.folder / "masks" / f"{index:08d}", numbers)
        entry: dict[str, Any] = {
            "id": len(self.images),
            "file_name": f"images/{name}",
            "index": index,
            "height": image.shape[1],
            "width": image.shape[2],
        }
        for key in ("image_index", "position"):  # of samples that are parts of an image
            if key in finished:
                entry[key] = finished[key][row].tolist()
        self.images.append(entry)

    def _to_pixels(self, image: Tensor) -> Array:
        """Return a finished sample in the values of its files, where those are whole numbers."""
        pixel_values = self.inspection.whole_values()
        if pixel_values is None:
            return image.numpy()
        dtype, values = pixel_values
        pixels = torch.round(image.double() * values.scale + values.low)
        return pixels.numpy().astype(dtype)


def _read_in_order(datamodule: BaseDataModule, stage: Stage, epoch: int) -> Iterator[Batch]:
    dataset = datamodule.dataset(stage)
    loader = MicroBatchLoader(dataset, datamodule.loader)
    starts = range(0, len(dataset), _BATCH)
    for start in track(starts, "exporting", len(starts)):
        yield loader.read(np.arange(start, min(start + _BATCH, len(dataset))), epoch)


def _outline(is_shown: Tensor) -> dict[str, Any]:
    """Box, area and run lengths of a defect in any of the images that show it: [C, H, W] bool."""
    mask: Bools = is_shown.any(0).numpy()
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    box_px = [0, 0, 0, 0]  # left, top, width, height
    if rows.size:
        top, left = int(rows[0]), int(columns[0])
        box_px = [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
    return {
        "bbox": box_px,
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": list(mask.shape), "counts": run_lengths(mask)},
    }
