"""Two ranks (gloo) under AdaptiveBatchSize: whichever runs out of memory, both end with the same
weights, and soon.

As a script this file is what both ranks run: Lightning starts the second one with the same words.
"""

import gc
import itertools
import logging
import sys
import time
import types
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lit_data.callbacks.adaptive.ranks import find_ranks
from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import ConfigError, LitDataError
from lit_data.testing import QUIET
from tests.helpers.families import run_family

WAIT_S = 30
"""Longest wait of one rank for the other; one that starts on a busy machine is given time to come."""

LIMIT_S = 240

pytestmark = pytest.mark.timeout(300)


class Fault(NamedTuple):
    """What goes wrong: at a point on a rank, from a batch to another, while more samples than a limit are in work."""

    rank: int = -1
    point: str = ""
    batch: int = 0
    limit: int = 4
    until: int = 99
    error: type[Exception] = torch.OutOfMemoryError


NONE = Fault()


class Model(LightningModule):
    """A classifier.

    Args:
        fault: What goes wrong.
        batch_norm: With batch norm, whose buffers each rank moves alone.
        branch: A layer is used on rank 0 only.
        sparse: A table is used, whose gradient is sparse.
    """

    def __init__(
        self,
        fault: Fault = NONE,
        *,
        batch_norm: bool = False,
        branch: bool = False,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.fault, self.branch = fault, branch
        self.body = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8) if batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Linear(8, 3),
        )
        self.extra = nn.Linear(6, 3)
        self.table = nn.Embedding(5, 3, sparse=True) if sparse else None
        self.pieces = []

    def check(self, point: str, samples: int) -> None:
        fault, batch = self.fault, self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        is_here = (fault.rank, fault.point) == (self.global_rank, point)
        if is_here and fault.batch <= batch < fault.until and samples > fault.limit:
            text = "CUDA out of memory" if fault.error is torch.OutOfMemoryError else "broken"
            raise fault.error(text)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.check("transfer", len(batch[0]))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.pieces.append(len(images))
        logits = self.body(images)
        if self.branch and self.global_rank == 0:
            logits = logits + self.extra(images)
        elif not self.branch:
            logits = logits + 0 * self.extra(images)
        if self.table is not None:
            logits = logits + self.table(images[:, 0].abs().long().clamp(max=4))
        self.check("forward", len(images))
        logits.register_hook(lambda grad: self.check("backward", len(images)))
        return nn.functional.cross_entropy(logits, labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if len(batch[0]) > 4 and self.global_rank == 1 and self.fault.point == "validation":
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.log("val", self.body(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Model):
    """The same with manual optimisation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Uneven(LightningDataModule):
    """One batch for each rank, of as many samples as it is told."""

    def __init__(self, *samples: int) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> DataLoader[Any]:
        rank, data = self.trainer.global_rank, _samples()
        start = sum(self.samples[:rank])
        return DataLoader(
            TensorDataset(*data[start : start + self.samples[rank]]), self.samples[rank]
        )


class Watch(logging.Handler):
    """Keeps warnings of lit_data."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _samples(count: int = 80) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 6, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (count,), generator=generator))


def _build(kind: type[Model], *args: Any, **options: Any) -> Model:
    torch.manual_seed(3)
    return kind(*args, **options)


def _fit(
    module: LightningModule, data: Any = None, *, adaptive: bool = True, **options: Any
) -> dict[str, Any]:
    """What a run on this rank leaves behind."""
    watch = Watch()
    logging.getLogger("lit_data").addHandler(watch)
    unused, size = options.pop("find_unused_parameters", False), options.pop("initial_size", None)
    callback = AdaptiveBatchSize(initial_size=size, grow_after=options.pop("grow_after", None))
    timeout = timedelta(seconds=WAIT_S)
    settings = {
        "devices": 2,
        "strategy": DDPStrategy(timeout=timeout, find_unused_parameters=unused),
        "callbacks": [callback] if adaptive else [],
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "plugins": [_make_scaler()] if options.pop("fp16", False) else None,
    }
    trainer = Trainer(**(QUIET | settings | options))
    found = {"error": "", "rank": trainer.global_rank}
    begun_s = time.monotonic()
    try:
        if isinstance(data, LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data or DataLoader(_samples(), 8), DataLoader(_samples(), 8))
    except (LitDataError, ValueError, torch.OutOfMemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("lit_data").removeHandler(watch)
    return found | {
        "seconds": time.monotonic() - begun_s,
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "steps": trainer.global_step,
        "pieces": getattr(module, "pieces", None),
        "warnings": watch.messages,
        "ooms": callback.summary()["batch/ooms"],
        "metrics": dict(trainer.callback_metrics),
        "scale": trainer.precision_plugin.state_dict(),
    }


def _run_all(folder: Path) -> None:
    runs = {}
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    gc.freeze()  # each replay collects garbage

    def run(name: str, module: Model, data: Any = None, **options: Any) -> None:
        runs[name] = _fit(module, data, **options)
        rank = runs[name]["rank"]
        torch.save(runs, folder / f"rank{rank}.pt")
        print(f"rank {rank}: {name} took {runs[name]['seconds']:.2f} s", flush=True)

    for name, (module, options) in SETTINGS.items():
        run(f"plain {name}", _build(Model, **module), adaptive=False, **options)
        run(f"clean {name}", _build(Model, **module), **options)
        for number in _choose(name):
            run(f"{number} {name}", _build(Model, FAULTS[number], **module), **options)
    for number, (fault, options) in enumerate(FATAL):
        run(f"fatal {number}", _build(Model, fault), **options)
    run("fatal transfer", _build(Model, Fault(1, "transfer", limit=0)), DataLoader(_samples(), 1))
    for samples, sparse in itertools.product(UNEVEN, (False, True)):
        module = _build(Model, sparse=sparse)
        run(f"uneven {samples} {sparse}", module, Uneven(*samples), use_distributed_sampler=False)
    run("growing", _build(Model, Fault(1, "backward", until=2)), grow_after=1)
    run("validation", _build(Model, Fault(1, "validation")))
    run("manual", _build(Manual, batch_norm=True), initial_size=2)
    run("plain manual", _build(Manual, batch_norm=True), adaptive=False)
    run("manual error", _build(Both))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Both(Manual):
    """Memory runs out on both ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


SETTINGS = {
    "plain": ({}, {}),
    "batch norm": ({"batch_norm": True}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "clipping": ({}, {"gradient_clip_val": 0.05}),
    "unused": ({"branch": True}, {"find_unused_parameters": True}),
    "fp16": ({}, {"fp16": True}),
    "sparse": ({"sparse": True}, {}),
}
FAULTS = [
    *(Fault(0, point, 0) for point in ("transfer", "forward", "backward")),
    *(Fault(1, point, 3) for point in ("transfer", "forward", "backward")),
    Fault(1, "backward", 1, limit=2),
    Fault(0, "forward", 2, limit=1),
]
FEW = [0, 4, 5, 6]
"""Of the faults, one at each point, on both ranks, and one that halves more than once."""
AT_ONCE = {}
IN_A_WINDOW = {"accumulate_grad_batches": 4}
FATAL = [
    (Fault(1, "forward", 1, limit=0, error=ValueError), AT_ONCE),
    (Fault(0, "backward", 1, limit=0, error=ValueError), IN_A_WINDOW),
    (Fault(1, "backward", 1, limit=0), AT_ONCE),
    (Fault(0, "forward", 1, limit=0), IN_A_WINDOW),
    (Fault(1, "transfer", 1, limit=0), AT_ONCE),
    (Fault(1, "transfer", 1, limit=0), IN_A_WINDOW),
]
UNEVEN = [(3, 1), (1, 3), (8, 5), (4, 4)]
TOLERANCES = {"fp16": 1e-3}
"""Where pieces round differently."""


def _choose(setting: str) -> list[int]:
    """Faults to try in a setting."""
    return list(range(len(FAULTS))) if setting == "plain" else FEW


class Runs(NamedTuple):
    """What each rank noted."""

    ranks: tuple[dict[str, Any], dict[str, Any]]

    def weights(self, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of both ranks."""
        return self.ranks[0][name]["weights"], self.ranks[1][name]["weights"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, "-W", "ignore", __file__, str(folder)]
    code, output = run_family(words, limit_s=LIMIT_S, OMP_NUM_THREADS="1")
    assert code == 0, output
    one, two = (torch.load(folder / f"rank{rank}.pt") for rank in (0, 1))
    return Runs((one, two))


# Beside a sparse gradient DDP (torch 2.13, gloo) halves the others; what is right is compared with
# one process below.
@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "sparse"])
def test_without_an_error_the_run_is_that_of_ddp(runs: Runs, setting: str) -> None:
    for rank in runs.ranks:
        assert rank[f"clean {setting}"]["error"] == rank[f"plain {setting}"]["error"] == ""
        assert rank[f"clean {setting}"]["steps"] == rank[f"plain {setting}"]["steps"] > 0
        assert rank[f"clean {setting}"]["pieces"] == rank[f"plain {setting}"]["pieces"] == [8] * 5
        _assert_close(rank[f"clean {setting}"]["metrics"], rank[f"plain {setting}"]["metrics"])
    _assert_close(runs.weights(f"clean {setting}")[0], runs.weights(f"plain {setting}")[0])
    _assert_equal(*runs.weights(f"clean {setting}"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "batch norm"])
def test_memory_runs_out_on_a_rank_and_both_have_the_weights_of_a_run_without(
    runs: Runs, setting: str
) -> None:
    clean = f"clean {setting}"
    for number in _choose(setting):
        name, fault = f"{number} {setting}", FAULTS[number]
        _assert_equal(*runs.weights(name))
        tolerance = TOLERANCES.get(setting, 1e-6)
        _assert_close(runs.weights(name)[0], runs.weights(clean)[0], tolerance)
        # From the next batch on both use the smaller size.
        later = 8 // fault.limit * (4 - fault.batch)
        for rank, found in enumerate(run[name] for run in runs.ranks):
            assert found["error"] == "", fault
            assert found["seconds"] < WAIT_S, fault
            assert found["steps"] == runs.ranks[0][clean]["steps"], fault
            assert bool(found["ooms"]) == (rank == fault.rank), fault
            assert found["pieces"][-later:] == [fault.limit] * later, fault
        assert runs.ranks[0][name]["scale"] == runs.ranks[1][name]["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("number", FEW)
def test_buffers_are_those_of_the_first_rank(runs: Runs, number: int) -> None:
    name = f"{number} batch norm"
    _assert_equal(*runs.weights(name))
    assert [rank[name]["error"] for rank in runs.ranks] == ["", ""]
    assert not torch.equal(runs.weights(name)[0]["body.1.running_mean"], torch.zeros(8))
    # The list is cut as the buffer is: an attempt that failed leaves nothing behind.
    assert runs.weights(name)[0]["body.1.num_batches_tracked"] == len(runs.ranks[0][name]["pieces"])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FATAL)))
