"""Libraries with pretrained nets: their weights, and the input that a net was trained on."""

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError, LitDataError, first_line
from lit_data.models.layers import pad_sides

Normalize = Literal["auto", "none"] | Mapping[str, Sequence[float]]
"""`auto`: as the weights were trained; `none`; or ``{mean: [...], std: [...]}`` of each channel, of values 0 to 1."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Of the three channels of ImageNet, on which most weights were trained."""

_INSTALL = {
    "monai": "monai",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "timm": "timm",
    "torchvision": "torchvision",
}
_LEAST_PX = 32  # deeper nets halve the resolution five times
_RESERVED = (
    "pretrained",
    "checkpoint",
    "weights",
    "encoder_weights",
    "cache_dir",
    "progress",
)
_CHATTY = ("huggingface_hub", "timm", "httpx")


def open_library(name: str) -> Any:  # noqa: ANN401 - a module
    """Import an optional library.

    Raises:
        ConfigError: It is not installed, or does not fit the installed torch.
    """
    package = _INSTALL[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = "medical" if name == "monai" else "nets"
        raise ConfigError(
            f"model.net needs {error.name or name}: pip install {package}, or "
            f"'lit-data-inspect[{extra}]'"
        ) from error
    except (ImportError, RuntimeError) as error:  # compiled for another torch
        raise ConfigError(
            f"{name} does not fit torch {torch.__version__} ({first_line(error)}): pip install -U "
            f"torch {package}"
        ) from error


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return further arguments of a library's function.

    Arguments that make the library read files or servers are refused.

    Raises:
        ConfigError: An argument is refused.
    """
    arguments = dict(options or {})
    for name in arguments:
        if str(name).startswith(_RESERVED):
            raise ConfigError(f"options.{name} is not allowed here: set model.net.weights")
    return arguments


@contextmanager
def building(what: str) -> Iterator[None]:
    """Turn a library's errors about its arguments into one line.

    Raises:
        ConfigError: It refuses them.
    """
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:  # each library has its own kinds
        raise ConfigError(
            f"{what} cannot be built: {type(error).__name__}: {first_line(error)}"
        ) from error


@contextmanager
def fetching(weights: str, net: str) -> Iterator[None]:
    """Turn the errors of a server into one line, and keep retries out of the log.

    Raises:
        ConfigError: The weights are not on this machine and could not be fetched.
    """
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    except LitDataError:
        raise
    except Exception as error:
        raise ConfigError(
            f"weights={weights} of {net} are not on this machine and could not be fetched "
            f"({type(error).__name__}: {first_line(error)}): give a file, model.net.weights=FILE, "
            "or model.net.weights=null to start at random"
        ) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class NormalizedNet(nn.Module):
    """Wraps a net of another library, so that it takes images in 0..1 of any size.

    Images are normalized to the mean and the standard deviation that the weights were trained with,
    which checkpoints hold. Sides are padded to a multiple that the net can halve, by repeating the
    edge. In training, a single image goes through twice, because batch normalization after a mean
    over the image needs two values; the statistics of all other layers stay the same.

    Args:
        net: From [B, channels, H, W] to a tensor, a dict with ``out`` or an object with ``logits``.
        normalize: See `Normalize`.
        trained: Mean and standard deviation for ``auto``; for other channels than RGB, their means
            are used.
        channels: Of the images.
        multiple_px: Sides are padded to a multiple of this.

    Raises:
        ConfigError: Means or deviations are not those of the channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        normalize: Normalize,
        trained: Mapping[str, Sequence[float]],
        channels: int,
        multiple_px: int = 1,
    ) -> None:
        super().__init__()
        self.net = net
        self._multiple_px = multiple_px
        mean, std = _read_normalize(normalize, trained, channels)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of the net, [B, K, ...]; maps have the size of the images.

        Args:
            images: [B, C, H, W] float32 in 0..1.
        """
        height, width = images.shape[-2:]
        normal = (images - self.mean[:, None, None]) / self.std[:, None, None]
        normal = pad_sides(normal, self._multiple_px, least_px=_LEAST_PX)
        is_single = self.training and len(images) == 1
        answer = _read_answer(self.net(normal.expand(2, -1, -1, -1) if is_single else normal))
        answer = answer[:1] if is_single else answer
        return answer[..., :height, :width] if answer.ndim == 4 else answer


def _read_answer(answer: Any) -> Tensor:  # noqa: ANN401 - what the net of a library returns
    if isinstance(answer, Mapping):  # segmentation of torchvision
        answer = answer["out"]
    # Inception and GoogLeNet, with their side outputs.
    logits: Tensor = getattr(answer, "logits", answer)
    return logits


def _read_normalize(
    normalize: Normalize, trained: Mapping[str, Sequence[float]], channels: int
) -> tuple[Tensor, Tensor]:
    if normalize == "none":
        return torch.zeros(channels), torch.ones(channels)
    if normalize == "auto":
        mean = list(trained["mean"])
        std = list(trained["std"])
        if len(mean) != channels:
            mean = [sum(mean) / len(mean)] * channels
            std = [sum(std) / len(std)] * channels
    elif isinstance(normalize, Mapping) and normalize.keys() == {"mean", "std"}:
        mean = list(normalize["mean"])
        std = list(normalize["std"])
    else:
        raise ConfigError(
            f"normalize={normalize!r}: choose auto, none or {{mean: [...], std: [...]}}"
        )
    if len(mean) != channels or len(std) != channels or min(std, default=0) <= 0:
        raise ConfigError(
            f"normalize has mean {mean} and std {std}: need {channels} of each, std above 0"
        )
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
