import torch

from lit_data.modules.voxel.points import find_cells, read_points
from lit_data.types import Batch


def _batch() -> Batch:
    coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 2], [2, 0, 0, 0], [2, 5, 0, 1]]).int()
    feats = torch.tensor([[0.3], [0.2], [0.0], [0.5]])
    shape = torch.tensor([[4, 4, 4], [3, 3, 3], [6, 2, 2]])
    return {"coords": coords, "feats": feats, "shape": shape}


def test_points_come_in_one_order_with_their_features() -> None:
    points = read_points(_batch())
    assert points.rows.tolist() == [0, 0, 2, 2]
    assert points.places.tolist() == [[1, 2, 2], [1, 2, 3], [0, 0, 0], [5, 0, 1]]
    assert points.feats.flatten().tolist() == torch.tensor([0.2, 0.3, 0.0, 0.5]).tolist()
    assert points.counts.tolist() == points.totals.tolist() == [2, 0, 2]
    assert points.starts().tolist() == [0, 2, 2]
    assert points.kept_share().tolist() == [1, 1, 1]
    subset = read_points(_batch() | {"occupied_total": torch.tensor([8, 0, 2])})
    assert subset.kept_share().tolist() == [0.25, 1, 1]


def test_a_piece_of_a_batch_keeps_its_points() -> None:
    whole = _batch()
    piece = {key: whole[key][2:] for key in ("coords", "feats")} | {"shape": whole["shape"][1:]}
    renumbered = piece | {"coords": piece["coords"] - torch.tensor([1, 0, 0, 0]).int()}
    piece["coords_count"] = torch.tensor([0, 2])
    fields = zip(read_points(piece), read_points(renumbered), strict=True)
    assert all(torch.equal(one, other) for one, other in fields)


def test_places_are_looked_up() -> None:
    points = read_points(_batch())
    rows = torch.tensor([[0, 0, 1], [2, 2, 2]])
    places = torch.tensor([[[1, 2, 3], [1, 2, 1], [1, 2, 3]], [[5, 0, 1], [5, 1, 1], [0, 0, 0]]])
    assert points.look_up(rows, places).tolist() == [[True, False, False], [True, False, True]]


def test_cells_share_a_volume_evenly() -> None:
    places = torch.arange(10)[:, None].expand(10, 3)
    cells = find_cells(places, torch.tensor([10, 5, 3]), 4)[:, 0]
    assert cells.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert find_cells(places[:3], torch.tensor([3, 3, 3]), 4)[:, 0].tolist() == [0, 2, 3]
