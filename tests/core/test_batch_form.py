"""Samples of batches as frameworks and their users make them: how many, and each in one piece, whole."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.core.batch_form import (
    batch_tensors,
    count_plain,
    count_samples,
    cut_evenly,
    slice_batch,
)
from lit_data.core.errors import ConfigError


class Pair(NamedTuple):
    images: Any
    labels: Any


@dataclass(frozen=True)
class Sample:
    images: Tensor
    names: list[str]
    scale: float = 1.0
    seen: int = field(default=7, init=False)


class Indexed:
    """As anomalib's or a detection library's own batch: a length, and [start:stop]."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: slice) -> "Indexed":
        return Indexed(self.images[index])


class Opaque:
    """Tensors, and no way to cut them."""

    def __init__(self) -> None:
        self.images = torch.zeros(4, 2)


def _counting(samples: int, *shape: int) -> Tensor:
    """Sample i is filled with i."""
    return torch.arange(samples).reshape(samples, *[1] * len(shape)).expand(samples, *shape).clone()


BATCHES = {
    "tensor": lambda: _counting(5, 2),
    "dict": lambda: {"image": _counting(5, 2), "label": _counting(5)},
    "ordered": lambda: OrderedDict(b=_counting(5), a=_counting(5, 1)),
    "default": lambda: defaultdict(list, image=_counting(5, 2)),
    "list": lambda: [_counting(5, 2), _counting(5)],
    "tuple": lambda: (_counting(5, 2), _counting(5)),
    "namedtuple": lambda: Pair(_counting(5, 2), _counting(5)),
    "dataclass": lambda: Sample(_counting(5, 2), list("abcde")),
    "array": lambda: np.arange(5),
    "arrays": lambda: [np.arange(5), np.zeros((5, 3))],
    "nested": lambda: {
        "views": [_counting(5, 2), {"deep": (_counting(5),)}],
        "paths": [Path(c) for c in "abcde"],
    },
    "empty parts": lambda: {"image": _counting(5), "nothing": None, "list": [], "dict": {}},
}


def _flatten(batch: Any) -> list[Any]:
    """What a batch holds for each sample, in order."""
    if isinstance(batch, Tensor | np.ndarray):
        return [batch.tolist()]
    if isinstance(batch, Sample):
        return [batch.images.tolist(), batch.names]
    if isinstance(batch, dict):
        return [found for part in batch.values() for found in _flatten(part)]
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Path):
        return [batch]
    if isinstance(batch, list | tuple):
        return [found for part in batch for found in _flatten(part)]
    return []


@pytest.mark.parametrize("name", BATCHES)
def test_pieces_hold_every_sample_once_and_in_order(name: str) -> None:
    batch = BATCHES[name]()
    assert count_samples(batch) == 5
    assert count_plain(batch) in (0, 5)
    for size in (1, 2, 3, 5, 6):
        places = cut_evenly(5, size)
        pieces = [slice_batch(batch, start, stop, 5) for start, stop in places]
        assert {type(piece) for piece in pieces} == {type(batch)}
        lengths = [stop - start for start, stop in places]
        assert [count_samples(piece) for piece in pieces] == lengths
        columns = zip(*map(_flatten, pieces), strict=True)
        assert [[item for part in column for item in part] for column in columns] == _flatten(batch)


def test_pieces_are_views_and_a_batch_stays_as_it_is() -> None:
    batch = {"image": _counting(4, 3), "array": np.arange(4), "path": ["a", "b", "c", "d"]}
    piece = slice_batch(batch, 1, 3, 4)
    assert piece["image"].data_ptr() == batch["image"][1].data_ptr()
    assert np.shares_memory(piece["array"], batch["array"])
    assert piece["path"] == ["b", "c"]
    assert (len(batch["image"]), len(batch["path"])) == (4, 4)


def test_what_belongs_to_the_whole_batch_goes_into_every_piece() -> None:
    numbers = [3, 0.5, True, torch.tensor(2.0), np.float32(1), np.array(3)]
    for value in [*numbers, "text", b"bytes", None, Path("a"), [], {}, ()]:
        piece = slice_batch({"image": _counting(4), "value": value}, 1, 2, 4)
        assert piece["value"] is value or piece["value"] == value


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", "b", "c", "d"], ["b", "c"]),
        (("a", "b", "c", "d"), ("b", "c")),
        ([1, 2, 3, 4], [2, 3]),
        ([None, "b", 3, 4.0], ["b", 3]),
        ([torch.tensor(n) for n in range(4)], [torch.tensor(1), torch.tensor(2)]),
        # another length: no entry for each sample
        (["red", "green"], ["red", "green"]),
    ],
    ids=str,
)
def test_lists_of_plain_things(values: Any, expected: Any) -> None:
    assert slice_batch({"image": _counting(4), "values": values}, 1, 3, 4)["values"] == expected