def test_an_error_on_one_rank_ends_the_other(runs: Runs, number: int) -> None:
    _assert_ended(runs, f"fatal {number}", FATAL[number][0])


@pytest.mark.slow
def test_a_batch_of_one_sample_that_cannot_be_moved_ends_the_other_rank_too(runs: Runs) -> None:
    _assert_ended(runs, "fatal transfer", Fault(1, "transfer"))


def _assert_ended(runs: Runs, name: str, fault: Fault) -> None:
    failed, other = runs.ranks[fault.rank][name], runs.ranks[1 - fault.rank][name]
    message = f"RankMismatchError: rank {fault.rank} failed in this step: see its own message"
    assert other["error"] == message
    own = "ValueError: broken" if fault.error is ValueError else "BatchMemoryError: batch "
    assert failed["error"].startswith(own)
    assert max(failed["seconds"], other["seconds"]) < WAIT_S


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You (have overridden|defined a):UserWarning")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("samples", UNEVEN)
def test_the_gradient_is_that_of_one_process_with_all_samples(
    runs: Runs, samples: tuple[int, int], sparse: bool
) -> None:
    name, alone = f"uneven {samples} {sparse}", _build(Model, sparse=sparse)
    Trainer(**QUIET, max_epochs=1, num_sanity_val_steps=0).fit(
        alone, datamodule=Uneven(sum(samples))
    )
    assert [rank[name]["pieces"] for rank in runs.ranks] == [[count] for count in samples]
    _assert_equal(*runs.weights(name))
    _assert_close(runs.weights(name)[0], alone.state_dict())


