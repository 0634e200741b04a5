import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.wings.volumes import PointVoxelNet, QueryCounts, VectorQuantiser
from lit_data.wings.volumes.voxel.blocks import read_between
from lit_data.wings.volumes.voxel.net import CellVoxels, Decoding, Field, compare, reconstruct
from lit_data.wings.volumes.voxel.points import Points, Queries, draw_queries, read_points

SIDE = 16
COUNTS = QueryCounts(points=64, near=256, anywhere=128)
SHAPES = torch.tensor([[12, 9, 7], [5, 16, 8], [3, 3, 20]])


def _net(**options: object) -> PointVoxelNet:
    torch.manual_seed(0)
    return PointVoxelNet(**({"grid": 8, "width": 8, "latent": 4, "hidden": 8} | options))  # type: ignore[arg-type]


def _batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows, parts = [], []
    for row, shape in enumerate(SHAPES):
        chosen = torch.randperm(int(shape.prod()), generator=generator)[:40]
        parts.append(torch.stack(torch.unravel_index(chosen, shape.tolist()), dim=1))
        rows.append(torch.full((40, 1), row))
    coords = torch.cat((torch.cat(rows), torch.cat(parts)), dim=1).int()
    return {"coords": coords, "feats": torch.rand(120, 1, generator=generator), "shape": SHAPES}


def _ask_all(net: PointVoxelNet, points: Points) -> tuple[Tensor, ...]:
    field = net(points)
    return (*net.ask(field, points.rows, points.places), field.cells)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
def test_shapes(levels: int, quantised: bool) -> None:
    net = _net(levels=levels, quantiser=VectorQuantiser(16, 4) if quantised else None)
    points = read_points(_batch())
    field = net(points)
    assert field.features.shape == (3 * 8**3, 8)
    assert field.cells.shape == (3, 8, 8, 8)
    assert field.misses.shape == (3,)
    assert (None if field.codes is None else tuple(field.codes.shape)) == (
        (3, (8 >> levels) ** 3) if quantised else None
    )
    logits, values = net.ask(field, points.rows, points.places)
    assert logits.shape == values.shape == (120,)


def test_no_volume_sees_another() -> None:
    net, batch = _net(quantiser=VectorQuantiser(16, 4)).eval(), _batch()
    other = _batch(seed=1)
    changed = {key: torch.cat((batch[key][:80], other[key][80:])) for key in ("coords", "feats")}
    one, two = (_ask_all(net, read_points(part | {"shape": SHAPES})) for part in (batch, changed))
    for before, after in zip(one[:2], two[:2], strict=True):
        assert torch.equal(before[:80], after[:80])
        assert not torch.equal(before[80:], after[80:])
    assert torch.equal(one[2][:2], two[2][:2])


@pytest.mark.parametrize("chunk", [1, 37, 1000])
def test_points_may_come_in_chunks(chunk: int) -> None:
    gradients = []
    for size in (1000, chunk):
        net = _net(point_chunk=size)
        answers = _ask_all(net, read_points(_batch()))
        sum(part.square().sum() for part in answers).backward()  # type: ignore[union-attr]
        gradients.append([weight.grad for weight in net.parameters()])
        assert all(gradient is not None for gradient in gradients[-1])
    assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_reading_between_cells_is_linear() -> None:
    grid, shape = 4, torch.tensor([16, 8, 4])
    sides = [(torch.arange(grid) + 0.5) * side / grid for side in shape.tolist()]
    centres = torch.cartesian_prod(*sides)
    # Of two volumes; features are places in mm.
    features = torch.cat((torch.zeros(grid**3, 3), centres))
    places = torch.tensor([[2, 1, 1], [9, 5, 2], [13, 6, 3], [0, 0, 0], [15, 7, 3]])
    rows = torch.ones(5, dtype=torch.int64)
    found = read_between(features, rows, places, shape.expand(5, 3), grid)
    low, high = centres.amin(0), centres.amax(0)
    assert_close(found, (places + 0.5).maximum(low).minimum(high))


def _field(cells: Tensor) -> Field:
    return Field(torch.zeros(3 * 8**3, 8), cells, SHAPES, None, torch.zeros(3))


