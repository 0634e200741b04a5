"""``export``: writes a trained model as one file, for `lit_inspect` or for another runtime."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_data.app.checkpoints import EXPORTED, find_checkpoint
from lit_data.app.cli import Parser
from lit_data.app.configuration.names import allow_packages
from lit_data.app.exported import open_exported, read_exported
from lit_data.app.predict import prepare_export
from lit_data.app.rerun import read_config, read_started
from lit_data.app.trained import take_trained
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, StoreError, first_line, show_path
from lit_data.core.files import explaining
from lit_data.core.temp import scratch_folder
from lit_data.datamodules.source import find_cache
from lit_data.predict.net_facts import NetFacts
from lit_data.wings.export.encode import encode_file
from lit_data.wings.export.int8 import Int8Options, choose_precision
from lit_data.wings.export.plain import FORMS, check_form
from lit_data.wings.export.runtime import write_runtime
from lit_inspect.replacement import replacing_by_path

log = logging.getLogger(__name__)

_INT8 = tuple(field.name for field in fields(Int8Options))
_INSPECT = "inspect"
_ELSEWHERE = "name another file: export RUN board.inspect"
_SUFFIXES = {_INSPECT: EXPORTED} | {form: suffix for form, (suffix, _) in FORMS.items()}
_KEYS = ("to", "runtime", "data.root", "data.read.max_pixels", "ckpt", "paths.cache", *_INT8)
_HELP = """\
usage: lit-data export RUN [FILE] [key=value ...] [--package NAME]

Writes the best checkpoint of a run as one .inspect file, by default RUN/model.inspect, for `lit-inspect FILE IMAGES
--out DIR`, which needs neither torch nor lit_data. It supports maps of defects, with or without references, masks of
watermarks, classes of images, and boxes. Keys:
to=onnx, openvino or torchscript: write a plain graph for other runtimes instead of to=inspect, with its input, output,
thresholds and classes as metadata; runtime=true: also write the wheel of lit_inspect next to the file;
data.root=FOLDER: images to check the file with, if those of the training are gone; data.read.max_pixels: size of the
largest image; ckpt=best, last or a path; paths.cache=FOLDER for decoded images; options of predict for tiles and
thresholds, such as predict.tile_px=256; int8=true: a net in int8, if the validation score drops by at most
int8_drop=0.01 (value ranges come from int8_images=64 training samples).
--package NAME allows classes of your own package."""


def main(arguments: Sequence[str]) -> None:
    """Export a run.

    Args:
        arguments: Arguments after ``export``.

    Raises:
        LitDataError: There is no such run, or its model cannot be exported.
    """
    parser = Parser("export")
    options = parser.read(arguments)
    if options.help:
        print(_HELP)
        return
    overrides = [text for text in options.words if "=" in text]
    paths = [text for text in options.words if "=" not in text]
    if not 1 <= len(paths) <= 2:
        raise ConfigError(
            "export needs the folder of a run, and accepts a file: export RUN board.inspect"
        )
    typed = _read_keys(overrides)
    form: str = typed["to"]
    suffix = _SUFFIXES[form]
    run = Path(paths[0])
    path = Path(paths[1]) if len(paths) > 1 else run / f"model{suffix}"
    if path.suffix != suffix:
        raise ConfigError(f"{path}: name a file that ends in {suffix}, as to={form} writes it")
    with allow_packages(options.package):
        encoded = encode_run(run, typed)
    _write(path, encoded, form)
    if typed["runtime"]:
        with explaining(path, _ELSEWHERE):
            wheel = write_runtime(path.parent)
        print(
            f"{wheel}: on the target machine, pip install {wheel.name} && lit-inspect "
            f"{path.name} IMAGES --out DIR"
        )


def _read_keys(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of the typed keys.

    Raises:
        ConfigError: A key has no effect on an export, or a value cannot be read.
    """
    try:
        typed = OmegaConf.from_dotlist(list(overrides))
    except (ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"the arguments of export cannot be read: {first_line(error)}") from error
    predict = OmegaConf.select(typed, "predict")
    for override in overrides:
        key = override.partition("=")[0]
        if key not in _KEYS and not key.startswith("predict."):
            raise ConfigError(
                f"'{key}' has no effect on export; {', '.join(_KEYS)} and predict.* have"
            )
    values = {} if predict is None else OmegaConf.to_container(predict)
    root, ckpt = OmegaConf.select(typed, "data.root"), OmegaConf.select(typed, "ckpt")
    most_px = OmegaConf.select(typed, "data.read.max_pixels")
    cache = OmegaConf.select(typed, "paths.cache")
    int8 = Int8Options(**{name: typed[name] for name in _INT8 if name in typed})
    form = typed.get("to", _INSPECT)
    check_choice("to", form, tuple(_SUFFIXES))
    check_form(form, int8=int8.int8)
    runtime = typed.get("runtime", False)
    if not isinstance(runtime, bool) or (runtime and form != _INSPECT):
        raise ConfigError("runtime must be true or false, and true needs to=inspect")
    return {
        "to": form,
        "runtime": runtime,
        "predict": values,
        "root": root,
        "max_pixels": most_px,
        "ckpt": ckpt,
        "cache": cache,
        "int8": int8,
    }


