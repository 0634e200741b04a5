"""Events that callbacks announce to each other: memory ran out, a new batch size, a release."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from lightning import Trainer

from lit_data.core.errors import ConfigError
from lit_data.core.lightning_internals import count_logged_steps

EventName = Literal["oom", "batch_size", "release", "precision"]


def is_logging_step(trainer: Trainer, batch_idx: int) -> bool:
    """Return True if Lightning logs at the end of this training batch."""
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
    # as in Lightning: the step that ends is not counted yet; batches that accumulate log once
    if not every_n_steps or (count_logged_steps(trainer) + 1) % every_n_steps:
        return False
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def log_metrics(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Pass values to the loggers at once.

    This bypasses ``log_dict``, which takes as long as a step (2 ms for a dozen values), repeats old
    values in later rows, fills the result tables of tests and is refused in prediction. Lightning's
    DeviceStatsMonitor does the same.
    """
    if not values or trainer.sanity_checking:
        return
    step = count_logged_steps(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run.

    Attributes:
        name: ``oom`` if a step ran out of memory; ``batch_size`` if the number of samples that go
            through the model at once changed; ``release`` if cached memory was released;
            ``precision`` if a loss scale overflowed or the precision changed.
        text: Readable sentence.
        values: Numbers of the event, with units in their names.
    """

    name: EventName
    text: str
    values: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ListensToEvents(Protocol):
    """A callback that receives announced events."""

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        """Take note of an event.

        Keep no reference to the error, which holds the tensors of the failed step.
        """
        ...


def announce(trainer: Trainer, event: Event, error: BaseException | None = None) -> None:
    """Call all callbacks that listen to events.

    Args:
        trainer: Trainer of the callbacks.
        event: What happened.
        error: The error behind the event, while it is being handled.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # its callback connector sets it
        if isinstance(callback, ListensToEvents):
            callback.on_event(trainer, event, error)


def choose_folder(trainer: Trainer, path: Path | None) -> Path | None:
    """Return the folder for the files of a callback, or None if it would be the working folder.

    All ranks must call this function, because Lightning broadcasts ``log_dir``.

    Args:
        trainer: Trainer whose loggers or ``default_root_dir`` give a folder.
        path: Folder that the callback was given, if any.
    """
    folder = path or Path(trainer.log_dir or trainer.default_root_dir)
    is_chosen = path is not None or bool(trainer.loggers)
    if not is_chosen and Path(trainer.default_root_dir).resolve() == Path.cwd():
        return None
    return folder


def check_folder(folder: Path | None, content: str) -> None:
    """Refuse a file in place of a folder.

    Args:
        folder: Folder for the files of a callback.
        content: Name of the folder's content, for the message.

    Raises:
        ConfigError: `folder` is a file.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"path={str(folder)!r} is a file: name a folder, {content} will be in it")
