"""The commands from Python: train, score and predict in a line each, and open what a run left.

    from lit_data.app import api

    run = api.fit("stripe", "data.root=images", "trainer.max_epochs=20")
    print(run.metrics["test/average_precision"], run.folder / "report.html")
    found = run.predict("data.root=new_images")

The words are those of the command line, so each key means what it means there.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_data.app.configuration.words import write_override
from lit_data.app.rerun import read_started
from lit_data.app.result import read_summary
from lit_data.core.errors import ConfigError, DataError, LitDataError
from lit_data.core.files import is_there

if TYPE_CHECKING:
    import lightning as L

    from lit_data.app.build import Run as Built
    from lit_data.app.one_image import Image, ImagePredictor
    from lit_inspect import Verdict

_OF_FIT = ("resume", "report", "ckpt")


@dataclass(frozen=True)
class Run:
    """Results of a command in its folder.

    Attributes:
        folder: The run folder.
        packages: Packages whose classes its configuration may name, as ``--package``.
    """

    folder: Path
    packages: tuple[str, ...] = ()

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """``summary.json``: scores by name, and what the run measured of itself.

        Raises:
            DataError: The run has not ended, or not well.
        """
        return read_summary(self.folder)

    @property
    def best(self) -> Path:
        """The best checkpoint.

        Raises:
            DataError: There is none: no run of ``fit``, or it was broken off before.
        """
        path = self.folder / "checkpoints" / "best.ckpt"
        if not is_there(path):
            raise DataError(
                f"{self.folder} has no checkpoints/best.ckpt: was it a run of fit, and did it "
                "validate at least once?"
            )
        return path

    def load_model(self) -> "L.LightningModule":
        """Load the module of the run with the weights of its best checkpoint.

        It is in evaluation mode, on the host.

        Raises:
            LitDataError: There is no such checkpoint, or the configuration is refused.
        """
        from lit_data.app.build import load_trained

        return load_trained(self.folder, self.best, self.packages)

    def predict(self, *overrides: str) -> "Run":
        """Predict with the best checkpoint, set up as this run.

        `overrides` come on top, such as ``data.root=new``.
        """
        return self._go_on("predict", overrides)

    def predict_image(self, *image: "Image") -> "Verdict":
        """Return the verdict of one image in memory; nothing is written.

            verdict = run.predict_image("part.png")
            print(verdict.verdict, verdict.score, verdict.defects)
            picture = verdict.overlay()  # [H, W, 3] uint8

        Verdict and score are those that `predict` writes into ``images.csv``. The first call loads
        the best checkpoint, which is kept for the others.

        Args:
            image: The path of a file, or an array [H, W] or [H, W, C] with pixels and channels as
                in the files of the training; target and references are one each.

        Returns:
            The record that `lit_inspect.Inspector` returns too, with the map in ``probability``.

        Raises:
            ConfigError: Images of this kind, or with these options, are predicted by `predict`
                alone; or there are too many or too few for an image.
            DataError: The image is bad, or unlike those of the training.
        """
        return self._image_predictor(*image)

    @cached_property
    def _image_predictor(self) -> "ImagePredictor":
        from lit_data.app.one_image import ImagePredictor

        return ImagePredictor(self.folder, self.best, self.packages)

    def test(self, *overrides: str) -> "Run":
        """Score the best checkpoint on the test split, set up as this run and `overrides`."""
        return self._go_on("test", overrides)

    def _go_on(self, command: str, overrides: Sequence[str]) -> "Run":
        started = read_started(self.folder)
        checkpoint = write_override("ckpt", self.best.absolute())
        words = started.replace([*overrides, checkpoint], without=_OF_FIT)
        return _run(command, words, self.packages, started.config_dir)


def fit(
    experiment: str, *overrides: str, packages: Sequence[str] = (), config_dir: str | None = None
) -> Run:
    """Train, as ``lit-data fit experiment=NAME``.

    Args:
        experiment: Its name.
        overrides: Words of the command line, such as ``trainer.max_epochs=20``.
        packages: Packages whose classes the configuration may name, as ``--package``.
        config_dir: Folder of your own groups and experiments, as ``--config-dir``.

    Raises:
        LitDataError: As on the command line; ``exit_code`` says of what kind.
    """
    return start(
        "fit", f"experiment={experiment}", *overrides, packages=packages, config_dir=config_dir
    )


def start(
    command: str, *overrides: str, packages: Sequence[str] = (), config_dir: str | None = None
) -> Run:
    """Run any command with a configuration.

    Such as ``fit``, ``validate``, ``test``, ``predict``, ``prepare`` and ``show``.

    Args:
        command: The word on the command line.
        overrides: The words behind it.
        packages: As for `fit`.
        config_dir: As for `fit`.

    Raises:
        LitDataError: As on the command line.
    """
    return _run(command, overrides, packages, config_dir)


def _run(
    command: str, overrides: Sequence[str], packages: Sequence[str], config_dir: str | None
) -> Run:
    from lit_data.app.run import run

    try:
        with _as_command():
            folder = run(command, overrides, packages=packages, config_dir=config_dir)
    except SystemExit as error:  # which leaves Hydra's job
        if isinstance(error.__cause__, LitDataError):
            raise error.__cause__ from error.__cause__.__cause__
        raise
    return Run(folder, tuple(packages))


def build(
    experiment: str,
    *overrides: str,
    trainer: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    config_dir: str | None = None,
) -> "Built":
    """Build the objects of a training and start nothing, for engines that train by themselves.

        objects = api.build("stripe", "data.root=images", "paths.run=runs/mine")
        objects.trainer.fit(objects.model, objects.datamodule, ckpt_path=objects.start)

    Args:
        experiment: Its name.
        overrides: As for `fit`; ``paths.run=FOLDER`` says where callbacks and loggers write, and is
            the same in all processes of a training.
        trainer: Arguments of Lightning's Trainer that an engine brings as objects, such as
            ``strategy`` and ``plugins``; they replace those of the configuration.
        packages: As for `fit`.
        config_dir: As for `fit`.

    Returns:
        ``trainer``, ``model``, ``datamodule``, the run ``folder``, the checkpoint ``start`` that
        training goes on from (None at its beginning), and ``build_model``, which
        returns a new model each time.

    Raises:
        LitDataError: As on the command line.
        ConfigError: `trainer` has callbacks or loggers, which would replace all that there are.
    """
    from lit_data.app.run import build_training

    arguments = trainer or {}
    for name, attribute in (("callbacks", "callbacks"), ("logger", "loggers")):
        if name in arguments:
            raise ConfigError(
                f"trainer['{name}'] would replace those of the configuration: append to "
                f"trainer.{attribute} of the objects that are built"
            )
    words = [f"experiment={experiment}", *overrides]
    return build_training(words, config_dir=config_dir, packages=packages, trainer=arguments)


def open_run(folder: str | Path, *, packages: Sequence[str] = ()) -> Run:
    """A run that has ended, by its folder.

    Args:
        folder: Such as ``runs/fit/stripe/2026-01-31_12-00-00``.
        packages: As for `fit`.

    Raises:
        DataError: The folder is no run.
    """
    read_started(Path(folder))
    return Run(Path(folder), tuple(packages))


@contextmanager
def _as_command() -> Iterator[None]:
    """Let Lightning start ranks with our command line, not with the script in ``__main__``."""
    # Its launcher runs the module of __main__ again, where that has a spec.
    main: Any = sys.modules["__main__"]
    before = getattr(main, "__spec__", None)
    main.__spec__ = find_spec("lit_data.__main__")
    try:
        yield
    finally:
        main.__spec__ = before
