import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_data.callbacks.gradient_checkpointing import GradientCheckpointing
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET
from tests.helpers.stock_modules import STOCK

Run = tuple[dict[str, Tensor], list[list[Tensor]], Tensor]


class KeepGradients(Callback):
    def __init__(self) -> None:
        self.gradients = []

    def on_before_optimizer_step(self, trainer: Any, module: LightningModule, *_: Any) -> None:
        grads = [parameter.grad for parameter in module.parameters()]
        self.gradients.append([grad.clone() for grad in grads if grad is not None])


class Foreign(LightningModule):
    """Spectral norm, whose result depends on its buffers; a block called by keyword; a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()
        self.frozen = nn.BatchNorm2d(4).eval().requires_grad_(False)
        self.last = nn.Conv2d(4, 1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.frozen.eval()
        mixed = self.mixer(images=batch[0], scale=batch[0].new_full((1,), 0.5))
        mixed = mixed + self.mixer(images=batch[0], scale=batch[0].new_ones(1))
        return self.last(self.frozen(mixed)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(1, 4, 3))
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.drop = nn.Dropout(0.5)

    def forward(self, *, images: Tensor, scale: Tensor) -> Tensor:
        return self.drop(self.norm(self.conv(images)).relu()) * scale


def _train(module: LightningModule, loader: Any, callbacks: list[Callback], **options: Any) -> Run:
    keep = KeepGradients()
    trainer = Trainer(
        **{**QUIET, "max_steps": 4, "limit_val_batches": 0, **options}, callbacks=[keep, *callbacks]
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        trainer.fit(module, loader)
        state = torch.get_rng_state()
    return module.state_dict(), keep.gradients, state


def _assert_same(one: Run, other: Run) -> None:
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(value, other[0][key]) for key, value in one[0].items())
    assert len(one[1]) == len(other[1]) > 0
    for before, after in zip(one[1], other[1], strict=True):
        assert all(map(torch.equal, before, after))
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize(
    ("stock", "options", "modules", "precision"),
    [
        ("classifier", {}, ["features", "head"], "bf16-mixed"),
        ("segmenter", {}, ["down.*", "up.?", "bottom"], "32-true"),
        # manual optimisation, and a gradient of a gradient
        ("gan", {}, ["generator", "discriminator"], "32-true"),
        ("gan", {"r1_weight": 1.0}, ["generator", "discriminator"], "bf16-mixed"),
    ],
)
def test_training_is_the_same_to_the_bit(
    stock: str, options: dict[str, Any], modules: list[str], precision: Any
) -> None:
    runs = []
    for callbacks in ([], [GradientCheckpointing(modules)]):
        module, loader = STOCK[stock].build(**options), STOCK[stock].loader(16, 8)
        runs.append(_train(module, loader, callbacks, precision=precision))
    _assert_same(*runs)


def test_any_buffer_is_updated_once_and_seen_as_it_was() -> None:
    loader = STOCK["gan"].loader(16, 8)
    runs = []
    for callbacks in ([], [GradientCheckpointing(["mixer", "frozen"])]):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = Foreign()
        runs.append(_train(module, loader, callbacks, accumulate_grad_batches=2, max_steps=2))
    _assert_same(*runs)
    assert runs[1][0]["mixer.norm.num_batches_tracked"] == 8  # two passes in each of four batches


@pytest.fixture
def process_group() -> Iterator[None]:
    """Lightning leaves its process group, its address and a number of threads behind."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("process_group")
def test_training_under_ddp_is_the_same_to_the_bit() -> None:
    loader, runs = STOCK["classifier"].loader(16, 8), []
    for callbacks in ([], [GradientCheckpointing(["features", "head"])]):
        runs.append(_train(STOCK["classifier"].build(), loader, callbacks, strategy="ddp"))
    _assert_same(*runs)


@contextmanager
def _attached(callback: GradientCheckpointing | None, module: LightningModule) -> Iterator[None]:
    trainer = None
    if callback:
        callback.on_fit_start(trainer, module)
    yield
    if callback:
        callback.teardown(trainer, module, "fit")


@pytest.mark.gpu
def test_dropout_on_the_gpu_is_repeated() -> None:
    gradients = []
    for callback in (None, GradientCheckpointing(["mixer"])):
        torch.manual_seed(0)
        module = Foreign().cuda()
        with _attached(callback, module):
            module.training_step([torch.ones(4, 1, 8, 8, device="cuda")], 0).backward()
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    for plain, repeated in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, repeated)  # another mask would be far off


