"""When callbacks log: at the steps at which Lightning hands values to its loggers."""

from collections.abc import Mapping

import lightning as L

from lit_data.lightning_internals import count_logged_steps


def is_logging_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether Lightning hands what is logged at the end of this training batch to the loggers."""
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
    if not every_n_steps or (count_logged_steps(trainer) + 1) % every_n_steps:
        return False
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def log_metrics(trainer: L.Trainer, values: Mapping[str, float]) -> None:
    """Hand values to the loggers at once.

    Past ``log_dict``, which costs a step of its own (2 ms for a dozen values), repeats old values in later rows, fills
    the result tables of tests and is refused in prediction; Lightning's DeviceStatsMonitor does the same.
    """
    if values and not trainer.sanity_checking:
        step = count_logged_steps(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)
