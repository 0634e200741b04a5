"""A LightningModule that generates images, and data for it, without a line of a GAN."""

from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset[dict[str, Tensor]]):
    """Images [C, 8, 8] of one brightness and a little noise."""

    def __init__(self, count: int, brightness: float = 0.8, channels: int = 3) -> None:
        generator = torch.Generator().manual_seed(count)
        noise = 0.1 * torch.rand(count, channels, 8, 8, generator=generator)
        self.images = (brightness + noise).clamp(0, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index]}


class Painter(LightningModule):
    """Learns the brightness of images by manual optimisation; draws from torch's own generator in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.brightness = nn.Parameter(torch.zeros(()))
        self.calls = []
        self.drawn = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = (batch["image"].mean() - self.brightness + 0.01 * torch.randn(())).square()
        self.drawn.append(float(loss.detach()))
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
        self.calls.append((count, seed, batch_size))
        torch.manual_seed(seed)
        return (self.brightness + 0.1 * torch.rand(count, 3, 8, 8)).clamp(0, 1)


class Sculptor(Painter):
    """Its objects are as bright as their azimuth."""

    def sweep_views(self, count: int, poses: Tensor, seed: int) -> Tensor:
        return poses[:, 0].view(1, -1, 1, 1, 1).expand(count, -1, 3, 8, 8)


class Album(LightningDataModule):
    """Photos for all stages; `poses` says from where."""

    def __init__(self, poses: Tensor | None = None, **brightness: float) -> None:
        super().__init__()
        self.poses, self.brightness = poses, brightness

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Photos(24), 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Photos(10, self.brightness.get("val", 0.8)), 4)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Photos(9, self.brightness.get("test", 0.8)), 4)
