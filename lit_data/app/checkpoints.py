"""Checkpoints: their files, their record of a training, the choice of one, and its weights."""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lit_data.app.launcher import RESUMED
from lit_data.app.remote_runs import fetch_checkpoint, fetch_newest
from lit_data.app.run_choice import choose_best, choose_newest, choose_unfinished
from lit_data.app.run_folder import AUTO, list_checkpoints
from lit_data.callbacks.amp import AMP
from lit_data.callbacks.wrapping import wrap
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, DataError, LitDataError, StoreError
from lit_data.core.files import replacing
from lit_data.core.opening import check_regular
from lit_data.images.bank import ImageBank
from lit_data.models.weights import read_checkpoint, refuse_nan
from lit_data.predict.task import find_task_of, list_trained

log = logging.getLogger(__name__)

_NAMED = ("best", "last")
_LATEST = "latest"
_TRAINING = ("state_dict", "loops", "optimizer_states")  # parts that training goes on from
_OURS = ("lit_data.", "lightning.")
_RESTORING = "trainer.connectors.checkpoint_connector"
KEY = "lit_data"
"""Of the record in a checkpoint, see `lit_data.app.record`."""
VERSION = 1
EXPORTED = ".inspect"
"""Suffix of exported files, which some commands take as checkpoints."""
_LOOKED_AT = 32  # images by which a set is described
Look = dict[str, Any]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, brings it to the disk, and renames it.

    Lightning builds a checkpoint in TMPDIR and moves it. Across file systems that is a copy over
    the old checkpoint, which a kill leaves cut short. It still writes addresses such as ``s3://``.
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


