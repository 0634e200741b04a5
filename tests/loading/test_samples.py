"""Any map-style dataset through the loader gives what torch's DataLoader gives."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.core.errors import ConfigError, DataError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.samples import SampleWriter
from tests.loading.rows import KINDS

Pair = namedtuple("Pair", ["image", "label"])


class Made:
    def __init__(self, make: Any, length: int = 23) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def _everything(index: int) -> dict[str, Any]:
    return {
        "tensor": torch.full((2, 3), index, dtype=torch.uint8),
        "half": torch.tensor([index, 1.5], dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True) * index,
        "array": np.full((3,), index, np.float32),
        "scalar": np.int16(index),
        "int": index,
        "float": index / 3,
        "bool": index % 2 == 0,
        "text": f"image {index}",
        "raw": bytes([index]),
        "pair": Pair(torch.tensor(index), index),
        "tuple": (index, [np.zeros(2), "a"], {"deep": index}),
    }


FORMS = {
    "everything": _everything,
    "tuple": lambda index: (torch.full((4,), float(index)), index),
    "tensor": lambda index: torch.full((4,), index),
    "array": lambda index: np.full((2, 2), index),
    "number": lambda index: index,
    "text": lambda index: f"{index}",
    "list": lambda index: [index, float(index)],
}


def _assert_same(one: Any, other: Any) -> None:
    # Text inside a tuple comes as a tuple from torch, text elsewhere as a list; here it is always a
    # list.
    assert type(one) is type(other) or (isinstance(one, list) and isinstance(other, tuple))
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, its in zip(one, other, strict=True):
            _assert_same(part, its)
    else:
        assert one == other


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batches_are_those_of_torch(kind: dict[str, Any], form: str) -> None:
    dataset = Made(FORMS[form])
    loader = MicroBatchLoader(dataset, LoaderOptions(batch_size=5, micro_batch_size=2, **kind))
    expected = list(DataLoader(dataset, batch_size=5))
    for ours, theirs in zip(loader, expected, strict=True):
        _assert_same(ours, theirs)
    loader.close()


def test_a_dataset_that_reads_many_at_once_is_asked_so() -> None:
    class Many(Made):
        asked: list[list[int]] = []  # noqa: RUF012

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked.append(indices)
            return [self.make(index) for index in indices]

    dataset = Many(FORMS["tuple"], 10)
    options = LoaderOptions(batch_size=6, micro_batch_size=4, worker_kind="inline")
    expected = DataLoader(Made(FORMS["tuple"], 10), batch_size=6)
    for ours, theirs in zip(MicroBatchLoader(dataset, options), expected, strict=True):
        _assert_same(ours, theirs)
    assert dataset.asked == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_set_epoch_reaches_the_dataset_in_workers_that_stay() -> None:
    class Epochs(Made):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> int:
            return self.epoch

    options = LoaderOptions(batch_size=8, worker_kind="process", num_workers=2, start_method="fork")
    loader = MicroBatchLoader(Epochs(None), options, shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert {int(value) for batch in loader for value in batch} == {epoch}
    loader.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda index: torch.zeros(2 + (index == 3)), r"a sample has shape \[3\] and that of sample 0 has \[2\]: crop"),
        (lambda index: {"x": np.zeros((2, 2 + (index == 3)))},
         r"x has shape \[2, 3\] and that of sample 0 has \[2, 2\]"),
        (lambda index: {"x": 1} if index != 3 else {"y": 1},
         r"a sample is a dict of \['y'\], and sample 0 is a dict of \['x'\]"),
        (lambda index: (1, 2) if index != 3 else (1, 2, 3), "a sample is a tuple of 3, and sample 0 is a list of 2"),
        (lambda index: 1 if index != 3 else 1.5, "a sample is 1.5, and that of sample 0 has dtype int64, which cannot"),
        (lambda index: torch.ones(2**18, dtype=torch.uint8 if index != 3 else torch.float32),  # read one at a time
         "a sample has dtype float32 and that of sample 0 has uint8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
def test_samples_of_another_form_are_named(make: Any, message: str, kind: dict[str, Any]) -> None:
    loader = MicroBatchLoader(Made(make), LoaderOptions(batch_size=8, **kind))
    with pytest.raises(DataError, match=message) as caught:
        list(loader)
    assert "while loading sample 3" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, device="meta"), "tensor on meta with layout torch.strided: datasets give"),
        (torch.eye(2).to_sparse(), "a tensor on cpu with layout torch.sparse_coo"),
        (
            {"x": object()},
            "x is a object, which cannot be put into a batch: return tensors.* or give .*collate_fn=list",
        ),
        ((1, {2, 3}), "part 1 of a sample is a set, which cannot be put into a batch"),
    ],
)
def test_what_cannot_be_put_into_a_batch_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleWriter(Made(lambda index: value), seed=0).describe()


# --- samples of several sizes


def _sized(index: int) -> tuple[Tensor, int]:
    return torch.full((2, 3 + index % 3, 4), index, dtype=torch.uint8), index


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"batch_size": 4}], ids=str)
def test_samples_of_another_size_are_refused_and_never_rewrapped(
    kind: dict[str, Any], sizes: dict[str, int]
) -> None:
    loader = MicroBatchLoader(Made(_sized), LoaderOptions(**sizes, **kind))
    message = r"part 0 of a sample has shape \[2, \d, 4\] .* sample 0 has .*: .*collate_fn=list"
    with pytest.raises(DataError, match=message):
        list(loader)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_collate_function_makes_batches_of_whole_samples(kind: dict[str, Any]) -> None:
    def together(samples: list[Any]) -> tuple[Any, ...]:
        return tuple(zip(*samples, strict=True))

    options = LoaderOptions(batch_size=5, **kind)
    loader = MicroBatchLoader(Made(_sized), options, shuffle=True, collate_fn=together)
    assert loader.choice.kind == kind["worker_kind"]
    plain = MicroBatchLoader(range(23), LoaderOptions(batch_size=5), shuffle=True)
    expected = torch.cat(list(plain)).tolist()
    batches = list(loader)
    assert [len(images) for images, _ in batches] == [5, 5, 5, 5, 3]
    assert [index for _, indices in batches for index in indices] == expected
    for images, indices in batches:
        for image, index in zip(images, indices, strict=True):
            assert torch.equal(image, _sized(index)[0])
    loader.close()


def test_a_collate_function_has_no_micro_batches_and_no_rows() -> None:
    text = "collate_fn makes a batch of whole samples: remove micro_batch_size"
    with pytest.raises(ConfigError, match=text):
        MicroBatchLoader(Made(_sized), LoaderOptions(micro_batch_size=2), collate_fn=list)

    class Writer(Made):
        fields: dict[str, Any] = {}  # noqa: RUF012

        def write_into(self, rows: Any, indices: Any, epoch: int) -> None: ...

    loader = MicroBatchLoader(Writer(_sized), LoaderOptions(), collate_fn=list)
    text = "Writer writes into the rows of a batch itself: remove collate_fn"
    with pytest.raises(ConfigError, match=text):
        list(loader)


# --- datasets that draw


class ManyDrawn(Made):
    """As Hugging Face's datasets with a random transform."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.rand(2)) for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def _draw_seldom(index: int) -> tuple[int, Tensor]:
    """Most samples draw nothing, the first one among them."""
    return index, torch.rand(2) if index % 5 == 4 else torch.full((2,), 1.0 + index)


def _drawn(kind: dict[str, Any], dataset: Any, *, epoch: int = 0, **options: Any) -> list[Any]:
    torch.rand(1)  # as a run before it may have left the generators
    loader = MicroBatchLoader(dataset, LoaderOptions(**options, **kind), shuffle=True)
    loader.set_epoch(epoch)
    found = {}
    for numbers, values in loader:
        found |= dict(zip(numbers.tolist(), values.tolist(), strict=True))
    loader.close()
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "dataset",
    [ManyDrawn(None), Made(lambda index: (index, torch.rand(2))), Made(_draw_seldom)],
    ids=["many at once", "one by one", "not the first"],
)
def test_what_is_drawn_is_the_same_tomorrow(
    kind: dict[str, Any], dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = _drawn(kind, dataset, batch_size=5)
    assert len({tuple(value) for value in map(tuple, first)}) == len(first)
    assert _drawn(kind, dataset, batch_size=3) == first
    warned = "draws from the global generators" in caplog.text
    assert warned == (kind["worker_kind"] == "thread"), "threads are refused, and that is told"
    assert _drawn(kind, dataset, batch_size=7, epoch=1) != first
