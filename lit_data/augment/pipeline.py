"""Pipelines of augmentations, and ready-made ones with common values."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from numpy.typing import ArrayLike
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment.augmentation import Augmentation, Layers
from lit_data.augment.colour import ColourJitter
from lit_data.augment.external import ExternalTransform
from lit_data.augment.geometry import Geometry
from lit_data.augment.host import HostTransform
from lit_data.augment.mixing import MixUp
from lit_data.augment.photometry import Photometry
from lit_data.augment.warping import Padding
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.types import Size, Stage


def as_augmentation(value: object) -> Augmentation | None:
    """Return the augmentation for a configured value.

    Args:
        value: An augmentation, any other torch module (see `ExternalTransform`), or None.

    Raises:
        ConfigError: The value is none of these.
    """
    if value is None or isinstance(value, Augmentation):
        return value
    if isinstance(value, nn.Module):
        return ExternalTransform(value)
    raise ConfigError(
        f"{value!r} is not an augmentation: give one of lit_data.augment or another torch module"
    )


def stage_augmentations(value: object, batch_keys: Collection[str]) -> dict[Stage, Augmentation]:
    """Return the augmentation of each stage that has one.

    Args:
        value: None, one augmentation (only for training), or a mapping from stages to augmentations
            or None.
        batch_keys: Keys of the samples: ``mask`` and ``boxes`` move with their images.

    Raises:
        ConfigError: A stage is unknown, a value is not an augmentation, or an augmentation does not
            move masks or boxes.
    """
    values: Mapping[Any, object] = value if isinstance(value, Mapping) else {"train": value}
    augmentations: dict[Stage, Augmentation] = {}
    for stage in values:
        check_choice("a stage of augment", stage, get_args(Stage))
    for stage, stage_value in values.items():
        augmentation = as_augmentation(stage_value)
        if augmentation is None:
            continue
        if stage != "predict":  # which has only images
            augmentation.check_layers(masks="mask" in batch_keys, boxes="boxes" in batch_keys)
        augmentations[stage] = augmentation
    return augmentations


class Pipeline(Augmentation):
    """Runs augmentations in turn, each with the numbers of its own stream.

    Args:
        steps: Augmentations; other torch modules become `ExternalTransform`.

    Raises:
        ConfigError: A step is not an augmentation, or two have the same type and would draw the
            same numbers.
    """

    def __init__(self, steps: Sequence[nn.Module]) -> None:
        super().__init__()
        augmentations = [as_augmentation(step) for step in steps]
        self.steps = nn.ModuleList(step for step in augmentations if step is not None)
        for step in self._each():
            self.crop_px = step.crop_px or self.crop_px  # the last crop gives the output
        # Numbers are stored by key, so each kind of step can be in a pipeline only once.
        for key, times in Counter(self.draw_keys).items():
            if times > 1:
                raise ConfigError(f"two steps of the pipeline draw {key!r}: join them into one")
        if any(step.host_steps for step in self._each()[1:]):
            raise ConfigError(
                "steps that run in the workers come first in a pipeline: put Albumentations or "
                "Torchvision before the others"
            )

    @property
    @override
    def host_steps(self) -> tuple[HostTransform, ...]:
        steps: list[HostTransform] = []
        for step in self._each():
            steps += step.host_steps
        return tuple(steps)

    @property
    def takes_bytes(self) -> bool:
        """True, because steps that need floats get them."""
        return True

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Keys of all steps."""
        return tuple(key for step in self._each() for key in step.draw_keys)

    @override
    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        for step in self._each():
            step.check_layers(masks=masks, boxes=boxes)

    def margin_px(self, patch_px: Size) -> tuple[int, int]:
        """Return the sum of the steps' margins; see `Augmentation.margin_px`."""
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
        """Run the steps in turn."""
        for step in self._each():
            # On a CPU bytes stay bytes up to the first step that needs floats.
            if not step.takes_bytes:
                layers = layers.in_floats()
            layers = step.transform(layers, draws)
        return layers

    def _each(self) -> list[Augmentation]:
        return [step for step in self.steps if isinstance(step, Augmentation)]


