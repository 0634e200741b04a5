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
    """Give values to the loggers at once.

    Past ``log_dict``, which costs a step of its own (2 ms for a dozen values), repeats old values
    in later rows, fills the result tables of tests and is refused in prediction; Lightning's
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
        name: ``oom``: a step ran out of memory; ``batch_size``: the samples that go through the
            model at once changed; ``release``: cached memory was given back; ``precision``: a loss
            scale overflowed or the precision changed.
        text: One sentence for people.
        values: Its numbers, units in the names.
    """

    name: EventName
    text: str
    values: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class ListensToEvents(Protocol):
    """A callback to which events are announced."""

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        """Take note of an event.

        Keep no reference to the error, which holds the tensors of the failed step.
        """
        ...


def announce(trainer: Trainer, event: Event, error: BaseException | None = None) -> None:
    """Call all callbacks that listen to events.

    Args:
        trainer: Whose callbacks.
        event: The event.
        error: The error behind it, while it is being handled.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # its callback connector sets it
        if isinstance(callback, ListensToEvents):
            callback.on_event(trainer, event, error)


def choose_folder(trainer: Trainer, path: Path | None) -> Path | None:
    """Return the folder for the files of a callback, or nothing where nobody chose one.

    It would be the working folder then. All ranks must call it, as Lightning broadcasts
    ``log_dir``.

    Args:
        trainer: Its loggers or its ``default_root_dir`` give a folder.
        path: The folder that the callback was given.
    """
    folder = path or Path(trainer.log_dir or trainer.default_root_dir)
    is_chosen = path is not None or bool(trainer.loggers)
    if not is_chosen and Path(trainer.default_root_dir).resolve() == Path.cwd():
        return None
    return folder


def check_folder(folder: Path | None, content: str) -> None:
    """Refuse a file in the place of a folder.

    Args:
        folder: For the files of a callback.
        content: Name of what will be in it, for the message.

    Raises:
        ConfigError: It is a file.
    """
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"path={str(folder)!r} is a file: name a folder, {content} will be in it")
