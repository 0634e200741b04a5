"""``predict``: what a model says of every image or volume of a folder."""

import inspect
import logging
import math
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_data.commands.checkpoints import find_checkpoint, load_weights, to_plain
from lit_data.commands.configuration.locate import resolve_target
from lit_data.commands.configuration.targets import allowed_names, read_options, trusted_names
from lit_data.commands.result import PartlyDoneError
from lit_data.commands.session import (
    build_datamodule,
    build_model,
    build_trainer,
    check_outside_root,
)
from lit_data.commands.trained import find_doubt, take_trained, warn_of_other_data
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError, list_problems, show_path
from lit_data.files import find_sha256
from lit_data.tasks import find_task
from lit_data.tasks.base import find_task_of
from lit_data.tasks.options import PredictOptions, PredictRun
from lit_data.tasks.writer import FINGERPRINT

log = logging.getLogger(__name__)

_NOT_CHOSEN: Final = (
    -1.0
)  # image threshold of a model whose validation had images of one kind only, or none


def run(cfg: DictConfig) -> dict[str, Any]:
    """Predict everything below the root.

    What is written depends on the data, see `lit_data.tasks`. A run goes on where it was
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
    options, checkpoint = read_options(PredictOptions, cfg.predict, "predict"), find_checkpoint(cfg)
    if options.folder is not None:
        check_outside_root(cfg, Path(options.folder), "predict.folder")
    folder = Path(cfg.paths.run if options.folder is None else options.folder)
    _refuse_links(folder)
    record = take_trained(cfg, checkpoint)
    datamodule, model = _open_data(cfg, options), build_model(cfg, trained=True)
    datamodule.setup("predict")
    warn_of_other_data(record, cfg.data.get("root"), getattr(datamodule, "bank", None))
    task = find_task(datamodule)
    load_weights(model, checkpoint)
    options = _take_threshold(model, options)
    if "image_threshold" not in task.unused:
        options = _take_image_threshold(model, options)
    _warn_of_nothing_to_resume(folder, options)
    place = PredictRun(
        folder=folder,
        identity=_identify(cfg, checkpoint, task.neutral_data),
        make_trainer=lambda callbacks: _build_trainer_of_one(
            cfg, callbacks=list(callbacks), logger=False
        ),
        doubt=find_doubt(record),
    )
    metrics, bad = task.predict(model, place, options)
    if bad:
        problems, done = list_problems(bad), f"all others are predicted in {show_path(folder)}"
        error = PartlyDoneError(
            problems.describe(f"{len(bad)} inputs are bad and have no prediction, {done}"), metrics
        )
        error.problems = problems.entries
        raise error
    return metrics


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with links, through which files elsewhere would be overwritten; checkpoints
    never are.

    Raises:
        ConfigError: Names the first.
    """
    for place, folders, files in os.walk(folder):
        for path in (
            Path(place) / name for name in (*folders, *files) if not name.endswith(".ckpt")
        ):
            if path.is_symlink():
                raise ConfigError(
                    f"predict.folder={show_path(folder)} holds a link, {show_path(path.relative_to(folder))} to "
                    f"{show_path(path.readlink())}: nothing is written through links; remove it, or give another "
                    "predict.folder"
                )


def _take_threshold(model: L.LightningModule, options: PredictOptions) -> PredictOptions:
    chosen = getattr(model, "predict_threshold", None)
    if options.threshold is not None or chosen is None:
        return options
    log.info("predict.threshold=%.4g, as validation chose it", chosen)
    return replace(options, threshold=float(chosen))


def _take_image_threshold(model: L.LightningModule, options: PredictOptions) -> PredictOptions:
    """The options with the model's score of images and the threshold of it, where they name none.

    Raises:
        ConfigError: The threshold was chosen for another score.
    """
    if options.image_score_fraction is None:
        options = replace(
            options, image_score_fraction=getattr(model, "image_score_fraction", None)
        )
    chosen = float(getattr(model, "image_threshold", _NOT_CHOSEN))
    if options.image_threshold is not None or chosen == _NOT_CHOSEN:
        return options
    fraction = float(getattr(model, "image_threshold_fraction", options.top_fraction))
    if not math.isclose(fraction, options.top_fraction, rel_tol=1e-5):
        raise ConfigError(
            f"an image scores as the mean of {options.top_fraction:g} of its pixels here, and validation chose the "
            f"threshold of the checkpoint for {fraction:.6g}: set model.image_score_fraction={fraction:.6g}, or give "
            "predict.image_threshold"
        )
    log.info("predict.image_threshold=%.6g, as validation chose it", chosen)
    return replace(options, image_threshold=chosen)


def _open_data(cfg: DictConfig, options: PredictOptions) -> BaseDataModule:
    """The datamodule, without its bad inputs if they are to be skipped.

    All images are predicted, so they need not be enough to be split, nor have masks.

    A store knows by which rule it was built, so that of ``fit`` is asked first: without bad inputs
    it serves here too.
    """
    kind = resolve_target(cfg.data._target_, "data", allowed_names(), trusted_names())
    takes = inspect.signature(
        kind
    ).parameters  # a datamodule of the user's own may have none of these choices
    for name, value in find_task_of(kind).predict_data.items():
        if name in takes:
            _set(cfg, name, value)
    given = cfg.data.get("on_bad", "error")
    if "on_bad" in takes and options.on_bad == "error":
        _set(cfg, "on_bad", "error")
    try:
        return build_datamodule(cfg)
    except DataError:
        if "on_bad" not in takes or given == options.on_bad:
            raise
    _set(cfg, "on_bad", options.on_bad)
    return build_datamodule(cfg)


def _set(cfg: DictConfig, name: str, value: Any) -> None:  # noqa: ANN401 - an option
    with open_dict(cfg.data):
        cfg.data[name] = value


def _warn_of_nothing_to_resume(folder: Path, options: PredictOptions) -> None:
    if options.resume and not (folder / FINGERPRINT).exists():
        log.warning(
            "predict.resume=true: there is nothing to go on with in %s, so everything is predicted; predict.folder="
            "FOLDER names the folder of the run before",
            folder,
        )


def _identify(cfg: DictConfig, checkpoint: Path, neutral: Collection[str]) -> dict[str, Any]:
    """What decides the predictions beside the options, as plain data."""
    data = {name: value for name, value in to_plain(cfg.data).items() if name not in neutral}
    seed = OmegaConf.select(cfg, "data.loader.seed")  # of the nuisance of layout `single`
    return {
        "checkpoint_sha256": find_sha256(checkpoint),
        "model": to_plain(cfg.model),
        "data": data,
        "seed": seed,
    }


def _build_trainer_of_one(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """A Trainer of one process, because files and tables are written by one, and images come in
    order.

    Raises:
        ConfigError: A launcher has started several.
    """
    trainer = build_trainer(cfg, **overrides)
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    environment = trainer.strategy.cluster_environment
    if (
        environment is not None
        and environment.creates_processes_externally
        and environment.world_size() > 1
    ):
        raise ConfigError(
            f"predict runs in one process, and {environment.world_size()} were started: "
            "start it without torchrun or srun"
        )
    log.info("predict puts what it finds together in one process: only the first device is used")
    return build_trainer(cfg, devices=1, num_nodes=1, strategy="auto", **overrides)
