"""The memory bank: rows that are sampled, a coreset of them, and the distance to its nearest row."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PROJECTED = 64
_SHRINKAGE = 0.03
_LEAST_STD = 0.05  # of a feature, as a fraction of the mean of all
_FARTHEST = 512  # rows that are looked at alone
_CANCELLED = 1e-6  # of the squared length of a row, whose nearest neighbour is itself
_GRAPH_ROWS = 512  # of the bank at a time, in a graph that is exported


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


def find_whitening(rows: Tensor) -> Tensor:
    """Return what rows are multiplied by so that their distances are those of Mahalanobis.

    Correlations are shrunk by 3 %, so that few rows are enough and directions in which good images
    hardly differ do not outweigh all else.

    Args:
        rows: [N, D] float32.

    Returns:
        [D, D] float32.
    """
    centred = (rows - rows.mean(0)).double()
    deviations = centred.pow(2).mean(0).sqrt()
    deviations = deviations.maximum(_LEAST_STD * deviations.mean()).clamp(min=1e-6)
    scaled = centred / deviations
    correlations = scaled.T @ scaled / len(rows) + _SHRINKAGE * torch.eye(rows.shape[1])
    factor = torch.linalg.cholesky(correlations)
    identity = torch.eye(len(factor), dtype=factor.dtype)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    whitening: Tensor = (inverse.T / deviations[:, None]).float().contiguous()
    return whitening


def choose_coreset(rows: Tensor, count: int, *, seed: int = 0) -> Tensor:
    """Choose rows so that none is far from all that are chosen.

    Greedy k-center: each time the farthest row.

    Distances are taken after a random projection to 64 dimensions (Johnson and Lindenstrauss,
    1984), as in Roth et al., "Towards total recall in industrial anomaly detection", CVPR 2022,
    after Sener and Savarese, "Active learning for convolutional neural networks: a core-set
    approach", ICLR 2018. Most steps look at the farthest rows alone: as long as one of them is
    farther than all others were, it is the farthest of all.

    Args:
        rows: [N, D] float32.
        count: How many; all where there are no more.
        seed: Of the projection and of the first row.

    Returns:
        [min(N, count)] int64 numbers of the rows, in the order they were chosen; rows equal to
        chosen ones come last.
    """
    if len(rows) <= count:
        return torch.arange(len(rows), device=rows.device)
    generator = torch.Generator().manual_seed(seed)
    projected = rows
    if rows.shape[1] > _PROJECTED:
        projection = torch.randn(rows.shape[1], _PROJECTED, generator=generator) / _PROJECTED**0.5
        projected = rows @ projection.to(rows.device)
    newest = torch.randint(len(rows), (1,), generator=generator).to(rows.device)
    nearest = projected.new_full((len(rows),), torch.inf)
    parts = [newest]
    lacking = count - 1
    while lacking:
        nearest = torch.minimum(nearest, _square_distances(projected, projected[newest]).amin(1))
        nearest[newest] = -1.0  # never twice
        farthest = nearest.topk(min(_FARTHEST, len(rows)))
        picked = _pick_farthest(projected[farthest.indices], farthest.values, lacking)
        newest = farthest.indices[picked]
        parts.append(newest)
        lacking -= len(newest)
    return torch.cat(parts)


def _pick_farthest(rows: Tensor, nearest: Tensor, most: int) -> Tensor:
    """Return numbers of rows, each time the farthest, as long as it is farther than the last row was.

    Args:
        rows: [N, D].
        nearest: [N] squared distances to what was chosen before, which fall.
        most: How many at most, at least 1.
    """
    squared = _square_distances(rows, rows)
    least = nearest[-1]
    picked: list[int] = []
    remaining = nearest.clone()
    while len(picked) < most:
        number = int(remaining.argmax())
        if picked and remaining[number] <= least:
            break
        picked.append(number)
        remaining = torch.minimum(remaining, squared[number])
        remaining[number] = -1.0
    return torch.tensor(picked, device=rows.device)


def _square_distances(rows: Tensor, centers: Tensor) -> Tensor:
    """[N, M] squared distances of rows [N, D] to centers [M, D]."""
    products = torch.addmm(centers.pow(2).sum(1), rows, centers.T, alpha=-2.0)
    return (products + rows.pow(2).sum(1, keepdim=True)).clamp(min=0)


def find_distances(rows: Tensor, bank: Tensor, *, chunk_bytes: int = 2**26) -> Tensor:
    """Euclidean distance of each row to the nearest row of a bank, in bounded memory on any device.

    Args:
        rows: [N, D] float.
        bank: [M, D] float, M at least 1.
        chunk_bytes: Of the distances that are in memory at a time; a row is the least.

    Returns:
        [N] float32; NaN for rows that hold NaN.
    """
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.float()
        bank = bank.float()
        if torch.compiler.is_exporting():  # the number of rows is not known yet
            return _measure(rows, torch.split(bank, _GRAPH_ROWS))
        step = max(1, chunk_bytes // (4 * len(bank)))
        parts = [rows.new_zeros(0)]
        for begin in range(0, len(rows), step):
            parts.append(_measure(rows[begin : begin + step], [bank]))
        return torch.cat(parts)


def _measure(rows: Tensor, banks: Sequence[Tensor]) -> Tensor:
    """Return the distance of each row [N, D] to the nearest one of all banks [M, D]."""
    nearest = []
    for bank in banks:
        products = torch.addmm(bank.pow(2).sum(1), rows, bank.T, alpha=-2.0)
        nearest.append(products.amin(1))
    lengths = rows.pow(2).sum(1)
    squared = torch.stack(nearest).amin(0) + lengths
    # Below that, what is left of large numbers that cancel is another on each machine.
    return squared.maximum(_CANCELLED * lengths).sqrt()