@pytest.mark.parametrize("array", [torch.tensor, np.array])
@pytest.mark.parametrize(
    "counts", [[2, 0, 3, 1], [0, 0, 6, 0], [0, 0, 0, 0], [1, 1, 1, 1], [6, 0, 0, 0]]
)
def test_ragged_fields_keep_their_items(counts: list[int], array: Any) -> None:
    owner = np.repeat(np.arange(4), counts)
    boxes = {"boxes": array(owner.reshape(-1, 1) * [1, 1]), "boxes_count": array(counts)}
    batch = boxes | {"image": _counting(4)}
    assert count_samples(batch) == 4
    for start, stop in [*cut_evenly(4, 1), *cut_evenly(4, 3), (0, 4)]:
        piece = slice_batch(batch, start, stop, 4)
        assert piece["boxes_count"].tolist() == counts[start:stop]
        assert piece["boxes"].tolist() == [[row, row] for row in owner if start <= row < stop]
        assert piece["image"].tolist() == list(range(start, stop))


@pytest.mark.parametrize(
    "batch",
    [
        {"image": _counting(4), "anchors": _counting(7)},
        [_counting(4), [_counting(3)]],
        (_counting(4), np.arange(5)),
        Sample(_counting(3), []),
        {"boxes": _counting(7), "boxes_count": torch.tensor([1, 2, 3, 0])},  # 6 of 7
        {"image": _counting(4), "targets": [{"boxes": _counting(2)}] * 3},
    ],
    ids=str,
)
def test_a_part_of_another_length_is_refused(batch: Any) -> None:
    message = r"a batch of 4 samples cannot be split: a part has length [2357]: .* slice_batch"
    with pytest.raises(ConfigError, match=message):
        slice_batch(batch, 0, 2, 4)


def _image(value: int, *shape: int) -> Tensor:
    return torch.full(shape, float(value))


APART = {
    "equal images, as many as channels": (lambda: [_image(n, 4, 8, 8) for n in range(4)], 4),
    "images of several sizes": (lambda: [_image(n, 3, 5 + n, 8) for n in range(4)], 4),
    "grey images": (lambda: [_image(n, 4, 8) for n in range(4)], 4),
    "dicts": (
        lambda: [{"image": _image(n, 4, 8, 8), "label": torch.tensor(n)} for n in range(4)],
        4,
    ),
    "dicts with as many boxes as images": (
        lambda: [{"boxes": _image(n, 2, 4)} for n in range(2)],
        2,
    ),
    "pairs": (lambda: [(_image(n, 3, 8, 8 + n), _image(n, 1, 8, 8 + n)) for n in range(5)], 5),
    "records": (lambda: [Sample(_image(n, 3, 2), []) for n in range(3)], 3),
    "arrays": (lambda: [np.full((3, 4), n) for n in range(3)], 3),
}


def _first_value(sample: Any) -> float:
    return float(batch_tensors(sample)[0].ravel()[0])


@pytest.mark.parametrize("name", APART)
def test_lists_of_samples_are_cut_by_their_outer_list(name: str) -> None:
    make, samples = APART[name]
    assert count_samples(make(), {samples}) == samples
    for start, stop in cut_evenly(samples, 2):
        piece = slice_batch(make(), start, stop, samples)
        assert [_first_value(sample) for sample in piece] == list(range(start, stop))
        shapes = [tensor.shape for tensor in batch_tensors(make()[start:stop])]
        assert [tensor.shape for tensor in batch_tensors(piece)] == shapes


@pytest.mark.parametrize("boxes", [[1, 2, 4, 3], [0, 1], [4, 4, 4], [1, 1, 1], [1, 1]])
@pytest.mark.parametrize("kind", [list, tuple])
def test_images_and_targets_as_torchvision_takes_them(boxes: list[int], kind: type) -> None:
    samples = len(boxes)
    images = kind(_image(n, 3, 4, 4 + n % 3) for n in range(samples))
    targets = kind(
        {"boxes": torch.zeros(count, 4), "labels": torch.full((count,), n)}
        for n, count in enumerate(boxes)
    )
    assert count_samples((images, targets), {samples}) == samples
    part_images, part_targets = slice_batch((images, targets), 1, samples, samples)
    assert [image[0, 0, 0].item() for image in part_images] == list(range(1, samples))
    assert [len(target["labels"]) for target in part_targets] == boxes[1:]


