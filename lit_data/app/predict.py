"""``predict``: what a model says of every image or volume of a folder."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lightning import LightningModule, Trainer
from omegaconf import DictConfig

from lit_data.app.build import build_datamodule, build_input_data, build_model, find_trained
from lit_data.app.checkpoints import load_weights
from lit_data.app.configuration.names import resolve_target, to_plain
from lit_data.app.configuration.targets import read_options
from lit_data.app.configuration.words import find_typed
from lit_data.app.quality import find_doubt
from lit_data.app.remote_predictions import RemoteFolder
from lit_data.app.result import PartlyDoneError
from lit_data.app.resuming import check_splits
from lit_data.app.shares import take_share
from lit_data.app.trained import take_trained, warn_of_other_data
from lit_data.core.addresses import is_remote
from lit_data.core.checks import check_outside_root, list_options
from lit_data.core.errors import ConfigError, list_problems, show_path
from lit_data.core.files import find_sha256, refuse_links
from lit_data.core.types import NEUTRAL, Stage
from lit_data.predict import find_task, find_task_of
from lit_data.predict.answers import read_image_threshold
from lit_data.predict.journal import FINGERPRINT
from lit_data.predict.options import (
    ExportRequest,
    Predicted,
    PredictOptions,
    PredictRun,
    Share,
)
from lit_data.predict.task import Task
from lit_data.predict.verdicts import find_calibration
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Predict everything below the root.

    What is written depends on the data, see `lit_data.predict`. A run goes on where it was
    interrupted with ``predict.resume=true predict.folder=FOLDER``: inputs of which all files are
    there are left as they are, if weights and options are those of the run before; if not, the
    differences are named.

    Bad inputs are left out, listed at the end and in ``bad.csv``, and do not stop the rest. As they
    have no prediction, the command then ends with exit code 3, as for any bad image, but after all
    else is written, summary.json too. ``predict.on_bad=error`` ends before anything is predicted.

    Returns:
        How much was predicted and found.

    Raises:
        ConfigError: There are links in the folder that is written to.
        PartlyDoneError: Inputs are bad; the others are predicted.
    """
    options = read_options(PredictOptions, cfg.predict, "predict")
    checkpoint = find_trained(cfg)
    folder = _choose_folder(cfg, options)
    kind = resolve_target(cfg.data._target_, "data")
    share, trainer = take_share(cfg, options, shares=find_task_of(kind).shares)
    with folder.copying(options, share):
        prediction = prepare_prediction(cfg, options, checkpoint, folder, share, trainer)
        bank = getattr(prediction.task.datamodule, "bank", None)
        warn_of_other_data(prediction.record, cfg.data.get("root"), bank)
        prediction = prediction.take_calibration()
        if share.leads:
            _warn_of_nothing_to_resume(folder, options)
        metrics, bad = prediction.start()
    if bad:
        raise _describe_bad(bad, getattr(bank, "skipped", ()), folder, metrics)
    return metrics


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """Folder into which a command predicts, where the files stay.

    Args:
        path: Of the folder.
    """

    path: Path
    sizes: ClassVar[Mapping[str, int]] = {}
    """Bytes of the files at an address: there is none."""

    def __str__(self) -> str:
        return show_path(self.path)

    def bring(self, path: Path) -> Path:
        """Return the path of a file of the folder, which is here."""
        return path

    def copying(self, options: PredictOptions, share: Share) -> AbstractContextManager[None]:
        """Do nothing, as no file is copied elsewhere."""
        return nullcontext()


def _choose_folder(cfg: DictConfig, options: PredictOptions) -> LocalFolder | RemoteFolder:
    """Choose the folder by the options.

    Raises:
        ConfigError: It lies in the data, or holds links.
    """
    folder = Path(cfg.paths.run)
    if options.folder is not None and is_remote(options.folder):
        return RemoteFolder(folder / ".predictions", options.folder)
    if options.folder is not None:
        folder = Path(options.folder)
        check_outside_root(folder, cfg.data.get("root"), "predict.folder")
    refuse_links(folder, "predict.folder")
    return LocalFolder(folder)


