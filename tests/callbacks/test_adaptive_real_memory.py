"""A CUDA device, or a process, that really runs out of memory: in forward, in backward, and in prediction."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from lit_data.callbacks import AdaptiveBatchSize
from lit_data.core.errors import BatchMemoryError
from lit_data.testing import QUIET

MIB = 2**20
LIMIT_BYTES = 512 * MIB
SAMPLE_BYTES = 8 * MIB


class _Greedy(torch.autograd.Function):
    """Takes `SAMPLE_BYTES` for each sample, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, where: str) -> Tensor:
        ctx.where, ctx.samples = where, len(values)
        return values + _fill(values) if where == "forward" else values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (grad + _fill(grad) if ctx.where == "backward" else grad), None


class Greedy(LightningModule):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.went_through = []

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.net(_Greedy.apply(self.net[0].weight.sum() * 0 + batch[0], self.where))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch), batch[1])
        self.went_through.append(len(batch[0]))
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0] + _fill(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fill(values: Tensor) -> Tensor:
    """Zero, by way of much memory."""
    memory = torch.zeros(len(values), SAMPLE_BYTES, dtype=torch.uint8, device=values.device)
    return memory[:, :1].to(values.dtype)


@pytest.fixture
def little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def _train(
    where: str, samples: int, callback: AdaptiveBatchSize, device: str = "gpu"
) -> tuple[Greedy, Trainer]:
    torch.manual_seed(0)
    values = torch.randn(4 * samples, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(values, torch.arange(4 * samples) % 2), batch_size=samples
    )
    module = Greedy(where)
    settings = QUIET | {"accelerator": device, "max_epochs": 1}
    trainer = Trainer(**settings, callbacks=[callback])
    trainer.fit(module, loader)
    return module, trainer


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_real_error_is_survived_bit_for_bit(where: str) -> None:
    callback = AdaptiveBatchSize(grow_after=None)
    module, trainer = _train(where, 96, callback)
    assert callback.summary()["batch/ooms"] >= 1
    assert trainer.global_step == 4
    size = int(callback.summary()["batch/size"])
    assert size * SAMPLE_BYTES < LIMIT_BYTES
    twin, _ = _train(where, 96, AdaptiveBatchSize(initial_size=size, grow_after=None))
    for name, value in module.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
def test_it_grows_to_the_fewest_pieces_that_fit() -> None:
    callback = AdaptiveBatchSize(grow_after=1)
    module, _ = _train("forward", 96, callback)
    assert max(module.went_through) * SAMPLE_BYTES > LIMIT_BYTES / 2


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
def test_one_sample_too_large_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SAMPLE_BYTES", LIMIT_BYTES)
    with pytest.raises(BatchMemoryError, match=r"asked for .* GiB free"):
        _train("forward", 4, AdaptiveBatchSize())


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
def test_prediction_is_split_in_order() -> None:
    values = torch.arange(96.0)[:, None]
    trainer = Trainer(**(QUIET | {"accelerator": "gpu"}), callbacks=[AdaptiveBatchSize()])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values), batch_size=96)
    (found,) = trainer.predict(Greedy("forward"), loader) or []
    assert torch.equal(torch.as_tensor(found).cpu(), values)


_PROGRAM = """
import resource, sys, warnings
import psutil, torch
warnings.simplefilter("ignore")
from lit_data.callbacks import AdaptiveBatchSize
from tests.callbacks import test_adaptive_real_memory as real

torch.set_num_threads(1)
real.SAMPLE_BYTES = 32 * real.MIB  # far above what the allocator of a process keeps
real._train(sys.argv[1], 2, AdaptiveBatchSize(), "cpu")  # what it needs for itself
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + 20 * real.SAMPLE_BYTES, resource.RLIM_INFINITY))
callback = AdaptiveBatchSize(grow_after=None)
_, trainer = real._train(sys.argv[1], 32, callback, "cpu")
print(callback.summary()["batch/ooms"], callback.summary()["batch/size"], trainer.global_step)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_whose_memory_is_limited_goes_on(where: str) -> None:
    words = [sys.executable, "-c", _PROGRAM, where]
    output = subprocess.check_output(words, text=True, timeout=100)
    ooms, size, steps = (int(word) for word in output.splitlines()[-1].split())
    assert (ooms, steps) == (1, 4)
    assert size == 16
