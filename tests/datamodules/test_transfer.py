import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor

from lit_data.callbacks import AdaptiveBatchSize
from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, Batch, FieldSpec, Ints, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.loading import LoaderOptions
from lit_data.loading.transfer import Copy, StagedBatch
from lit_data.testing import QUIET
from tests.helpers.limited_memory import out_of_memory

BEFORE, TRANSFER, AFTER = HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
SHORT = {BEFORE: "before", TRANSFER: "transfer", AFTER: "after"}
SUBSETS = ((), (BEFORE,), (TRANSFER,), (AFTER,), HOOKS)
RUNS = ("fit", "validate", "test", "predict")

notes = []
"""What ran, in order."""


class Rows:
    fields: Final = {"x": FieldSpec((3,), "float32"), "index": FieldSpec((), "int64")}

    def __len__(self) -> int:
        return 8

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        rows["x"][:], rows["index"][:] = indices[:, None], indices


class Data(BaseDataModule):
    """Plans ten times the index, and adds the plan to x."""

    batch_keys = ("x", "index", "label")

    def __init__(self, batch_format: BatchFormat = "dict") -> None:
        super().__init__(
            loader=LoaderOptions(batch_size=4, num_workers=0), batch_format=batch_format
        )

    def build_dataset(self, stage: Stage) -> Rows:
        return Rows()

    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        notes.append("plan")
        return {"plan": 10 * batch["index"]} | batch

    def finish_batch(self, batch: Batch, stage: Stage) -> Batch:
        notes.append("finish")
        assert not torch.is_grad_enabled()
        return {"x": batch["x"] + batch["plan"][:, None], "index": batch["index"]}


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        notes.append("step")
        self.seen.append(batch)
        return self.layer(batch["x"] if isinstance(batch, dict) else batch[0]).mean()

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _before(self: Plain, batch: Any, dataloader_idx: int) -> Any:
    notes.append("before")
    assert set(batch) == {"x", "index", "plan"}
    return batch | {"plan": batch["plan"] * 10}


