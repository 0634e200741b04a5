"""`Suite`: what every suite of this folder is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from lit_data.core.checks import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite(ABC):
    """A measurement that `suite` names in a configuration; its fields are the keys below that node.

    Fields that hold a whole number are at least 1.

    Args:
        repeats: How often each case is measured, in turn with the others.
        device: Where batches go: `auto`, or a device of torch.

    Raises:
        ConfigError: A value is out of its range.
    """

    repeats: int = 3
    device: str = "auto"

    def __post_init__(self) -> None:
        """Check every count."""
        for field in fields(self):
            if field.type is int or field.type == "int":
                check_count(f"suite.{field.name}", getattr(self, field.name), 1)

    @abstractmethod
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        """Measure, write ``benchmark.csv`` into `cfg.paths.run`, and print it.

        Returns:
            Keys of summary.json.
        """
