from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.transfer import Copy, SideStream, StagedBatch, finish_transfer
from tests.simulated.log import LOG


def test_a_copy_is_taken_only_while_its_key_holds_what_was_copied() -> None:
    image, index, other = torch.zeros(2), torch.arange(2), torch.ones(2)
    copies = {"image": Copy(image, image.clone()), "index": Copy(index, index.clone())}
    batch = StagedBatch({"image": image, "index": index}, copies)
    planned = batch.extended(batch | {"plan": other, "index": other, "name": "a"})
    moved = finish_transfer(planned, torch.device("cpu"))
    assert moved["image"] is copies["image"].device
    assert moved["index"] is other
    assert moved["plan"] is other
    assert moved["name"] == "a"


class _Plan:
    """Has a tensor, and notes how it was moved."""

    def __init__(self, values: Tensor, *asked: Any) -> None:
        self.values, self.asked = values, asked

    def to(self, device: torch.device, non_blocking: bool = False) -> "_Plan":
        return _Plan(self.values.to(device), device, non_blocking)


META = torch.device("meta")


def test_what_hooks_add_is_moved_inside_containers_too() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    inner = {"plan": _Plan(torch.ones(2)), "name": "a"}
    added = {"all": [torch.ones(1), inner], "packed": packed, "none": None}
    moved = finish_transfer(StagedBatch(added), META)
    tensor, inside = moved["all"]
    assert tensor.device == inside["plan"].values.device == moved["packed"].data.device == META
    assert (inside["name"], moved["none"]) == ("a", None)
    assert added["all"][0].device.type == "cpu"


def test_each_batch_is_copied_before_the_one_ahead_of_it_is_used() -> None:
    events = []

    class Noting(SideStream):
        def __init__(self) -> None:
            pass

        def start(self, batch: Any) -> StagedBatch:
            events.append(f"copy {int(batch['n'])}")
            return StagedBatch(batch)

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(3):
            yield {"n": torch.tensor(number)}

    for batch in Noting().ahead(batches()):
        events.append(f"use {int(batch['n'])}")
    assert events == ["copy 0", "copy 1", "use 0", "copy 2", "use 1", "use 2"]


_BUSY = (64, 64) if LOG.installed else (4096, 4096)


class _Images:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.full((3, 64, 64), index % 251, dtype=torch.uint8)
        return {"image": image, "index": torch.tensor(index)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_copies_on_the_side_stream_hold_what_the_host_held(kind: str) -> None:
    workers = 0 if kind == "inline" else 2
    options = LoaderOptions(
        batch_size=16, micro_batch_size=4, worker_kind=kind, num_workers=workers, pin_memory=True
    )
    loader = MicroBatchLoader(_Images(), options, shuffle=True)
    device = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(*_BUSY, device=device)
    loader.device = device
    seen = []
    for epoch in range(5):
        loader.set_epoch(epoch)
        for batch in loader:
            assert all(copy.host.is_pinned() for copy in batch.copies.values())
            # The next copies lie behind this, so that reuse too early would show.
            side = loader.side_stream.stream
            with torch.cuda.stream(side):
                busy = (busy @ busy).clamp(-1, 1)
            moved = finish_transfer(batch, device)
            del batch
            images = moved["image"].long()
            seen.append((images.amax((1, 2, 3)), images.amin((1, 2, 3)), moved["index"]))
    loader.close()
    for most, least, index in seen:
        assert torch.equal(most, index % 251)
        assert torch.equal(least, index % 251)
