"""Ask modules of all kinds for predictions in their batch format, and read their answers."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lit_data.core.batch_form import walk_tensors
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat, format_batch
from lit_data.models.image_ranks import NO_THRESHOLD

_SLACK = 1e-3  # of sums of weights and of half precision


class AskedModule:
    """Wraps a module, so that its `predict_step` gets our batches in the format it expects.

    Batches go through the module's own ``on_after_batch_transfer``, as under a Trainer. All other
    attributes are those of the module.

    Args:
        model: The module.
        datamodule: Its `batch_format` is the format of the batches.
    """

    def __init__(self, model: LightningModule, datamodule: BaseDataModule) -> None:
        self._model = model
        self._datamodule = datamodule

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        return getattr(self._model, name)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:  # noqa: ANN401 - whatever it returns
        """Return the module's prediction for one of our batches."""
        names = self._datamodule.channel_names
        return Question(self._model, self._datamodule.batch_format, names).ask(batch)


class Question:
    """Calls the `predict_step` of a module with our finished batches.

    `predict_step` takes (batch) or (batch, batch_idx).

    Args:
        model: The module.
        batch_format: See `BaseDataModule`.
        channels: Names of channels that the format may pick.
    """

    def __init__(
        self, model: LightningModule, batch_format: BatchFormat, channels: Mapping[str, int]
    ) -> None:
        self._model = model
        self._format = batch_format
        self._channels = channels
        takes_index = len(inspect.signature(model.predict_step).parameters) > 1
        self._index_argument = (0,) if takes_index else ()

    def ask(self, batch: Batch) -> Any:  # noqa: ANN401 - whatever it returns
        """Return the prediction of the module for a batch on its device.

        Anomalib's modules resize and normalize in their ``forward``; their `predict_step` leaves
        that to callbacks.
        """
        if self._format == "anomalib":
            scores = read_probability(self._model(batch["image"]))
            if scores is None:
                return None
            return interpolate(scores, batch["image"].shape[2:], mode="bilinear")
        formatted = format_batch(batch, self._format, self._channels)
        # No Trainer runs here, so the module's own hook is called by hand.
        transferred = self._model.on_after_batch_transfer(formatted, 0)
        return self._model.predict_step(transferred, *self._index_argument)


def read_probability(outputs: object) -> Tensor | None:
    """Return the probability of each pixel from the outputs of a `predict_step`.

    Returns:
        [B, 1, H, W], read from a dict with ``probability``, an object with ``anomaly_map``
        (anomalib), or a tensor [B, 1, H, W] or [B, H, W]. A tensor with more channels gives the
        probability of all classes but 0. None for anything else.
    """
    if isinstance(outputs, dict):
        probability = outputs.get("probability")
        return probability if isinstance(probability, Tensor) else None
    outputs = getattr(outputs, "anomaly_map", outputs)
    if not isinstance(outputs, Tensor) or outputs.ndim not in (3, 4):
        return None
    if outputs.ndim == 3:
        return outputs[:, None]
    if outputs.shape[1] == 1:
        return outputs
    return 1 - outputs[:, :1]  # channel 0 is the background


def read_threshold(model: object) -> float:
    """Return the lowest probability of a marked pixel: the model's threshold, or 0.5 without one."""
    return float(getattr(model, "predict_threshold", 0.5))


def read_image_threshold(model: object) -> float | None:
    """Return the image threshold that validation chose; None if it chose none."""
    chosen = float(getattr(model, "image_threshold", NO_THRESHOLD))
    return None if chosen == NO_THRESHOLD else chosen


def read_kinds(outputs: object) -> Tensor | None:
    """Return the probability of each class, without the background, from the outputs of a `predict_step`.

    Returns:
        [B, K - 1, H, W], read from a dict with ``classes`` or a tensor with several channels; None
        for anything else.
    """
    if isinstance(outputs, dict):
        classes = outputs.get("classes")
        is_map = isinstance(classes, Tensor) and classes.ndim == 4
        return classes if is_map else None
    if not isinstance(outputs, Tensor) or outputs.ndim != 4 or outputs.shape[1] < 2:
        return None
    return outputs[:, 1:]


def read_classes(objects: Mapping[str, Tensor]) -> Tensor | None:
    """Return the classes of detected objects, from 0, or None if the model names none."""
    if "classes" in objects:
        return objects["classes"]
    if "labels" in objects:
        return objects["labels"] - 1  # torchvision counts the background as 0
    return None


@torch.no_grad()
def ask_step(model: LightningModule, batch: Batch) -> Any:  # noqa: ANN401 - whatever it returns
    """Move a finished batch from the host to the model's device, and return the prediction.

    The model predicts in evaluation mode, and then returns to its previous mode.
    """
    was_training = model.training
    model.eval()
    device_batch: Batch = {}
    for key, value in batch.items():
        device_batch[key] = value.to(model.device) if isinstance(value, Tensor) else value
    outputs = model.predict_step(device_batch, 0)
    model.train(was_training)
    return outputs


def check_probabilities(values: Tensor) -> None:
    """Refuse outputs of a model that are not probabilities, because verdicts cannot rest on them.

    Raises:
        ConfigError: They contain NaN, or values outside of 0..1.
    """
    if not values.numel():
        return
    least, largest = (float(value) for value in values.float().aminmax())
    if math.isnan(least):
        raise ConfigError(
            "predict_step returned NaN: the model overflows on this image. Set "
            "trainer.precision=32-true if it is lower, or use the checkpoint of an earlier epoch"
        )
    if not (least >= -_SLACK and largest <= 1 + _SLACK):
        raise ConfigError(
            f"probability goes from {least:.4g} to {largest:.4g}: predict_step must return "
            "values in 0..1, so apply sigmoid to logits first"
        )


@contextmanager
def refusing_nan(model: LightningModule) -> Iterator[None]:
    """Refuse a model that returned NaN while it was scored: NaN would count as below the threshold.

    Raises:
        ConfigError: The model returned NaN.
    """
    is_nan = torch.zeros((), dtype=torch.bool)

    def look(_module: nn.Module, _images: object, answers: object) -> None:
        nonlocal is_nan
        for answer in walk_tensors(answers):
            if answer.is_floating_point():
                # On the device, which nothing waits for.
                is_nan = is_nan.to(answer.device) | answer.isnan().any()

    parts = [part for part in (model, getattr(model, "net", None)) if isinstance(part, nn.Module)]
    handles = [part.register_forward_hook(look) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if is_nan:
        raise ConfigError(
            "the net returns NaN, so its scores are meaningless: set trainer.precision=32-true "
            "if it is lower, or use the checkpoint of an earlier epoch"
        )