@pytest.mark.slow
def test_ranks_that_grow_apart_stay_together(runs: Runs) -> None:
    for rank, found in enumerate(run["growing"] for run in runs.ranks):
        assert found["error"] == ""
        assert found["ooms"] == rank
        assert found["steps"] == 5
    _assert_equal(*runs.weights("growing"))
    _assert_close(runs.weights("growing")[0], runs.weights("clean plain")[0])


@pytest.mark.slow
def test_validation_is_split_on_one_rank_alone(runs: Runs) -> None:
    _assert_close(runs.ranks[0]["validation"]["metrics"], runs.ranks[0]["clean plain"]["metrics"])
    _assert_equal(runs.ranks[0]["validation"]["metrics"], runs.ranks[1]["validation"]["metrics"])
    assert [rank["validation"]["ooms"] for rank in runs.ranks] == [0, 1]


@pytest.mark.slow
def test_manual_optimisation_is_left_alone_with_one_warning(runs: Runs) -> None:
    message = "AdaptiveBatchSize does not handle manual optimization on several ranks: out-of-memory errors are raised"
    for rank in runs.ranks:
        assert rank["manual"]["warnings"] == rank["manual error"]["warnings"] == [message]
        assert rank["manual error"]["error"] == "OutOfMemoryError: CUDA out of memory"
        assert rank["manual"]["pieces"] == rank["plain manual"]["pieces"] == [8] * 5
        _assert_equal(rank["manual"]["weights"], rank["plain manual"]["weights"])


