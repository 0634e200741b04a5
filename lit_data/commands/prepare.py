"""``prepare``: check the files and build the decoded store ahead of the first run."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_data.commands.export import export_set
from lit_data.commands.session import build_datamodule, check_outside_root
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, StoreCorruptError
from lit_data.io.store.store import DecodedStore

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Decode every file strictly: into the store, or with ``prepare.check=true`` only to see whether it is good.

    ``prepare.store=ADDRESS`` writes it in shards to another place instead, see `lit_data.io.shards`.
    ``prepare.export=FOLDER`` then writes the samples of a stage with their defects, see `lit_data.commands.export`; of
    CT volumes it writes the occupied voxels, all of them.

    Returns:
        Images, patches of each split and bytes of the store; samples, defects and distractors of an export.

    Raises:
        DataError: Files are bad; all of them are listed.
        StoreCorruptError: With ``prepare.verify=true``: the store or a source is not what it was.
    """
    if cfg.prepare.check:
        counts = build_datamodule(cfg, prepared=False).check_sources()
        log.info("%s", _describe_good(counts))
        return {f"prepare/{key}": value for key, value in counts.items()}
    if cfg.prepare.store:
        return {f"prepare/{key}": value for key, value in _publish(cfg).items()}
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    if cfg.prepare.verify:
        damaged = datamodule.verify_sources()
        if damaged:
            raise StoreCorruptError(f"{len(damaged)} entries are damaged:\n  " + "\n  ".join(damaged[:100]))
    report: dict[str, Any] = datamodule.describe()
    if isinstance(datamodule.bank, DecodedStore) and (told := datamodule.bank.describe_compression()):
        report["compression"] = told
    if cfg.prepare.export:
        report |= _export(cfg, datamodule)
    for key, value in report.items():
        log.info("%s: %s", key.replace("_", " "), value)
    return {f"prepare/{key}": value for key, value in report.items()}


def _publish(cfg: DictConfig) -> dict[str, int]:
    """Write the set in shards to a server or a network disk."""
    source, address = build_datamodule(cfg, prepared=False).source, str(cfg.prepare.store)
    if source is None:
        raise ConfigError("prepare.store is for kinds of data whose files are those of a `Source`")
    check_outside_root(cfg, Path(address), "prepare.store")
    report = source.publish(address, cfg.prepare.shard_bytes)
    log.info("read it with data.root=%s", address)
    return report


def _describe_good(report: Mapping[str, Any]) -> str:
    """``44 images good; 30 / 7 / 7 train, val, test``, or what else was counted."""
    what = next((what for what in ("images", "volumes") if what in report), "files")
    left_out = f", {report['skipped']} left out" if report.get("skipped") else ""
    splits = [split for split in ("train", "val", "test") if f"{split}_{what}" in report]
    shares = " / ".join(str(report[f"{split}_{what}"]) for split in splits)
    return f"{report.get(what, 'all')} {what} good{left_out}" + (f"; {shares} {', '.join(splits)}" if splits else "")


def _export(cfg: DictConfig, datamodule: BaseDataModule) -> dict[str, int]:
    if cfg.prepare.export_stage not in ("train", "val", "test"):
        raise ConfigError(f"prepare.export_stage={cfg.prepare.export_stage!r} must be train, val or test")
    about = {"name": cfg.name, "seed": cfg.seed, "data": OmegaConf.to_container(cfg.data, resolve=True)}
    folder, stage = Path(cfg.prepare.export), cfg.prepare.export_stage
    check_outside_root(cfg, folder, "prepare.export")
    done = datamodule.export_files(folder)
    if done is None:
        done = export_set(datamodule, folder, stage=stage, epoch=cfg.prepare.export_epoch, about=about)
    return {f"exported_{key}": value for key, value in done.items()}