def _transfer(self: Plain, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    notes.append("transfer")
    assert type(batch) is dict
    return L.LightningModule.transfer_batch_to_device(self, batch, device, dataloader_idx)


def _after(self: Plain, batch: Any, dataloader_idx: int) -> Any:
    notes.append("after")
    assert set(batch) == {"x", "index"}
    return batch | {"x": batch["x"] + 0.5}


class Batches:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        return iter([{"x": torch.ones(4, 3), "index": torch.arange(4)}] * 2)


class Bare(L.LightningDataModule):
    """Knows nothing of lit_data."""

    def train_dataloader(self) -> Batches:
        return Batches()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_model(*hooks: str, base: type[Plain] = Plain, **others: Any) -> Any:
    """A module with some hooks of its own."""
    own = {BEFORE: _before, TRANSFER: _transfer, AFTER: _after}
    return type("Model", (base,), {name: own[name] for name in hooks} | others)()


def run(model: L.LightningModule, datamodule: Any, name: str = "fit", **options: Any) -> L.Trainer:
    defaults = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 1}
    trainer = L.Trainer(**(defaults | options))
    getattr(trainer, name)(model, datamodule=datamodule)
    return trainer


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the log is told. Lightning warns anew, and filters and its memory of warnings stay as they are."""
    told = []
    caplog.set_level("WARNING", "lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr("lit_data.datamodules.transfer.rank_zero_info", told.append)
    monkeypatch.setattr(data_connector, "warning_cache", data_connector.WarningCache())
    notes.clear()
    before = list(warnings.filters)
    yield told
    assert warnings.filters == before


# --- order


@pytest.mark.parametrize(
    ("hooks", "name"),
    [*((hooks, "fit") for hooks in SUBSETS), *((HOOKS, name) for name in RUNS[1:])],
)
def test_both_run_in_order_and_each_is_told_once(
    hooks: tuple[str, ...], name: str, lines: list[str]
) -> None:
    model = make_model(*hooks)
    run(model, Data(), name)
    own = {hook: [SHORT[hook]] * (hook in hooks) for hook in HOOKS}
    once = ["plan", *own[BEFORE], *own[TRANSFER], "finish", *own[AFTER], "step"]
    assert notes == once * (
        9 if name == "fit" else 2
    )  # two epochs, their validation, and the sanity check
    index = model.seen[0]["index"]
    plan = index * (100 if BEFORE in hooks else 10)
    assert torch.equal(model.seen[0]["x"][:, 0], index + plan + (0.5 if AFTER in hooks else 0.0))
    assert sorted(line.split(":")[0] for line in lines) == sorted(hooks)
    assert all("that of Data" in line and "that of Model" in line for line in lines)
    assert not data_connector.warning_cache
    if hooks == HOOKS:
        assert sorted(lines) == [
            f"{AFTER}: first that of Data, then that of Model on the batch in its batch_format",
            f"{BEFORE}: first that of Data, then that of Model on the planned batch; no batch is copied ahead",
            f"{TRANSFER}: that of Model moves the planned batch instead of that of Data; no batch is copied ahead",
        ]


@pytest.mark.parametrize("name", RUNS)
def test_the_modules_hooks_run_as_with_lightning_alone(name: str) -> None:
    def note(hook: str) -> Callable[..., Any]:
        def call(self: Any, batch: Any, *args: Any) -> Any:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            state = *modes, torch.is_autocast_enabled("cpu")
            self.states.append((hook, self._current_fx_name, len(args), *state))
            return batch

        return call

    def watch(datamodule: L.LightningDataModule) -> list[Any]:
        model = make_model(**{hook: note(hook) for hook in HOOKS}, states=[])
        trainer = run(model, datamodule, name, precision="bf16-mixed", profiler="simple")
        assert all(
            f"[LightningModule]Model.{hook}" in trainer.profiler.recorded_durations
            for hook in HOOKS
        )
        return model.states

    ours = watch(Data())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*It will use the implementation from `LightningModule`")
        assert ours == watch(Bare())


# --- what the module's hooks on the host may do


@pytest.mark.parametrize(("hook", "batch_format"), [(BEFORE, "dict"), (TRANSFER, {"x": "x"})])
def test_keys_that_the_module_adds_reach_its_hook_and_its_step(
    hook: str, batch_format: BatchFormat
) -> None:
    def add(self: Plain, batch: Any, *args: Any) -> Any:
        batch["weight"] = batch["index"] + 1
        return batch

    def after(self: Plain, batch: Any, dataloader_idx: int) -> Any:
        assert "weight" in batch
        return batch

    model = make_model(**{hook: add, AFTER: after})
    run(model, Data(batch_format), max_epochs=1)
    assert model.seen
    assert all(torch.equal(batch["weight"] * 11 - 11, batch["x"][:, 0]) for batch in model.seen)


def _without_plan(batch: Batch) -> Batch:
    del batch["plan"]
    return batch


def _with(key: str) -> Callable[[Batch], Batch]:
    return lambda batch: batch | {key: 1}


@pytest.mark.parametrize(
    ("hook", "change", "batch_format", "problem"),
    [
        (BEFORE, lambda batch: tuple(batch.values()), "dict", "returned tuple instead of a dict"),
        (TRANSFER, lambda batch: None, "dict", "returned None instead of a dict"),
        (BEFORE, _without_plan, "dict", r"dropped the keys \['plan'\]"),
        (TRANSFER, _with("label"), "dict", r"added .* \['label'\], which the datamodule makes"),
        (BEFORE, _with("y"), {"y": "x"}, r"added the keys \['y'\], which the datamodule makes"),
        (TRANSFER, _with("y"), ("x",), r"added .* \['y'\], which only a batch that is a dict can"),
    ],
)
def test_another_structure_is_an_error_that_says_what_to_do(
    hook: str, change: Callable[[Batch], Any], batch_format: BatchFormat, problem: str
) -> None:
    model = make_model(**{hook: lambda self, batch, *args: change(batch)})
    text = rf"Model\.{hook} {problem}.*: Data gave it its batch, .*'plan'.* do the rest in {AFTER}, which"
    with pytest.raises(ConfigError, match=text):
        run(model, Data(batch_format))


def test_a_hook_written_for_another_structure_says_what_it_was_given() -> None:
    def unpack(self: Plain, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        return images, labels

    with pytest.raises(ValueError, match="too many values") as caught:
        run(make_model(on_before_batch_transfer=unpack), Data(("x", "index")))
    assert caught.value.__notes__ == [
        f"Model.{BEFORE} was given the batch of Data, a dict with the keys ['plan', 'x', 'index']"
    ]


class Ahead(Data):
    """Its copies are wrong, to be told from what is moved anew."""

    def plan_batch(self, batch: Batch, stage: Stage) -> Batch:
        planned = super().plan_batch(batch, stage)
        return StagedBatch(planned, {"x": Copy(planned["x"], torch.full_like(planned["x"], -1000))})


@pytest.mark.parametrize("hooks", SUBSETS)
def test_copies_that_are_under_way_are_given_up_for_hooks_on_the_host(
    hooks: tuple[str, ...],
) -> None:
    model = make_model(*hooks)
    run(model, Ahead(), "validate")
    is_copy = bool((model.seen[0]["x"] < -500).all())
    assert is_copy == (BEFORE not in hooks and TRANSFER not in hooks)


@pytest.mark.parametrize("hooks", SUBSETS)
def test_no_copy_is_begun_that_would_be_given_up(
    hooks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoaderOptions, "pins_memory", True)
    datamodule, device = Data(), torch.device("cuda", 0)
    selector = data_connector._DataHookSelector(make_model(*hooks), datamodule)
    strategy = SimpleNamespace(root_device=device)
    trainer = SimpleNamespace(strategy=strategy, global_rank=0, world_size=1)
    trainer._data_connector = SimpleNamespace(_datahook_selector=selector)
    datamodule.trainer = trainer
    ahead = BEFORE not in hooks and TRANSFER not in hooks
    assert datamodule.val_dataloader().device == (device if ahead else None)


@pytest.mark.parametrize(
    ("hooks", "format_of"),
    [((), lambda x: x), (HOOKS, lambda x: {"x": x}), (HOOKS, lambda x: (x, x))],
)
def test_an_example_input_meets_the_modules_hooks_alone(
    hooks: tuple[str, ...], format_of: Callable[..., Any]
) -> None:
    met = []

    def note(self: Plain, batch: Any, *args: Any) -> Any:
        met.append(batch)
        return batch

    model = make_model(**dict.fromkeys(hooks, note), forward=lambda self, *args, **kwargs: None)
    model.example_input_array = format_of(torch.ones(4, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)
        run(model, Data(), enable_model_summary=True, max_epochs=1, limit_val_batches=0)
    assert all(batch is model.example_input_array for batch in met[: len(hooks)])
    assert len(met) == len(hooks) * (1 + 2)
    assert notes == ["plan", "finish", "step"] * 2


# --- one run after the other


def _assert_runs(datamodule: Data, hooks: tuple[str, ...], lines: list[str]) -> None:
    notes.clear()
    lines.clear()
    run(make_model(*hooks), datamodule, "validate")
    assert {note for note in notes if note in SHORT.values()} == {SHORT[hook] for hook in hooks}
    assert len(lines) == len(hooks)


def test_each_run_has_the_hooks_of_its_own_module(lines: list[str]) -> None:
    datamodule = Data()
    for hooks in ((AFTER,), (), HOOKS, (AFTER,)):
        _assert_runs(datamodule, hooks, lines)
    model = make_model(AFTER)
    trainer = run(model, datamodule)
    trainer.test(model, datamodule=datamodule)
    assert len(lines) == 1 + 2  # each run of one trainer tells anew


# --- Lightning's own warning


@pytest.mark.parametrize("again", [True, False])
def test_a_datamodule_that_overrides_the_hook_again_takes_it_over(
    again: bool, lines: list[str]
) -> None:
    class Own(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return super().on_after_batch_transfer(batch, dataloader_idx) if again else batch

    with pytest.warns(UserWarning, match="You have overridden `on_after_batch_transfer` in both"):
        run(make_model(AFTER, BEFORE), Own(), "validate")
    assert notes == ["plan", "before", *["finish"] * again, "step"] * 2
    assert [line.split(":")[0] for line in lines] == [BEFORE]


# --- callbacks that stand around the hooks


def _only_training(**options: Any) -> dict[str, Any]:
    return {"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0} | options


@pytest.mark.parametrize("size", [None, 2])
def test_the_modules_hook_runs_once_for_each_batch_and_micro_batches_are_cut_out_of_it(
    size: int | None,
) -> None:
    model = make_model(BEFORE, AFTER)
    callback = AdaptiveBatchSize(initial_size=size, grow_after=None)
    run(model, Data(), **_only_training(callbacks=[callback]))
    moved = ["plan", "before", "finish", "after"]
    comparison = ["finish", "after"] if size else []  # of a piece, once for batches of a form
    steps = ["step"] * (2 if size else 1)
    assert notes == [*moved, *comparison, *steps, *moved, *steps]
    assert sorted(int(n) for batch in model.seen for n in batch["index"]) == list(range(8))
    assert all(torch.equal(batch["x"][:, 0], 101 * batch["index"] + 0.5) for batch in model.seen)


def test_memory_that_runs_out_in_the_modules_hook_is_survived() -> None:
    def after(self: Plain, batch: Any, dataloader_idx: int) -> Any:
        notes.append("after")
        if len(batch["x"]) > 2:
            raise out_of_memory()
        return batch

    model = make_model(BEFORE, on_after_batch_transfer=after)
    run(model, Data(), **_only_training(callbacks=[AdaptiveBatchSize(grow_after=None)]))
    planned, whole, pieces = ["plan", "before"], ["finish", "after"], ["finish", "after"] * 2
    steps = ["step", "step"]
    assert notes == [*planned, *whole, *pieces, *steps, *planned, *pieces, *steps]


class Fine(Data):
    """Adds a number that no half precision holds, and says which dtype it began with."""

    def finish_batch(self, batch: Batch, stage: Stage) -> Batch:
        assert batch["x"].dtype == torch.float32
        finished = super().finish_batch(batch, stage)
        return finished | {"x": finished["x"] + 1 / 3 - 1 / 3}


PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@pytest.mark.parametrize("batch_format", ["dict", ("x", "index")])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_come_in_the_dtype_of_the_module_and_are_made_in_float32(
    precision: Any, run: str, batch_format: BatchFormat
) -> None:
    module, plain = Plain(), Plain()
    getattr(L.Trainer(**QUIET, max_epochs=1), run)(plain, datamodule=Fine(batch_format))
    trainer = L.Trainer(**QUIET, max_epochs=1, precision=precision)
    getattr(trainer, run)(module, datamodule=Fine(batch_format))
    assert len(module.seen) == len(plain.seen) > 0
    for batch, expected in zip(module.seen, plain.seen, strict=True):
        for key in batch if isinstance(batch, dict) else (0, 1):
            is_float = expected[key].is_floating_point()
            dtype = PRECISIONS[precision] if is_float else expected[key].dtype
            assert batch[key].dtype == dtype
            assert torch.equal(batch[key], expected[key].to(dtype))
