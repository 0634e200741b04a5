"""`GANModule`: a step is the same however it is cut, what memory it takes, and what it leaves behind."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from benchmarks.gan_steps import find_penalty, step_originally
from lit_data.callbacks import AMP
from lit_data.callbacks.wrapping import wrap
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.schedule import learning_rate_factor
from lit_data.predict.memory_limit import measure_peak_bytes
from lit_data.testing import QUIET
from lit_data.wings.gan import ConvDiscriminator, ConvGenerator, GANModule, RayGenerator, RayPatches
from lit_data.wings.gan.model.conditions import Use
from tests.models.runs import assert_plain_checkpoint, load_batches

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`.*"
    ),
]

SIDE, BATCH = 8, 8


def _batches(count: int, *, size: int = BATCH, side: int = SIDE) -> list[Batch]:
    images = torch.rand(count * size, 3, side, side, generator=torch.Generator().manual_seed(0))
    index = torch.arange(count * size)
    poses = torch.stack((index / 9, index / 20), dim=1)
    whole = {"image": images, "index": index, "label": index % 3, "pose": poses}
    parts = [slice(n * size, (n + 1) * size) for n in range(count)]
    return [{key: value[part] for key, value in whole.items()} for part in parts]


def _module(**options: Any) -> GANModule:
    torch.manual_seed(0)
    sizes = {"image_px": SIDE, "num_labels": 3, "posed": True, "width": 4}
    generator = options.pop("generator", None)
    generator = generator or ConvGenerator(**sizes, latent_size=6, style_size=8)  # type: ignore[arg-type]
    defaults = {"image_px": SIDE, "latent_size": 6, "num_labels": 3, "r1_every": 2}
    return GANModule(generator, ConvDiscriminator(**sizes), **(defaults | options))  # type: ignore[arg-type]


def _rays(**options: Any) -> GANModule:
    torch.manual_seed(0)
    generator = RayGenerator(
        image_px=SIDE, latent_size=6, plane_px=4, features=4, width=4, hidden=8, points=4
    )
    discriminator = ConvDiscriminator(image_px=4, width=4, posed=True, placed=True)
    defaults = {"image_px": SIDE, "latent_size": 6, "r1_every": 2, "patches": RayPatches(4)}
    return GANModule(generator, discriminator, **(defaults | options))  # type: ignore[arg-type]


def _fit(
    module: L.LightningModule, batches: list[Batch], *callbacks: L.Callback, **options: Any
) -> L.Trainer:
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": list(callbacks), **options})
    trainer.fit(module, load_batches(*batches))
    return trainer


def _assert_close(one: nn.Module, two: nn.Module, atol: float) -> None:
    for (name, value), other in zip(
        one.state_dict().items(), two.state_dict().values(), strict=True
    ):
        assert_close(value, other, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


class KeepGradients(L.Callback):
    """Gradients of all parameters before each step of an optimizer."""

    def __init__(self) -> None:
        self.found = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters()}
        self.found.append({name: g if g is None else g.clone() for name, g in gradients.items()})


@pytest.mark.parametrize(("make", "loss"), [(_module, "non_saturating"), (_rays, "hinge")])
def test_parts_of_a_batch_give_its_step(make: Any, loss: str) -> None:
    whole, parts = make(loss=loss), make(loss=loss, micro_batch_size=3, r1_micro_batch_size=1)
    logged = [
        _fit(module, _batches(3), precision="64-true").callback_metrics for module in (whole, parts)
    ]
    _assert_close(whole, parts, 1e-9)
    names = ("generator_loss", "discriminator_loss", "r1", "real_score", "fake_score")
    assert set(logged[0]) == {f"train/{name}" for name in names}
    for name, value in logged[0].items():
        assert_close(value, logged[1][name], rtol=0, atol=1e-9)


def _step_carefully(module: GANModule, batch: Batch) -> None:
    """Make a step as tutorials of today have it."""
    optimizers: Any = module.optimizers()
    generator_optimizer, discriminator_optimizer = optimizers
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.DISCRIMINATOR)
    with torch.no_grad():
        fakes = module.generator(part.latents, part.conditions)
    real = part.read_real().requires_grad_()
    real_scores = module.discriminator(real, part.conditions)
    loss = module.losses.real(real_scores).mean()
    loss = loss + module.losses.fake(module.discriminator(fakes, part.conditions)).mean()
    discriminator_optimizer.zero_grad()
    module.manual_backward(loss + find_penalty(module, real, real_scores))
    discriminator_optimizer.step()
    (part,) = module.draws.cut(batch, None, epoch=module.current_epoch, use=Use.GENERATOR)
    fakes = module.generator(part.latents, part.conditions)
    loss = module.losses.generator(module.discriminator(fakes, part.conditions)).mean()
    generator_optimizer.zero_grad()
    module.manual_backward(loss)
    generator_optimizer.step()
    module.follow_generator(module.batches_done)


@pytest.mark.parametrize(
    ("make", "step"),
    [(_module, step_originally), (_module, _step_carefully), (_rays, _step_carefully)],
)
def test_a_step_is_that_of_others(make: Any, step: Any) -> None:
    ours, theirs = make(), make()
    wrap(theirs, "training_step", lambda _, batch, batch_idx: step(theirs, batch))
    for module in (ours, theirs):
        _fit(module, _batches(3), precision="64-true")
    for name in ("generator", "discriminator", "ema_generator"):
        _assert_close(getattr(ours, name), getattr(theirs, name), 1e-9)


def test_each_half_leaves_the_other_net_alone() -> None:
    keep, calls = KeepGradients(), list[bool]()
    module = _module(r1_weight=0.0)
    module.generator.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    _fit(module, _batches(1), keep)
    assert calls == [False, True], "one batch of fakes without a graph, one with"
    for found, own in zip(keep.found, ("discriminator.", "generator."), strict=True):
        names = {name for name, gradient in found.items() if gradient is not None}
        assert names == {name for name, _ in module.named_parameters() if name.startswith(own)}
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.discriminator.parameters())


def _sgd(lr: float) -> dict[str, Any]:
    make = partial(torch.optim.SGD, lr=lr)
    return {"generator_optimizer": make, "discriminator_optimizer": make}


def _flatten(gradients: dict[str, Tensor | None], net: str) -> Tensor:
    parts = [g.flatten() for name, g in gradients.items() if name.startswith(net) and g is not None]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("make", "options", "callbacks"),
    [
        (_module, {"precision": "bf16-mixed"}, []),
        (_rays, {}, [partial(AMP, "bf16")]),
        (_module, {}, [partial(AMP, "fp16", init_scale=1024.0)]),
        (_rays, {}, [partial(AMP, "fp16", init_scale=1024.0)]),
    ],
    ids=["trainer-bf16", "amp-bf16", "amp-fp16", "rays-fp16"],
)
def test_mixed_precision_finds_the_gradients_of_float32(
    make: Any, options: Any, callbacks: Any
) -> None:
    exact, mixed = KeepGradients(), KeepGradients()
    penalty = _fit(make(**_sgd(1e-4)), _batches(1), exact).callback_metrics["train/r1"]
    made = [callback() for callback in callbacks]
    trainer = _fit(make(**_sgd(1e-4)), _batches(1), mixed, *made, **options)
    assert trainer.callback_metrics["train/r1"] == penalty, "it is float32 under autocast too"
    assert trainer.callback_metrics["train/generator_loss"].dtype == torch.float32
    for one, two, net in zip(
        exact.found, mixed.found, ("discriminator.", "generator."), strict=True
    ):
        wanted, found = _flatten(one, net), _flatten(two, net)
        # The gradients of an untrained field nearly cancel out, which leaves few of bfloat16's 8
        # bits.
        assert float((found - wanted).norm() / wanted.norm()) < (0.5 if make is _rays else 0.05)


@pytest.mark.parametrize("callbacks", [[], [partial(AMP, "fp16", init_scale=1024.0)]])
def test_gradients_are_clipped_without_the_loss_scale(callbacks: Any) -> None:
    module = _module(gradient_clip_norm=1e-3, **_sgd(1.0))
    before = [weight.detach().clone() for weight in module.discriminator.parameters()]
    _fit(module, _batches(1), *(callback() for callback in callbacks))
    pairs = zip(before, module.discriminator.parameters(), strict=True)
    moved = torch.cat([(one - two).detach().flatten() for one, two in pairs])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_memory_does_not_grow_with_the_batch_but_with_its_parts() -> None:
    peaks = {}

    def measure(size: int | None, call: Any, *args: Any) -> None:
        peaks[size] = measure_peak_bytes(lambda: call(*args))

    for size in (None, 8):
        module = _module(micro_batch_size=size)
        wrap(module, "training_step", partial(measure, size))
        _fit(module, _batches(1, size=64))
    assert peaks[8] < 0.3 * peaks[None]


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 16}])
def test_both_learning_rates_follow_the_schedule(limit: dict[str, int]) -> None:
    rates = []
    note = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: rates.append(
            [o.param_groups[0]["lr"] for o in trainer.optimizers]
        )
    )
    _fit(_module(schedule="cosine", micro_batch_size=4), _batches(4), note, **limit)
    wanted = [1e-3 * learning_rate_factor("cosine", (step + 0.5) / 8) for step in range(8)]
    assert [first for first, _ in rates] == pytest.approx(wanted, rel=1e-5)
    assert [first for first, _ in rates] == [second for _, second in rates]


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    plain = {"image_px": SIDE, "channels": 3, "latent_size": 6, "num_labels": 3}
    plain |= {"seed": 4, "loss": "hinge", "r1_weight": 2.0, "r1_every": 3, "ema_decay": 0.9}
    plain |= {"micro_batch_size": 5, "r1_micro_batch_size": 2}
    plain |= {"schedule": "cosine", "gradient_clip_norm": 2.0}
    module, other, path = _module(**plain), _module(), tmp_path / "a.ckpt"
    trainer = _fit(module, _batches(1))
    assert_plain_checkpoint(module, other, trainer, path, plain)
    nets = {"generator": other.generator, "discriminator": other.discriminator}
    loaded = GANModule.load_from_checkpoint(path, weights_only=True, **nets)
    poses = torch.zeros(2, 2)
    assert torch.equal(loaded.sample_images(2, poses=poses), module.sample_images(2, poses=poses))
    loader = load_batches(*_batches(2))
    assert trainer.validate(other, loader, verbose=False)[0].keys() == {"val/real_score"}
    assert trainer.test(other, loader, verbose=False)[0].keys() == {"test/real_score"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "wasserstein"}, "'wasserstein' is unknown: choose one of non_saturating, hinge"),
        ({"schedule": "linear"}, "schedule='linear' is unknown"),
        ({"r1_every": 0}, "r1_weight=1.0, r1_every=0: need 0 or more, and 1 or more"),
        ({"gradient_clip_norm": 0.0}, "gradient_clip_norm=0.0: need a number above 0, or none"),
        ({"micro_batch_size": 0}, "micro_batch_size=0, r1_micro_batch_size=None: need 1 or more"),
        ({"ema_decay": 1.0}, "ema_decay=1.0: need 0 or more, below 1"),
        ({"seed": -1}, "seed=-1 is not usable"),
        ({"latent_size": 5}, "latent_size=6 of ConvGenerator: the module has 5 - set it to that"),
        ({"num_labels": 4}, "num_labels=3 of ConvGenerator: the module has 4 - set it to that"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _module(**options)


@pytest.mark.parametrize("missing", ["index", "pose"])
def test_a_batch_without_what_is_needed(missing: str) -> None:
    batch = {key: value for key, value in _batches(1)[0].items() if key != missing}
    with pytest.raises(ConfigError, match=f"the batch has no '{missing}' but image, "):
        _fit(_module(), [batch])


class Data(L.LightningDataModule):
    """Says what its images are, as ours do."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        for name, value in facts.items():
            setattr(self, name, value)

    def train_dataloader(self) -> Any:
        return load_batches(*_batches(1))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"image_px": (8, 16)}, r"image_px=\(8, 8\) of ConvGenerator: the data have \(8, 16\)"),
        (
            {"poses": None},
            r"depend on the pose, but the data have no views: set data.views=folders",
        ),
        ({"channels": 1}, "channels=3 of ConvGenerator: the data have 1 - set it to that"),
        (
            {"num_labels": 5},
            "num_labels=3: the data have 5 - set model.num_labels to that, or to 0",
        ),
    ],
)
def test_data_that_do_not_fit_the_nets(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        L.Trainer(**QUIET, max_epochs=1).fit(_module(), datamodule=Data(**facts))
