"""`MemoryBank`: a coreset of features of good images, and the distance to its nearest row."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.models.anomaly.normality import Normality

_PROJECTED = 64
_SHRINKAGE = 0.03
_LEAST_STD = 0.05  # of a feature, as a fraction of the mean of all
_FARTHEST = 512  # rows that are looked at alone
_CANCELLED = 1e-6  # of the squared length of a row, whose nearest neighbour is itself
_GRAPH_ROWS = 512  # of the bank at a time, in a graph that is exported


class MemoryBank(Normality):
    """Bank of features of good images; the score of a place is its distance to the nearest (PatchCore).

    Roth et al., "Towards total recall in industrial anomaly detection", CVPR 2022: maps of all
    scales are joined at the finest scale, and the bank is a coreset of the features of all training
    images. It ignores positions, so images may have any size, and parts may be anywhere.

    Args:
        size: Largest number of rows of the bank, each with 4 bytes per channel.
        candidates: Largest number of features from which the bank is chosen, a uniform sample of
            all.
        whiten: Measure Mahalanobis distances with the covariance of the candidates, so that neither
            one map nor correlated features outweigh the rest; False for encoders that learned a
            metric.
        seed: Seed of the sample and of the coreset.

    Raises:
        ConfigError: An option is out of its range.
    """

    bank: Tensor
    whitening: Tensor

    def __init__(
        self, size: int = 4000, *, candidates: int = 40000, whiten: bool = True, seed: int = 0
    ) -> None:
        if not 1 <= size <= candidates:
            raise ConfigError(f"size={size}, candidates={candidates}: need 1 <= size <= candidates")
        super().__init__(candidates, seed)
        self.register_buffer("bank", torch.zeros(0, 0))
        self.register_buffer("whitening", torch.zeros(0, 0))
        self.size = size
        self.whiten = whiten
        self.seed = seed

    @property
    @override
    def is_fitted(self) -> bool:
        return len(self.bank) > 0

    @override
    def add(self, maps: Sequence[Tensor]) -> None:
        self.candidates.add(_join(maps).permute(0, 2, 3, 1).flatten(0, 2))

    @override
    def fit(self) -> None:
        """Choose the bank from its current rows and the candidates."""
        device = self.bank.device
        rows = self.candidates.rows
        if self.whiten and not self.is_fitted:
            self.whitening = find_whitening(rows).to(device)
        if self.whiten:
            rows = rows @ self.whitening.cpu()
        rows = torch.cat([self.bank.cpu(), rows]) if self.is_fitted else rows
        chosen = choose_coreset(rows, self.size, seed=self.seed)
        rows = rows.to(device)
        self.bank = rows[chosen.to(device)].contiguous()
        self.limit = find_distances(rows, self.bank).max()
        self.candidates.clear()

    @override
    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        features = _join(maps)
        count, width, rows, columns = features.shape
        known = len(self.whitening) if self.whiten else self.bank.shape[1]
        if width != known:
            raise ConfigError(
                f"the encoder gives {width} features and the memory bank has {known}: predict "
                "with the model.net of the training"
            )
        places = features.permute(0, 2, 3, 1).reshape(-1, width)
        if self.whiten:
            with torch.autocast(places.device.type, enabled=False):
                places = places.float() @ self.whitening
        return find_distances(places, self.bank).view(count, 1, rows, columns)


def _join(maps: Sequence[Tensor]) -> Tensor:
    """[B, sum of C_i, h, w] of maps of several scales, at the finest."""
    finest, *coarser = maps
    size = finest.shape[2:]
    resized = [F.interpolate(one, size, mode="bilinear") for one in coarser]
    return torch.cat([finest, *resized], 1)


def find_whitening(rows: Tensor) -> Tensor:
    """Return the matrix that turns Euclidean distances of rows into Mahalanobis distances.

    Correlations are shrunk by 3 %, so that few rows are enough, and directions in which good images
    hardly differ do not outweigh all others.

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
    """Choose rows so that every row is near a chosen one.

    Greedy k-center: each time the farthest row.

    Distances are taken after a random projection to 64 dimensions (Johnson and Lindenstrauss,
    1984), as in Roth et al., "Towards total recall in industrial anomaly detection", CVPR 2022,
    after Sener and Savarese, "Active learning for convolutional neural networks: a core-set
    approach", ICLR 2018. Most steps look only at the farthest rows: while one of them is farther
    than all others were, it is the farthest of all.

    Args:
        rows: [N, D] float32.
        count: Number of rows to choose; all rows if there are no more.
        seed: Seed of the projection and of the first row.

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
    """Return the Euclidean distance of each row to the nearest row of a bank, in bounded memory.

    Args:
        rows: [N, D] float.
        bank: [M, D] float, M at least 1.
        chunk_bytes: Size of the distances that are in memory at a time; at least one row.

    Returns:
        [N] float32; NaN for rows that contain NaN.
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