class StripeAugment(Pipeline):
    """Flips, turns by 90 degrees and whole-pixel shifts, then gain and noise.

    The geometry moves only whole pixels, so it adds no new values to images and masks. A patch is
    reflected beyond its edges. Samples that are not square turn only by 180 degrees. See
    `stripe_augment` for one that does more.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        shift_px: Largest shift along each axis. 0 by default: reflected edges show a
            misregistration of the opposite sign, which taught a net to overlook thin scratches
            (test average precision of the stripe experiment 0.79 with 4 px, 0.92 without).
        gain: Largest change of an image's factor, which is in [1 - gain, 1 + gain].
        noise: Largest standard deviation of the added noise, in units of the 0..1 value range;
            drawn for each image from [0, noise].

    Raises:
        ConfigError: A size is negative, or gain is not below 1.
    """

    def __init__(
        self,
        *,
        flip: bool = True,
        turn: bool = True,
        shift_px: int = 0,
        gain: float = 0.1,
        noise: float = 0.01,
    ) -> None:
        geometry = Geometry(
            flip_left_right=flip, flip_top_bottom=flip, turn=turn, shift_px=shift_px
        )
        super().__init__([geometry, Photometry(gain=gain, noise=noise)])


def stripe_augment(
    *,
    flip: bool = True,
    turn: bool = True,
    shift_px: int = 0,
    rotate_deg: float = 10.0,
    scale: Sequence[float] = (0.9, 1.1),
    crop_px: int | Size | None = None,
    padding: Padding = "reflect",
    gain: float = 0.1,
    offset: float = 0.05,
    contrast: float = 0.1,
    gamma: float = 0.2,
    blur_px: float = 0.7,
    noise: float = 0.02,
    registered: bool = False,
) -> Pipeline:
    """Return an augmentation of target, references and mask.

    All of them share one geometry, and each image has its own exposure. `StripeAugment` is the part
    of it that copies whole pixels. Rotation and scale interpolate, which also softens thin defects.
    The ranges are small on purpose and were not tuned, because inspected parts have almost the same
    position and lighting.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        shift_px: Largest shift along each axis, in whole pixels.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        crop_px: Size of the output, one number or (height, width); None keeps that of the input.
        padding: Values outside the input: `reflect`, `zeros` or `border`.
        gain: Largest change of the factor; see `Photometry` for this and the following.
        offset: Largest number added.
        contrast: Largest change of contrast.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of the blur.
        noise: Largest standard deviation of the noise.
        registered: Let target and references share their exposure.
    """
    geometry = Geometry(
        flip_left_right=flip,
        flip_top_bottom=flip,
        turn=turn,
        shift_px=shift_px,
        rotate_deg=rotate_deg,
        scale=scale,
        crop_px=crop_px,
        padding=padding,
    )
    photometry = Photometry(
        gain=gain,
        offset=offset,
        contrast=contrast,
        gamma=gamma,
        blur_px=blur_px,
        noise=noise,
        registered=registered,
    )
    return Pipeline([geometry, photometry])


