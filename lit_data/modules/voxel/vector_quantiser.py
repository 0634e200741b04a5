"""`VectorQuantiser`: latents replaced by the nearest of a set of learned codes."""

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lit_data.errors import ConfigError

# A prime (Knuth, "The Art of Computer Programming", 6.4): steps over M latents without repeat.
_SPREAD: Final = 2654435761


class Quantised(NamedTuple):
    """Latents after quantising.

    Attributes:
        latents: [M, D] float32: codes in value, while gradients pass straight to what came in.
        codes: [M] int64: which code.
        misses: [M] float32: mean squared distance to the code, whose gradient pulls latents to
            their codes.
    """

    latents: Tensor
    codes: Tensor
    misses: Tensor


class VectorQuantiser(nn.Module):
    """Codebook that follows the latents as a running mean.

    van den Oord et al., NeurIPS 2017, appendix A.1.

    In training `forward` only counts; `update`, once after each step, moves the codes. So the
    pieces of a batch that is worked off in several count together, and ranks meet once a step,
    whatever each of them did in it. A code that is used less than `restart_share` of what it would
    be if all were used alike starts again at a latent of the last batch; so do all codes at the
    first update. All state lies in buffers, and nothing draws from torch's generators.

    Args:
        codes: Size of the codebook.
        width: Length of a code.
        decay: Of the running mean, per step.
        restart_share: See above; 0 never restarts a code that was used once.

    Raises:
        ConfigError: A number is out of range.
    """

    codebook: Tensor
    sizes: Tensor
    sums: Tensor
    seen_sizes: Tensor
    seen_sums: Tensor
    candidates: Tensor
    updates: Tensor

    def __init__(
        self, codes: int = 512, width: int = 16, *, decay: float = 0.97, restart_share: float = 0.1
    ) -> None:
        super().__init__()
        if codes < 2 or width < 1 or not 0 <= decay < 1 or not 0 <= restart_share < 1:
            raise ConfigError(
                f"codes={codes}, width={width}, decay={decay}, restart_share={restart_share}: need "
                "codes >= 2, width >= 1, 0 <= decay < 1 and 0 <= restart_share < 1"
            )
        self.codes, self.width, self.decay, self.restart_share = codes, width, decay, restart_share
        self.register_buffer("codebook", torch.randn(codes, width))
        for name in ("sizes", "seen_sizes"):
            self.register_buffer(name, torch.zeros(codes))
        for name in ("sums", "seen_sums", "candidates"):
            self.register_buffer(name, torch.zeros(codes, width))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, latents: Tensor) -> Quantised:
        """Replace each latent by its nearest code.

        Args:
            latents: [M, D], at least one.
        """
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float()
            near = torch.addmm(
                self.codebook.square().sum(1), latents.detach(), self.codebook.T, alpha=-2
            )
            codes = near.argmin(1)
            nearest = self.codebook[codes]
            if self.training:
                self._count(latents.detach(), codes)
            misses = (latents - nearest).square().mean(1)
            return Quantised(latents + (nearest - latents).detach(), codes, misses)

    @torch.no_grad()
    def update(self) -> None:
        """Move the codes to what was counted since the last call; on several ranks, to what all counted."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen_sizes)
            dist.all_reduce(self.seen_sums)
            dist.broadcast(self.candidates, 0)
        self.sizes.lerp_(self.seen_sizes, 1 - self.decay)
        self.sums.lerp_(self.seen_sums, 1 - self.decay)
        usual = self.seen_sizes.sum() / self.codes
        # Without anything counted `usual` is 0, and no code is below it.
        unused = (self.sizes < self.restart_share * usual) | ((self.sizes == 0) & (usual > 0))
        self.sizes.copy_(torch.where(unused, usual, self.sizes))
        self.sums.copy_(torch.where(unused[:, None], self.candidates * usual, self.sums))
        means = self.sums / self.sizes.clamp(min=1e-12)[:, None]
        self.codebook.copy_(torch.where(self.sizes[:, None] > 0, means, self.codebook))
        self.seen_sizes.zero_()
        self.seen_sums.zero_()
        self.updates += 1

    @torch.no_grad()
    def _count(self, latents: Tensor, codes: Tensor) -> None:
        # A step whose loss overflows is skipped by the gradient scaler; here it must not count
        # either.
        finite = latents.isfinite().all(1)
        latents = latents.nan_to_num(0.0, 0.0, 0.0)
        self.seen_sizes.index_add_(0, codes, finite.float())
        self.seen_sums.index_add_(0, codes, latents * finite[:, None])
        places = (
            (torch.arange(self.codes, device=codes.device) + self.updates * self.codes)
            * _SPREAD
            % len(latents)
        )
        self.candidates.copy_(latents[places])
