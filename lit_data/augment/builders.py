"""Augmentations for whole tasks, with the values that people use for them."""

from collections.abc import Sequence

from lit_data.augment.colour import ColourJitter
from lit_data.augment.geometry import Geometry
from lit_data.augment.mixup import MixUp
from lit_data.augment.photometry import Photometry
from lit_data.augment.pipeline import Pipeline
from lit_data.augment.warping import Padding


def stripe_augment(
    *,
    flip: bool = True,
    turn: bool = True,
    shift_px: int = 0,
    rotate_deg: float = 10.0,
    scale: Sequence[float] = (0.9, 1.1),
    crop_px: int | tuple[int, int] | None = None,
    padding: Padding = "reflect",
    gain: float = 0.1,
    offset: float = 0.05,
    contrast: float = 0.1,
    gamma: float = 0.2,
    blur_px: float = 0.7,
    noise: float = 0.02,
    registered: bool = False,
) -> Pipeline:
    """Augment target, references and mask: one geometry for all, an exposure for each image.

    `StripeAugment` is the part of it that copies whole pixels. Rotation and scale interpolate,
    which also softens thin defects. The ranges are small on purpose and were not tuned: parts that
    are inspected lie and are lit almost alike.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        shift_px: Largest shift along each axis, whole pixels.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        crop_px: Size of the output, one number or (height, width); none keeps that of the input.
        padding: `reflect`, `zeros` or `border`.
        gain: See `Photometry`, as for the following.
        offset: Largest number added.
        contrast: Largest change of contrast.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of the blur.
        noise: Largest standard deviation of the noise.
        registered: Target and references share their exposure.
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
    crop_px: int | tuple[int, int] | None = None,
    padding: Padding = "zeros",
    hue: float = 0.015,
    saturation: float = 0.7,
    value: float = 0.4,
    min_box_px: float = 2.0,
    min_box_visible: float = 0.1,
    mixup: float = 0.0,
    mixup_alpha: float = 32.0,
) -> Pipeline:
    """Augment RGB images with boxes.

    Defaults are those of ultralytics (``ultralytics/cfg/default.yaml``: ``fliplr`` 0.5, ``scale``
    0.5, no rotation, shear or perspective, ``hsv_h`` 0.015, ``hsv_s`` 0.7, ``hsv_v`` 0.4); its
    ``translate`` of 0.1 is a tenth of the side, here 32 px for 320. Its grey border is 0 here: a
    mirrored object would have no box. As there, samples that are blended have each been moved by
    themselves, and share their colours.

    Args:
        flip_left_right: Mirror left-right with probability 1/2.
        flip_top_bottom: Mirror top-bottom with probability 1/2.
        shift_px: Largest shift along each axis, whole pixels.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        shear_deg: Largest shear along each axis.
        perspective: Largest tilt, as a fraction.
        crop_px: Size of the output, one number or (height, width); none keeps that of the input.
        padding: `reflect`, `zeros` or `border`.
        hue: Largest turn of the hue, as a fraction of the colour circle.
        saturation: Largest change of the saturation, as a fraction.
        value: Largest change of the value, as a fraction.
        min_box_px: Smallest height and width of a box that is kept.
        min_box_visible: Smallest fraction of a moved box in the output, for it to be kept.
        mixup: Fraction of the samples that are blended with another one, see `MixUp`.
        mixup_alpha: Of the Beta distribution of the weight of the sample itself.
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
    blend = MixUp(probability=mixup, alpha=mixup_alpha)
    return Pipeline([geometry, blend, ColourJitter(hue=hue, saturation=saturation, value=value)])


def segmentation_augment(
    *,
    flip: bool = True,
    turn: bool = True,
    rotate_deg: float = 15.0,
    scale: Sequence[float] = (0.7, 1.4),
    crop_px: int | tuple[int, int] | None = None,
    padding: Padding = "reflect",
    gain: float = 0.25,
    contrast: float = 0.25,
    gamma: float = 0.3,
    blur_px: float = 1.0,
    noise: float = 0.03,
    geometry_probability: float = 0.2,
    photometry_probability: float = 0.15,
) -> Pipeline:
    """Augment images with label masks; all channels of a sample share their exposure.

    Ranges of nnU-Net (``nnUNetTrainer.get_training_transforms``): scale 0.7 to 1.4, brightness and
    contrast 0.75 to 1.25, blur up to 1 px, and the 15 degrees it rotates oblong patches by. Its
    gamma of 0.7 to 1.5 is 0.7 to 1.3 here. As there, each change touches 10 to 30 % of the samples:
    where all are changed, a short run learns less.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        rotate_deg: Largest rotation, either way.
        scale: Smallest and largest factor.
        crop_px: Size of the output, one number or (height, width); none keeps that of the input.
        padding: `reflect`, `zeros` or `border`.
        gain: See `Photometry`, as for the following.
        contrast: Largest change of contrast.
        gamma: Largest change of the exponent.
        blur_px: Largest standard deviation of the blur.
        noise: Largest standard deviation of the noise.
        geometry_probability: Of a sample to be rotated and scaled; flips and turns have 1/2 and
            3/4.
        photometry_probability: Of each of gain, contrast, gamma, blur and noise to touch a sample.
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