@pytest.mark.parametrize("owners", [[0, 0, 1, 2, 2], [0, 2, 2, 2], [1, 1, 2], [0, 1, 2], []])
def test_objects_that_name_their_image_follow_it(owners: list[int]) -> None:
    batch = {
        "img": _counting(3, 3, 4, 4),
        "im_file": ["a", "b", "c"],
        "ori_shape": ((4, 4),) * 3,
        "cls": torch.tensor(owners).reshape(-1, 1),
        "bboxes": torch.zeros(len(owners), 4),
        "batch_idx": torch.tensor(owners, dtype=torch.float32),
    }
    assert count_samples(batch) == 3
    for start, stop in [*cut_evenly(3, 1), *cut_evenly(3, 2)]:
        piece = slice_batch(batch, start, stop, 3)
        expected = [owner for owner in owners if start <= owner < stop]
        assert piece["img"][:, 0, 0, 0].tolist() == list(range(start, stop))
        assert piece["cls"].flatten().tolist() == expected
        assert len(piece["bboxes"]) == len(expected)
        assert piece["batch_idx"].tolist() == [owner - start for owner in expected]
        assert piece["im_file"] == ["a", "b", "c"][start:stop]
        assert len(piece["ori_shape"]) == stop - start


def test_masks_of_as_many_objects_as_images_are_refused_and_others_are_not() -> None:
    batch = {"img": _counting(3, 3, 4, 4), "cls": _counting(3, 1), "masks": _counting(3, 4, 4)}
    batch["batch_idx"] = torch.tensor([0, 0, 2])
    refused = r"'masks' has one entry for each image or for each object: .*slice_batch"
    with pytest.raises(ConfigError, match=refused):
        slice_batch(batch, 0, 2, 3)
    four = {"batch_idx": torch.tensor([0, 0, 2, 2]), "cls": _counting(4, 1)}
    objects = batch | four | {"masks": _counting(4, 4, 4)}
    assert slice_batch(objects, 2, 3, 3)["masks"][:, 0, 0].tolist() == [2, 3]
    images = batch | four
    assert slice_batch(images, 2, 3, 3)["masks"][:, 0, 0].tolist() == [2]


def test_objects_with_a_length_are_cut_and_others_refused() -> None:
    batch = Indexed(_counting(4, 2))
    assert count_samples(batch) == 4
    assert slice_batch(batch, 1, 3, 4).images[:, 0].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"a Opaque holds tensors and has no length: .*slice_b"):
        slice_batch({"image": _counting(4), "more": Opaque()}, 0, 2, 4)


@pytest.mark.parametrize(
    "batch",
    [(torch.zeros(2, 3, 4, 4),) * 2, [torch.zeros(2, 3, 4, 4)] * 2, (torch.zeros(2, 5),) * 2],
    ids=str,
)
def test_what_could_be_samples_or_fields_is_refused(batch: Any) -> None:
    refused = r"of 2 could hold samples, or fields of 2 samples each: .*slice_batch"
    with pytest.raises(ConfigError, match=refused):
        slice_batch(batch, 0, 1, 2)
    assert [len(part) for part in slice_batch(batch, 0, 1, 2, stacked=True)] == [1, 1]


@pytest.mark.parametrize(
    ("batch", "sizes", "stacked", "expected"),
    [
        ({"image": torch.zeros(8, 2), "anchors": torch.zeros(3)}, {8, 5}, False, 8),
        ({"anchors": torch.zeros(3), "image": torch.zeros(8, 2)}, (), False, 0),
        ([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], {2}, False, 2),
        ([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], {8, 3}, True, 3),
        # The last batch may have 3.
        ([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], {2, 3}, False, 0),
        ([torch.zeros(8, 5), torch.zeros(3, 5)], {8}, False, 8),
        (torch.zeros(32, 5), {8}, False, 32),  # several crops of each sample
        ({"text": "none", "scale": 2.0}, {8}, False, 0),
        ({"boxes": torch.zeros(7, 4), "image": torch.zeros(4, 2)}, range(1, 5), False, 4),
    ],
)
def test_the_loader_decides_between_several_readings(
    batch: Any, sizes: Any, stacked: bool, expected: int
) -> None:
    assert count_samples(batch, sizes, stacked=stacked) == expected
