"""Manual optimisation under AdaptiveBatchSize: what has not stepped is repeated, and what has is never repeated."""

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.errors import BatchMemoryError

BATCH, BATCHES = 8, 4

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


@dataclass
class Plan:
    """From a step on memory runs out at a point while more samples than a limit are in work."""

    point: str = ""
    limit: int = 4
    step: int = 0
    happened: int = 0

    def check(self, point: str, samples: int, step: int) -> None:
        if point == self.point and samples > self.limit and step >= self.step:
            self.happened += 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less"
            )


class Breaking(torch.optim.Adam):
    """Its step can end half way, as when the second moment of a later parameter does not fit."""

    def __init__(self, module: "Pair", part: str, **options: Any) -> None:
        super().__init__(getattr(module, part).parameters(), lr=2e-3, betas=(0.5, 0.99), **options)
        self.module, self.part = module, part

    def step(self, closure: Any = None) -> Any:
        self.module.check(f"before {self.part}'s step")
        first = self.param_groups[0]["params"][0]
        try:
            self.module.check("step" if self.part == "generator" else "second step")
        except torch.OutOfMemoryError:
            with torch.no_grad():
                first.add_(1)
            self.state[first]["step"] = torch.ones(())
            raise
        return super().step(closure)


class Pair(L.LightningModule):
    """Two networks with an optimizer each; noise, dropout and batch norm in the step, noise in the
    augmentation.

    Counts its steps itself, so that pieces and batches of their size are the same to it.

    Args:
        plan: When memory runs out.
        batch_norm: Without it a single sample can be trained on.
        step_every: Pieces whose gradients are added up.
        critic_every: The critic steps after so many steps of the generator.
        zero_first: Zero the gradients before backward instead of after the step.
        options: Of the optimizers.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        batch_norm: bool = True,
        step_every: int = 1,
        critic_every: int = 1,
        zero_first: bool = False,
        toggle: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plan, self.step_every, self.critic_every = plan or Plan(), step_every, critic_every
        self.zero_first, self.toggle, self.options = zero_first, toggle, options
        self.seen = self.samples = 0
        self.generator = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8) if batch_norm else torch.nn.Identity(),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 6),
        )
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def check(self, point: str) -> None:
        self.plan.check(point, self.samples, self.seen - 1)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.plan.check("transfer", len(batch), self.seen)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        noise = torch.randn_like(batch) * 0.1
        self.plan.check("augment", len(batch), self.seen)
        return batch + noise

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.seen, self.samples = self.seen + 1, len(batch)
        steps = self.seen % self.step_every == 0
        first, second = self.optimizers()
        self._begin(first)
        hidden = self.generator[:2](torch.randn(len(batch), 4))
        self.check("forward")
        hidden.register_hook(lambda grad: self.check("backward"))
        fake = self.generator[2:](hidden)
        loss = F.softplus(-self.critic(fake)).mean()
        self.log("generator", loss, on_step=True, on_epoch=True)
        self._end(first, loss, steps)

        self._begin(second)
        self.critic.eval()
        self.check("second forward")
        self.critic.train()
        loss = (
            F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(batch)).mean()
        )
        loss.register_hook(lambda grad: self.check("second backward"))
        self._end(second, loss, steps and self.seen // self.step_every % self.critic_every == 0)
        self.log("critic", loss, on_step=True, on_epoch=True)
        return {"loss": loss.detach(), "images": batch}

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        return [
            Breaking(self, "generator", **self.options),
            Breaking(self, "critic", **self.options),
        ], []

    def _begin(self, optimizer: Any) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        if self.zero_first:
            optimizer.zero_grad()

    def _end(self, optimizer: Any, loss: Tensor, steps: bool) -> None:
        self.manual_backward(loss / self.step_every)
        if steps:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.check("clip")
            optimizer.step()
            if not self.zero_first:
                optimizer.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(optimizer)


class Notes(Logger):
    """Keeps what is logged."""

    name, version = "notes", 0

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append(
            (step, {key: value for key, value in metrics.items() if key != "batch/ooms"})
        )

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def _loader(sizes: list[int] | None = None) -> DataLoader[Tensor]:
    """Batches of 8, or of given sizes, of the same samples."""
    images = torch.randn(BATCH * BATCHES, 6, generator=torch.Generator().manual_seed(0))
    sizes = sizes or [BATCH] * BATCHES
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    batches = [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]
    return DataLoader(images, batch_sampler=batches)  # type: ignore[arg-type]


def _fit(
    module: Pair,
    *callbacks: L.Callback,
    sizes: list[int] | None = None,
    epochs: int = 2,
    notes: Notes | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Everything that a run leaves behind."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=notes or False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    torch.manual_seed(7)
    trainer.fit(module, _loader(sizes))
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "random": torch.get_rng_state(),
        "steps": trainer.global_step,
        "logged": {
            key: value
            for key, value in trainer.callback_metrics.items()
            if not key.startswith("batch/")
        },
        "trained": [parameter.requires_grad for parameter in module.parameters()],
        "training": [part.training for part in module.modules()],
        "seen": module.seen,
        "scale": trainer.precision_plugin.state_dict(),
    }


def _build(plan: Plan | None = None, **options: Any) -> Pair:
    torch.manual_seed(3)
    return Pair(plan, **options)


def _assert_same(one: Any, two: Any, where: str = "") -> None:
    """To the bit, in any nesting."""
    if isinstance(one, Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, Mapping):
        assert one.keys() == two.keys(), where
        for key in one:
            _assert_same(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            _assert_same(a, b, f"{where}/{number}")
    else:
        assert one == two, where


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zeroed before backward": {"zero_first": True},
    "without toggling": {"toggle": False, "zero_first": True},
    "accumulation over 3": {"step_every": 3},
    "critic every 3rd step": {"critic_every": 3},
    "both": {"step_every": 2, "critic_every": 3, "toggle": False},
    "fused": {"fused": True},
}


@pytest.mark.parametrize(
    ("point", "variant"),
    [
        *itertools.product(["transfer", "augment", "forward", "backward"], VARIANTS),
        # Where gradients are added up, the first batch does not step, and a fused step does not end
        # half way.
        *itertools.product(
            ["clip", "before generator's step", "step"], ["plain", "zeroed before backward"]
        ),
        *itertools.product(["step"], ["without toggling", "critic every 3rd step"]),
        ("before generator's step", "fused"),
    ],
)
def test_a_replay_is_a_run_in_halves_from_the_start(point: str, variant: str) -> None:
    plan, notes, twin_notes = Plan(point), Notes(), Notes()
    adaptive = AdaptiveBatchSize(grow_after=None)
    found = _fit(_build(plan, **VARIANTS[variant]), adaptive, notes=notes)
    twin = AdaptiveBatchSize(initial_size=4, grow_after=None)
    _assert_same(found, _fit(_build(**VARIANTS[variant]), twin, notes=twin_notes))
    assert notes.rows == twin_notes.rows
    assert plan.happened == 1
    assert adaptive.summary() == {"batch/ooms": 1, "batch/skipped": 0, "batch/size": 4}
    assert all(found["trained"])
    assert all(found["training"])


@pytest.mark.parametrize(
    ("point", "variant", "step"),
    [
        *itertools.product(
            ["transfer", "augment", "forward", "backward"],
            ["plain", "accumulation over 3", "both", "fused"],
            [1, 2, 3],
        ),
        # Only where gradients are not merely added up.
        *itertools.product(["clip", "before generator's step"], ["plain"], [1, 2, 3]),
        *itertools.product(["clip", "before generator's step"], ["accumulation over 3"], [2]),
        *itertools.product(["clip", "before generator's step"], ["both"], [1, 3]),
        ("clip", "fused", 1),
    ],
)
def test_a_replay_in_a_later_step_is_a_run_with_smaller_batches(
    point: str, variant: str, step: int
) -> None:
    plan = Plan(point, step=step)
    found = _fit(_build(plan, **VARIANTS[variant]), AdaptiveBatchSize(grow_after=None), epochs=1)
    assert plan.happened == 1
    sizes = [BATCH] * step + [BATCH // 2] * 2 * (BATCHES - step)
    twin = _fit(_build(**VARIANTS[variant]), sizes=sizes, epochs=1)
    # What a batch shows of its step is the mean over its pieces.
    found["logged"], twin["logged"] = _keep_epoch(found["logged"]), _keep_epoch(twin["logged"])
    _assert_same(found, twin)


@pytest.mark.parametrize("variant", ["plain", "accumulation over 3"])
@pytest.mark.parametrize("point", ["transfer", "augment", "forward", "backward"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_piece_that_fails_makes_those_behind_it_smaller(
    point: str, variant: str, step: int
) -> None:
    plan = Plan(point, limit=2, step=step)
    adaptive = AdaptiveBatchSize(initial_size=4, grow_after=None)
    found = _fit(_build(plan, **VARIANTS[variant]), adaptive, epochs=1)
    assert plan.happened == 1
    sizes = [4] * step + [2] * ((BATCH * BATCHES - 4 * step) // 2)
    twin = _fit(_build(**VARIANTS[variant]), sizes=sizes, epochs=1)
    found["logged"], twin["logged"] = _keep_epoch(found["logged"]), _keep_epoch(twin["logged"])
    _assert_same(found, twin)


def _keep_epoch(logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in logged.items() if not key.endswith("_step")}


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    ("point", "step"),
    [
        *itertools.product(
            ["second forward", "second backward", "second step", "before critic's step"], [0, 2]
        ),
        ("step", 2),  # half way, and no copy is kept after the first step
    ],
)
def test_what_has_stepped_is_not_repeated(point: str, step: int, options: dict[str, Any]) -> None:
    plan = Plan(point, step=step)
    module = _build(plan, **options)
    message = (
        rf"memory ran out in batch {step} after an optimizer had stepped, so the step cannot be repeated \(CUDA out of "
        r"memory. Tried to allocate 2.00 GiB. GPU 0 has less\): lower the batch size, or set "
        r"AdaptiveBatchSize\(after_step='skip'\) to go on without it"
    )
    with pytest.raises(BatchMemoryError, match=f"^{message}$"):
        _fit(module, AdaptiveBatchSize(grow_after=None))
    assert plan.happened == 1


def test_whether_a_fused_step_began_to_change_weights_is_not_known() -> None:
    with pytest.raises(BatchMemoryError, match="after an optimizer had stepped"):
        _fit(
            _build(Plan("before generator's step", step=1), fused=True),
            AdaptiveBatchSize(grow_after=None),
        )


@pytest.mark.parametrize(
    "point", ["second forward", "second backward", "second step", "before critic's step"]
)
def test_a_skipped_piece_is_counted_and_told_and_the_rest_goes_on(
    point: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan, notes = Plan(point, step=1), Notes()
    adaptive = AdaptiveBatchSize(grow_after=None, after_step="skip")
    found = _fit(_build(plan), adaptive, notes=notes, epochs=1, profiler="simple")
    assert adaptive.summary() == {"batch/ooms": 1, "batch/skipped": 1, "batch/size": 4}
    assert adaptive.state_dict()["skipped"] == 1
    assert (
        "batch 1: 8 samples are skipped, memory ran out after an optimizer step" in caplog.messages
    )
    assert [
        (row["batch/size"], row["batch/pieces"], row["batch/skipped"]) for row in _steps(notes)
    ] == [
        (8, 1, 0),
        (4, 2, 1),  # nothing went through of the batch before, and nothing is logged for it
        (4, 2, 1),
    ]
    # 1 whole batch, 1 step of the generator alone, 2 batches of two pieces.
    assert (found["seen"], found["steps"]) == (6, 2 + 1 + 8)
    assert all(found["trained"])
    assert all(found["training"])
    again = AdaptiveBatchSize(grow_after=None, after_step="skip")
    again.load_state_dict(adaptive.state_dict())
    _fit(_build(Plan(point)), again, epochs=1)
    assert again.summary() == {"batch/ooms": 1, "batch/skipped": 1, "batch/size": 4}


def test_pieces_after_a_skipped_one_are_smaller() -> None:
    plan, notes = Plan("second forward", limit=2), Notes()
    adaptive = AdaptiveBatchSize(initial_size=4, grow_after=None, after_step="skip")
    found = _fit(_build(plan), adaptive, notes=notes, epochs=1)
    assert [(row["batch/size"], row["batch/pieces"]) for row in _steps(notes)] == [(2, 2)] + [
        (2, 4)
    ] * 3
    assert adaptive.summary()["batch/skipped"] == 1
    assert found["seen"] == 1 + 2 + 4 * 3


def test_one_sample_that_does_not_fit_is_skipped_too() -> None:
    adaptive = AdaptiveBatchSize(initial_size=1, grow_after=None, after_step="skip")
    module = _build(Plan("second forward", limit=0, step=24), batch_norm=False)
    found = _fit(module, adaptive, epochs=1)
    assert adaptive.summary()["batch/skipped"] == 8
    assert found["seen"] == 32


def test_a_skipped_piece_leaves_no_gradient_to_who_has_not_stepped() -> None:
    module = _build(Plan("second backward", step=1), critic_every=3, toggle=False)
    kept: list[dict[str, Tensor]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            kept.append(
                {
                    n: p.grad.clone()
                    for n, p in module.critic.named_parameters()
                    if p.grad is not None
                }
            )

    _fit(module, Watch(), AdaptiveBatchSize(grow_after=None, after_step="skip"), epochs=1)
    assert kept[0]
    _assert_same(kept[1], kept[0])


def test_a_piece_that_fits_in_no_way_ends_the_run() -> None:
    with pytest.raises(
        BatchMemoryError, match="batch 2: one sample of tensor 6 float32 does not fit"
    ):
        _fit(
            _build(Plan("forward", limit=0, step=2), batch_norm=False),
            AdaptiveBatchSize(grow_after=None),
        )


@pytest.mark.parametrize("point", ["forward", "backward", "clip", "before generator's step"])
def test_a_gradient_scaler_is_put_back(point: str) -> None:
    found, twin = (
        _fit(
            _build(plan),
            AdaptiveBatchSize(initial_size=size, grow_after=None),
            plugins=[_scale(2.0**10)],
        )
        for plan, size in ((Plan(point), None), (None, 4))
    )
    assert found["scale"]["_growth_tracker"] == found["steps"] == 32
    _assert_same(found, twin)


def test_a_step_that_the_scaler_skipped_is_repeated() -> None:
    plan = Plan("second forward")
    found, twin = (
        _fit(
            _build(plan),
            AdaptiveBatchSize(initial_size=size, grow_after=None),
            plugins=[_scale(2.0**40)],
        )
        for plan, size in ((plan, None), (None, 4))
    )
    assert plan.happened == 1
    assert 0 < found["scale"]["scale"] < 2.0**40
    _assert_same(found, twin)


def test_a_skipped_piece_does_not_count_as_unscaled() -> None:
    plan = Plan("second step", step=1)
    adaptive = AdaptiveBatchSize(grow_after=None, after_step="skip")
    found = _fit(_build(plan), adaptive, plugins=[_scale(2.0**10)], epochs=1)
    assert found["steps"] == 2 + 1 + 8


@pytest.mark.parametrize("point", ["step", "forward"])
def test_the_profiler_goes_on(point: str) -> None:
    plan = Plan(point)
    found = _fit(_build(plan), AdaptiveBatchSize(grow_after=None), profiler="simple")
    assert plan.happened == 1
    _assert_same(found, _fit(_build(), AdaptiveBatchSize(initial_size=4, grow_after=None)))


@pytest.mark.parametrize(
    "plan", [Plan(), Plan("forward"), Plan("second forward")], ids=["none", "repeated", "raised"]
)
def test_optimizers_and_loops_are_left_as_they_were(plan: Plan) -> None:
    module, error = _build(plan), plan.point.startswith("second")
    adaptive = AdaptiveBatchSize(grow_after=None)
    with pytest.raises(BatchMemoryError) if error else nullcontext():
        _fit(module, adaptive)
    trainer = module.trainer
    for optimizer in trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert "advance" not in vars(trainer.fit_loop.epoch_loop.manual_optimization)
    assert (
        not {"batch_to_device", "validation_step", "test_step", "predict_step"}
        & vars(trainer.strategy).keys()
    )


def test_other_errors_pass_through() -> None:
    class Wrong(Pair):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            raise ValueError("not my size")

    with pytest.raises(ValueError, match=r"^not my size$"):
        _fit(Wrong(), AdaptiveBatchSize())


def test_without_an_error_the_run_is_that_without_the_callback() -> None:
    notes, twin_notes = Notes(), Notes()
    found = _fit(_build(step_every=2), AdaptiveBatchSize(), notes=notes)
    _assert_same(found, _fit(_build(step_every=2), notes=twin_notes))
    kept = [
        {key: value for key, value in row.items() if not key.startswith("batch/")}
        for _, row in notes.rows
    ]
    assert [row for row in kept if row] == [row for _, row in twin_notes.rows]


def _steps(notes: Notes) -> list[dict[str, float]]:
    return [row for _, row in notes.rows if "batch/size" in row]


def _scale(first: float) -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=first, growth_interval=1000)
    )


def test_more_optimizer_steps_than_batches_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Manual(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).mean())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = L.Trainer(
        max_epochs=1, callbacks=[AdaptiveBatchSize(initial_size=2)], accelerator="cpu", **options
    )
    trainer.fit(Manual(), DataLoader(torch.rand(32, 3), batch_size=8))
    said = [
        record.message
        for record in caplog.records
        if "each a training_step of its own" in record.message
    ]
    assert len(said) == 1
    assert said[0].startswith("batch 0 went through in 4 pieces")
    assert "the optimizers step 4 times for this batch" in said[0]
    assert trainer.global_step == 16
