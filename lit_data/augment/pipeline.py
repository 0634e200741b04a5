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
    """Return the augmentation that a value of the user stands for.

    Args:
        value: An augmentation, any other torch module (see `ExternalTransform`), or none.

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
    """Return the augmentation of each stage that has one.

    Args:
        value: None, one augmentation (for training alone), or a mapping of stage to augmentation or
            none.

    Raises:
        ConfigError: A stage is unknown, or a value is no augmentation.
    """
    values: Mapping[Any, object] = value if isinstance(value, Mapping) else {"train": value}
    augmentations: dict[Stage, Augmentation] = {}
    for stage in values:
        _check_stage(stage)
    for stage, stage_value in values.items():
        augmentation = as_augmentation(stage_value)
        if augmentation is not None:
            augmentations[stage] = augmentation
    return augmentations


def _check_stage(stage: object) -> None:
    stages = get_args(Stage)
    if stage in stages:
        return
    nearest = get_close_matches(str(stage), stages, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    raise ConfigError(f"augment has no stage {stage!r}: choose of {', '.join(stages)}.{hint}")


class Pipeline(Augmentation):
    """Augmentations that run one after the other, each with the numbers of its own stream.

    Args:
        steps: Augmentations; other torch modules become `ExternalTransform`.

    Raises:
        ConfigError: A step is no augmentation, or two are of one kind: they would draw the same
            numbers.
    """

    def __init__(self, steps: Sequence[nn.Module]) -> None:
        super().__init__()
        augmentations = [as_augmentation(step) for step in steps]
        self.steps = nn.ModuleList(step for step in augmentations if step is not None)
        for step in self._each():
            self.crop_px = step.crop_px or self.crop_px  # the last crop is what comes out
        for key, times in Counter(self.draw_keys).items():
            if times > 1:
                raise ConfigError(f"two steps of the pipeline draw {key!r}: join them into one")

    @property
    def takes_bytes(self) -> bool:
        """Always: steps that need floats get them."""
        return True

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Keys of all steps."""
        return tuple(key for step in self._each() for key in step.draw_keys)

    def margin_px(self, patch_px: tuple[int, int]) -> tuple[int, int]:
        """Return the sum over the steps; see `Augmentation.margin_px`."""
        vertical, horizontal = 0, 0
        for step in self._each():
            step_vertical, step_horizontal = step.margin_px(patch_px)
            vertical += step_vertical
            horizontal += step_horizontal
        return vertical, horizontal

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the numbers of all steps; see `Augmentation.draw`."""
        draws: dict[str, Tensor] = {}
        for step in self._each():
            draws |= step.draw(seed, epoch, index, channels)
        return draws

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Run the steps."""
        for step in self._each():
            if not step.takes_bytes:
                layers = layers.in_floats()
            layers = step.transform(layers, draws)
        return layers

    def _each(self) -> list[Augmentation]:
        return [step for step in self.steps if isinstance(step, Augmentation)]
