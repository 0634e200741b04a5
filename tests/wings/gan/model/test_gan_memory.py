"""`GANModule` when memory runs out, and after an interruption."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_data.callbacks import AdaptiveBatchSize
from lit_data.callbacks.wrapping import wrap
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET
from lit_data.wings.gan import ConvDiscriminator, ConvGenerator, GANDataModule, GANModule
from tests.helpers.limited_memory import out_of_memory

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`.*"
    ),
]

SIDE, FITTING = 8, 4
FIRST = 11
HALVES = ("fakes", "discriminator", "generator", "backward")


def _module(**options: Any) -> GANModule:
    torch.manual_seed(0)
    generator = ConvGenerator(image_px=SIDE, latent_size=6, width=4, style_size=8)
    discriminator = ConvDiscriminator(image_px=SIDE, width=4)
    defaults = {"image_px": SIDE, "latent_size": 6, "ema_decay": 0.0}
    return GANModule(generator, discriminator, **(defaults | options))


def _loader(*sizes: int) -> DataLoader[Any]:
    images = torch.rand(sum(sizes), 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    parts = zip(images.split(list(sizes)), torch.arange(sum(sizes)).split(list(sizes)), strict=True)  # type: ignore[no-untyped-call]
    batches = [{"image": some, "index": index} for some, index in parts]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _fail(module: GANModule, half: str) -> list[int]:
    """Let memory run out once more than some samples go through a net, in one half of the step; sizes that failed."""
    refused = []

    def check(count: int) -> None:
        if count > FITTING:
            refused.append(count)
            raise out_of_memory()

    def generate(call: Callable[..., Tensor], latents: Tensor, conditions: Any) -> Tensor:
        grad = torch.is_grad_enabled()
        if half == ("generator" if grad else "fakes"):
            check(len(latents))
        images = call(latents, conditions)
        if grad and half == "backward":
            images.register_hook(lambda gradient: check(len(gradient)))
        return images

    def judge(call: Callable[..., Tensor], images: Tensor, conditions: Any) -> Tensor:
        if half == "discriminator" and next(module.discriminator.parameters()).requires_grad:
            check(len(images))
        return call(images, conditions)

    wrap(module.generator, "forward", generate)
    wrap(module.discriminator, "forward", judge)
    return refused


def _assert_equal(one: nn.Module, two: nn.Module) -> None:
    for (name, value), other in zip(
        one.state_dict().items(), two.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name


def _cut_from(module: GANModule, half: str) -> GANModule:
    """Let a module use from a half of its step on the size that fits."""
    learner = "_teach_generator" if half in ("generator", "backward") else "_teach_discriminator"

    def add_gradients(call: Any, optimizer: Any, learn: Any, batch: Batch) -> Any:
        if learn.__name__ == learner:
            module.micro_batch_size = FITTING
        return call(optimizer, learn, batch)

    wrap(module, "add_gradients", add_gradients)
    return module


@pytest.mark.parametrize("half", HALVES)
def test_a_step_that_ran_out_of_memory_is_that_of_micro_batches(half: str) -> None:
    failing, plain = _module(r1_every=1), _cut_from(_module(r1_every=1), half)
    refused = _fail(failing, half)
    adaptive = AdaptiveBatchSize(min_size=1)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[adaptive])
    trainer.fit(failing, _loader(8, 8))
    Trainer(**QUIET, max_epochs=1).fit(plain, _loader(8, 8))
    assert refused == [8]
    _assert_equal(failing, plain)
    assert trainer.global_step == 2 * 2, "each optimizer steps once for each batch"
    assert all(parameter.requires_grad for parameter in failing.discriminator.parameters())
    assert adaptive.summary() == {"batch/ooms": 1, "batch/size": FITTING}


class Record(Callback):
    """Weights and logged values after each batch; a checkpoint after some."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        logged = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        self.found.append({**{k: v.clone() for k, v in pl_module.state_dict().items()}, **logged})
        if self.path is not None and len(self.found) == FIRST:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_takes_the_same_steps_to_the_bit(tmp_path: Path) -> None:
    """The checkpoint is from the middle of an epoch, which has four batches, and between two penalties."""
    drawn = {"count": 8, "size_px": [16, 16], "tiles": 2, "seed": 0}
    options = LoaderOptions(batch_size=6, micro_batch_size=6, num_workers=0, seed=3)
    make_data = partial(GANDataModule, image_px=SIDE, samples=drawn, loader=options)
    make_data = partial(make_data, splits={"train": 0.75, "val": 0.25}, cache_dir=str(tmp_path))
    make = partial(_module, micro_batch_size=4, r1_every=4, ema_decay=0.9)
    make = partial(make, schedule="cosine", gradient_clip_norm=1.0)
    limits = {**QUIET, "max_epochs": 8, "limit_val_batches": 0}
    path = tmp_path / "middle.ckpt"
    whole, resumed = Record(path), Record()
    Trainer(**limits, callbacks=[whole]).fit(make(), datamodule=make_data())
    Trainer(**limits, callbacks=[resumed]).fit(
        make(), datamodule=make_data(), ckpt_path=path, weights_only=False
    )
    assert len(whole.found) == FIRST + len(resumed.found) == FIRST + 21
    for one, two in zip(whole.found[FIRST:], resumed.found, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert torch.equal(value, two[name]), name
    assert not torch.equal(whole.found[-1]["last_r1"], whole.found[FIRST]["last_r1"])
