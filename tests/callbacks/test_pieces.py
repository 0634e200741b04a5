import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.callbacks.adaptive.merge import Merger
from lit_data.core.batch_form import cut_evenly


class Pair(NamedTuple):
    images: Any
    labels: Any


def test_pieces_of_every_number_and_size() -> None:
    for samples, size in itertools.product(range(1, 130), range(1, 140)):
        pieces = cut_evenly(samples, size)
        counts = [stop - start for start, stop in pieces]
        assert [start for start, _ in pieces] == [0, *itertools.accumulate(counts[:-1])]
        assert sum(counts) == samples
        assert len(counts) == -(-samples // size)
        assert size >= counts[0] == max(counts)
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)


OUTPUTS = {
    # joined, one entry per sample
    "tensor": (lambda n, first: torch.arange(first, first + n), torch.arange(5)),
    "array": (lambda n, first: np.arange(first, first + n), np.arange(5)),
    "list": (lambda n, first: list(range(first, first + n)), [0, 1, 2, 3, 4]),
    "tuple": (lambda n, first: tuple(range(first, first + n)), (0, 1, 2, 3, 4)),
    "texts": (lambda n, first: list("abcde"[first : first + n]), list("abcde")),
    "detections": (
        lambda n, first: [{"boxes": torch.full((k, 4), k)} for k in range(first, first + n)],
        [{"boxes": torch.full((k, 4), k)} for k in range(5)],
    ),
    # means, weighted by samples
    "number": (lambda n, first: float(first), 3.0 * (2 / 5)),
    "scalar": (lambda n, first: torch.tensor(float(first)), torch.tensor(6 / 5)),
    # the last
    "text": (lambda n, first: f"{first}", "3"),
    "count": (lambda n, first: 7 + n, 9),
    "matrix": (lambda n, first: torch.full((7, 7), n), torch.full((7, 7), 2)),
    "nothing": (lambda n, first: None, None),
    "now and then": (lambda n, first: None if first else torch.ones(n), None),
    # structures
    "parts": (
        lambda n, first: (
            torch.arange(first, first + n),
            {"loss": torch.tensor(1.0), "name": ["x"] * n},
        ),
        (torch.arange(5), {"loss": torch.tensor(1.0), "name": ["x"] * 5}),
    ),
    "pair": (
        lambda n, first: Pair(torch.ones(n), torch.zeros(n, 2)),
        Pair(torch.ones(5), torch.zeros(5, 2)),
    ),
    "list of parts": (
        lambda n, first: [torch.ones(n), torch.zeros(n, 2)],
        [torch.ones(5), torch.zeros(5, 2)],
    ),
    "ordered": (lambda n, first: OrderedDict(b=torch.ones(n)), OrderedDict(b=torch.ones(5))),
    "odd key": (lambda n, first: {"x": 1.0} | ({"y": 2.0} if first else {}), {"x": 1.0}),
    "empty": (lambda n, first: [], []),
}


def _is_same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict):
        return list(found) == list(expected) and all(
            _is_same(found[key], expected[key]) for key in found
        )
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    if isinstance(found, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(np.all(found == expected))


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_pieces_are_those_of_the_batch(name: str) -> None:
    make, expected = OUTPUTS[name]
    assert _is_same(Merger([3, 2]).merge([make(3, 0), make(2, 3)]), expected)


def test_a_pair_of_tensors_stays_a_pair_where_pieces_have_two_samples() -> None:
    outputs = [(torch.tensor(1.0), torch.ones(2)), (torch.tensor(3.0), torch.zeros(2))]
    assert _is_same(
        Merger([2, 2]).merge(outputs), (torch.tensor(2.0), torch.tensor([1.0, 1, 0, 0]))
    )


def test_a_square_of_equal_pieces_has_its_samples_in_the_first_dimension_which_is_noted() -> None:
    merger = Merger([2, 2])
    joined = merger.merge([{"scores": torch.zeros(2, 2)}, {"scores": torch.ones(2, 2)}])
    assert torch.equal(joined["scores"], torch.tensor([[0.0, 0], [0, 0], [1, 1], [1, 1]]))
    assert merger.ambiguous == ["['scores']"]
    uneven = Merger([2, 3])  # classes x samples
    assert uneven.merge([torch.zeros(2, 2), torch.zeros(2, 3)]).shape == (2, 5)
    assert not uneven.ambiguous
