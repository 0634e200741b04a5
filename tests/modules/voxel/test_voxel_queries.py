import pytest
import torch

from lit_data.errors import ConfigError
from lit_data.modules import QueryCounts
from lit_data.modules.voxel.points import Points, Queries, draw_queries, read_points
from lit_data.types import Batch

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

SIDE = 16
COUNTS = QueryCounts(points=64, near=256, anywhere=128)


def _slab(volumes: int = 2, *, every: int = 1, high: int = 6) -> Batch:
    """Volumes whose slices 3 to `high` are occupied; of their voxels every n-th is a point."""
    places = torch.cartesian_prod(torch.arange(3, high), torch.arange(SIDE), torch.arange(SIDE))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(1))
    kept = places[order[: len(places) // every]]
    rows = torch.arange(volumes).repeat_interleave(len(kept))[:, None]
    coords = torch.cat((rows, kept.repeat(volumes, 1)), dim=1)
    return {
        "coords": coords,
        "feats": coords[:, 1:2] / SIDE,
        "shape": torch.full((volumes, 3), SIDE),
        "occupied_total": torch.full((volumes,), len(places)),
    }


def _draw(
    points: Points, index: list[int], *, epoch: int = 0, seed: int = 0, counts: QueryCounts = COUNTS
) -> Queries:
    return draw_queries(points, counts, grid=8, seed=seed, index=torch.tensor(index), epoch=epoch)


def test_answers_are_true() -> None:
    queries = _draw(read_points(_slab()), [4, 9])
    at, asked = queries.places[:, :64], queries.places[:, 64:]
    assert ((at[..., 0] >= 3) & (at[..., 0] < 6)).all()
    assert torch.equal(queries.values, at[..., 0] / SIDE)
    assert (queries.value_weights == 1).all()
    assert torch.equal(queries.occupied, ((asked[..., 0] >= 3) & (asked[..., 0] < 6)).float())
    assert asked.min() == 0
    assert asked.max() == SIDE - 1
    assert 0.3 < queries.occupied[:, :256].mean() < 0.9  # near the points both are common
    assert queries.weights[:, 256:].min() == 1


def test_places_depend_on_seed_sample_and_epoch_alone() -> None:
    points = read_points(_slab())
    first = _draw(points, [4, 9]).places
    assert torch.equal(_draw(points, [9, 4]).places, first.flip(0))
    later, seeded = _draw(points, [4, 9], epoch=1), _draw(points, [4, 9], seed=1)
    for other in (later, seeded, _draw(points, [5, 8])):
        assert (other.places != first).any(-1).float().mean() > 0.9


def test_a_subset_of_the_points_gives_the_same_expectation() -> None:
    many = QueryCounts(points=1, near=60000, anywhere=60000)
    for part in (slice(0, 60000), slice(60000, None)):
        shares = []
        for every in (1, 5):
            queries = _draw(read_points(_slab(1, every=every)), [0], counts=many)
            weights = queries.weights[0, part]
            shares.append(float((queries.occupied[0, part] * weights).sum() / weights.sum()))
        assert shares[1] == pytest.approx(shares[0], rel=0.05)


def test_a_volume_without_points_has_only_free_places() -> None:
    batch = _slab(1) | {"shape": torch.full((2, 3), SIDE), "occupied_total": torch.tensor([768, 0])}
    queries = _draw(read_points(batch), [0, 1])
    assert (queries.value_weights[1] == 0).all()
    assert (queries.weights[1, :256] == 0).all()
    assert (queries.occupied[1] * queries.weights[1] == 0).all()
    nothing = {
        key: value[:0] if key in ("coords", "feats") else value for key, value in batch.items()
    }
    assert (_draw(read_points(nothing), [0, 1]).occupied == 0).all()


def test_there_must_be_places() -> None:
    with pytest.raises(ConfigError, match="points=0, near=2048, anywhere=1024: need 1 or more"):
        QueryCounts(points=0)
