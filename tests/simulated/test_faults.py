"""What only a device shows: streams, page-locking, memory that runs out beside the step, a broken context."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_data.callbacks import AdaptiveBatchSize, MemoryMonitor, SampleDigest, SaveOnSignal
from lit_data.callbacks.device_memory import CudaGauge
from lit_data.core.out_of_memory import is_out_of_memory
from lit_data.core.value_range import ValueRange
from lit_data.datamodules.image_batch import ImageTransform
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.transfer import SideStream
from lit_data.predict import TiledPredictor
from lit_data.testing import QUIET
from tests.simulated import cuda
from tests.simulated.log import LOG

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CUDA = torch.device("cuda", 0)
GPU = {**QUIET, "accelerator": "gpu", "max_epochs": 1, "limit_val_batches": 0}


@pytest.fixture(autouse=True)
def only_simulated() -> None:
    if not LOG.installed:
        pytest.skip("it breaks the device on purpose: only a simulated one stands that")


class _Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index)), "index": torch.tensor(index)}


class _Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def _loader(**options: Any) -> MicroBatchLoader:
    return MicroBatchLoader(_Samples(), LoaderOptions(batch_size=8, num_workers=0, **options))


def _train(*callbacks: Callback, loader: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(**(GPU | options), callbacks=list(callbacks))
    trainer.fit(_Line(), loader if loader is not None else _loader())
    return trainer


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_predictions_are_those_of_the_host_whichever_device_is_current(device: str) -> None:
    net = nn.Conv2d(3, 1, 3, padding=1)
    image = np.random.default_rng(0).integers(0, 256, (3, 100, 90)).astype(np.uint8)
    found = []
    for place in ("cpu", device):
        predictor = TiledPredictor(net, tile_px=64, overlap_px=16, batch_size=4, device=place)
        ((_, values),) = predictor.predict([image])
        found.append(values)
    torch.testing.assert_close(*found)
    net.cpu()
    assert {what for what, _ in LOG.notes if what.startswith("event on")} == {f"event on {device}"}
    blocking = [place for what, place in LOG.waits if what == "blocking copy to the device"]
    assert not [place for place in blocking if "tiles" in place]


def test_a_slot_that_cannot_be_locked_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.Runtime.fails = 2
    counted = AdaptiveBatchSize(grow_after=None)
    trainer = _train(counted)
    assert trainer.global_step == 8
    assert counted.summary()["batch/ooms"] == 0
    assert "cannot be page-locked (CUDA error 2)" in caplog.text


def test_no_room_to_copy_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = SideStream.start, list[int]()

    def fails_once(self: SideStream, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return start(self, batch)

    monkeypatch.setattr(SideStream, "start", fails_once)
    loader = _loader()
    loader.device = CUDA
    seen = [index for batch in loader for index in batch["index"].tolist()]
    assert seen == list(range(64))
    assert len(calls) == 8


def test_a_broken_context_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = []

    class Last(Callback):
        def on_exception(
            self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
        ) -> None:
            told.append(exception)

    class Breaks(_Line):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            def broken(*_: object, **__: object) -> None:
                raise RuntimeError("CUDA error: device-side assert triggered")

            for name in ("mem_get_info", "memory_stats_as_nested_dict"):
                monkeypatch.setattr(torch.cuda, name, broken)
            for name in ("reset_peak_memory_stats", "synchronize"):
                monkeypatch.setattr(torch.cuda, name, broken)
            raise IndexError("label 7 is out of range")

    callbacks = [MemoryMonitor(path=tmp_path, plot=False), SampleDigest(), Last()]
    trainer = Trainer(**GPU, callbacks=callbacks)
    with pytest.raises(IndexError, match="label 7 is out of range"):
        trainer.fit(Breaks(), _loader())
    assert [str(error) for error in told] == ["label 7 is out of range"]


def test_the_limit_knows_the_share_of_this_process() -> None:
    held = torch.ones(2**20, device=CUDA)
    gauge = CudaGauge(CUDA)
    assert gauge.read().limit_bytes == cuda.TOTAL_BYTES
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert gauge.read().limit_bytes == cuda.TOTAL_BYTES // 4
    del held


@pytest.mark.parametrize("status", ["CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_NOT_INITIALIZED"])
def test_cudnn_without_memory_is_out_of_memory(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(f"cuDNN error: {status}")
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**20, cuda.TOTAL_BYTES))
    assert is_out_of_memory(error)


def test_sixteen_bits_of_one_texture_are_spread_on_the_device() -> None:
    nothing = {"synthesis": None, "nuisance": None, "augment": None, "read_px": (8, 8)}
    values = ValueRange(0, 65535)
    transform = ImageTransform(values=values, expand=(0, 0, 0), seed=0, **nothing)
    pixels = np.random.default_rng(0).integers(0, 65536, (2, 1, 8, 8), dtype=np.uint16)
    images = torch.from_numpy(pixels)
    expected = transform.draw({"image": images})["image"]
    found = transform.draw({"image": images.to(CUDA)})["image"]
    assert torch.equal(found.cpu(), expected)
    assert expected.shape == (2, 3, 8, 8)


def test_the_digest_is_that_of_the_host_and_waits_for_nothing() -> None:
    digests = []
    for accelerator in ("cpu", "gpu"):
        digest = SampleDigest()
        LOG.clear()
        _train(digest, accelerator=accelerator)
        waits = [place for _, place in LOG.waits if "sample_digest" in place]
        digests.append(digest.summary())
    assert digests[0] == digests[1]
    assert digests[0]["train/samples_hashed"] == 64
    assert len(waits) == 0


def test_ranks_agree_one_step_later_without_a_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = iter([0, 15, 15])

    def all_reduce(mine: Tensor, operation: object) -> None:
        mine.fill_(max(int(mine.inner), next(others)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    callback, strategy = SaveOnSignal(tmp_path / "a.ckpt"), SimpleNamespace(root_device=CUDA)
    trainer = SimpleNamespace(strategy=strategy, world_size=2, global_rank=0)
    trainer.is_last_batch = False
    assert [callback.ask_ranks(trainer) for _ in range(3)] == [0, 0, 15]
