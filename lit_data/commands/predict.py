"""``predict``: what a model says of every image or volume of a folder."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.checkpoints import find_checkpoint, load_weights
from lit_data.commands.predict_journal import FINGERPRINT
from lit_data.commands.predict_options import PredictOptions, PredictRun, read_options
from lit_data.commands.result import PartlyDoneError
from lit_data.commands.session import build_datamodule, build_model, build_trainer, check_outside_root
from lit_data.commands.views import open_view
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError, Problems

log = logging.getLogger(__name__)

_NEUTRAL: Final = (
    *("backend", "batch_format", "cache", "cache_bytes", "cache_dir", "loader", "on_bad"),
    *("edges", "mask_splits", "patch_px", "patterns", "progressive", "samples_per_image", "split_seed", "splits"),
    "stride_px",
)
"""Options of data that do not change what is said of a whole image."""


def run(cfg: DictConfig) -> dict[str, Any]:
    """Predict everything below the root.

    What is written depends on the data: see `MapFiles` for stripes, `MarkFiles` for watermarks, `BoxWriter` for images
    with boxes, `VolumeWriter` for volumes and `generate` for generated images, which need the data for its sides alone.
    The first two work on whole images, tile by tile, and go on where they were interrupted with
    ``predict.resume=true predict.folder=FOLDER``: images of which all files are there are left as they are, if weights
    and options are those of the run before; if not, the differences are named.

    Bad inputs are left out, listed at the end and in ``bad.csv``, and do not stop the rest. As they have no prediction,
    the command then ends with exit code 3, as for any bad image, but after all else is written, summary.json too.
    ``predict.on_bad=error`` ends before anything is predicted.

    Returns:
        How much was predicted and found.

    Raises:
        PartlyDoneError: Inputs are bad; the others are predicted.
    """
    options, checkpoint = read_options(_to_plain(cfg.predict)), find_checkpoint(cfg)
    if options.folder is not None:
        check_outside_root(cfg, Path(options.folder), "predict.folder")
    datamodule, model = _open_data(cfg, options), build_model(cfg)
    datamodule.setup("predict")
    load_weights(model, checkpoint)
    folder = Path(cfg.paths.run if options.folder is None else options.folder)
    _warn_of_nothing_to_resume(folder, options)
    place = PredictRun(
        folder=folder,
        identity=_identify(cfg, checkpoint),
        make_trainer=lambda callbacks: _build_trainer_of_one(cfg, callbacks=list(callbacks), logger=False),
    )
    metrics, bad = open_view(datamodule).predict(model, place, options)
    if bad:
        raise PartlyDoneError(_describe_bad(bad, folder), metrics)
    return metrics


def _describe_bad(bad: Sequence[tuple[str, str]], folder: Path) -> str:
    problems = Problems()
    for path, reason in bad:
        problems.add(path, reason)
    return problems.describe(f"{len(bad)} inputs are bad and have no prediction, all others are predicted in {folder}")


def _open_data(cfg: DictConfig, options: PredictOptions) -> BaseDataModule:
    """The datamodule, without its bad inputs if they are to be skipped.

    All images are predicted, so they need not be enough to be split, nor have masks.

    A store knows by which rule it was built, so that of ``fit`` is asked first: without bad inputs it serves here too.
    """
    if {"splits", "mask_splits"} <= cfg.data.keys():
        cfg.data.splits, cfg.data.mask_splits = {"train": 1.0}, []
    knows = "on_bad" in cfg.data  # a datamodule of the user's own may have no such choice
    if knows and options.on_bad == "error":
        cfg.data.on_bad = "error"
    try:
        return build_datamodule(cfg)
    except DataError:
        if not knows or cfg.data.on_bad == options.on_bad:
            raise
    cfg.data.on_bad = options.on_bad
    return build_datamodule(cfg)


def _warn_of_nothing_to_resume(folder: Path, options: PredictOptions) -> None:
    if options.resume and not (folder / FINGERPRINT).exists():
        log.warning(
            "predict.resume=true: there is nothing to go on with in %s, so everything is predicted; predict.folder="
            "FOLDER names the folder of the run before",
            folder,
        )


def _identify(cfg: DictConfig, checkpoint: Path) -> dict[str, Any]:
    """What decides the predictions beside the options, as plain data."""
    with checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    data = {name: value for name, value in _to_plain(cfg.data).items() if name not in _NEUTRAL}
    seed = OmegaConf.select(cfg, "data.loader.seed")  # of the nuisance of layout `single`
    return {"checkpoint_sha256": digest, "model": _to_plain(cfg.model), "data": data, "seed": seed}


def _to_plain(node: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _build_trainer_of_one(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """A Trainer of one process, because files and tables are written by one, and images come in order.

    Raises:
        ConfigError: A launcher has started several.
    """
    trainer = build_trainer(cfg, **overrides)
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    environment = trainer.strategy.cluster_environment
    if environment is not None and environment.creates_processes_externally and environment.world_size() > 1:
        raise ConfigError(
            f"predict runs in one process, and {environment.world_size()} were started: "
            "start it without torchrun or srun"
        )
    log.info("predict puts what it finds together in one process: only the first device is used")
    return build_trainer(cfg, devices=1, num_nodes=1, strategy="auto", **overrides)