def _count_saved_bytes(module: LightningModule, batch: Any) -> int:
    """Distinct storages that the graph of one step holds, parameters and the batch aside."""
    tensors = (*module.parameters(), *module.buffers(), *batch)
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = module(batch[0])
    assert logits.requires_grad
    return sum(saved.values())


def test_saved_activations_fall() -> None:
    module, batch = STOCK["classifier"].build(), next(iter(STOCK["classifier"].loader(8, 8)))
    callback = GradientCheckpointing(["features"])
    plain = _count_saved_bytes(module, batch)
    with _attached(callback, module):
        assert _count_saved_bytes(module, batch) < plain / 20
    assert _count_saved_bytes(module, batch) == plain


@pytest.mark.parametrize(("training", "gradients"), [(True, True), (True, False), (False, True)])
def test_it_acts_in_training_with_gradients_only(training: bool, gradients: bool) -> None:
    module = STOCK["classifier"].build().train(training)
    module.head.train()  # what counts is the LightningModule
    calls = []
    with _attached(GradientCheckpointing(["head"]), module), torch.set_grad_enabled(gradients):
        module.head[1].register_forward_hook(lambda *_: calls.append(1))
        logits = module(torch.ones(2, 3, 16, 16))
        if gradients:
            logits.sum().backward()
    assert len(calls) == (2 if training and gradients else 1)


def test_it_is_undone_after_a_fit_and_after_an_error() -> None:
    stock, callback = STOCK["classifier"], GradientCheckpointing(["features"])
    module = stock.build()
    trainer = Trainer(**QUIET, max_steps=1, callbacks=[callback])
    trainer.fit(module, stock.loader())
    assert "forward" not in vars(module.features)
    trainer.validate(module, stock.loader(), verbose=False)

    class Failing(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert "forward" in vars(module.features)
            raise KeyError("step")

    trainer = Trainer(**QUIET, max_steps=1, callbacks=[callback, Failing()])
    with pytest.raises(KeyError, match="step"):
        trainer.fit(module, stock.loader())
    assert "forward" not in vars(module.features)


def test_a_module_that_took_no_part_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = STOCK["classifier"].build()
    module.unused = nn.Linear(1, 1)
    with caplog.at_level(logging.WARNING):
        _train(module, STOCK["classifier"].loader(), [GradientCheckpointing(["head", "unused"])])
    (message,) = caplog.messages
    assert "'unused' was not called in training, so it saved no memory; name mod" in message


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        # no such module
        (
            ["featurs"],
            r"'featurs' matches no submodule of Classifier - .* - the nearest: 'features'",
        ),
        (["head.*.*"], r"'head\.\*\.\*' matches no submodule of Classifier"),
        # without a forward pass
        (["blocks"], r"which has no forward pass .* choose what it holds: 'blocks\.\*'"),
        (["bloc*"], r"'blocks' is a ModuleList"),
        # one inside another
        (["features.0", "features"], r"'features\.0' is inside 'features', .* - choose one"),
        (["head", "head.?"], r"'head\.0' is inside 'head'"),
        # the same module under another name
        (["features", "blocks.0"], r"'blocks\.0' is inside 'features'"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(modules: list[str], message: str) -> None:
    module = STOCK["classifier"].build()
    module.blocks = nn.ModuleList([module.features[0]])
    with pytest.raises(ConfigError, match=message):
        GradientCheckpointing(modules).on_fit_start(None, module)
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)], ids=str)
def test_a_module_that_changes_its_input_in_place_is_named(first: nn.Module) -> None:
    class Changes(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Sequential(first, nn.Linear(4, 1))])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.blocks[0](self.stem(batch)).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[GradientCheckpointing(["blocks.*"])])
    with pytest.raises(ConfigError, match=r"'blocks\.0' changes its input in place.*inplace=False"):
        trainer.fit(Changes(), torch.utils.data.DataLoader(torch.randn(8, 4), 4))


def test_a_compiled_module_updates_its_buffers_once() -> None:
    runs = []
    for callback in (None, GradientCheckpointing(["features"])):
        module = STOCK["classifier"].build()
        with _attached(callback, module):
            compiled = torch.compile(module.features, backend="aot_eager", fullgraph=True)
            compiled(torch.ones(2, 3, 16, 16) + torch.arange(16)).square().sum().backward()
        runs.append([*(p.grad for p in module.features.parameters()), *module.features.buffers()])
    assert all(map(torch.equal, *runs))