def detection_augment(
    *,
    flip_left_right: bool = True,
    flip_top_bottom: bool = False,
    shift_px: int = 32,
    rotate_deg: float = 0.0,
    scale: Sequence[float] = (0.5, 1.5),
    shear_deg: float = 0.0,
    perspective: float = 0.0,
    crop_px: int | Size | None = None,
    padding: Padding = "zeros",
    hue: float = 0.015,
    saturation: float = 0.7,
    value: float = 0.4,
    min_box_px: float = 2.0,
    min_box_visible: float = 0.1,
    mixup: float = 0.0,
    mixup_alpha: float = 32.0,
) -> Pipeline:
    """Return an augmentation of RGB images with boxes.

    Defaults are those of ultralytics (``ultralytics/cfg/default.yaml``: ``fliplr`` 0.5, ``scale``
    0.5, no rotation, shear or perspective, ``hsv_h`` 0.015, ``hsv_s`` 0.7, ``hsv_v`` 0.4); its
    ``translate`` of 0.1 is a tenth of the side, here 32 px for 320. The border is 0 instead of
    gray, and is not reflected, because a mirrored object would have no box. As in ultralytics,
    blended samples are moved separately and have the same color changes.

    Args:
        flip_left_right: Mirror left-right with probability 1/2.
        flip_top_bottom: Mirror top-bottom with probability 1/2.
        shift_px: Largest shift along each axis, in whole pixels.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        shear_deg: Largest shear along each axis.
        perspective: Largest tilt, as a fraction.
        crop_px: Size of the output, one number or (height, width); None keeps that of the input.
        padding: Values outside the input: `reflect`, `zeros` or `border`.
        hue: Largest turn of the hue, as a fraction of the color circle.
        saturation: Largest change of the saturation, as a fraction.
        value: Largest change of the value, as a fraction.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output for the box to be kept.
        mixup: Fraction of the samples that are blended with another one, see `MixUp`.
        mixup_alpha: Parameter of the Beta distribution that the sample's own weight is drawn from.
    """
    geometry = Geometry(
        flip_left_right=flip_left_right,
        flip_top_bottom=flip_top_bottom,
        shift_px=shift_px,
        rotate_deg=rotate_deg,
        scale=scale,
        shear_deg=shear_deg,
        perspective=perspective,
        crop_px=crop_px,
        padding=padding,
        min_box_px=min_box_px,
        min_box_visible=min_box_visible,
    )
    # As in ultralytics, samples are blended after they are moved, and before their color changes.
    blend = MixUp(probability=mixup, alpha=mixup_alpha)
    return Pipeline([geometry, blend, ColourJitter(hue=hue, saturation=saturation, value=value)])


def segmentation_augment(
    *,
    flip: bool = True,
    turn: bool = True,
    rotate_deg: float = 15.0,
    scale: Sequence[float] = (0.7, 1.4),
    crop_px: int | Size | None = None,
    padding: Padding = "reflect",
    gain: float = 0.25,
    contrast: float = 0.25,
    gamma: float = 0.3,
    blur_px: float = 1.0,
    noise: float = 0.03,
    geometry_probability: float = 0.2,
    photometry_probability: float = 0.15,
) -> Pipeline:
    """Return an augmentation of images with label masks.

    All channels of a sample share their exposure. The ranges are those of nnU-Net
    (``nnUNetTrainer.get_training_transforms``): scale 0.7 to 1.4, brightness and contrast 0.75 to
    1.25, blur up to 1 px, and the 15 degrees it rotates oblong patches by. Its gamma of 0.7 to 1.5
    is 0.7 to 1.3 here. As in nnU-Net, each change applies to 10 to 30 % of the samples: if all are
    changed, a short run learns less.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        crop_px: Size of the output, one number or (height, width); None keeps that of the input.
        padding: Values outside the input: `reflect`, `zeros` or `border`.
        gain: Largest change of the factor; see `Photometry` for this and the following.
        contrast: Largest change of contrast.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of the blur.
        noise: Largest standard deviation of the noise.
        geometry_probability: Probability that a sample is rotated and scaled; flips and turns have
            1/2 and 3/4.
        photometry_probability: Probability of each of gain, contrast, gamma, blur and noise.
    """
    geometry = Geometry(
        flip_left_right=flip,
        flip_top_bottom=flip,
        turn=turn,
        rotate_deg=rotate_deg,
        scale=scale,
        probability=geometry_probability,
        crop_px=crop_px,
        padding=padding,
    )
    photometry = Photometry(
        gain=gain,
        contrast=contrast,
        gamma=gamma,
        blur_px=blur_px,
        noise=noise,
        probability=photometry_probability,
        registered=True,
    )
    return Pipeline([geometry, photometry])
