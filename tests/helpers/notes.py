"""A logger that keeps what callbacks log."""

from typing import Any

from lightning.pytorch.loggers.logger import Logger


class Notes(Logger):
    """Keeps the values whose names begin with a prefix, and their steps.

    Args:
        *prefixes: For example ``amp/``.
    """

    def __init__(self, *prefixes: str) -> None:
        super().__init__()
        self.prefixes = prefixes
        self.rows = []
        self.steps = []

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        row = {
            name: float(value) for name, value in metrics.items() if name.startswith(self.prefixes)
        }
        if row:
            self.rows.append(row)
            self.steps.append(step)
