"""Who draws the defects."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.core.grid import PatchGrid
from lit_data.core.types import Array
from lit_data.core.value_range import ValueRange
from lit_data.datamodules import placement as backend
from lit_data.datamodules.placement import DrawingBackend, choose_drawing
from lit_data.datasets import PatchDataset
from lit_data.datasets.patch_source import GridPatches
from lit_data.images import ImageBank
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.writer import DefectWriter


def make_trainer(device: str = "cpu", ranks: int = 1) -> Any:
    """Return what is asked of a Trainer."""
    return SimpleNamespace(
        world_size=ranks, strategy=SimpleNamespace(root_device=torch.device(device))
    )


def options(batch_size: int) -> LoaderOptions:
    return LoaderOptions(batch_size=batch_size, num_workers=2)


class Bank(ImageBank):
    """Three images of noise in memory."""

    channels, dtype, skipped = 3, np.dtype("uint8"), ()
    heights_px, widths_px = np.full(3, 40), np.full(3, 50)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Array:
        return np.random.default_rng(index).integers(0, 255, (3, 40, 50), dtype=np.uint8)

    def name(self, index: int) -> str:
        return f"{index}.png"


@pytest.fixture
def dataset() -> PatchDataset:
    images = Bank()
    grid = PatchGrid(images.heights_px, images.widths_px, 16, 12)
    return PatchDataset(images, GridPatches(grid))


@pytest.fixture
def writer() -> DefectWriter:
    return DefectWriter(DefectSpec(probability=1.0), 0, ValueRange(0, 255, whole=True))


def _pretend(monkeypatch: pytest.MonkeyPatch, cpu_us: float, device_us: float) -> None:
    """Let a batch of 8 take these times for each sample."""
    found = iter([8 * cpu_us, 8 * device_us])
    monkeypatch.setattr(backend, "measure", lambda draw, device: (draw(), next(found))[1])


@pytest.mark.parametrize(
    ("cpu_us", "device_us", "chosen"), [(20, 10, "device"), (10, 10, "workers")]
)
def test_on_the_same_cores_the_cheaper_one_draws(
    dataset: PatchDataset,
    writer: DefectWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cpu_us: float,
    device_us: float,
    chosen: str,
) -> None:
    _pretend(monkeypatch, cpu_us, device_us)
    caplog.set_level(logging.INFO)
    choice = choose_drawing(dataset, writer, options(8), make_trainer())
    assert choice.backend == ("device" if chosen == "device" else "cpu")
    assert (choice.cpu_us, choice.device_us) == (cpu_us, device_us)
    times = f"a sample takes {device_us} us on the cpu and {cpu_us} us in each of 2 workers"
    assert f"synthetic defects are drawn by the {chosen}: {times}" in caplog.text


def test_ranks_do_not_measure(dataset: PatchDataset, writer: DefectWriter) -> None:
    choice = choose_drawing(dataset, writer, options(4), make_trainer(ranks=2))
    assert (choice.backend, choice.cpu_us) == ("cpu", None)
    assert "2 ranks must agree" in choice.reason


@pytest.mark.parametrize(("name", "by_workers"), [("cpu", True), ("device", False)])
def test_a_configured_one_is_taken(
    dataset: PatchDataset, writer: DefectWriter, name: str, by_workers: bool
) -> None:
    chooser = DrawingBackend(name)  # type: ignore[arg-type]
    assert (chooser.choose(dataset, writer, LoaderOptions(), None) is writer) == by_workers
    assert chooser.to_plain()["defects"]["reason"] == "as configured"


def test_workers_that_cannot_draw(dataset: PatchDataset, writer: DefectWriter) -> None:
    without_pixels = SimpleNamespace(pixels=False)
    for data, by in ((dataset, None), (without_pixels, writer)):
        assert DrawingBackend("auto").choose(data, by, LoaderOptions(), None) is None  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="backend=cpu draws into stored pixels"):
            DrawingBackend("cpu").choose(data, by, LoaderOptions(), None)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_draws_large_batches(dataset: PatchDataset, writer: DefectWriter) -> None:
    choice = choose_drawing(dataset, writer, options(18), make_trainer("cuda"))
    assert choice.device_us is not None
    assert choice.device_us > 0
    assert choice.cpu_us is not None
    assert choice.backend == ("device" if choice.device_us < choice.cpu_us else "cpu")