@dataclass(frozen=True)
class Prediction:
    """Objects of a prediction; nothing is predicted yet.

    Attributes:
        task: Of the data.
        model: With its weights.
        run: Where the files go.
        options: With the thresholds of the model, where none are typed.
        checkpoint: The file of the weights.
        record: What `take_trained` returned.
        conditions: Options that scores of images depend on.
    """

    task: Task[Any]
    model: LightningModule
    run: PredictRun
    options: PredictOptions
    checkpoint: Path
    record: Mapping[str, Any] | None
    conditions: Mapping[str, Any]

    def start(self) -> Predicted:
        """Predict, and write the predictions."""
        return self.task.predict(self.model, self.run, self.options)

    def choose(self, numbers: Sequence[int]) -> "Prediction":
        """Return the prediction of some images alone."""
        return replace(self, run=replace(self.run, chosen=numbers))

    def take_calibration(self) -> "Prediction":
        """Return the prediction with the calibration of the checkpoint, if that holds."""
        if not self.task.has_verdicts() or "predict.image_threshold" in find_typed():
            return self
        calibration = find_calibration(self.checkpoint, self.conditions)
        if calibration is None:
            return self
        log.info("verdicts as calibrated: %s", calibration.promise)
        return replace(self, run=replace(self.run, calibration=calibration))


def prepare_prediction(
    cfg: DictConfig,
    options: PredictOptions,
    checkpoint: Path,
    folder: LocalFolder | RemoteFolder,
    share: Share,
    trainer: Trainer,
    *,
    split: Stage | None = None,
) -> Prediction:
    """Open the data and the model of a prediction.

    Args:
        cfg: The configuration, which takes the model and the reading options of the checkpoint.
        options: How.
        checkpoint: The file of the weights.
        folder: Where the files go.
        share: Inputs of this process.
        trainer: Of one process, without callbacks.
        split: Images of this split alone; None: all below the root.
    """
    # The options of the checkpoint come first: stores are built by them.
    record = take_trained(cfg, checkpoint)
    # Before some are left out that have no part in a prediction.
    data_options = to_plain(cfg.data)
    datamodule = build_datamodule(cfg) if split else build_input_data(cfg, options.on_bad)
    model = build_model(cfg, trained=checkpoint)
    share.wait()  # the first rank of each machine has prepared the data
    datamodule.setup("predict")
    if split is not None:
        check_splits(cfg, checkpoint, datamodule.list_splits(), [split])
    task = find_task(datamodule)
    # Thresholds that validation chose lie among the weights.
    load_weights(model, checkpoint)
    options = take_thresholds(model, options, has_verdicts=task.has_verdicts())
    doubt = find_doubt(record)
    if doubt is not None and not task.has_verdicts():  # verdicts would say so
        log.warning("%s: train longer, or choose another run", doubt)
    run = PredictRun(
        folder=folder.path,
        identity=_identify(checkpoint, to_plain(cfg.model), data_options, type(datamodule)),
        trainer=trainer,
        share=share,
        doubt=doubt,
        remote_sizes=folder.sizes,
        bring=folder.bring,
        chosen=task.list_split(split) if split else None,
        reference_limits=read_limits(model),
    )
    conditions = list_conditions(cfg, task, options)
    return Prediction(task, model, run, options, checkpoint, record, conditions)


def prepare_export(
    cfg: DictConfig,
    typed: Mapping[str, Any],
    checkpoint: Path,
    record: Mapping[str, Any] | None,
) -> tuple[Task[Any], ExportRequest]:
    """Open the data and the model of a run, of which its task makes what `lit_inspect` runs.

    Args:
        cfg: The configuration of the run, with the model and the reading options of the checkpoint.
        typed: Options of ``predict``.
        checkpoint: The file of the weights.
        record: What `take_trained` returned.
    """
    datamodule = build_input_data(cfg, "skip")
    datamodule.setup("predict")
    model = build_model(cfg, trained=checkpoint)
    load_weights(model, checkpoint)
    task = find_task(datamodule)
    options = read_options(PredictOptions, typed, "predict")
    has_verdicts = task.has_verdicts()
    options = take_thresholds(model, options, has_verdicts=has_verdicts)
    calibration = None
    if has_verdicts and "image_threshold" not in typed:
        calibration = find_calibration(checkpoint, list_conditions(cfg, task, options))
    return task, ExportRequest(
        model=model.eval(),
        options=options,
        doubt=find_doubt(record),
        calibration=calibration,
        reference_limits=read_limits(model),
    )