class Encoded(NamedTuple):
    """An encoded model of a run.

    Attributes:
        facts: Facts of the net.
        data: Bytes of its ``.inspect`` file.
    """

    facts: NetFacts
    data: bytes


def encode_run(run: Path, typed: Mapping[str, Any]) -> Encoded:
    """Return the model of a run, and the bytes of its file.

    Args:
        run: The run folder, whose configuration determines the model and the data.
        typed: Options of ``predict`` and of int8, and `root`, `max_pixels`, `ckpt` and `cache`,
            which replace those of the run.

    Raises:
        LitDataError: The configuration is invalid, or the model cannot be exported.
    """
    cfg = read_config(run)
    checkpoint = _find(typed["ckpt"], run, Path(typed["cache"] or find_cache()))
    record = take_trained(cfg, checkpoint)
    _settle_paths(cfg, typed, read_started(run).folder)
    cfg.ckpt = str(checkpoint)
    if typed["max_pixels"] is not None:
        cfg.data.read.max_pixels = typed["max_pixels"]
    training = deepcopy(cfg)
    task, request = prepare_export(cfg, typed["predict"], checkpoint, record)
    if request.doubt is not None:
        log.warning("%s: verdicts of the file are unsure, train longer", request.doubt)
    facts = task.export(replace(request, trained=_list_trained(record)))
    data = encode_file(facts)
    int8: Int8Options = typed["int8"]
    return Encoded(facts, choose_precision(data, training, int8) if int8.int8 else data)


def _settle_paths(cfg: DictConfig, typed: Mapping[str, Any], folder: Path) -> None:
    """Set the paths: read images where the run read them, and decode them into this user's cache.

    A run folder may belong to anybody, so it must not choose where files are written.

    Args:
        cfg: The configuration of the run.
        typed: See `encode_run`.
        folder: Folder in which the run was started; its paths are relative to it.
    """
    cfg.paths.cache = str(typed["cache"] or find_cache())
    if "cache_dir" in cfg.data:
        cfg.data.cache_dir = cfg.paths.cache
    root = cfg.data.get("root") if typed["root"] is None else typed["root"]
    # In the folder of the start, a path stays as typed, because stores depend on it.
    is_elsewhere = folder.resolve() != Path.cwd()
    if root is not None and typed["root"] is None and is_elsewhere and "://" not in str(root):
        root = str(folder / Path(root).expanduser())
    cfg.data.root = root
    splits = cfg.data.get("splits")
    if isinstance(splits, str) and splits.lower().endswith(".csv"):
        cfg.data.splits = str(folder / splits)


def _list_trained(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the facts about its training for a file, with only the last part of the images' path."""
    if record is None:
        return None
    root = record["root"]
    return {**record, "root": None if root is None else PurePath(root).name}


def _find(ckpt: object, run: Path, cache: Path) -> Path:
    is_path = ckpt not in (None, "best", "last")
    return find_checkpoint(ckpt, None if is_path else str(run), run, cache)


def _write(path: Path, encoded: Encoded, form: str) -> None:
    """Write a file after the runtime of this machine has confirmed its answers.

    Raises:
        StoreError: It cannot be written, or its answers differ from those of torch.
    """
    with explaining(path, _ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder() as folder:
            board = Path(folder, f"model{EXPORTED}")
            board.write_bytes(encoded.data)
            try:
                settings = open_exported(board, is_patient=True).settings
            except StoreError as error:
                raise StoreError(f"{show_path(path)} was not written: {error}") from error
            if form == _INSPECT:
                with replacing_by_path(path) as part:
                    shutil.copyfile(board, part)
            else:
                _, write = FORMS[form]
                write(encoded.facts, read_exported(board), path)
    size_bytes = path.stat().st_size
    print(f"{path}: {settings.task}, {size_bytes} bytes, {settings.golden} golden answers agree")
