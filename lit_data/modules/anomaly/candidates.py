"""`Candidates`: a uniform sample of bounded size of rows that come in batches."""

import torch
from torch import Tensor


class Candidates:
    """Uniform sample of bounded size of all rows that were added.

    Vitter, "Random sampling with a reservoir", 1985.

    Each row draws a number, and those of the largest numbers stay.

    Args:
        size: Most rows that stay.
        seed: Of the numbers.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.rows = torch.zeros(0, 0)
        self.draws = torch.zeros(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Tensor) -> None:
        """Let rows [N, D] take part, on any device; those that stay are kept on the host as float32."""
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
        """Forget the rows; the numbers go on."""
        self.rows = self.rows[:0]
        self.draws = self.draws[:0]

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors alone, so that checkpoints load with ``weights_only=True``."""
        return {"rows": self.rows, "draws": self.draws, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self.rows = state["rows"]
        self.draws = state["draws"]
        self._generator.set_state(state["generator"])