def read_limits(model: LightningModule) -> Sequence[float] | None:
    """Return the limits of references that fit, as a training found them; None without any."""
    limits = getattr(model, "reference_limits", None)
    return None if limits is None else limits.tolist()


def list_conditions(cfg: DictConfig, task: Task[Any], options: PredictOptions) -> dict[str, Any]:
    """Return the options that scores of images depend on, which names of files are not."""
    data_options = to_plain(cfg.data)
    return {
        "model": to_plain(cfg.model),
        "data": {name: data_options.get(name) for name in task.trained_data if name != "files"},
        "predict": options.list_scoring(),
    }


def _identify(
    checkpoint: Path, model: Mapping[str, Any], data: Mapping[str, Any], kind: type
) -> dict[str, Any]:
    """Return what decides the predictions beside the options: a run goes on with the same only.

    Args:
        checkpoint: The file of the weights.
        model: The node `model` as plain data.
        data: The node `data` as plain data.
        kind: The datamodule, whose neutral options change no prediction.
    """
    loader = data.get("loader")
    neutral = list_options(kind, NEUTRAL)
    return {
        "checkpoint_sha256": find_sha256(checkpoint),
        "model": model,
        "data": {name: value for name, value in data.items() if name not in neutral},
        # Layout `single` draws its nuisance by it.
        "seed": loader.get("seed") if isinstance(loader, Mapping) else None,
    }


def _describe_bad(
    bad: Sequence[tuple[str, str]],
    listed: Sequence[tuple[str, str]],
    folder: LocalFolder | RemoteFolder,
    metrics: Mapping[str, Any],
) -> PartlyDoneError:
    """Return the error at the end, which shows the bad inputs that were not listed at the start."""
    problems = list_problems(sorted(set(bad) - set(listed)))
    headline = (
        counted(len(bad), "input is bad and has", "inputs are bad and have")
        + f" no prediction; the predictions of all others are in {folder}, with bad.csv"
    )
    text = problems.describe(headline) if len(problems) else headline
    error = PartlyDoneError(text, metrics)
    error.problems = problems.entries
    return error


def take_thresholds(
    model: LightningModule, options: PredictOptions, *, has_verdicts: bool
) -> PredictOptions:
    """Return the options with the thresholds that validation chose, where they name none.

    Args:
        model: With its weights, among which the thresholds lie.
        options: As typed.
        has_verdicts: Images get a verdict, by a threshold of their own.

    Raises:
        ConfigError: A threshold was chosen for another score.
    """
    options = _take_threshold(model, options)
    return _take_image_threshold(model, options) if has_verdicts else options


def _take_threshold(model: LightningModule, options: PredictOptions) -> PredictOptions:
    """Return the options with the model's threshold, where they name none."""
    chosen = getattr(model, "predict_threshold", None)
    if options.threshold is not None or chosen is None:
        return options
    log.info("predict.threshold=%.4g, chosen in validation", chosen)
    return replace(options, threshold=float(chosen))


def _take_image_threshold(model: LightningModule, options: PredictOptions) -> PredictOptions:
    """Return the options with the model's score of images and its threshold, where they name none.

    Raises:
        ConfigError: The threshold was chosen for another score.
    """
    if options.image_score_fraction is None:
        fraction_of_model = getattr(model, "image_score_fraction", None)
        options = replace(options, image_score_fraction=fraction_of_model)
    chosen = read_image_threshold(model)
    if options.image_threshold is not None or chosen is None:
        return options
    # A threshold holds for scores of the fraction of pixels that it was chosen with.
    fraction = float(getattr(model, "image_threshold_fraction", options.top_fraction))
    if not math.isclose(fraction, options.top_fraction, rel_tol=1e-5):
        raise ConfigError(
            f"an image scores as the mean of {options.top_fraction:g} of its pixels here, and "
            f"validation chose the threshold of the checkpoint for {fraction:.6g}: set "
            f"model.image_score_fraction={fraction:.6g}, or give predict.image_threshold"
        )
    log.info("predict.image_threshold=%.6g, chosen in validation", chosen)
    return replace(options, image_threshold=chosen)


def _warn_of_nothing_to_resume(folder: LocalFolder | RemoteFolder, options: PredictOptions) -> None:
    if options.resume and not (folder.path / FINGERPRINT).exists():
        log.warning(
            "predict.resume=true: there is nothing to resume in %s, so everything is predicted; "
            "set predict.folder to the folder of the earlier run",
            folder,
        )
