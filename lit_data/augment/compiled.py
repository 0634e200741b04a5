"""`Compiled`: another augmentation, translated by torch's compiler."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lit_data.augment.augmentation import Augmentation
from lit_data.augment.layers import Layers


class Compiled(Augmentation):
    """Compiles an augmentation at its first batch, and again for each new shape of batches.

    On two CPU cores `StripeAugment` took 0.55 of its time, after 16 s of compiling (``+benchmark=synthesis
    benchmark.compile=true`` measures it on your machine). Needs a C++ compiler, on a GPU Triton. Pixels stay the same
    but for the last bit of a float32.

    Args:
        augmentation: What is compiled.
        backend: Of `torch.compile`.
        mode: Of `torch.compile`, e.g. `max-autotune`; none is its default.
    """

    def __init__(self, augmentation: Augmentation, *, backend: str = "inductor", mode: str | None = None) -> None:
        super().__init__()
        self.augmentation, self.crop_px = augmentation, augmentation.crop_px
        self.backend, self.mode = backend, mode
        self._compiled: Callable[..., Layers] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": None}  # what was compiled cannot be pickled

    @property
    def draw_keys(self) -> tuple[str, ...]:
        """Those of the augmentation."""
        return self.augmentation.draw_keys

    def margin_px(self, patch_px: tuple[int, int]) -> tuple[int, int]:
        """That of the augmentation."""
        return self.augmentation.margin_px(patch_px)

    def draw(self, seed: int, epoch: int, index: ArrayLike, channels: int) -> dict[str, Tensor]:
        """What the augmentation draws."""
        return self.augmentation.draw(seed, epoch, index, channels)

    def transform(self, layers: Layers, draws: Mapping[str, Tensor]) -> Layers:
        """Apply drawn numbers."""
        if self._compiled is None:
            self._compiled = torch.compile(self.augmentation.transform, backend=self.backend, mode=self.mode)
        return self._compiled(layers, {key: draws[key] for key in self.draw_keys if key in draws})
