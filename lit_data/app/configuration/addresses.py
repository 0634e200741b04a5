"""Options that name a folder which a run writes to; `predict.folder` may be an address.

Anywhere else an address is refused in one line: without the check ``Path("s3://bucket/a")`` is a
folder ``s3:/bucket/a`` of the working directory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_data.app.configuration.names import walk
from lit_data.core.addresses import is_remote, parse_store
from lit_data.core.errors import ConfigError

_LOCAL_OPTIONS = (
    "paths.runs",
    "paths.cache",
    "paths.run",
    "data.cache_dir",
    "prepare.export",
    "sweep.resume",
)
_OUR_CALLBACKS = "lit_data.callbacks."
_ADDRESS = re.compile(r"[a-z0-9+]+:/", re.IGNORECASE)


def check_addresses(job: Mapping[str, Any]) -> None:
    """Refuse an address in an option that names a folder or file of this machine.

    Callbacks and loggers of Lightning take addresses themselves; ours write to local folders.

    Args:
        job: the resolved configuration as plain data.

    Raises:
        ConfigError: names the key and the address.
    """
    predictions = (job.get("predict") or {}).get("folder")
    if isinstance(predictions, str) and is_remote(predictions):
        parse_store(predictions, "predict.folder")
    else:
        check_local("predict.folder", predictions)
    for key in _LOCAL_OPTIONS:
        group, _, name = key.partition(".")
        options = job.get(group)
        if isinstance(options, Mapping):
            check_local(key, options.get(name))
    for key, node in walk(job):
        if isinstance(node, Mapping) and str(node.get("_target_")).startswith(_OUR_CALLBACKS):
            check_local(f"{key}.path", node.get("path"))


def check_local(key: str, folder: object) -> None:
    """Refuse an address where a folder is meant.

    Raises:
        ConfigError: names the key and the address.
    """
    if _ADDRESS.match(str(folder).removeprefix(f"{Path.cwd()}/")):
        raise ConfigError(
            f"{key}={folder} is an address: it must lie on a disk of this machine; name a folder; "
            "checkpoints may lie at an address, callbacks.last.dirpath=s3://BUCKET/RUN/checkpoints"
        )
