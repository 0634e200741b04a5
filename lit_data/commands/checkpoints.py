"""Checkpoints: how they are written, what they say of their training, which one a command takes, and its weights."""

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from typing_extensions import override

from lit_data.errors import ConfigError, DataError, LitDataError, StoreError
from lit_data.files import replacing
from lit_data.io.images.image_source import ImageBank
from lit_data.modules.weights import read_checkpoint
from lit_data.tasks.base import find_task_of

log = logging.getLogger(__name__)


_NAMED: Final = ("best", "last")
_RESUMED: Final = (
    "last",
    "interrupted",
    "step",
)  # checkpoints that hold the whole state of a training
_OURS: Final = ("lit_data.", "lightning.")
_RESTORING: Final = "trainer.connectors.checkpoint_connector"
_KEY: Final = "lit_data"
_VERSION: Final = 1
_LOOKED_AT: Final = 32  # images by which a set is described

Look = dict[str, Any]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, brings it to the disk, and renames it.

    Lightning builds a checkpoint in memory and then in TMPDIR, and moves it from there: where that
    is another file system, the move is a copy over the old checkpoint, which a kill leaves cut
    short. Addresses such as ``s3://`` are written as Lightning writes them.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)


class TrainedRecord(L.Callback):
    """Writes into each checkpoint what it is trained on: the data, how they are read, the model and
    its scores.

    Args:
        cfg: The configuration of the run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self._look: Look | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        bank = getattr(trainer.datamodule, "bank", None)  # type: ignore[attr-defined]  # of the data connector
        self._look = None if bank is None else look_at(bank)

    @override
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        data = to_plain(self.cfg.data)
        names = find_task_of(type(trainer.datamodule)).trained_data  # type: ignore[attr-defined]  # of the data connector
        scores = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        }
        monitors = [
            found.monitor
            for found in trainer.checkpoint_callbacks
            if isinstance(found, ModelCheckpoint)
        ]
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
    if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        return False
    look = record["look"]
    return all(isinstance(score, float) for score in record["scores"].values()) and (
        look is None or _is_look(look)
    )


def _is_look(look: Mapping[str, Any]) -> bool:
    """Whether it has the parts of what `look_at` gives."""
    if look.keys() != {"channels", "size_px", "grey", "spread"} or not isinstance(
        look["size_px"], list
    ):
        return False
    numbers = [look["channels"], look["grey"], look["spread"], *look["size_px"]]
    return len(look["size_px"]) == 2 and all(isinstance(number, int | float) for number in numbers)


def _is_plain(value: object) -> bool:
    """Whether a value is a number, text that refers to nothing, or made of such."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return (
        value is None
        or (isinstance(value, str) and "${" not in value)
        or isinstance(value, int | float)
    )


def look_at(bank: ImageBank) -> Look:
    """Describe images.

    Returns:
        ``channels``, the median ``size_px`` [height, width], and of the means of up to 32 images
        their mean ``grey`` and standard deviation ``spread``, in parts of the range of the dtype.
    """
    numbers = np.unique(np.linspace(0, len(bank) - 1, min(_LOOKED_AT, len(bank))).astype(np.int64))
    dtype: np.dtype[Any] = np.dtype(bank.dtype)
    full = float(np.iinfo(dtype).max) if dtype.kind in "ui" else 1.0
    means = [float(np.nanmean(bank[int(number)], dtype=np.float64)) / full for number in numbers]
    size_px = [int(np.median(sides)) for sides in (bank.heights_px, bank.widths_px)]
    grey, spread = float(np.mean(means)), float(np.std(means))
    return {"channels": int(bank.channels), "size_px": size_px, "grey": grey, "spread": spread}


def absolute_root(root: str) -> str:
    """Return a folder as an absolute path, and an address as it is."""
    return root if "://" in root else str(Path(root).expanduser().resolve())