def _fake(strategy: object, world_size: int = 2) -> Any:
    return types.SimpleNamespace(strategy=strategy, world_size=world_size)


def test_a_single_process_has_no_ranks() -> None:
    assert find_ranks(_fake(DDPStrategy(), world_size=1), _build(Model)) is None


def test_other_strategies_are_refused() -> None:
    class FSDPStrategy:
        model = None

    message = r"works on one device or with DDP, not with FSDPStrategy: use strategy=ddp, or train"
    with pytest.raises(ConfigError, match=message):
        find_ranks(_fake(FSDPStrategy()), _build(Model))


def test_batch_norm_that_waits_for_other_ranks_is_refused() -> None:
    strategy = DDPStrategy()
    strategy.model = object.__new__(DistributedDataParallel)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(_build(Model, batch_norm=True))
    message = (
        r"^body.1 is a SyncBatchNorm, .*: set Trainer\(sync_batchnorm=False\), or train without"
    )
    with pytest.raises(ConfigError, match=message):
        find_ranks(_fake(strategy), module)


def _make_scaler() -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    )


def _assert_equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def _assert_close(
    one: Mapping[str, Tensor], two: Mapping[str, Tensor], tolerance: float = 1e-6
) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, two[name], atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


if __name__ == "__main__":
    _run_all(Path(sys.argv[1]))