def test_only_cells_that_can_hold_something_are_looked_into() -> None:
    cells = torch.full((3, 8, 8, 8), -9.0)
    cells[1, 2, 3, 4] = 9
    voxels = CellVoxels(_field(cells), grid=8, cell_threshold=0.1)
    rows, places = voxels.find(torch.arange(len(voxels)))
    assert rows.tolist() == [1, 1]
    assert places.tolist() == [[1, 6, 4], [1, 7, 4]]
    everywhere = CellVoxels(_field(torch.zeros(3, 8, 8, 8)), grid=8, cell_threshold=0.1)
    rows, places = everywhere.find(torch.arange(len(everywhere)))
    assert len(rows) == int(SHAPES.prod(1).sum())
    assert len(torch.unique(torch.cat((rows[:, None], places), dim=1), dim=0)) == len(rows)
    assert (places < SHAPES[rows]).all()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [97, 100000])
def test_reconstructions_are_what_is_asked_one_by_one(chunk: int) -> None:
    net, points = _net().eval(), read_points(_batch())
    field = net(points)
    threshold = float(net.ask(field, points.rows, points.places)[0].sigmoid().median())
    cell_threshold = float(field.cells.sigmoid().quantile(0.3))
    decoding = Decoding(threshold, cell_threshold, chunk)
    found = reconstruct(net, field, decoding)
    for row, (shape, volume) in enumerate(zip(SHAPES.tolist(), found, strict=True)):
        places = torch.cartesian_prod(*map(torch.arange, shape))
        logits, values = net.ask(field, torch.full((len(places),), row), places)
        cell = tuple(((2 * places + 1) * 8 // (2 * SHAPES[row])).unbind(1))
        sure = (logits.sigmoid() > threshold) & (field.cells[row][cell].sigmoid() >= cell_threshold)
        assert 0 < int(sure.sum()) < len(places)
        assert torch.equal(volume["coords"], places[sure].int())
        assert_close(volume["values"], values[sure].clamp(0, 1))
        assert volume["scores"].min() > threshold
    both, true, predicted, errors = compare(net, field, points, decoding)
    sets = [{tuple(place) for place in volume["coords"].tolist()} for volume in found]
    hits = [
        sum(tuple(place) in own for place in points.places[points.rows == row].tolist())
        for row, own in enumerate(sets)
    ]
    assert both.tolist() == hits
    assert true.tolist() == [40] * 3
    subset = points._replace(totals=points.totals * 4)
    scaled = compare(net, field, subset, decoding)
    assert (scaled[0] == 4 * both).all()
    assert (scaled[1] == 160).all()
    assert predicted.tolist() == [len(own) for own in sets]
    values = net.ask(field, points.rows, points.places)[1].clamp(0, 1)
    misses = (values - points.feats[:, 0]).double()
    sums = misses.abs().sum(), misses.square().sum(), torch.tensor(120.0).double()
    assert_close(errors, torch.stack(sums))


@torch.no_grad()
def test_large_volumes_are_scored_by_some_of_their_voxels() -> None:
    net, points = _net().eval(), read_points(_batch())
    field = net(points)
    exact = compare(net, field, points, Decoding(0.3, 0.0))
    some = compare(net, field, points, Decoding(0.3, 0.0, score_voxels=900))
    assert torch.equal(exact[0], some[0])
    assert float(some[2].sum()) == pytest.approx(float(exact[2].sum()), rel=0.1)
    assert not torch.equal(some[2], exact[2])


def test_nothing_in_nothing_out() -> None:
    net = _net().eval()
    empty = {"coords": torch.zeros(0, 4).int(), "feats": torch.zeros(0, 1), "shape": SHAPES}
    field = net(read_points(empty))
    assert torch.isfinite(field.features).all()
    found = reconstruct(net, field, Decoding(cell_threshold=0.99))
    assert [len(volume["coords"]) for volume in found] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 7}, "grid=7, .*a grid that is a multiple of 2"),
        ({"width": 6}, "width=6, .*a width that is a multiple of 4"),
        ({"channels": 0}, "channels=0"),
        ({"channels": 2}, "the points have 1 feature: set model.net.channels to that, not 2"),
        ({"quantiser": VectorQuantiser(4, 3)}, "quantiser.width=3: it must be latent=4"),
    ],
)
def test_impossible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _net(**options)(read_points(_batch()))


@pytest.mark.parametrize(
    "options", [{"threshold": 1.0}, {"cell_threshold": -0.1}, {"query_chunk": 0}]
)
def test_impossible_decodings(options: dict[str, float]) -> None:
    message = "need 0 < threshold < 1, 0 <= cell_threshold < 1 and the rest >= 1"
    with pytest.raises(ConfigError, match=message):
        Decoding(**options)  # type: ignore[arg-type]


# points and queries


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


def test_there_must_be_places() -> None:
    with pytest.raises(ConfigError, match="points=0, near=2048, anywhere=1024: need 1 or more"):
        QueryCounts(points=0)