def to_plain(node: DictConfig) -> dict[str, Any]:
    """Return a node as dicts and lists."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    found: dict[str, Any] = plain
    return found


def find_checkpoint(cfg: DictConfig) -> Path:
    """The checkpoint `cfg.ckpt`: a path, or `best` or `last` of `cfg.run`, the newest of that name;
    null: `best`.

    Raises:
        ConfigError: `cfg.ckpt` or `cfg.run` is no text, or empty, or a path is given along with a
            run.
        DataError: The file or the run does not exist, or there is none to choose.
    """
    run = cfg.get("run")
    if run is not None and (not isinstance(run, str) or not run):
        raise ConfigError(f"run={run!r}: give latest, or the folder of a run")
    if cfg.ckpt not in (None, *_NAMED):
        if run is not None:
            raise ConfigError(
                f"run={run} and ckpt={cfg.ckpt}: give one of them, or ckpt=best or last"
            )
        return _check_checkpoint(cfg.ckpt)
    runs = Path(cfg.paths.runs) / "fit" / cfg.name
    if run in (None, "latest"):
        return _choose_newest(runs, f"**/checkpoints/{cfg.ckpt or 'best'}.ckpt")
    if not Path(run).is_dir():
        raise DataError(
            f"run={run} is not a folder: give latest, or the folder of a run below {runs}"
        )
    return _choose_newest(Path(run), f"checkpoints/{cfg.ckpt or 'best'}.ckpt")


def find_start(cfg: DictConfig) -> Path | None:
    """The checkpoint that ``fit`` goes on from, if any: that of `ckpt`, or the newest of the run
    `resume`.

    Raises:
        ConfigError: Both are given, or one of them is no text, or empty.
        DataError: The file does not exist or is no checkpoint, or there is none to choose.
    """
    resume = cfg.get("resume")
    if cfg.get("run") is not None:
        raise ConfigError(
            f"run={cfg.run} chooses the checkpoint of other commands: fit goes on with resume={cfg.run}"
        )
    if resume is None:
        return None if cfg.ckpt is None else _check_training(find_checkpoint(cfg))
    if cfg.ckpt is not None:
        raise ConfigError(f"resume={resume} and ckpt={cfg.ckpt}: give one of them")
    if not isinstance(resume, str) or not resume:
        raise ConfigError(f"resume={resume!r}: give latest, or the folder of a run")
    runs = Path(cfg.paths.runs) / "fit" / cfg.name
    if resume != "latest" and not Path(resume).is_dir():
        raise DataError(
            f"resume={resume} is not a folder: give latest, or the folder of a run below {runs}"
        )
    patterns = [
        f"{'**/' if resume == 'latest' else ''}checkpoints/{name}.ckpt" for name in _RESUMED
    ]
    return _check_training(_choose_newest(runs if resume == "latest" else Path(resume), *patterns))


def _choose_newest(folder: Path, *patterns: str) -> Path:
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    if not found:
        names = " or ".join(pattern.rpartition("/")[2] for pattern in patterns)
        raise DataError(f"no {names} below {folder}: run fit first, or give ckpt=<path>")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    log.info("checkpoint: %s", newest)
    return newest


def _check_checkpoint(ckpt: object) -> Path:
    if not isinstance(ckpt, str) or not ckpt:
        raise ConfigError(
            f"ckpt={ckpt!r}: give the path of a checkpoint, {' or '.join(_NAMED)}; null for none"
        )
    path = Path(ckpt)
    if not (path.is_file() or path.is_dir()):  # reading a FIFO would wait for ever
        raise DataError(
            f"ckpt={ckpt} is not a file: give the path of a checkpoint that fit wrote, or best, or last"
        )
    return path


def _check_training(path: Path) -> Path:
    """Refuse a file that holds no state of a training, before the data are read."""
    if path.is_dir():  # in pieces, one of each rank
        return path
    found = read_checkpoint(path, mapped=True)  # its weights are read once, by Lightning
    if missing := [key for key in ("state_dict", "loops", "optimizer_states") if key not in found]:
        raise StoreError(
            f"{path} holds no {', '.join(missing)}: training goes on from a checkpoint that Lightning wrote with them, "
            "such as last.ckpt"
        )
    return path


def load_weights(model: L.LightningModule, path: Path) -> None:
    """Give a model the weights of a checkpoint, and nothing else of it; only plain data is
    unpickled.

    Raises:
        StoreError: The file is no checkpoint, or that of another model.
    """
    if path.is_dir():
        raise StoreError(
            f"{path} is a checkpoint in pieces, one of each rank: make one file of them with "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint, or train with "
            "trainer.strategy.state_dict_type=full"
        )
    found = read_checkpoint(path)
    _check_weights(found, model, path)
    try:
        model.load_state_dict(found["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StoreError(
            f"{path} does not hold weights of {type(model).__name__}: {reason}"
        ) from error


@contextmanager
def restoring(start: Path | None, trainer: L.Trainer, model: L.LightningModule) -> Iterator[None]:
    """Hold the state of a training against what is to take it over, and let errors of taking it
    over name the file.

    Raises:
        StoreError: The checkpoint is damaged, or that of another model or of other callbacks.
    """
    if start is None or start.is_dir():  # in pieces, one of each rank
        yield
        return
    found = read_checkpoint(start, mapped=True)
    _check_weights(found, model, start)
    for name, state, like in _pair_states(found, trainer):
        if fault := _find_fault(state, like):
            raise StoreError(
                f"{start} is damaged: the state of {name} has {fault}; go on from an earlier checkpoint"
            )
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        if not _is_restoring(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise StoreError(
            f"{start} does not fit this run: {type(error).__name__}: {reason}. Go on with the model and the "
            "options it was saved with, or from an earlier checkpoint"
        ) from error


def _check_weights(found: Mapping[str, Any], model: L.LightningModule, path: Path) -> None:
    """Refuse learned weights of NaN, which stay so; buffers may hold what they like."""
    weights = found.get("state_dict")
    if not isinstance(weights, Mapping):
        return  # said where they are loaded
    learned = {
        name: weights[name]
        for name, _ in model.named_parameters()
        if isinstance(weights.get(name), Tensor)
    }
    bad = [
        name
        for name, weight in learned.items()
        if weight.is_floating_point() and weight.isnan().any()
    ]
    if bad:
        raise StoreError(
            f"{path} holds NaN in {len(bad)} of {len(learned)} weights, first in {bad[0]}: training diverged before it "
            "was saved. Take an earlier checkpoint, or train again with a lower learning rate"
        )


def _pair_states(
    found: Mapping[str, Any], trainer: L.Trainer
) -> Iterator[tuple[str, object, object]]:
    """Each state of a checkpoint that this run would take over, with what this run has in its
    place.

    Those of foreign callbacks are their own business: they may hold what a new one does not.
    """
    states = found.get("callbacks", {})
    yield "all callbacks", states, {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        if callback.state_key in states and type(callback).__module__.startswith(_OURS):
            yield (
                callback.state_key.partition("{")[0],
                states[callback.state_key],
                callback.state_dict(),
            )
    yield "the loops", found["loops"], {"fit_loop": trainer.fit_loop.state_dict()}


def _find_fault(state: object, like: object, place: str = "") -> str:
    """The first value of another kind than this run has in its place, or none; what is not set yet has no kind."""
    if isinstance(like, Mapping):
        if not isinstance(state, Mapping):
            return f"{place or 'nothing'} = {str(state)[:40]!r}"
        pairs = (
            (f"{place}.{key}".lstrip("."), state.get(key, like[key]), like[key]) for key in like
        )
        return next(
            (fault for pair in pairs if (fault := _find_fault(pair[1], pair[2], pair[0]))), ""
        )
    for kind in (Number, str, list):
        if isinstance(like, kind) and state is not None and not isinstance(state, kind | Tensor):
            return f"{place} = {str(state)[:40]!r}"
    return ""


def _is_restoring(error: Exception) -> bool:
    """Whether an error comes from where Lightning takes over the state of a checkpoint."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        str(frame.f_globals.get("__name__")).endswith(_RESTORING)
        and "restore" in frame.f_code.co_name
        for frame in frames
    )
