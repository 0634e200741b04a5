"""`SingleTexture`: three images, as of three exposures of the same place, made from one."""

import torch
from kornia.geometry.transform import warp_affine
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_data.augment.geometry import Geometry
from lit_data.augment.photometry import NOISE_DRAWS, Photometry, noise_windows
from lit_data.augment.pipeline import Pipeline
from lit_data.errors import ConfigError
from lit_data.rng import Stream, uniform


class SingleTexture(nn.Module):
    """Small independent shift, gain and noise for each channel of one texture.

    They make target and references of it.

    Args:
        shift_px: Largest shift along each axis, between pixels too (bilinear).
        gain: Each channel is multiplied by a factor in [1 - gain, 1 + gain].
        noise: Standard deviation of the noise of each channel, in units of the 0..1 value range.

    Raises:
        ConfigError: A size is negative, or gain is not below 1.
    """

    def __init__(self, *, shift_px: float = 0.5, gain: float = 0.03, noise: float = 0.01) -> None:
        super().__init__()
        if shift_px < 0 or noise < 0 or not 0 <= gain < 1:
            raise ConfigError(
                f"shift_px={shift_px}, gain={gain}, noise={noise}: need shift_px, noise >= 0, 0 <= "
                "gain < 1"
            )
        self.shift_px = shift_px
        self.gain = gain
        self.noise = noise

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the parameters of a batch.

        Those of a sample are a pure function of (seed, epoch, its index).

        Returns:
            ``nuisance`` [B, C, 6] float32 in [0, 1), on the host.
        """
        per_channel = 3 + NOISE_DRAWS  # shift along both axes, gain, window of the noise
        draws = uniform(seed, Stream.NUISANCE, index, epoch, channels * per_channel)
        return {"nuisance": torch.from_numpy(draws.copy()).view(len(draws), channels, per_channel)}

    @torch.no_grad()
    def forward(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Apply drawn parameters.

        Args:
            images: [B, C, H, W] float32 in 0..1.
            draws: The parameters of `draw`, on the device of the images.

        Returns:
            [B, C, H, W] float32 in 0..1.
        """
        batch, channels, height, width = images.shape
        drawn = draws["nuisance"]
        shift = (2 * drawn[..., :2] - 1).reshape(-1, 2, 1) * self.shift_px
        matrix = torch.cat(
            (torch.eye(2, device=images.device).expand(batch * channels, 2, 2), shift), dim=-1
        )
        planes = warp_affine(
            images.reshape(-1, 1, height, width),
            matrix,
            (height, width),
            padding_mode="reflection",
            align_corners=True,
        )
        gain = 1 + self.gain * (2 * drawn[..., 2] - 1)
        images = planes.view_as(images) * gain[..., None, None]
        return (images + self.noise * noise_windows(drawn[..., 3:], height, width)).clamp_(0, 1)


class StripeAugment(Pipeline):
    """Flips, turns by 90 degrees and whole-pixel shifts, then gain and noise.

    The geometry moves whole pixels only, so pixel values and masks keep their set of values. Beyond
    its edges a patch is reflected. Samples that are not square turn by
    180 degrees only. See `stripe_augment` for one that does more.

    Args:
        flip: Mirror left-right and top-bottom, each with probability 1/2.
        turn: Turn by a random multiple of 90 degrees.
        shift_px: Largest shift along each axis. 0 by default: reflected edges show a
            misregistration of the opposite sign, which taught a net to overlook thin scratches
            (test average precision of the stripe experiment 0.79 with 4 px, 0.92 without).
        gain: Each image is multiplied by a factor in [1 - gain, 1 + gain].
        noise: Largest standard deviation of the added noise, in units of the 0..1 value range; each
            image draws its own from [0, noise].

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
        if shift_px < 0 or noise < 0 or not 0 <= gain < 1:
            raise ConfigError(
                f"shift_px={shift_px}, gain={gain}, noise={noise}: need shift_px, noise >= 0, 0 <= "
                "gain < 1"
            )
        geometry = Geometry(
            flip_left_right=flip, flip_top_bottom=flip, turn=turn, shift_px=shift_px
        )
        super().__init__([geometry, Photometry(gain=gain, noise=noise)])
