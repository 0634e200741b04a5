"""The pictures with which a synthesis and an augmentation are designed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_data.commands.figures import TRUE_COLOUR, circle_mask, open_figure, save_figure, show_images, show_mask
from lit_data.datamodules.base import BaseDataModule
from lit_data.types import Batch, Stage

_SIDE_PX = 64
"""Of the part of a patch that is shown of a family."""
_CANDIDATES = 4  # drawn of a family for each that is shown


def draw_families(datamodule: BaseDataModule, planned: Batch, path: Path, *, stage: Stage, count: int = 4) -> int:
    """Draw each family of defects in a row of its own: for each example the patch around it, and its mask.

    Over an example stands its severity: the mean change in standard deviations of the noise around it.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch of it, as `draw_samples` returns.
        path: The PNG to write; without synthesis nothing is drawn.
        stage: Whose patches.
        count: Examples of each family.

    Returns:
        Families drawn.
    """
    batch = {key: value[: _CANDIDATES * count] for key, value in planned.items() if isinstance(value, Tensor)}
    families = datamodule.inspect(stage).preview_families(batch)
    if not families:
        return 0
    count = min(count, len(families[0].after))
    figure, axes = open_figure(len(families), ["with the defect", "mask"] * count)
    for cells, family in zip(axes, families, strict=True):
        cells[0].set_ylabel(family.name, fontsize=9)
        is_seen = family.mask.flatten(1).any(dim=1)  # some draws change less than what counts as a defect
        chosen = torch.argsort(is_seen.int(), descending=True, stable=True)[:count].tolist()
        for place, number in enumerate(chosen):
            window = _window_around(family.centre[number], family.after.shape[1:])
            show_images(cells[2 * place : 2 * place + 1], family.after[number : number + 1][(slice(None), *window)])
            show_mask(cells[2 * place + 1], family.mask[number][window])
            cells[2 * place].set_xlabel(f"severity {float(family.severity[number]):.1f}", fontsize=8)
            cells[2 * place + 1].set_xlabel(f"{int(family.mask[number].sum())} px", fontsize=8)
    save_figure(figure, path, f"families of defects on {stage} patches", ())
    return len(families)


def draw_augmented(datamodule: BaseDataModule, planned: Batch, path: Path, *, stage: Stage, count: int = 6) -> int:
    """Draw samples before and after augmentation, with the masks that move along.

    Args:
        datamodule: A prepared and opened datamodule.
        planned: A planned batch of it, as `draw_samples` returns.
        path: The PNG to write; where the stage has no augmentation nothing is drawn.
        stage: Whose samples.
        count: Rows of the picture.

    Returns:
        Samples drawn.
    """
    before = datamodule.inspect(stage).draw(planned)
    if before is None:
        return 0
    after = datamodule.finish_batch(planned, stage)
    rows = _choose_rows(before.get("mask"), len(after["image"]), count)
    figure, axes = open_figure(len(rows), ("before", "reference 1", "after", "reference 1", "mask after"))
    for cells, row in zip(axes, rows, strict=True):
        for place, batch in ((0, before), (2, after)):
            show_images(cells[place : place + 2], batch["image"][row])
            if "mask" in batch:
                circle_mask(cells[place], batch["mask"][row, 0], TRUE_COLOUR)
        if "mask" in after:
            show_mask(cells[4], after["mask"][row, 0])
    title = f"{stage} samples before and after augmentation, epoch {int(planned['epoch'][0])}"
    save_figure(figure, path, title, ("true defect",))
    return len(rows)


def _choose_rows(masks: Tensor | None, length: int, count: int) -> list[int]:
    """Samples with defects first."""
    if masks is None:
        return list(range(min(length, count)))
    marked = masks.flatten(1).sum(1).numpy()
    return [int(row) for row in np.argsort(-marked, kind="stable")[:count]]


def _window_around(centre: Tensor, shape_px: Sequence[int]) -> tuple[slice, slice]:
    starts = [
        int(np.clip(round(float(place)) - _SIDE_PX // 2, 0, max(0, length - _SIDE_PX)))
        for place, length in zip(centre, shape_px, strict=True)
    ]
    return slice(starts[0], starts[0] + _SIDE_PX), slice(starts[1], starts[1] + _SIDE_PX)
