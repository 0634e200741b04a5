"""A classifier with names of its own."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Classifier(L.LightningModule):
    """Two convolutions and a mean."""

    def __init__(self, classes: int, width: int = 8, lr: float = 0.03) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *(
                nn.Conv2d(3, width, 3, stride=2),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, stride=2),
                nn.ReLU(),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("hits", self._count_hits(batch), batch_size=len(batch["label"]))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_hits", self._count_hits(batch), batch_size=len(batch["label"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["image"]).softmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)

    def _count_hits(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(batch["image"]).argmax(1) == batch["label"]).float().mean()
