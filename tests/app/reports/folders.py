"""Run folders as `fit` leaves them, without a training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

CSV = """\
batch/ooms,batch/size,data/samples_per_s,epoch,memory/rss_bytes,step,test/dice,time/forward_s,time/wait_s,train/loss,val/dice
0.0,16.0,70.5,,1048576,9,,0.02,0.001,,
,,,0,,9,,,,6.5,
,,,0,,19,,,,,0.5
0.0,8.0,71.5,,2097152,29,,0.03,0.002,,
,,,1,,29,,,,nan,
,,,1,,39,,,,2.5,0.75
,,,2,,40,,,,,0.8
,,,2,,40,0.7,,,,
"""
LOG = """\
2026-01-31 12:00:00,001 INFO lit_data.loading.choice: loader: inline, no workers: a whole epoch takes 0.007 s
2026-01-31 12:00:05,001 WARNING lit_data.callbacks.adaptive.replay: batch 3: 16 samples at once ran out of memory; now 8
2026-01-31 12:00:07,001 INFO lightning.pytorch.utilities.rank_zero: DataWaitMonitor: the model takes 89% of the time
"""
SUMMARY = {
    "command": "fit",
    "experiment": "stripe",
    "seconds": 46.77,
    "samples_per_s": 72.02,
    "data_wait_fraction": 0.0105,
    "peak_rss_bytes": 780496896,
    "samples_sha256": None,
    "test/dice": 0.7,
    "test/dice_baseline": 0.3,
    "train/limited_by": "the model takes 89% of the time",
    "val/dice": 0.8,
}
CONFIG = {
    "command": "fit",
    "name": "stripe",
    "seed": 1,
    "data": {"loader": {"batch_size": 16, "seed": "${seed}"}, "root": "${paths.runs}/images"},
    "callbacks": {"checkpoint": {"monitor": "val/dice", "mode": "max"}},
    "paths": {"runs": "runs", "run": "${hydra:runtime.output_dir}"},
}


def make_run(
    folder: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    overrides: tuple[str, ...] = ("+experiment=stripe",),
    summary: Mapping[str, Any] | None = SUMMARY,
    csv: str | None = CSV,
    log: str = LOG,
    pictures: tuple[str, ...] = ("samples", "memory"),
) -> Path:
    """A run folder; each part may be left out or replaced."""
    (folder / ".hydra").mkdir(parents=True)
    runtime = {
        "choices": {"experiment": "stripe", "trainer": "cpu"},
        "output_dir": str(folder),
        "config_sources": [],
    }
    hydra = {"hydra": {"overrides": {"task": list(overrides)}, "runtime": runtime}}
    for name, content in (("config", dict(config)), ("hydra", hydra)):
        (folder / ".hydra" / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(dict(summary)), encoding="utf-8")
    if csv is not None:
        (folder / "csv").mkdir()
        (folder / "csv" / "metrics.csv").write_text(csv, encoding="utf-8")
    (folder / "fit.log").write_text(log, encoding="utf-8")
    loaders = {"train": {"kind": "inline", "workers": 0, "reason": "a whole epoch takes 0.03 s"}}
    (folder / "loader.json").write_text(json.dumps(loaders), encoding="utf-8")
    for name in pictures:
        Image.effect_noise((300, 200), 80).convert("RGB").save(folder / f"{name}.png")
    return folder
