"""The memory bank: a bounded sample, a coreset of it, distances in bounded memory."""

import pytest
import torch

from lit_data.modules.anomaly.module import Candidates, choose_coreset, find_distances


def test_the_sample_is_bounded_and_that_of_one_batch() -> None:
    rows = torch.arange(1000.0)[:, None]
    whole, parts = Candidates(100, seed=3), Candidates(100, seed=3)
    whole.add(rows)
    for part in rows.split(37):
        parts.add(part)
    assert len(whole) == len(parts) == 100
    assert sorted(whole.rows.flatten().tolist()) == sorted(parts.rows.flatten().tolist())
    assert len(whole.rows.unique()) == 100
    assert 350 < float(whole.rows.mean()) < 650


def test_a_sample_goes_on_where_it_was_saved() -> None:
    rows = torch.arange(600.0)[:, None]
    whole, first, second = (Candidates(50) for _ in range(3))
    whole.add(rows)
    first.add(rows[:200])
    second.load_state_dict(first.state_dict())
    second.add(rows[200:])
    assert sorted(second.rows.flatten().tolist()) == sorted(whole.rows.flatten().tolist())


def test_the_coreset_covers_what_a_sample_misses() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(5000, 8, generator=generator)
    rare = 20 + torch.randn(5, 8, generator=generator)
    rows = torch.cat([dense, rare])
    chosen = choose_coreset(rows, 50)
    assert len(set(chosen.tolist())) == 50
    assert (chosen >= 5000).any()
    sampled = torch.randperm(5005, generator=generator)[:50]
    assert (
        find_distances(rows, rows[chosen]).max() < 0.9 * find_distances(dense, rows[sampled]).max()
    )
    assert choose_coreset(rows[:40], 50).tolist() == list(range(40))


def test_equal_rows_are_chosen_once_each() -> None:
    assert len(set(choose_coreset(torch.ones(6, 3), 4).tolist())) == 4


@pytest.mark.parametrize("chunk_bytes", [4, 4 * 70 * 3, 2**26])
def test_distances_are_those_of_all_pairs_in_any_chunks(chunk_bytes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, bank = torch.randn(20, 5, generator=generator), torch.randn(70, 5, generator=generator)
    expected = torch.cdist(rows, bank).amin(1)
    torch.testing.assert_close(
        find_distances(rows, bank, chunk_bytes=chunk_bytes), expected, atol=1e-4, rtol=1e-4
    )


def test_what_is_no_number_has_no_distance() -> None:
    rows = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    found = find_distances(rows, torch.zeros(3, 2))
    assert found[0] == 1
    assert found[1].isnan()
    assert find_distances(rows[:0], torch.zeros(3, 2)).shape == (0,)
