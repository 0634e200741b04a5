"""Gaussian spots of a few fixed shapes, from tables that are computed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import call_checked
from lit_data.errors import ConfigError
from lit_data.synthesis.families.base import Family, Floats, Parameters
from lit_data.synthesis.kernels import SUBPIXELS, SpotShape, spot_kernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_data.synthesis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot(Family):
    """A Gaussian spot cut to a small window, which is the extent that the mask marks.

    Args:
        weight: See `Family`.
        amplitude: See `Family`; height of the peak.
        contrast: See `Family`.
        shapes: The shapes to choose from; mappings with the fields of `SpotShape` are accepted.
    """

    shapes: tuple[SpotShape | Mapping[str, float], ...] = (
        SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
        SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    )

    name: ClassVar[str] = "spot"
    parameters: ClassVar[tuple[str, ...]] = ("shape",)
    draws: ClassVar[int] = 0
    turns_inwards: ClassVar[bool] = True
    marks_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Accept mappings, as a configuration gives them."""
        shapes = []
        for shape in self.shapes:
            if isinstance(shape, Mapping):
                shape = call_checked(SpotShape, (), shape, "spot.shapes")
            shapes.append(shape)
        if not shapes:
            raise ConfigError(
                "spot.shapes is empty: give at least one shape, or leave the family out"
            )
        object.__setattr__(self, "shapes", tuple(shapes))
        Family.__post_init__(self)

    @property
    def spots(self) -> tuple[SpotShape, ...]:
        """The shapes."""
        return self.shapes  # type: ignore[return-value]  # from its birth on

    @property
    @override
    def variants(self) -> tuple[float, ...]:
        return tuple(shape.weight for shape in self.spots)

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        return {"shape": variant.astype(np.float32)}

    @override
    def window_px(
        self, parameters: dict[str, Floats], shape_px: tuple[int, int]
    ) -> NDArray[np.int64]:
        height = max(shape.height_px for shape in self.spots)
        width = max(shape.width_px for shape in self.spots)
        return np.array((height, width))

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        offset_y = ((windows.centre_y - windows.nearest_y + 0.5) * SUBPIXELS).long()
        offset_x = ((windows.centre_x - windows.nearest_x + 0.5) * SUBPIXELS).long()
        shape = parameters["shape"].long().view(-1)
        return _table(self.spots, windows.device)[shape, offset_y, offset_x]


@lru_cache(maxsize=16)
def _table(shapes: tuple[SpotShape, ...], device: "torch.device") -> "Tensor":
    import torch

    return torch.from_numpy(spot_kernels(shapes)).to(device)
