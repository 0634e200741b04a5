"""`Normality`: what features of good images look like, and how far those of others are from that."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_data.modules.anomaly.candidates import Candidates


class Normality(nn.Module):
    """Base of what `AnomalyModule` learns: a sample of good features while training, a model of them after it.

    Args:
        candidates: Most rows of the sample.
        seed: Of the sample.

    Attributes:
        limit: The largest distance of good training images, 1 before `fit`.
    """

    limit: Tensor

    def __init__(self, candidates: int, seed: int) -> None:
        super().__init__()
        self.candidates = Candidates(candidates, seed)
        self.register_buffer("limit", torch.ones(()))
        self.register_load_state_dict_pre_hook(take_sizes)  # type: ignore[no-untyped-call]

    @property
    def is_fitted(self) -> bool:
        """True once there is something to compare with."""
        raise NotImplementedError

    def add(self, maps: Sequence[Tensor]) -> None:
        """Let features of good images take part in the sample.

        Args:
            maps: [B, C_i, h_i, w_i] of each scale, the finest first.
        """
        raise NotImplementedError

    def fit(self) -> None:
        """Learn from the sample."""
        raise NotImplementedError

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Distances to what is normal.

        Args:
            maps: As for `add`.

        Returns:
            [B, 1, h, w] float32, of the finest map.

        Raises:
            ConfigError: The maps are not those that it was fitted on.
        """
        raise NotImplementedError


def take_sizes(module: nn.Module, states: dict[str, Any], prefix: str, *others: object) -> None:
    """Make the buffers of a module as large as those of a checkpoint, which it cannot know before it is fitted.

    A hook for ``register_load_state_dict_pre_hook``.
    """
    for name, buffer in module.named_buffers(recurse=False):
        stored = states.get(prefix + name)
        if isinstance(stored, Tensor) and stored.ndim == buffer.ndim:
            setattr(module, name, buffer.new_zeros(stored.shape))
