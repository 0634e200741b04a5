"""A training that was stopped at a step goes on, also where its loader has no length."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.families import run_family
from tests.helpers.fork_server import WITHOUT_PICTURES
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


WORDS = [
    sys.executable,
    "-m",
    "lit_data",
    "fit",
    "+experiment=stripe",
    "--package=stopper",
    "trainer=cpu",
    "callbacks=safe",
    "+callbacks.stopper._target_=stopper.Stopper",
    "trainer.enable_progress_bar=false",
    "model.net.width=4",
    *STRIPES,
    *NO_TIMELINES,
    "trainer.max_epochs=3",
    "trainer.check_val_every_n_epoch=3",
    "resume=auto",
    "hydra.run.dir=night",
    "paths.cache=cache",
    "logger=none",
]


def _fit(folder: Path, samples: int) -> tuple[int, str]:
    return run_family(
        [*WORDS, f"data.loader.global_batch_size={samples}"],
        limit_s=200,
        cwd=folder,
        **WITHOUT_PICTURES,
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was stopped after its second step of 12 samples."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "stopper.py").write_text(STOPPER)
    code, output = _fit(folder, 12)
    assert code == 143, output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("samples", [12, 8])
def test_a_resizable_training_goes_on_from_any_step(
    samples: int, stopped: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    shutil.copytree(stopped, folder)
    code, output = _fit(folder, samples)
    assert code == 0, output
    assert (folder / "night/summary.json").is_file()
