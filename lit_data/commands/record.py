"""What ``fit`` writes into each checkpoint: the data, how they are read, the model and its scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lit_data.errors import StoreError
from lit_data.io.images.image_source import ImageBank
from lit_data.modules.weights import read_checkpoint
from lit_data.tasks.base import find_task_of

_KEY: Final = "lit_data"
_VERSION: Final = 1
_LOOKED_AT: Final = 32  # images by which a set is described

Look = dict[str, Any]


class TrainedRecord(L.Callback):
    """Writes into each checkpoint what it is trained on: the data, how they are read, the model and its scores.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self._look: Look | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        bank = getattr(_datamodule_of(trainer), "bank", None)
        self._look = None if bank is None else look_at(bank)

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data = to_plain(self.cfg.data)
        if classes := getattr(_datamodule_of(trainer), "classes", None):
            data["classes"] = list(classes)
        names = find_task_of(type(trainer.datamodule)).trained_data  # type: ignore[attr-defined]  # of the data connector
        scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        monitors = [found.monitor for found in trainer.checkpoint_callbacks if isinstance(found, ModelCheckpoint)]
        checkpoint[_KEY] = {
            "version": _VERSION,
            "experiment": str(self.cfg.name),
            "root": None if data.get("root") is None else absolute_root(str(data["root"])),
            "kind": str(data["_target_"]),
            "data": {name: data[name] for name in names if name in data},
            "model": to_plain(self.cfg.model),
            "scores": dict(sorted(scores.items(), key=lambda score: score[0] not in monitors)),
            "look": self._look,
        }


def read_record(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return what ``fit`` wrote into a checkpoint; None if nothing, as into one of another program.

    Raises:
        StoreError: The file is no checkpoint, or holds something else under that name.
    """
    if checkpoint.is_dir():  # in pieces, one of each rank
        return None
    content = read_checkpoint(checkpoint, mapped=True)
    record = content.get(_KEY)
    if record is None or (isinstance(record, Mapping) and record.get("version") != _VERSION):
        return None
    if not _is_record(record):
        raise StoreError(f"{checkpoint} is damaged: what it says of its training cannot be read")
    epoch = content.get("epoch")
    return {**record, "epochs": epoch + 1 if isinstance(epoch, int) else 0}


def _is_record(record: object) -> bool:
    """Whether it has the parts of a record, of plain values: a checkpoint may be anybody's."""
    if not isinstance(record, Mapping) or not _is_plain(record):
        return False
    kinds = {
        "experiment": str,
        "kind": str,
        "data": Mapping,
        "model": Mapping,
        "scores": Mapping,
        "look": Mapping | None,
    }
    scores, look = record.get("scores"), record.get("look")
    return (
        all(isinstance(record.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(score, float) for score in scores.values())
        and (look is None or _is_look(look))
    )


def _is_look(look: Mapping[str, Any]) -> bool:
    """Whether it has the parts of what `look_at` gives."""
    if look.keys() != {"channels", "size_px", "grey", "spread"} or not isinstance(look["size_px"], list):
        return False
    numbers = [look["channels"], look["grey"], look["spread"], *look["size_px"]]
    return len(look["size_px"]) == 2 and all(isinstance(number, int | float) for number in numbers)


def _is_plain(value: object) -> bool:
    """Whether a value is a number, text that refers to nothing, or made of such."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or (isinstance(value, str) and "${" not in value) or isinstance(value, int | float)


def look_at(bank: ImageBank) -> Look:
    """Describe images.

    Returns:
        ``channels``, the median ``size_px`` [height, width], and of the means of up to 32 images their mean ``grey``
        and standard deviation ``spread``, in parts of the range of the dtype.
    """
    numbers = np.unique(np.linspace(0, len(bank) - 1, min(_LOOKED_AT, len(bank))).astype(np.int64))
    full = float(np.iinfo(bank.dtype).max) if np.dtype(bank.dtype).kind in "ui" else 1.0
    means = [float(np.nanmean(bank[int(number)], dtype=np.float64)) / full for number in numbers]
    size_px = [int(np.median(sides)) for sides in (bank.heights_px, bank.widths_px)]
    grey, spread = float(np.mean(means)), float(np.std(means))
    return {"channels": int(bank.channels), "size_px": size_px, "grey": grey, "spread": spread}


def absolute_root(root: str) -> str:
    """Return a folder as an absolute path, and an address as it is."""
    return root if "://" in root else str(Path(root).expanduser().resolve())


def _datamodule_of(trainer: L.Trainer) -> L.LightningDataModule | None:
    found: L.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]  # of the data connector
    return found


def to_plain(node: DictConfig) -> dict[str, Any]:
    """Return a node as dicts and lists."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    found: dict[str, Any] = plain
    return found
