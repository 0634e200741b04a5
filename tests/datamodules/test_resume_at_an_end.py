"""A training that was stopped at a step goes on, also where its loader has no length."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.outputs import NO_TIMELINES, STRIPES

STOPPER = """
import os
import signal

import lightning as L


class Stopper(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
@pytest.mark.parametrize("samples", [12, 8])
def test_a_resizable_training_goes_on_from_any_step(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stopper.py").write_text(STOPPER)
    words = [
        sys.executable,
        "-m",
        "lit_data",
        "fit",
        "+experiment=stripe",
        "--package=stopper",
        "trainer=cpu",
        "callbacks=safe",
    ]
    words += [
        "+callbacks.stopper._target_=stopper.Stopper",
        "trainer.enable_progress_bar=false",
        *STRIPES,
        *NO_TIMELINES,
    ]
    words += ["trainer.max_epochs=3", "trainer.check_val_every_n_epoch=3", "resume=auto"]
    words += ["hydra.run.dir=night", "paths.cache=cache", "logger=none"]
    for size, code in ((12, 143), (samples, 0)):
        done = subprocess.run([*words, f"data.loader.global_batch_size={size}"], check=False)
        assert done.returncode == code
