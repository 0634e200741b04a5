import torch

from lit_data.modules.voxel.points import Points, find_cells, read_points
from lit_data.types import Batch


def _batch() -> Batch:
    coords = torch.tensor(
        [[0, 1, 2, 3], [0, 1, 2, 2], [2, 0, 0, 0], [2, 5, 0, 1]], dtype=torch.int32
    )
    feats = torch.tensor([[0.3], [0.2], [0.0], [0.5]])
    return {
        "coords": coords,
        "feats": feats,
        "shape": torch.tensor([[4, 4, 4], [3, 3, 3], [6, 2, 2]]),
    }


def _equal(one: Points, other: Points) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_points_come_in_one_order_with_their_features() -> None:
    points = read_points(_batch())
    assert points.rows.tolist() == [0, 0, 2, 2]
    assert points.places.tolist() == [[1, 2, 2], [1, 2, 3], [0, 0, 0], [5, 0, 1]]
    assert points.feats.flatten().tolist() == torch.tensor([0.2, 0.3, 0.0, 0.5]).tolist()
    assert points.counts.tolist() == points.totals.tolist() == [2, 0, 2]
    assert points.starts().tolist() == [0, 2, 2]
    assert points.kept_share().tolist() == [1, 1, 1]


def test_a_piece_of_a_batch_keeps_its_points() -> None:
    whole = _batch()
    piece = {
        "coords": whole["coords"][2:],
        "feats": whole["feats"][2:],
        "shape": whole["shape"][1:],
        "coords_count": torch.tensor([0, 2]),
    }
    renumbered = piece | {"coords": piece["coords"] - torch.tensor([1, 0, 0, 0], dtype=torch.int32)}
    del renumbered["coords_count"]
    assert _equal(read_points(piece), read_points(renumbered))


def test_places_are_looked_up() -> None:
    points = read_points(_batch())
    rows = torch.tensor([[0, 0, 1], [2, 2, 2]])
    places = torch.tensor([[[1, 2, 3], [1, 2, 1], [1, 2, 3]], [[5, 0, 1], [5, 1, 1], [0, 0, 0]]])
    assert points.look_up(rows, places).tolist() == [[True, False, False], [True, False, True]]


def test_the_share_of_a_subset() -> None:
    points = read_points(_batch() | {"occupied_total": torch.tensor([8, 0, 2])})
    assert points.kept_share().tolist() == [0.25, 1, 1]


def test_cells_share_a_volume_evenly() -> None:
    places = torch.arange(10)[:, None].expand(10, 3)
    assert find_cells(places, torch.tensor([10, 5, 3]), 4)[:, 0].tolist() == [
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        3,
        3,
        3,
    ]
    assert find_cells(places[:3], torch.tensor([3, 3, 3]), 4)[:, 0].tolist() == [0, 2, 3]
