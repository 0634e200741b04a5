"""``show``: draw what a model will see, with the plan of each patch."""

import csv
import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lit_data.commands.pictures import draw_samples
from lit_data.commands.session import build_datamodule

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Write ``samples.png``, and ``plan.csv`` with one row for each defect drawn in the patches shown.

    Returns:
        Number of patches and defects shown.
    """
    folder = Path(cfg.paths.run)
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    path, stage = folder / "samples.png", cfg.show.stage
    batch, shown = draw_samples(datamodule, path, stage=stage, count=cfg.show.count, epoch=cfg.show.epoch)
    rows = datamodule.describe_plan(batch, stage, shown)
    if rows:
        path = folder / "plan.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        log.info("plan: %s", path)
    return {"show/patches": len(shown), "show/defects": len(rows)}
