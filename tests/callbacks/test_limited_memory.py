"""The tests' own faults and simulated device do what their words say."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lit_data.out_of_memory import is_out_of_memory
from lit_data.testing import QUIET
from tests.limited_memory import POINTS, FaultPlan, Point, SimulatedDevice, install
from tests.stock_modules import STOCK

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
)

OUT_OF_MEMORY = r"CUDA out of memory\. Tried to allocate 2\.00 GiB\. GPU 0 has a total capacity of 8\.00 GiB of which"


class Note(L.Callback):
    """What is changed when the error comes."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.changed: list[str] = []
        self.with_gradient: list[str] = []
        self.batches = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
    ) -> None:
        self.before = {
            name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()
        }

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        now = dict(pl_module.named_parameters())
        self.changed = [
            name for name, value in self.before.items() if not torch.equal(value, now[name])
        ]
        self.with_gradient = [name for name, parameter in now.items() if parameter.grad is not None]


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.parametrize("point", POINTS)
def test_a_point_raises_in_the_step_that_was_asked_for(point: Point, stock: str) -> None:
    note, asked = Note(), []

    def when(n: int, step: int, micro: int) -> bool:
        asked.append((n, step, micro))
        return step == 2

    module = STOCK[stock].build()
    faults = install(module, FaultPlan(point, when))
    trainer = L.Trainer(**QUIET, max_steps=9, limit_val_batches=0, callbacks=[note])
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY) as caught:
        trainer.fit(module, STOCK[stock].loader(12, 4))
    assert is_out_of_memory(caught.value)
    assert note.batches == 2
    assert set(asked) == {(4, 0, 0), (4, 1, 0), (4, 2, 0)}
    assert (faults.entered, faults.refused) == ([4, 4, 4], [4])


@pytest.mark.parametrize(
    ("point", "changed", "with_gradient"),
    [
        ("forward_middle", 0, []),
        # The inner module is the second convolution, whose gradient is computed after its output's.
        ("backward", 0, ["features.5.weight", "features.5.bias", "head.2.weight", "head.2.bias"]),
        ("optimizer", 0, "all"),
        ("optimizer_middle", 5, "all"),
    ],
)
def test_an_error_strikes_half_way(point: Point, changed: int, with_gradient: Any) -> None:
    module, note = STOCK["classifier"].build(), Note()
    install(module, FaultPlan(point, lambda n, step, micro: True))
    with pytest.raises(torch.OutOfMemoryError):
        L.Trainer(**QUIET, callbacks=[note]).fit(module, STOCK["classifier"].loader())
    names = [name for name, _ in module.named_parameters()]
    assert len(names) == 10
    assert note.changed == names[:changed]
    assert note.with_gradient == (names if with_gradient == "all" else with_gradient)


def test_pressure_is_random_but_the_same_for_the_same_seed() -> None:
    def run(seed: int) -> list[bool]:
        device = SimulatedDevice(
            1000, fixed_bytes=100, sample_bytes=10, pressure_bytes=400, seed=seed
        )
        return [device.plan().when(70, 0, 0) for _ in range(50)]

    assert run(1) == run(1) != run(2)
    assert 0 < sum(run(1)) < 50


def test_a_device_limits_a_run_in_every_stage() -> None:
    device = SimulatedDevice(10 * 2**30, fixed_bytes=2**30, sample_bytes=2**30)
    module, stock = STOCK["classifier"].build(), STOCK["classifier"]
    faults = install(module, device.plan())
    trainer = L.Trainer(**QUIET, max_steps=2)
    trainer.fit(module, stock.loader(18, 9), stock.loader(7, 7))
    text = r"Tried to allocate 10\.00 GiB\. GPU 0 has a total capacity of 10\.00 GiB of which 9\.00 GiB is free"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        trainer.validate(module, stock.loader(10, 10))
    assert device.pieces == [7, 9, 9, 7]
    assert (faults.entered, faults.refused) == ([7, 9, 9, 7, 10], [10])
