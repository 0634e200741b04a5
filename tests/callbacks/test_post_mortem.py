import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.trainer.states import RunningStage
from torch import nn

from lit_data.callbacks import AMP, AdaptiveBatchSize, GradientCheckpointing
from lit_data.callbacks.device_memory import MemoryReading
from lit_data.callbacks.memory import post_mortem
from lit_data.callbacks.memory.post_mortem import (
    PostMortems,
    advise,
    describe_failure,
    find_tensors,
)

CPU = torch.device("cpu")
READING = MemoryReading(3 * 2**30, 4 * 2**30, 5 * 2**30, 8 * 2**30)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(101, 211, bias=False)
        self.norm = nn.BatchNorm1d(211, affine=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(images).exp())


@pytest.fixture
def trained() -> tuple[Net, torch.optim.Optimizer]:
    """With gradients and optimizer state."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 101)).sum().backward()
    optimizer.step()
    return net, optimizer


def _trainer(
    module: nn.Module | None = None, optimizers: Any = (), device: torch.device = CPU
) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=device),
        lightning_module=module or nn.Linear(1, 1),
        optimizers=list(optimizers),
        global_step=12,
        current_epoch=3,
        state=SimpleNamespace(stage=RunningStage.TRAINING),
        train_dataloader=None,
        callbacks=[],
    )


def _owners(tensors: list[post_mortem.HeldTensor], *shape: int) -> list[str]:
    return sorted(tensor.owner for tensor in tensors if tensor.shape == shape)


def test_parameters_gradients_state_and_buffers_have_names(
    trained: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = trained
    tensors = find_tensors(net, [optimizer])
    assert _owners(tensors, 211, 101) == [
        "gradient of first.weight",
        "optimizer state exp_avg of first.weight",
        "optimizer state exp_avg_sq of first.weight",
        "parameter first.weight",
    ]
    assert _owners(tensors, 211) == ["buffer norm.running_mean", "buffer norm.running_var"]
    kinds = {tensor.kind for tensor in tensors if tensor.shape == (211, 101)}
    assert kinds == {"gradients", "optimizer state", "parameters"}
    sizes = [tensor.nbytes for tensor in tensors]
    assert sizes == sorted(sizes, reverse=True)


def test_no_tensor_is_kept_alive() -> None:
    net, images = Net(), torch.ones(3, 101)
    out = net(images)
    alive = [weakref.ref(out), weakref.ref(images)]
    gc.disable()
    try:
        found = find_tensors(net, [])
        text = describe_failure(_trainer(net), None, READING, [])
        del out, images
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()
    assert found
    assert text


def test_the_text_says_what_failed_where_and_who_held_what(
    trained: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = trained
    trainer = _trainer(net, [optimizer])
    labels = torch.ones(8, dtype=torch.int64)
    batch = {"image": torch.ones(8, 3, 4, 4), "label": labels, "seed": torch.tensor(3)}
    kept = [torch.zeros(1234, 5) for _ in range(3)]
    try:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    except torch.OutOfMemoryError as error:
        text = describe_failure(trainer, error, READING, [post_mortem.see_batch(trainer, batch, 7)])
    assert text.startswith("out of memory: step 12, epoch 3, train\nfor less use a smaller batch,")
    assert "OutOfMemoryError: Tried to allocate 2.00 GiB\n" in text
    assert " in test_the_text_says_what_failed_where_and_who_held_what\n" in text
    assert "train batch 7: 8 samples: [8, 3, 4, 4] float32, [8] int64\n" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    table = rows[rows.index("## memory") + 1 :]
    assert table[:2] == ["size count where, what", "3.0 GiB cpu allocated"]
    assert {"4.0 GiB cpu reserved", "5.0 GiB cpu peak", "8.0 GiB cpu limit"} <= set(table)
    assert "72.3 KiB 3 cpu activation or other [1234, 5] float32" in table
    assert "83.2 KiB 1 cpu parameter first.weight [211, 101] float32" in table
    assert "83.2 KiB 1 cpu parameters" in table
    assert "allocator" not in text
    assert len(kept) == 3


def test_five_are_written_and_none_is_overwritten_and_the_log_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "oom-2.txt").write_text("of an earlier run")
    files = PostMortems()
    written = [files.write(tmp_path, _trainer(), None, READING, []) for _ in range(7)]
    names = [path.name if path else None for path in written]
    assert names == ["oom-1.txt", "oom-3.txt", "oom-4.txt", "oom-5.txt", "oom-6.txt", None, None]
    assert (tmp_path / "oom-2.txt").read_text() == "of an earlier run"
    text = f"out of memory: {written[0]} lists what held it; for less use a smaller batch, AMP, "
    assert caplog.messages[0].startswith(text)
    assert PostMortems().write(tmp_path / "oom-1.txt", _trainer(), None, READING, []) is None
    assert caplog.messages[-1].startswith("no post-mortem could be written: FileExistsError: ")


@pytest.mark.parametrize(
    ("attached", "advice"),
    [
        ([], "a smaller batch, AMP, GradientCheckpointing or AdaptiveBatchSize, which splits it"),
        ([AdaptiveBatchSize()], "a smaller batch, AMP or GradientCheckpointing"),
        ([AdaptiveBatchSize(), GradientCheckpointing(["0"]), AMP()], "a smaller batch"),
    ],
)
def test_what_is_attached_is_not_advised(attached: list[Callback], advice: str) -> None:
    assert advise(SimpleNamespace(callbacks=attached)) == f"for less use {advice}"


def test_a_part_that_fails_says_so_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(post_mortem, "find_tensors", fail)
    text = describe_failure(_trainer(), None, READING, [])
    assert "## memory\ncould not be read: RuntimeError: no\n" in text
    assert "## error\nunknown\n" in text
    assert "## last batches\nnone yet\n" in text
