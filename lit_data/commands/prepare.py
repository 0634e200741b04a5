"""``prepare``: check the files and build the decoded store ahead of the first run."""

import logging
from typing import Any

from omegaconf import DictConfig

from lit_data.commands.session import build_datamodule
from lit_data.commands.targets import instantiate
from lit_data.errors import StoreCorruptError

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Decode every file strictly: into the store, or with ``prepare.check=true`` only to see whether it is good.

    Returns:
        Images, patches of each split and bytes of the store.

    Raises:
        DataError: Files are bad; all of them are listed.
        StoreCorruptError: With ``prepare.verify=true``: the store or a source is not what it was.
    """
    if cfg.prepare.check:
        return {f"prepare/{key}": value for key, value in instantiate(cfg.data).check_sources().items()}
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    if cfg.prepare.verify:
        damaged = datamodule.verify_sources()
        if damaged:
            raise StoreCorruptError(f"{len(damaged)} entries are damaged:\n  " + "\n  ".join(damaged[:100]))
    report = datamodule.describe()
    for key, value in report.items():
        log.info("%s: %s", key.replace("_", " "), value)
    return {f"prepare/{key}": value for key, value in report.items()}
