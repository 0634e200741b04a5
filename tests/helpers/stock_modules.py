"""Three LightningModules as others write them, with data: nothing here knows of lit_data.

``STOCK["classifier"]``, ``STOCK["segmenter"]`` and ``STOCK["gan"]`` build them and their loaders,
always the same ones. A training step of 8 samples takes a few milliseconds on one core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

SIZE = 16
CLASSES = 4
NOISE = 8


class Classifier(LightningModule):
    """Batches (images [B, 3, 16, 16], labels [B]); batch norm, dropout, a torchmetrics metric in
    train and val.

    Args:
        lr: Learning rate of SGD with momentum.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, CLASSES))
        self.train_accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), on_epoch=True, batch_size=len(images))
        self.log("val/accuracy", self.val_accuracy, on_epoch=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Segmenter(LightningModule):
    """Batches {"image" [B, 1, 16, 16], "mask" [B, 1, 16, 16], "name" [B texts]}; dict output, AdamW
    with a schedule.

    Args:
        lr: Learning rate of AdamW.
    """

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.down = nn.ModuleList([_block(1, 8), _block(8, 16)])
        self.bottom = _block(16, 16)
        self.up = nn.ModuleList([_block(32, 8), _block(16, 8)])
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            images = block(images)
            skips.append(images)
            images = F.max_pool2d(images, 2)
        images = self.bottom(images)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            images = block(torch.cat([F.interpolate(images, scale_factor=2.0), skip], 1))
        return self.last(images)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["image"])
        dice = _dice(logits, batch["mask"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"]) + 1 - dice
        self.log_dict({"train/loss": loss, "train/dice": dice}, batch_size=len(logits))
        return {"loss": loss, "logits": logits.detach(), "dice": dice.detach()}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        dice = _dice(self(batch["image"]), batch["mask"])
        self.log("val/dice", dice, batch_size=len(batch["image"]), prog_bar=True)
        return {"dice": dice}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"name": batch["name"], "probability": self(batch["image"]).sigmoid()}

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(LightningModule):
    """Batches [images [B, 1, 16, 16]]; manual optimisation, two optimizers, noise drawn in the
    step.

    Args:
        r1_weight: Weight of the squared gradient of the discriminator at real images; 0 leaves it
            out.
    """

    def __init__(self, r1_weight: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.r1_weight = r1_weight
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 8 * 4 * 4),
            nn.Unflatten(1, (8, 4, 4)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.2),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images = batch[0]
        noise = torch.randn(len(images), NOISE, device=self.device)
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_generator)
        loss = F.softplus(-self.discriminator(self(noise))).mean()
        self._step(for_generator, loss)
        self.untoggle_optimizer(for_generator)
        self.log("train/generator_loss", loss, prog_bar=True)

        self.toggle_optimizer(for_discriminator)
        fake = self.discriminator(self(noise).detach())
        loss = F.softplus(fake).mean() + self._judge_real(images)
        self._step(for_discriminator, loss)
        self.untoggle_optimizer(for_discriminator)
        self.log("train/discriminator_loss", loss, prog_bar=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log(
            "val/realness", self.discriminator(batch[0]).sigmoid().mean(), batch_size=len(batch[0])
        )

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.discriminator(batch[0]).sigmoid()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        networks = (self.generator, self.discriminator)
        return [
            torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.99)) for net in networks
        ], []

    def _judge_real(self, images: Tensor) -> Tensor:
        images = images.detach().requires_grad_(self.r1_weight > 0)
        logits = self.discriminator(images)
        loss = F.softplus(-logits).mean()
        if self.r1_weight:
            (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
            loss = loss + self.r1_weight * slope.square().sum((1, 2, 3)).mean()
        return loss

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class _Named(Dataset[dict[str, Any]]):
    """Samples of a segmentation set, each with its file's name."""

    def __init__(self, images: Tensor, masks: Tensor) -> None:
        self.images, self.masks = images, masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "mask": self.masks[index], "name": f"{index:04d}.png"}


@dataclass(frozen=True, slots=True)
class Stock:
    """A module and the samples it eats.

    Attributes:
        module: Its class.
        samples: Makes a dataset of so many samples.
    """

    module: Callable[..., LightningModule]
    samples: Callable[[int], Dataset[Any]]

    def build(self, *, seed: int = 0, **options: Any) -> LightningModule:
        """The module; the global random state stays as it is."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.module(**options)

    def loader(
        self, samples: int = 16, batch_size: int = 8, *, shuffle: bool = False
    ) -> DataLoader[Any]:
        """A plain DataLoader in this process; its order has a seed of its own."""
        order = torch.Generator().manual_seed(1)
        return DataLoader(self.samples(samples), batch_size, shuffle=shuffle, generator=order)


def _make_labelled(samples: int) -> TensorDataset:
    labels = torch.arange(samples) % CLASSES
    return TensorDataset(_draw(samples, 3) + labels.reshape(-1, 1, 1, 1) / CLASSES, labels)


def _make_masked(samples: int) -> _Named:
    images = _draw(samples, 1)
    return _Named(images, (F.avg_pool2d(images, 3, 1, 1) > 0.5).float())


def _make_unlabelled(samples: int) -> TensorDataset:
    return TensorDataset(_draw(samples, 1) * 2 - 1)


def _draw(samples: int, channels: int) -> Tensor:
    return torch.rand(samples, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _dice(logits: Tensor, masks: Tensor) -> Tensor:
    found = logits.sigmoid()
    return (2 * (found * masks).sum() + 1) / (found.sum() + masks.sum() + 1)


STOCK = {
    "classifier": Stock(Classifier, _make_labelled),
    "segmenter": Stock(Segmenter, _make_masked),
    "gan": Stock(Gan, _make_unlabelled),
}
