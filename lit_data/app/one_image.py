"""`ImagePredictor`: verdicts of single images by the model of a run, in memory."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lit_data.app.configuration.names import allow_packages
from lit_data.app.predict import prepare_export
from lit_data.app.rerun import read_config
from lit_data.app.trained import take_trained, warn_of_other_data
from lit_data.core.errors import ConfigError, DataError, LitDataError
from lit_data.core.temp import scratch_folder
from lit_data.datamodules.base import BaseDataModule
from lit_data.datasets.references import rule_of
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource
from lit_data.predict.net_facts import list_settings
from lit_inspect.counts import counted
from lit_inspect.errors import InspectError
from lit_inspect.rows import ArrayRows

if TYPE_CHECKING:
    from lit_inspect import Inspector, Verdict

Floats = NDArray[np.float32]
Image = NDArray[Any] | str | os.PathLike[str]

_AS_THEY_ARE: dict[str, Any] = {
    "patterns": ["**/*"],
    "exclude": [],
    "masks": None,
    "label_format": "none",
    "annotations": None,
    "boxes_from": "labels",
}
"""Options that look for more than images in a folder."""


class _Ready(NamedTuple):
    inspector: "Inspector"
    decoder: Decoder


class ImagePredictor:
    """The model of a run, which the first image loads.

    Args:
        run: The run folder.
        checkpoint: The file of the weights.
        packages: Packages whose classes the configuration may name.
    """

    def __init__(self, run: Path, checkpoint: Path, packages: Sequence[str] = ()) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._packages = packages
        self._ready: _Ready | None = None

    def __call__(self, *images: Image) -> "Verdict":
        """Return the verdict of one image; for arguments and errors see `Run.predict_image`."""
        _check_types(images)
        ready = self._ready or self._open(images)
        try:
            rows = _read(ready, images)
            if rows.pixels.dtype.name != ready.inspector.settings.dtype and self._ready:
                ready = self._open(images)  # whose range of values is another one
            verdict = ready.inspector.inspect(rows)
        except InspectError as error:
            raise DataError(f"predict_image: {error}") from error
        self._ready = ready
        return verdict

    def _open(self, images: Sequence[Image]) -> _Ready:
        """Load the model, and find out from the first image how all of its kind become its input."""
        from lit_inspect import Inspector
        from lit_inspect.settings import read_settings

        cfg = read_config(self._run)
        with allow_packages(self._packages), scratch_folder() as folder:
            record = take_trained(cfg, self._checkpoint)
            names = _lay_out(cfg, images, folder)
            try:
                task, request = prepare_export(cfg, {}, self._checkpoint, record)
                _check_channels(task.datamodule, record)
                bank = getattr(task.datamodule, "bank", None)
                warn_of_other_data(record, cfg.data.root, bank)
                facts = task.export(request)
            except LitDataError as error:
                text = str(error)
                for path, name in names.items():
                    text = text.replace(str(path), name)
                raise type(error)(f"predict_image: {text}") from error
            manifest = list_settings(facts, facts.options)
            settings = read_settings({**manifest, "golden": 0, "versions": {}})
        device = _find_device(cfg)
        request.model.to(device)  # by itself, so that Lightning's modules learn their device
        decoder = facts.source.decoder
        if not isinstance(decoder, ImageDecoder):  # one that scales, as the inspector does
            decoder = ImageDecoder(facts.source.read)
        return _Ready(Inspector.of(settings, _TorchNet(facts.net.to(device), device)), decoder)


def _check_types(images: Sequence[Image]) -> None:
    """Refuse what is neither path nor array, and an image of both.

    Raises:
        ConfigError: It is.
    """
    for image in images:
        if not isinstance(image, np.ndarray | str | os.PathLike):
            raise ConfigError(
                f"predict_image: a {type(image).__name__} is not an image: give a path or a "
                "NumPy array, such as numpy.asarray(image)"
            )
    if len({isinstance(image, np.ndarray) for image in images}) > 1:
        raise ConfigError(
            "predict_image: an image of files and arrays: give only files or only arrays"
        )


def _read(ready: _Ready, images: Sequence[Image]) -> ArrayRows:
    """Return the pixels of an image as they are read, before any scaling."""
    arrays = [image for image in images if isinstance(image, np.ndarray)]
    if arrays:
        taken = ready.inspector.take(*arrays)
        return ArrayRows(taken.read(0, taken.shape[1]))
    # As `predict` reads them, which knows more kinds of files than the runtime.
    paths = [os.fspath(image) for image in images if not isinstance(image, np.ndarray)]
    return ArrayRows(ready.decoder(ImageSource(tuple(paths))).array)


def _find_device(cfg: DictConfig) -> torch.device:
    is_told = OmegaConf.select(cfg, "trainer.accelerator") == "cpu"
    device = None if is_told else torch.accelerator.current_accelerator(check_available=True)
    return device or torch.device("cpu")


class _TorchNet:
    """A net of torch in the place of one of onnxruntime."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self._net = net
        self._device = device

    @property
    def input_shape(self) -> list[int | str]:
        return ["batch", "channels", "height", "width"]

    def run(self, images: Floats) -> Floats:
        with torch.inference_mode():
            answers: Floats = (
                self._net(torch.from_numpy(images).to(self._device)).float().cpu().numpy()
            )
        return answers


def _check_channels(datamodule: BaseDataModule, record: Mapping[str, Any] | None) -> None:
    """Refuse an image of other channels than those that a checkpoint was trained on.

    Raises:
        DataError: It has others.
    """
    bank, look = getattr(datamodule, "bank", None), (record or {}).get("look")
    if bank is not None and look and look["channels"] != bank.channels:
        raise DataError(
            f"an image of {counted(bank.channels, 'channel')}, but the model was trained with "
            f"{look['channels']}"
        )


def _lay_out(cfg: DictConfig, images: Sequence[Image], folder: Path) -> dict[Path, str]:
    """Let the data of a run be one image, which is copied into a folder.

    Returns:
        For each copy what it was called.

    Raises:
        ConfigError: There are more or fewer files or arrays than an image has.
        DataError: A file is not there, or an array is none of pixels.
    """
    roles = rule_of(cfg.data.get("layout")).roles or ("image",)
    if len(images) != len(roles):
        raise ConfigError(
            f"predict_image: an image of this run has {counted(len(roles), 'file or array', 'files or arrays')} "
            f"({', '.join(roles)}), not {len(images)}"
        )
    root = folder / "images"
    root.mkdir()
    globs, names = {}, {}
    for role, image in zip(roles, images, strict=True):
        suffix, name = ".npy", role
        if not isinstance(image, np.ndarray):
            suffix, name = Path(image).suffix, os.fspath(image)
        path = root / f"{role}-0{suffix}"
        _copy(image, path)
        names[path] = name
        globs[role] = f"{role}-*{suffix}"
    with open_dict(cfg.data):
        for name, value in _AS_THEY_ARE.items():
            if name in cfg.data:
                cfg.data[name] = value
        if len(roles) > 1:
            cfg.data.files = globs
        cfg.data.root = str(root)
        cfg.data.cache_dir = str(folder / "cache")
    return names


def _copy(image: Image, path: Path) -> None:
    """Write an image into a new file.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    if isinstance(image, np.ndarray):
        np.save(path, image)
        return
    try:
        shutil.copyfile(image, path)
    except OSError as error:
        raise DataError(f"{os.fspath(image)}: {error.strerror}") from error
