"""Whole runs on a device with little memory: no error ends them, no sample is lost, and the size finds its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import BatchMemoryError
from lit_data.testing import QUIET
from tests.helpers.limited_memory import SimulatedDevice, install
from tests.helpers.tally import Meanwhile, Rows, Tally

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tally, Rows, Trainer]]:
    """Train on a device for some steps; checks that every sample counted once, with its share of its batch."""

    def fit(
        device: SimulatedDevice,
        adaptive: AdaptiveBatchSize,
        steps: int,
        *,
        batch: int = 256,
        epoch: int = 10,
        last: int | None = None,
        events: dict[int, Callable[[], None]] | None = None,
    ) -> tuple[Tally, Rows, Trainer]:
        monkeypatch.setattr("lit_data.callbacks.adaptive_batch_size.open_gauge", lambda _: device)
        module, rows, samples = Tally(batch * epoch), Rows(), batch * (epoch - 1) + (last or batch)
        install(module, device.plan())
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(0)).split(batch)
        loader = DataLoader([{"index": part} for part in order], batch_size=None)
        limits = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 1}
        options = QUIET | limits | {"logger": rows}
        trainer = Trainer(**options, callbacks=[adaptive, Meanwhile(events)])
        trainer.fit(module, loader)
        expected = torch.zeros_like(module.learned)
        for step in range(steps):
            expected[order[step % epoch]] += 1 / len(order[step % epoch])
        assert torch.allclose(module.learned.detach(), expected, rtol=0, atol=1e-9)
        assert trainer.global_step == steps == len(rows.rows)
        return module, rows, trainer

    return fit


Fit = Callable[..., tuple[Tally, Rows, Trainer]]


def _device(fits: int, **options: Any) -> SimulatedDevice:
    """So many samples fit, beside 2000 bytes that are always there."""
    return SimulatedDevice(2000 + fits * 100, fixed_bytes=2000, sample_bytes=100, **options)


def _limit(device: SimulatedDevice, fits: int) -> Callable[[], None]:
    """From now on so many samples fit."""
    return lambda: setattr(device, "limit_bytes", 2000 + fits * 100)


@pytest.mark.parametrize(
    ("fits", "grow_after"), [(255, 1), (128, 2), (86, 1), (85, 2), (40, 1), (3, 2)]
)
def test_it_settles_on_the_fewest_pieces_that_fit(fits: int, grow_after: int, fit: Fit) -> None:
    device = _device(fits)
    _, rows, _ = fit(device, AdaptiveBatchSize(grow_after=grow_after), 20)
    assert rows.pieces()[14:] == [-(-256 // fits)] * 6
    assert max(rows.sizes()) <= fits


def test_it_follows_when_memory_goes_and_comes(fit: Fit) -> None:
    device = _device(300)
    limits = {10: 100, 30: 10, 50: 150, 70: 300}
    events = {step: _limit(device, fits) for step, fits in limits.items()}
    _, rows, _ = fit(device, AdaptiveBatchSize(grow_after=1), 90, events=events)
    pieces = rows.pieces()
    assert pieces[:10] == [1] * 10
    assert pieces[24:30] == [3] * 6
    assert pieces[44:50] == [26] * 6
    assert pieces[64:70] == [2] * 6
    assert pieces[84:] == [1] * 6


def test_memory_that_is_too_little_for_one_sample_ends_the_run(fit: Fit) -> None:
    text = r"batch 0 \(sample 684\): one sample of index 1 int64 does not fit into memory"
    with pytest.raises(BatchMemoryError, match=text):
        fit(_device(0), AdaptiveBatchSize(), 5)


def test_never_more_retries_in_a_step_than_halvings(fit: Fit) -> None:
    device = _device(300)
    steps = {20: lambda: setattr(device, "limit_bytes", 2100)}
    _, rows, _ = fit(device, AdaptiveBatchSize(grow_after=1), 25, events=steps)
    assert [row["batch/ooms"] for row in rows.rows] == [0] * 20 + [8] * 5
