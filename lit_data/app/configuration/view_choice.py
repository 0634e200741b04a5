"""Patches at full resolution for a training on long strips, which whole images scaled down would spoil."""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from lit_data.app.configuration.model_choice import goes_on
from lit_data.app.launcher import is_first_rank
from lit_data.core.errors import DataError
from lit_data.core.types import Size

VIEW_PX = 256
"""Side of the square that the experiment `anomaly` scales whole images to."""
PATCHES = ("data.size_px=null", f"data.patch_px={VIEW_PX}")
"""Words for patches of that size."""
VIEWED = {"data": "anomaly", "model": "anomaly"}
"""Choices of groups by which a training scales whole images to that square."""
_DECIDING = ("data.size_px", "data.patch_px", "data.fit", "data.scale", "resume", *VIEWED)
_SWEPT = ("experiment", "data.root")
_LOOKED_AT = 32


def choose_view(cfg: DictConfig, overrides: Sequence[Override]) -> list[str]:
    """Return words for patches where most images of the folder are strips, and say so; else none.

    Args:
        cfg: As composed for a training, of the groups that `VIEWED` says.
        overrides: Of the command line, as Hydra needs them.
    """
    if any(map(_decides, overrides)) or cfg.data.size_px != VIEW_PX:
        return []
    loss = _describe_loss(Path(str(cfg.data.root)))
    if not loss:
        return []
    if is_first_rank():
        print(
            f"lit_data: whole {loss}. {' '.join(PATCHES)} uses patches at full resolution "
            f"instead; data.size_px={VIEW_PX} uses whole images, in a fraction of the time",
            file=sys.stderr,
        )
    return list(PATCHES)


def _decides(override: Override) -> bool:
    """Return True for a word that leaves nothing to choose."""
    key = override.key_or_group
    is_swept = key in _SWEPT and override.is_sweep_override()
    return key in _DECIDING or is_swept or goes_on(override)


def _describe_loss(folder: Path) -> str:
    """Return what scaling to the view loses of the first images of a folder, if much."""
    from lit_data.images.scaling import Scaling

    sizes_px = list(islice(_read_sizes(folder), _LOOKED_AT))
    scaling = Scaling(size_px=(VIEW_PX, VIEW_PX), fit="stretch")
    return scaling.describe_loss(sizes_px)


def _read_sizes(folder: Path) -> Iterator[Size]:
    """Read (height, width) of images in a folder and below; what cannot be read is left out."""
    from lit_data.images.discovery import is_hidden
    from lit_data.images.header import EXTENSIONS, read_header

    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if is_hidden(name) or Path(name).suffix.lower() not in EXTENSIONS:
                continue
            try:
                header = read_header(Path(parent, name))
            except (DataError, OSError):
                continue
            yield header.height_px, header.width_px
