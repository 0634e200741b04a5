"""`Normality`: a sample of the features of good images, and the distance of other features to it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Candidates:
    """Uniform sample, of bounded size, of all rows that were added.

    Vitter, "Random sampling with a reservoir", 1985.

    Each row draws a random number, and the rows with the largest numbers stay.

    Args:
        size: Largest number of rows that stay.
        seed: Seed of the random numbers.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.rows = torch.zeros(0, 0)
        self.draws = torch.zeros(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Tensor) -> None:
        """Add rows [N, D], on any device; those that stay are kept on the host as float32."""
        draws = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        least = self.draws.min() if len(self) >= self.size else draws.new_tensor(-1.0)
        chosen = torch.nonzero(draws > least).flatten()
        added = rows.detach()[chosen.to(rows.device)].float().cpu()
        all_rows = torch.cat([self.rows, added]) if len(self) else added
        all_draws = torch.cat([self.draws, draws[chosen]])
        sampled = all_draws.topk(min(self.size, len(all_draws))).indices
        self.rows = all_rows[sampled]
        self.draws = all_draws[sampled]

    def clear(self) -> None:
        """Remove the rows; the random numbers continue."""
        self.rows = self.rows[:0]
        self.draws = self.draws[:0]

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors only, so that checkpoints load with ``weights_only=True``."""
        return {"rows": self.rows, "draws": self.draws, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the state that `state_dict` returned."""
        self.rows = state["rows"]
        self.draws = state["draws"]
        self._generator.set_state(state["generator"])


class Normality(nn.Module):
    """Base of what `AnomalyModule` learns: samples good features in training, and then fits a model of them.

    Args:
        candidates: Largest number of rows of the sample.
        seed: Seed of the sample.

    Attributes:
        limit: The largest distance of good training images, 1 before `fit`.
        has_places: True if all images or patches must have the same size.
    """

    limit: Tensor
    has_places: ClassVar[bool] = False

    def __init__(self, candidates: int, seed: int) -> None:
        super().__init__()
        self.candidates = Candidates(candidates, seed)
        self.register_buffer("limit", torch.ones(()))
        self.register_load_state_dict_pre_hook(take_sizes)  # type: ignore[no-untyped-call]

    @property
    def is_fitted(self) -> bool:
        """True once there are features to compare with."""
        raise NotImplementedError

    def add(self, maps: Sequence[Tensor]) -> None:
        """Add features of good images to the sample.

        Args:
            maps: [B, C_i, h_i, w_i] of each scale, the finest first.
        """
        raise NotImplementedError

    def fit(self) -> None:
        """Learn from the sample."""
        raise NotImplementedError

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return distances to the normal features.

        Args:
            maps: As for `add`.

        Returns:
            [B, 1, h, w] float32, with the size of the finest map.

        Raises:
            ConfigError: The maps are not those that it was fitted on.
        """
        raise NotImplementedError


def take_sizes(module: nn.Module, states: dict[str, Any], prefix: str, *others: object) -> None:
    """Resize the buffers of a module to those of a checkpoint: their sizes are unknown before `fit`.

    A hook for ``register_load_state_dict_pre_hook``.
    """
    for name, buffer in module.named_buffers(recurse=False):
        stored = states.get(prefix + name)
        if isinstance(stored, Tensor) and stored.ndim == buffer.ndim:
            setattr(module, name, buffer.new_zeros(stored.shape))