class TrainedRecord(Callback):
    """Writes into each checkpoint what it is trained on.

    That is the data, how they are read, the model and its scores.

    Args:
        experiment: The configuration's ``name``.
        data: Its node `data` as plain data.
        model: Its node `model` as plain data.
    """

    def __init__(self, experiment: str, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._data = data
        self._model = model
        self._look: Look | None = None
        self._undo = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()
        # `on_save_checkpoint` of callbacks is left out for a checkpoint of weights alone.
        self._undo.callback(wrap(trainer.strategy, "save_checkpoint", partial(self._save, trainer)))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bank = getattr(trainer.datamodule, "bank", None)  # type: ignore[attr-defined]  # of the data connector
        self._look = None if bank is None else look_at(bank)

    def _save(
        self,
        trainer: Trainer,
        save: Callable[..., None],
        checkpoint: dict[str, Any],
        *args: Any,  # noqa: ANN401 - as its strategy takes them
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        checkpoint[KEY] = self._describe(trainer)
        save(checkpoint, *args, **kwargs)

    def _describe(self, trainer: Trainer) -> dict[str, Any]:
        data = self._data
        root = data.get("root")
        names = list_trained(find_task_of(type(trainer.datamodule)))  # type: ignore[attr-defined]  # of the data connector
        chosen = getattr(trainer.datamodule, "chosen_options", {})  # type: ignore[attr-defined]  # of the data connector
        # Plain values only: checkpoints are read without unpickling anything else.
        return {
            "version": VERSION,
            "experiment": self._experiment,
            "root": None if root is None else absolute_root(str(root)),
            "kind": str(data["_target_"]),
            "data": {name: data[name] for name in names if name in data} | chosen,
            "model": self._model,
            "scores": _list_scores(trainer),
            "look": self._look,
        }


def _list_scores(trainer: Trainer) -> dict[str, float]:
    """Metrics of validation that are defined, what checkpoints are chosen by first."""
    monitors = []
    for checkpoint in trainer.checkpoint_callbacks:
        if isinstance(checkpoint, ModelCheckpoint):
            monitors.append(checkpoint.monitor)
    logged = trainer.callback_metrics
    names = [name for name in logged if name.startswith("val/") and logged[name].isfinite()]
    names.sort(key=lambda name: name not in monitors)
    return {name: float(logged[name]) for name in names}


def look_at(bank: ImageBank) -> Look:
    """Describe images.

    Returns:
        ``channels``, the median ``size_px`` [height, width], and of the means of up to 32 images
        their mean ``grey`` and standard deviation ``spread``, in parts of the range of the dtype.
    """
    numbers = np.unique(np.linspace(0, len(bank) - 1, min(_LOOKED_AT, len(bank))).astype(np.int64))
    dtype: np.dtype[Any] = np.dtype(bank.dtype)
    highest = float(np.iinfo(dtype).max) if dtype.kind in "ui" else 1.0
    means = [float(np.nanmean(bank[int(number)], dtype=np.float64)) / highest for number in numbers]
    return {
        "channels": int(bank.channels),
        "size_px": [int(np.median(bank.heights_px)), int(np.median(bank.widths_px))],
        "grey": float(np.mean(means)),
        "spread": float(np.std(means)),
    }


def is_exported(path: object) -> bool:
    """Return True for the name of an exported file."""
    return str(path).endswith(EXPORTED)


def absolute_root(root: str) -> str:
    """Return a folder as an absolute path, and an address as it is."""
    return root if "://" in root else str(Path(root).expanduser().resolve())


def find_checkpoint(ckpt: object, run: object, runs: Path, cache: Path) -> Path:
    """Find the checkpoint that a command reads.

    Args:
        ckpt: A path or address, or `best` or `last` of `run`; None: `best`.
        run: The folder or address of a run; `latest`: the newest one; None: the best one, see
            `lit_data.app.run_choice`.
        runs: Folder of the runs of ``fit`` of this experiment.
        cache: Below it checkpoints at addresses are copied.

    Raises:
        ConfigError: `ckpt` or `run` is no text, or empty, or a path is given along with a run.
        DataError: The file or the run does not exist, or there is none to choose.
    """
    if run is not None:
        _check_text("run", run)
    if ckpt not in (None, *_NAMED):
        if run is not None:
            raise ConfigError(f"run={run} and ckpt={ckpt}: give one of them, or ckpt=best or last")
        return _check_checkpoint(ckpt, cache)
    names = [f"{ckpt or 'best'}.ckpt"]
    if run is None:
        return _check_any(choose_best(runs, names), names, runs)
    if run == _LATEST:
        return _check_any(choose_newest(runs, names), names, runs)
    return _find_in_run("run", str(run), runs, names, cache)


def find_start(
    ckpt: object,
    run: object,
    resume: object,
    runs: Path,
    folder: Path,
    cache: Path,
) -> Path | None:
    """Find the checkpoint that ``fit`` goes on from, if any.

    Args:
        ckpt: As for `find_checkpoint`.
        run: An option of other commands.
        resume: The folder or address of a run, whose newest checkpoint is taken; `latest`: of the newest run
            that has not ended; `auto` takes that of this run, and is None in a folder without one.
        runs: As for `find_checkpoint`.
        folder: That of this run.
        cache: As for `find_checkpoint`.

    Raises:
        ConfigError: Both `ckpt` and `resume` are given, or one of them is no text, or empty.
        DataError: The file does not exist or is no checkpoint, or there is none to choose.
    """
    if run is not None:
        raise ConfigError(
            f"run={run} chooses the checkpoint of other commands: fit resumes with resume={run}"
        )
    if resume is None and ckpt in _NAMED:
        names = [f"{ckpt}.ckpt"]
        start = choose_unfinished(runs, names)
        return _check_training(_check_any(start, names, runs))
    if resume is None:
        return None if ckpt is None else _check_training(_check_checkpoint(ckpt, cache))
    if ckpt is not None:
        raise ConfigError(f"resume={resume} and ckpt={ckpt}: give one of them")
    _check_text("resume", resume)
    if resume == AUTO:
        start = _find_newest(folder, RESUMED)
        return None if start is None else _check_training(start)
    if resume == _LATEST:
        start = choose_unfinished(runs, RESUMED)
        return _check_training(_check_any(start, RESUMED, runs))
    return _check_training(_find_in_run("resume", str(resume), runs, RESUMED, cache))


def _check_text(option: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{option}={value!r}: give latest, or the folder of a run")


def _find_in_run(option: str, run: str, runs: Path, names: Sequence[str], cache: Path) -> Path:
    """Return the newest checkpoint of some names in a run.

    Args:
        option: That names the run.
        run: Its folder or address.
        runs: See `find_checkpoint`, as `cache`.
        names: Of the files.
        cache: See there.
    """
    if is_remote(run):
        return _check_any(fetch_newest(run, names, cache, option), names, run)
    if not Path(run).is_dir():
        raise DataError(
            f"{option}={run} is not a folder: give latest, or the folder of a run below {runs}"
        )
    return _check_any(_find_newest(Path(run), names), names, run)


def _find_newest(run: Path, names: Sequence[str]) -> Path | None:
    """Return the checkpoint of a run that was written last; None without any."""
    written = list_checkpoints(run, names, "checkpoints")
    if not written:
        return None
    checkpoint = run / max(written).name
    log.info("checkpoint: %s", checkpoint)
    return checkpoint


def _check_any(checkpoint: Path | None, names: Sequence[str], folder: str | Path) -> Path:
    if checkpoint is None:
        # A run that ended before its first validation has no best one.
        others = [] if is_remote(str(folder)) else sorted(Path(folder).glob("checkpoints/*.ckpt"))
        cure = f"give ckpt={others[-1]}" if others else "run fit first, or give ckpt=<path>"
        if others and others[-1].name == "last.ckpt":
            cure = "give ckpt=last"  # which goes with run=FOLDER, as a path does not
        raise DataError(f"no {' or '.join(names)} below {folder}: {cure}")
    return checkpoint


def _check_checkpoint(ckpt: object, cache: Path) -> Path:
    if not isinstance(ckpt, str) or not ckpt:
        raise ConfigError(
            f"ckpt={ckpt!r}: give the path of a checkpoint, {' or '.join(_NAMED)}; null for none"
        )
    if is_remote(ckpt):
        return fetch_checkpoint(ckpt, cache, "ckpt")
    path = Path(ckpt)
    if path.is_dir():  # in pieces, one of each rank
        return path
    try:
        check_regular(path)
    except DataError as error:
        raise DataError(
            f"ckpt={ckpt}: {error}; give the path of a checkpoint that fit wrote, or best, or last"
        ) from error
    return path


def _check_training(path: Path) -> Path:
    """Refuse a file that holds no state of a training, before the data are read."""
    if path.is_dir():  # in pieces, one of each rank
        if not (path / ".metadata").is_file():
            raise StoreError(f"{path} is a folder but not a sharded checkpoint: remove it")
        return path
    content = read_checkpoint(path, mapped=True)  # its weights are read once, by Lightning
    missing = [key for key in _TRAINING if key not in content]
    if missing:
        raise StoreError(
            f"{path} holds no {', '.join(missing)}: training resumes only from a checkpoint that "
            "has them, such as last.ckpt"
        )
    return path


def load_weights(model: LightningModule, path: Path) -> None:
    """Give a model the weights of a checkpoint, and nothing else of it.

    Only plain data is unpickled.

    Raises:
        StoreError: The file is no checkpoint, or that of another model.
    """
    if path.is_dir():
        raise StoreError(
            f"{path} is a sharded checkpoint, with one file for each rank: join them with "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint, or train with "
            "trainer.strategy.state_dict_type=full"
        )
    content = read_checkpoint(path)
    _check_weights(content, model, path)
    try:
        model.load_state_dict(content["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StoreError(
            f"{path} does not hold weights of {type(model).__name__}: {reason}"
        ) from error


def take_precision(trainer: Trainer, path: Path) -> None:
    """Let a model be scored in the precision that its training fell back to.

    Raises:
        StoreError: The checkpoint is damaged.
    """
    states = read_checkpoint(path, mapped=True, verify=False).get("callbacks", {})
    _check_state("all callbacks", states, {}, path)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        if isinstance(callback, AMP) and (state := states.get(callback.state_key)) is not None:
            _check_state(callback.state_key, state, callback.state_dict(), path)
            callback.take_fallback(state)


@contextmanager
def restoring(start: Path | None, trainer: Trainer, model: LightningModule) -> Iterator[None]:
    """Check the state of a training before it is taken over, and name its file in errors of that.

    Raises:
        StoreError: The checkpoint is damaged, or that of another model or of other callbacks.
    """
    if start is None:
        yield
        return
    content: Mapping[str, Any] = {}
    if not start.is_dir():  # in pieces, one of each rank
        content = read_checkpoint(start, mapped=True, verify=False)  # which was done before
        _check_weights(content, model, start)
        _check_states(content, trainer, start)
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        if not _is_restoring(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise StoreError(
            f"{start} does not fit this run: {type(error).__name__}: {reason}. Resume with the "
            "model and the options it was saved with, or from an earlier checkpoint"
        ) from error
    if trainer.global_step == content.get("global_step"):
        _warn_of_end(trainer, start)


def _warn_of_end(trainer: Trainer, start: Path) -> None:
    """Log what to type if a checkpoint has reached the end already; Lightning ends without an error."""
    most = trainer.max_epochs
    # Limits count from the beginning of the first run, not from the checkpoint.
    if most is not None and 0 <= most <= trainer.current_epoch:
        log.warning(
            "nothing was trained: %s has finished trainer.max_epochs=%d: set trainer.max_epochs=%d, or "
            "higher, to train longer",
            start,
            most,
            trainer.current_epoch + max(1, most),
        )
        return
    log.warning(
        "nothing was trained: step %d of %s is beyond trainer.max_steps or trainer.max_time, which "
        "count from the beginning of the first run: raise them",
        trainer.global_step,
        start,
    )


def _check_states(content: Mapping[str, Any], trainer: Trainer, path: Path) -> None:
    for name, state, template in _pair_states(content, trainer):
        _check_state(name, state, template, path)


def _check_state(name: str, state: object, template: object, path: Path) -> None:
    if fault := _find_fault(state, template):
        raise StoreError(
            f"{path} is damaged: the state of {name} has {fault}; take an earlier checkpoint"
        )


def _check_weights(content: Mapping[str, Any], model: LightningModule, path: Path) -> None:
    weights = content.get("state_dict")
    if not isinstance(weights, Mapping):
        return  # an error follows where they are loaded
    learned: dict[str, Tensor] = {}
    for name, _ in model.named_parameters():
        if isinstance(weights.get(name), Tensor):
            learned[name] = weights[name]
    refuse_nan(learned, str(path))


def _pair_states(
    content: Mapping[str, Any], trainer: Trainer
) -> Iterator[tuple[str, object, object]]:
    """Yield each state that a checkpoint gives to this run: its name, and what this run has there.

    Those of foreign callbacks are their own business: they may hold what a new one does not.
    """
    states = content.get("callbacks", {})
    yield "all callbacks", states, {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        key = callback.state_key
        if key in states and type(callback).__module__.startswith(_OURS):
            yield key.partition("{")[0], states[key], callback.state_dict()
    yield "the loops", content["loops"], {"fit_loop": trainer.fit_loop.state_dict()}


def _find_fault(state: object, template: object, key: str = "") -> str:
    """Describe the first value of another kind than this run has there; empty if there is none.

    A value that is not set yet has no kind.
    """
    if isinstance(template, Mapping):
        if not isinstance(state, Mapping):
            return f"{key or 'nothing'} = {str(state)[:40]!r}"
        for name, value in template.items():
            fault = _find_fault(state.get(name, value), value, f"{key}.{name}".lstrip("."))
            if fault:
                return fault
        return ""
    for kind in (Number, str, list):
        is_kind = state is None or isinstance(state, kind | Tensor)
        if isinstance(template, kind) and not is_kind:
            return f"{key} = {str(state)[:40]!r}"
    return ""


def _is_restoring(error: Exception) -> bool:
    """Return True if an error comes from where Lightning takes over the state of a checkpoint."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module.endswith(_RESTORING) and "restore" in frame.f_code.co_name:
            return True
    return False
