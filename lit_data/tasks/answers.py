"""What modules of all kinds make of a batch, asked in their form and read into ours."""

import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat, format_batch
from lit_data.types import Batch


class AskedModule:
    """A module whose `predict_step` is given our batches: it gets them in its `batch_format`.

    They go through its own ``on_after_batch_transfer``, as under a Trainer. All else is that of the
    module.

    Args:
        model: The module.
        datamodule: Whose format it wants.
    """

    def __init__(self, model: L.LightningModule, datamodule: BaseDataModule) -> None:
        self._model, self._datamodule = model, datamodule

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(self._model, name)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:  # noqa: ANN401 - whatever it returns
        """What the module says of a batch of ours."""
        names = self._datamodule.channel_names
        return Question(self._model, self._datamodule.batch_format, names).ask(batch)


class Question:
    """Calls of `predict_step` of a module with finished batches of ours.

    It takes (batch) or (batch, batch_idx).

    Args:
        model: The module.
        batch_format: See `BaseDataModule`.
        channels: Names of channels that the format may pick.
    """

    def __init__(
        self, model: L.LightningModule, batch_format: BatchFormat, channels: Mapping[str, int]
    ) -> None:
        self._model, self._format, self._channels = model, batch_format, channels
        self._more = (0,) if len(inspect.signature(model.predict_step).parameters) > 1 else ()

    def ask(self, batch: Batch) -> Any:  # noqa: ANN401 - whatever it returns
        """What the module says of a batch on its device.

        Anomalib's modules resize and normalise in their ``forward``; their `predict_step` leaves
        that to callbacks.
        """
        if self._format == "anomalib":
            scores = read_probability(self._model(batch["image"]))
            return (
                scores
                if scores is None
                else interpolate(scores, batch["image"].shape[2:], mode="bilinear")
            )
        formatted = format_batch(batch, self._format, self._channels)
        return self._model.predict_step(
            self._model.on_after_batch_transfer(formatted, 0), *self._more
        )


def read_probability(found: object) -> Tensor | None:
    """The probability of each pixel that a `predict_step` returned.

    Returns:
        [B, 1, H, W] of a dict with ``probability``, an object with ``anomaly_map`` (anomalib), a
        tensor [B, 1, H, W] or [B, H, W]; of a tensor with more channels, all that is not class 0;
        none of anything else.
    """
    if isinstance(found, dict):
        return found["probability"] if isinstance(found.get("probability"), Tensor) else None
    found = getattr(found, "anomaly_map", found)
    if not isinstance(found, Tensor) or found.ndim not in (3, 4):
        return None
    if found.ndim == 3:
        return found[:, None]
    return found if found.shape[1] == 1 else 1 - found[:, :1]


def read_threshold(model: object) -> float:
    """Return the probability from which a pixel counts as found: that of the model, else 0.5."""
    return float(getattr(model, "predict_threshold", 0.5))


def read_kinds(found: object) -> Tensor | None:
    """The probability of each class behind the background that a `predict_step` returned.

    Returns:
        [B, K - 1, H, W] of a dict with ``classes``, or of a tensor with several channels; none of
        anything else.
    """
    if isinstance(found, dict):
        found = found.get("classes")
        return found if isinstance(found, Tensor) and found.ndim == 4 else None
    return (
        found[:, 1:]
        if isinstance(found, Tensor) and found.ndim == 4 and found.shape[1] > 1
        else None
    )


def read_classes(found: Mapping[str, Tensor]) -> Tensor | None:
    """The classes of found objects, from 0: ``classes``, or torchvision's ``labels``, which count the background."""
    return (
        found["classes"]
        if "classes" in found
        else found["labels"] - 1
        if "labels" in found
        else None
    )


@torch.no_grad()
def ask_step(model: L.LightningModule, batch: Batch) -> Any:  # noqa: ANN401 - whatever it returns
    """What `predict_step` says of a finished batch on the host, which is moved to the model; the mode comes back."""
    training = model.training
    model.eval()
    moved = {
        key: value.to(model.device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }
    outputs = model.predict_step(moved, 0)
    model.train(training)
    return outputs
