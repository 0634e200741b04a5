"""``prepare``: check the files and build the decoded store ahead of the first run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_data.checks import check_count
from lit_data.commands.configuration.targets import read_options
from lit_data.commands.export import export_set
from lit_data.commands.session import build_datamodule, check_outside_root
from lit_data.datamodules.base import BaseDataModule
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, StoreCorruptError

Split = Literal["train", "val", "test"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``prepare``; conf/prepare.yaml has one line for each.

    Args:
        check: Only decode every file and list the bad ones.
        verify: Compare the store and its sources with their checksums.
        store: Write the set in shards to this folder or address.
        shard_bytes: Decoded bytes of the images of a shard.
        export: Write samples as training sees them into this folder.
        export_stage: Whose samples.
        export_epoch: The epoch they are drawn for.
    """

    check: bool
    verify: bool
    store: str | None
    shard_bytes: int
    export: str | None
    export_stage: Split
    export_epoch: int

    def __post_init__(self) -> None:
        for name, least in (("shard_bytes", 1), ("export_epoch", 0)):
            check_count(f"prepare.{name}", getattr(self, name), least)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Decode every file strictly: into the store, or with ``prepare.check=true`` only to see
    whether it is good.

    ``prepare.store=ADDRESS`` writes it in shards to another place instead, see
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
    if options.check:
        counts = build_datamodule(cfg, prepared=False).check_sources()
        log.info("%s", _describe_good(counts))
        _print_counts(counts)
        _warn_of_no_masks(cfg, counts)
        return {f"prepare/{key}": value for key, value in counts.items()}
    if options.store:
        return {f"prepare/{key}": value for key, value in _publish(cfg, options).items()}
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    if options.verify:
        damaged = datamodule.verify_sources()
        if damaged:
            raise StoreCorruptError(
                f"{len(damaged)} entries are damaged:\n  " + "\n  ".join(damaged[:100])
            )
    report: dict[str, Any] = datamodule.describe()
    if options.export:
        report |= _export(cfg, options, datamodule)
    for key, value in report.items():
        log.info("%s: %s", key.replace("_", " "), value)
    _warn_of_no_masks(cfg, report)
    return {f"prepare/{key}": value for key, value in report.items()}


def _print_counts(counts: Mapping[str, Any]) -> None:
    """Print two tables of what was counted: of the set, and of each split."""
    splits = [split for split in SPLITS if any(key.startswith(f"{split}_") for key in counts)]
    whole = {
        key: value
        for key, value in counts.items()
        if not key.startswith(tuple(f"{one}_" for one in splits))
    }
    columns = dict.fromkeys(key.partition("_")[2] for key in counts if key not in whole)
    for headings, rows in (
        (("found", ""), [(key.replace("_", " "), value) for key, value in whole.items()]),
        (
            ("split", *columns),
            [(split, *(counts.get(f"{split}_{key}", "") for key in columns)) for split in splits],
        ),
    ):
        table = Table()
        for place, heading in enumerate(headings):
            table.add_column(
                heading.replace("_", " "), justify="right" if place else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        if rows:
            Console().print(table)


def _warn_of_no_masks(cfg: DictConfig, report: Mapping[str, Any]) -> None:
    """Warn where training would find nothing that says what a defect is."""
    learns_good = cfg.data.get("train_on") == "good"
    if (
        report.get("images_with_masks") == 0
        and cfg.data.get("synthesis") is None
        and not learns_good
    ):
        log.warning(
            "no image has a mask, so fit has nothing to learn: name their folder, data.masks=FOLDER, draw defects, "
            "synthesis=library, learn good parts alone, +experiment=anomaly, or folders as labels, +experiment=labelled"
        )


def _publish(cfg: DictConfig, options: PrepareOptions) -> dict[str, int]:
    """Write the set in shards to a server or a network disk."""
    source, address = build_datamodule(cfg, prepared=False).source, str(options.store)
    if source is None:
        raise ConfigError("prepare.store is for kinds of data whose files are those of a `Source`")
    check_outside_root(cfg, Path(address), "prepare.store")
    report = source.publish(address, options.shard_bytes)
    log.info("read it with data.root=%s", address)
    return report


def _describe_good(report: Mapping[str, Any]) -> str:
    """``44 images good; 30 / 7 / 7 train, val, test``, or what else was counted."""
    what = next((what for what in ("images", "volumes") if what in report), "files")
    left_out = f", {report['skipped']} left out" if report.get("skipped") else ""
    splits = [split for split in ("train", "val", "test") if f"{split}_{what}" in report]
    shares = " / ".join(str(report[f"{split}_{what}"]) for split in splits)
    return f"{report.get(what, 'all')} {what} good{left_out}" + (
        f"; {shares} {', '.join(splits)}" if splits else ""
    )


def _export(cfg: DictConfig, options: PrepareOptions, datamodule: BaseDataModule) -> dict[str, int]:
    about = {
        "name": cfg.name,
        "seed": cfg.seed,
        "data": OmegaConf.to_container(cfg.data, resolve=True),
    }
    folder = Path(str(options.export))
    check_outside_root(cfg, folder, "prepare.export")
    done = export_set(
        datamodule, folder, stage=options.export_stage, epoch=options.export_epoch, about=about
    )
    return {f"exported_{key}": value for key, value in done.items()}
