"""`Pipeline`: augmentations one after the other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.external import ExternalTransform
from lit_data.errors import ConfigError
from lit_data.types import Stage


def as_augmentation(value: object) -> Augmentation | None:
    """An augmentation from what a user gives: one of ours, any other torch module (see
    `ExternalTransform`), or none.

    Raises:
        ConfigError: It is something else.
    """
    if value is None or isinstance(value, Augmentation):
        return value
    if isinstance(value, nn.Module):
        return ExternalTransform(value)
    raise ConfigError(
        f"{value!r} is not an augmentation: give one of lit_data.augment or another torch module"
    )


def stage_augmentations(value: object) -> dict[Stage, Augmentation]:
    """Which augmentation each stage has.

    Args:
        value: None, one augmentation (for training alone), or a mapping of stage to augmentation or
            none.

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


class Pipeline(Augmentation):
    """Runs augmentations in their order, each with the numbers of its own stream.

    Args:
        steps: Augmentations; other torch modules become `ExternalTransform`.

    Raises:
        ConfigError: A step is no augmentation, or two are of one kind: they would draw the same
            numbers.
    """

    def __init__(self, steps: Sequence[nn.Module]) -> None:
        super().__init__()
        made = [as_augmentation(step) for step in steps]
        self.steps = nn.ModuleList(step for step in made if step is not None)
        self.crop_px = next(
            (step.crop_px for step in reversed(list(self._each())) if step.crop_px), None
        )
        twice = [key for key, times in Counter(self.draw_keys).items() if times > 1]
        if twice:
            raise ConfigError(f"two steps of the pipeline draw {twice[0]!r}: join them into one")

    @property
    def takes_bytes(self) -> bool:
        """Always."""
        return True

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Those of all steps."""
        return tuple(key for step in self._each() for key in step.draw_keys)

    def margin_px(self, patch_px: tuple[int, int]) -> tuple[int, int]:
        """The sum over the steps; see `Augmentation.margin_px`."""
        margins = [step.margin_px(patch_px) for step in self._each()]
        return sum(margin[0] for margin in margins), sum(margin[1] for margin in margins)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """What all steps draw; see `Augmentation.draw`."""
        drawn: dict[str, Tensor] = {}
        for step in self._each():
            drawn |= step.draw(seed, epoch, index, channels)
        return drawn

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Run the steps."""
        for step in self._each():
            layers = step.transform(layers if step.takes_bytes else layers.in_floats(), draws)
        return layers

    def _each(self) -> list[Augmentation]:
        return [step for step in self.steps if isinstance(step, Augmentation)]
