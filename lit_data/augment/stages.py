"""What a datamodule holds for the `augment` a user gives it."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from torch import nn

from lit_data.augment.augmentation import Augmentation
from lit_data.augment.foreign import Foreign
from lit_data.errors import ConfigError
from lit_data.types import Stage


def as_augmentation(value: object) -> Augmentation | None:
    """An augmentation from what a user gives: one of ours, any other torch module (see `Foreign`), or none.

    Raises:
        ConfigError: It is something else.
    """
    if value is None or isinstance(value, Augmentation):
        return value
    if isinstance(value, nn.Module):
        return Foreign(value)
    raise ConfigError(f"{value!r} is not an augmentation: give one of lit_data.augment or another torch module")


def stage_augmentations(value: object) -> dict[Stage, Augmentation]:
    """Which augmentation each stage has.

    Args:
        value: None, one augmentation (for training alone), or a mapping of stage to augmentation or none.

    Returns:
        The stages that have one.

    Raises:
        ConfigError: A stage is unknown, or a value is no augmentation.
    """
    given: Mapping[Any, object] = value if isinstance(value, Mapping) else {"train": value}
    for stage in given:
        _check_stage(stage)
    made = {stage: as_augmentation(part) for stage, part in given.items()}
    return {stage: part for stage, part in made.items() if part is not None}


def _check_stage(stage: object) -> None:
    stages = get_args(Stage)
    if stage in stages:
        return
    near = get_close_matches(str(stage), stages, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"augment has no stage {stage!r}: choose of {', '.join(stages)}.{hint}")
