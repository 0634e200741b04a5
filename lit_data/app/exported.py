"""Exported files as models of ``test`` and ``validate``: what is deployed is what is scored."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor

from lit_data.core.errors import ConfigError, StoreError, show_path
from lit_data.core.machine import available_memory_bytes
from lit_data.models.scored import ScoredModule

if TYPE_CHECKING:
    from lit_inspect import Inspector
    from lit_inspect.board import Board

_PATIENT_SECONDS = 600.0
_MEMORY_FRACTION = 0.8


def read_exported(path: Path) -> "Board":
    """Return the parts of an exported file.

    Raises:
        StoreError: It is damaged, or no such file.
    """
    from lit_inspect import InspectError
    from lit_inspect.board import read_board

    try:
        return read_board(path)
    except InspectError as error:
        raise StoreError(str(error)) from error


def open_exported(
    path: Path, threads: int | None = None, *, is_patient: bool = False
) -> "Inspector":
    """Return an exported file, ready to answer.

    Args:
        path: The file.
        threads: That its graph computes with; None: one for each core of this process.
        is_patient: True where it may take minutes, and most of the memory that is free.

    Raises:
        StoreError: It is damaged, or gives other answers on this machine.
    """
    from lit_inspect import InspectError, Inspector, Limits

    limits = Limits()
    if is_patient:
        memory_bytes = max(limits.memory_bytes, int(_MEMORY_FRACTION * available_memory_bytes()))
        limits = Limits(seconds=_PATIENT_SECONDS, memory_bytes=memory_bytes)
    try:
        return Inspector(path, threads=threads, limits=limits)
    except InspectError as error:
        raise StoreError(str(error)) from error


def use_exported(model: LightningModule, graph: "Graph") -> None:
    """Let a module answer by the graph and the thresholds of an exported file.

    Args:
        model: Of the kind that was exported; its weights are not used.
        graph: Of the file.

    Raises:
        ConfigError: The module is scored by more than the file answers.
    """
    task = graph.inspector.settings.task
    has_hook = type(model).on_after_batch_transfer is not LightningModule.on_after_batch_transfer
    if not isinstance(model, ScoredModule) or model.exported_as != task or has_hook:
        raise ConfigError(
            f"{graph.path} holds {task}, which cannot be scored as a {type(model).__name__}: "
            "choose the experiment it was exported from, or test the checkpoint"
        )

    def forward(images: Tensor) -> Any:  # noqa: ANN401 - as the module gives it
        return model.invert(graph(images), images)

    # An attribute of the object goes before the method of its class.
    vars(model)["forward"] = forward
    for name, value in graph.thresholds.items():
        threshold = getattr(model, name, None)
        if isinstance(threshold, Tensor):
            threshold.fill_(value)


class Graph:
    """The graph of an exported file, for batches as a module gets them.

    Args:
        path: The file.

    Raises:
        StoreError: The file is damaged, or gives other answers on this machine.
    """

    def __init__(self, path: Path) -> None:
        self.inspector = open_exported(path, threads=torch.get_num_threads(), is_patient=True)
        settings = self.inspector.settings
        self.path = path
        self._stored = _find_stored(settings.expand, settings.channels)
        limit = settings.image_threshold
        self.thresholds = {
            "predict_threshold": settings.threshold,
            "image_threshold": -1.0 if limit is None else limit,
            "image_threshold_fraction": settings.top_fraction,
        }

    def __call__(self, images: Tensor) -> Tensor:
        """Return the answers for images [B, C, h, w] in 0..1, on their device.

        Raises:
            ConfigError: The graph takes images of another size alone.
            StoreError: It gives no answer, or one that is NaN, infinite or outside of 0..1.
        """
        from lit_inspect import InspectError

        sides = zip(self.inspector.input_shape[2:], images.shape[2:], strict=True)
        if any(isinstance(allowed, int) and allowed != side for allowed, side in sides):
            raise ConfigError(
                f"{self.path} takes only images of {list(self.inspector.input_shape[2:])} px, "
                f"but samples have {list(images.shape[2:])}: test the checkpoint, or export with "
                f"predict.tile_px={list(images.shape[2:])}"
            )
        try:
            answers = self.inspector.run(self.to_stored(images).float().cpu().numpy())
        except InspectError as error:
            raise StoreError(f"{show_path(self.path)}: {error}") from error
        return torch.from_numpy(answers).to(images.device)

    def to_stored(self, images: Tensor) -> Tensor:
        """Return the channels as they are stored, of those that a module gets."""
        return images[:, self._stored] if self._stored else images


def _find_stored(expand: Sequence[int] | None, channels: int) -> list[int]:
    """Return where a module gets each stored channel; empty if it gets them as they are.

    Args:
        expand: For each channel that a module gets the stored one.
        channels: Stored channels; those that a module does not get may be anything.
    """
    if expand is None or list(expand) == list(range(channels)):
        return []
    return [expand.index(channel) if channel in expand else 0 for channel in range(channels)]
