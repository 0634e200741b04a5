import pytest
import torch

from lit_data.augment.matrices import Moves, compose, invert, turn_covers


def make_moves(batch: int, seed: int = 0, *, bent: bool) -> Moves:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(batch, 8, generator=generator) * bent
    return Moves(
        mirror=torch.where(torch.rand(batch, 2, generator=generator) < 0.5, -1.0, 1.0),
        quarters=torch.randint(0, 4, (batch,), generator=generator),
        linear=torch.eye(2) + 0.3 * noise[:, :4].view(-1, 2, 2),
        tilt=0.2 * noise[:, 4:6] - 0.1 * bent,
        shift=torch.randint(-3, 4, (batch, 2), generator=generator).float() + noise[:, 6:8],
    )


@pytest.mark.parametrize(
    ("size", "crop", "covers"),
    [
        ((8, 8), (8, 8), True),
        ((8, 12), (8, 12), False),
        ((8, 12), (8, 8), True),
        ((8, 12), (4, 9), False),
    ],
)
def test_turned_inputs_cover_crops(
    size: tuple[int, int], crop: tuple[int, int], covers: bool
) -> None:
    assert turn_covers(size, crop) == covers
    quarters = torch.arange(4)
    still = Moves(
        torch.ones(4, 2),
        quarters,
        torch.eye(2).expand(4, 2, 2),
        torch.zeros(4, 2),
        torch.zeros(4, 2),
    )
    swapped = compose(still, size, crop)[:, 0, 1] != 0
    assert swapped.tolist() == [False, covers, False, covers]


def test_whole_moves_are_exact() -> None:
    matrix = compose(make_moves(64, bent=False), (9, 14), (6, 7))
    corner = torch.tensor([3.0, 5.0, 1.0])
    for each in (matrix, invert(matrix)):
        assert torch.equal(each, each.round())
        assert torch.equal(each[:, 2], torch.tensor([0.0, 0.0, 1.0]).expand(64, 3))
    assert torch.equal((matrix @ corner)[:, :2] % 1, torch.zeros(64, 2))


def test_the_inverse_undoes_the_matrix() -> None:
    matrix = compose(make_moves(32, bent=True), (40, 30), (20, 25))
    product = matrix.double() @ invert(matrix).double()
    torch.testing.assert_close(
        product / product[:, 2:, 2:], torch.eye(3).double().expand(32, 3, 3), atol=2e-3, rtol=0
    )


def test_the_centre_stays_in_the_centre_of_the_crop() -> None:
    moves = make_moves(16, bent=True)
    still = Moves(moves.mirror, moves.quarters, moves.linear, moves.tilt, torch.zeros(16, 2))
    centre = compose(still, (21, 21), (11, 7)) @ torch.tensor([10.0, 10.0, 1.0])
    torch.testing.assert_close(
        centre[:, :2] / centre[:, 2:], torch.tensor([3.0, 5.0]).expand(16, 2)
    )
