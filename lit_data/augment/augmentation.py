"""`Augmentation`: random numbers drawn on the host that change pixels on the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.devices import divided, exact_products, runs_on_cpu
from lit_data.core.errors import ConfigError
from lit_data.core.types import Size

if TYPE_CHECKING:
    from lit_data.augment.host import HostTransform

BOX_COLUMNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Images, masks and boxes of one batch, on one device.

    Args:
        images: [B, C, H, W] float32 in 0..1, or uint8 in 0..255.
        masks: [B, K, H, W] of any dtype, or None. They are moved by nearest neighbor, so no new
            value appears.
        boxes: [N, 6] float32 = (row in batch, class, cx, cy, w, h), the last four in fractions 0..1
            of the image size, or None.

    Raises:
        ConfigError: A shape or dtype is wrong, or the sizes differ.
    """

    images: Tensor
    masks: Tensor | None = None
    boxes: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse shapes and dtypes that would be transformed incorrectly."""
        if self.images.ndim != 4 or self.images.dtype not in (torch.float32, torch.uint8):
            raise ConfigError(
                f"images are {_describe(self.images)}: they must be [B, C, H, W] float32"
            )
        if self.masks is not None and not self._fits(self.masks):
            raise ConfigError(
                f"masks are {_describe(self.masks)} with images {_describe(self.images)}: they "
                "must be [B, K, H, W]"
            )
        if self.boxes is not None and (self.boxes.ndim != 2 or self.boxes.shape[1] != BOX_COLUMNS):
            raise ConfigError(
                f"boxes are {_describe(self.boxes)}: they must be [N, 6] = (row, class, cx, cy, w, "
                "h)"
            )

    @property
    def size_px(self) -> tuple[int, int]:
        """(H, W) of the images."""
        height, width = self.images.shape[-2:]
        return height, width

    def in_floats(self) -> "Layers":
        """Return the same layers with images of float32 in 0..1."""
        if self.images.dtype == torch.float32:
            return self
        return Layers(divided(self.images, 255.0), self.masks, self.boxes)

    def _fits(self, masks: Tensor) -> bool:
        return (
            masks.ndim == 4
            and masks.shape[0] == self.images.shape[0]
            and masks.shape[2:] == self.images.shape[2:]
        )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class Augmentation(nn.Module, ABC):
    """Base of all augmentations.

    `draw` makes every random number of a batch on the host, for each sample from its own stream.
    The numbers are part of the batch, under keys that begin with ``augment_``. `forward` applies
    them on the device and draws nothing.

    A subclass implements `draw`, `draw_keys` and `transform`.
    """

    crop_px: Size | None = None
    """(height, width) of the output; None if it is that of the input."""

    @property
    def takes_bytes(self) -> bool:
        """True if `transform` also takes uint8 on a CPU, which moves a quarter of the memory."""
        return False

    @property
    def host_steps(self) -> "tuple[HostTransform, ...]":
        """Steps that the loader's workers run; by default none."""
        return ()

    @property
    @abstractmethod
    def draw_keys(self) -> tuple[str, ...]:
        """Keys that `draw` may add to a batch."""

    @abstractmethod
    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the numbers of a batch.

        The numbers of a sample are a pure function of (seed, epoch, its index).

        Args:
            seed: Seed, 0 <= seed < 2**64.
            epoch: Number of the epoch.
            index: [B] sample indices, on the host.
            channels: C, the number of channels of a sample.

        Returns:
            Tensors on the host whose first dimension is B.
        """

    @abstractmethod
    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers; runs without gradient and without autocast."""

    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        """Refuse layers that would not move with the images; by default all of them move.

        Args:
            masks: True if the images have masks.
            boxes: True if the images have boxes.

        Raises:
            ConfigError: A layer would not move with the images.
        """

    def margin_px(self, patch_px: Size) -> tuple[int, int]:
        """Return the margin that must be read around a patch so that no padding is visible.

        Args:
            patch_px: (height, width) of the patch after the crop.

        Returns:
            Pixels above and below, and pixels left and right.
        """
        return 0, 0

    @torch.no_grad()
    def forward(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers, in float32 whatever the precision of the run.

        Args:
            layers: Images, masks and boxes; their tensors do not change.
            draws: The numbers of `draw`, on the device of the layers; other keys are ignored.

        Returns:
            New layers on the same device, with images of float32.
        """
        # On a CPU bytes stay bytes as long as possible, to move less memory.
        if not (self.takes_bytes and runs_on_cpu(layers.images)):
            layers = layers.in_floats()
        device = layers.images.device
        with torch.autocast(device.type, enabled=False), exact_products(device):
            return self.transform(layers, draws).in_floats()


class Compiled(Augmentation):
    """An augmentation that is compiled at its first batch, and again for each new batch shape.

    It fuses the small steps of Kornia. On a CPU it also replaces OpenCV, so measure whether it is
    faster there. Needs a C++ compiler, or Triton on a GPU. Pixels stay the same within rounding.

    Args:
        augmentation: Augmentation to compile.
        backend: Backend of `torch.compile`.
        mode: Mode of `torch.compile`, such as `max-autotune`; None is its default.
    """

    def __init__(
        self, augmentation: Augmentation, *, backend: str = "inductor", mode: str | None = None
    ) -> None:
        super().__init__()
        self.augmentation = augmentation
        self.crop_px = augmentation.crop_px
        self.backend = backend
        self.mode = mode
        self._compiled: Callable[..., Layers] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": None}  # compiled code cannot be pickled

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Keys of the augmentation."""
        return self.augmentation.draw_keys

    @property
    @override
    def host_steps(self) -> "tuple[HostTransform, ...]":
        return self.augmentation.host_steps

    @override
    def check_layers(self, *, masks: bool, boxes: bool) -> None:
        self.augmentation.check_layers(masks=masks, boxes=boxes)

    def margin_px(self, patch_px: Size) -> tuple[int, int]:
        """Return the margin of the augmentation."""
        return self.augmentation.margin_px(patch_px)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """Draw the numbers of the augmentation."""
        return self.augmentation.draw(seed, epoch, index, channels)

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers."""
        if self._compiled is None:
            self._compiled = torch.compile(
                self.augmentation.transform, backend=self.backend, mode=self.mode
            )
        # Without the batch's other keys, because each new one would trigger another compilation.
        draws = {key: draws[key] for key in self.draw_keys if key in draws}
        return self._compiled(layers, draws)
