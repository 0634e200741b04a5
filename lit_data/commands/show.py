"""``show``: draw what a model will see, with the plan of each patch, the families of defects and the augmentation."""

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lit_data.commands.pictures import draw_samples
from lit_data.commands.previews import draw_families
from lit_data.commands.session import build_datamodule
from lit_data.files import write_table
from lit_data.tasks import find_task

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Write pictures of samples and of what they are made by.

    - ``samples.png``, and ``plan.csv`` with one row for each defect drawn in the patches shown
    - ``families.png``: each family of defects on its own, with masks and severities
    - ``augment.png``: samples before and after augmentation, where the stage has one

    Returns:
        Number of patches or images, defects and families shown.
    """
    folder = Path(cfg.paths.run)
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    path, stage = folder / "samples.png", cfg.show.stage
    batch, shown = draw_samples(datamodule, path, stage=stage, count=cfg.show.count, epoch=cfg.show.epoch)
    rows = datamodule.inspect(stage).describe_plan(batch, shown)
    if rows:
        path = folder / "plan.csv"
        write_table(path, list(rows[0]), rows)
        log.info("plan: %s", path)
    families = draw_families(datamodule, batch, folder / "families.png", stage=stage, count=cfg.show.examples)
    find_task(datamodule).draw_augmented(batch, shown, folder / "augment.png", stage=stage)
    return {"show/patches": len(shown), "show/defects": len(rows), "show/families": families}
