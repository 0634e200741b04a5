"""Two ranks (gloo) compare with the real images of both, and come to the same numbers.

As a script this file is what both ranks run: Lightning starts the second one with the same words.
"""

import json
import sys
from pathlib import Path

import pytest
from lightning import Trainer

from lit_data.callbacks import ImageMetrics, SampleImages
from lit_data.testing import QUIET
from tests.callbacks.painter import Album, Painter
from tests.helpers.families import run_family


def _train(folder: Path) -> None:
    metrics = ImageMetrics(every_n_steps=2, count=20, batch_size=4)
    settings = QUIET | {"devices": 2, "strategy": "ddp", "max_epochs": 1, "log_every_n_steps": 1}
    callbacks = [metrics, SampleImages(every_n_steps=2)]
    trainer = Trainer(**settings, default_root_dir=folder, callbacks=callbacks)
    trainer.fit(Painter(), datamodule=Album())
    found = dict(metrics.summary())
    found |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["real"] = {stage: distances.samples for stage, distances in metrics.real.items()}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_both_ranks_measure_the_same(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    code, output = run_family(words, limit_s=240, OMP_NUM_THREADS="1")
    assert code == 0, output
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["real"] == {"train": 20, "val": 10}  # of 12 and 5 on each rank
    assert {"train/kid_small", "val/kid_small"} <= first.keys()
    pictures = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert pictures == ["step-000002.png", "step-000003.png"]


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
