"""``prepare``: check the files and build the decoded store ahead of the first run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_data.checks import check_count, check_outside_root
from lit_data.commands.build import build_datamodule
from lit_data.commands.configuration.names import to_plain
from lit_data.commands.configuration.targets import read_options
from lit_data.commands.export import export_set
from lit_data.datamodules.base import BaseDataModule
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, StoreCorruptError

Split = Literal["train", "val", "test"]

log = logging.getLogger(__name__)

_MOST_DAMAGED: Final = 100  # that a message lists
_NO_MASKS: Final = (
    "no image has a mask, so fit has nothing to learn: name their folder, data.masks=FOLDER, draw "
    "defects, synthesis=library, learn good parts alone, +experiment=anomaly, or folders as "
    "labels, +experiment=classification"
)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``prepare``; conf/prepare.yaml has one line for each.

    Args:
        check: Only decode every file and list the bad ones.
        verify: Compare the store and its sources with their checksums.
        shards: Write the dataset in shards to this folder or address.
        shard_bytes: Decoded bytes of the images of a shard.
        export: Write samples as training sees them into this folder.
        export_stage: Whose samples.
        export_epoch: The epoch they are drawn for.
    """

    check: bool
    verify: bool
    shards: str | None
    shard_bytes: int
    export: str | None
    export_stage: Split
    export_epoch: int

    def __post_init__(self) -> None:
        for name, least in (("shard_bytes", 1), ("export_epoch", 0)):
            check_count(f"prepare.{name}", getattr(self, name), least)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Decode every file strictly, into the store; with ``prepare.check=true`` nothing is stored.

    ``prepare.shards=ADDRESS`` writes it in shards to another place instead, see
    `lit_data.io.shards`. ``prepare.export=FOLDER`` then writes the samples of a stage with their
    defects, see `lit_data.commands.export`.

    Returns:
        Images, patches of each split and bytes of the store; samples, defects and distractors of an
        export.

    Raises:
        DataError: Files are bad; all of them are listed.
        StoreCorruptError: With ``prepare.verify=true``: the store or a source is not what it was.
    """
    options = read_options(PrepareOptions, cfg.prepare, "prepare")
    datamodule = build_datamodule(cfg, prepared=not (options.check or options.shards))
    data = to_plain(cfg.data)
    if options.check:
        report: dict[str, Any] = datamodule.check_sources()
        log.info("%s", _describe_good(report))
        _print_counts(report)
    elif options.shards:
        return _name_figures(_publish(datamodule, options, data.get("root")))
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
        log.warning(_NO_MASKS)
    return _name_figures(report)


def _name_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was counted, under its names in summary.json."""
    return {f"prepare/{key}": value for key, value in report.items()}


def _open(datamodule: BaseDataModule, options: PrepareOptions) -> dict[str, Any]:
    """Open the store, verify it if that is asked for, and return what is in it."""
    datamodule.setup("fit")
    if options.verify:
        damaged = datamodule.verify_sources()
        if damaged:
            entries = "\n  ".join(damaged[:_MOST_DAMAGED])
            raise StoreCorruptError(f"{len(damaged)} entries are damaged:\n  {entries}")
    return datamodule.describe()


def _print_counts(counts: Mapping[str, Any]) -> None:
    """Print two tables of what was counted: of the set, and of each split."""
    of_set: dict[str, Any] = {}
    of_split: dict[str, dict[str, Any]] = {}
    for key, value in counts.items():
        split, _, name = key.partition("_")
        if split in SPLITS and name:
            of_split.setdefault(split, {})[name] = value
        else:
            of_set[key] = value
    _print_table(("found", ""), [(key.replace("_", " "), value) for key, value in of_set.items()])
    columns = list(dict.fromkeys(name for row in of_split.values() for name in row))
    rows = []
    for split in SPLITS:
        if split in of_split:
            rows.append((split, *(of_split[split].get(name, "") for name in columns)))
    _print_table(("split", *columns), rows)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, numbers to the right; none without rows."""
    if not rows:
        return
    table = Table()
    for index, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if index else "left"
        table.add_column(heading.replace("_", " "), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def _publish(datamodule: BaseDataModule, options: PrepareOptions, root: object) -> dict[str, int]:
    """Write the set in shards to a server or a network disk."""
    address = str(options.shards)
    if datamodule.source is None:
        raise ConfigError("prepare.shards is for kinds of data whose files are those of a `Source`")
    check_outside_root(Path(address), root, "prepare.shards")
    report = datamodule.source.publish(address, options.shard_bytes)
    log.info("read it with data.root=%s", address)
    return report


def _describe_good(report: Mapping[str, Any]) -> str:
    """Return ``44 images good; 30 / 7 / 7 train, val, test``, or what else was counted."""
    unit = next((unit for unit in ("images", "volumes") if unit in report), "files")
    text = f"{report.get(unit, 'all')} {unit} good"
    if report.get("skipped"):
        text += f", {report['skipped']} left out"
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
