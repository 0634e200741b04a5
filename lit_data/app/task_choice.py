"""Experiment of a command line that names none: that of its checkpoint, or a proposal by its folder."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from lit_data.app.configuration.tree import ConfigTree, Engine
from lit_data.app.configuration.words import read_override
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, DataError, escape, show_path
from lit_data.core.wings import recognise

_OF_TRAINED = ("validate", "test", "predict", "calibrate", "pod", "benchmark")
"""Commands that take a checkpoint."""
_WITHOUT_DATA = ("doctor",)
_CHOOSING = ("experiment", "data", "data._target_", "suite")
"""Keys that choose the data; a suite of benchmarks brings its own."""
_NAMED = ("best", "last", "latest")
_MOST_CHANNELS = 4
_MASKED = ("folder", "beside")
"""Layouts of inspection images with masks."""


def choose_experiment(hydra: Engine, command: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the experiment of the checkpoint, where they choose no data.

    A word without a key that is the name of an experiment chooses that.

    Args:
        hydra: The engine of `open_hydra`.
        command: The word on the command line.
        overrides: Those behind it.

    Raises:
        ConfigError: Nothing tells the experiment; it says which one the folder looks like.
        DataError: There is no such checkpoint.
        StoreError: It is damaged.
    """
    tree = ConfigTree(hydra, command, overrides)
    experiments = tree.options("experiment")
    overrides = [f"experiment={word}" if word in experiments else word for word in overrides]
    typed = {word.lstrip("+").partition("=")[0]: word for word in overrides}
    if command in _WITHOUT_DATA or any(key in typed for key in _CHOOSING):
        return [*overrides, *_name_after_data(typed)]
    tree.parse(overrides)  # what is misspelt is named first
    texts = {key: read_override(word) for key, word in typed.items()}
    ckpt, run = texts.get("ckpt"), texts.get("run")
    has_checkpoint = any(text is not None and text not in _NAMED for text in (ckpt, run))
    if command in _OF_TRAINED and has_checkpoint:
        return [f"experiment={_read_experiment(ckpt, run, experiments)}", *overrides]
    root = texts.get("data.root")
    for name in () if root is None else _recognise(root):
        if name in experiments:
            line = shlex.join(["lit-data", command, f"experiment={name}", *overrides])
            raise ConfigError(
                f"no experiment is chosen, and {show_path(root or '')} looks like {name}: {line}"
            )
    where = "" if root is None else f", and {show_path(root)} looks like none"
    raise ConfigError(
        f"no experiment is chosen{where}: add experiment=NAME, one of {', '.join(experiments)}; "
        "lit-data --help tells what each is for"
    )


def _name_after_data(typed: Mapping[str, str]) -> list[str]:
    """Return the name of a run whose kind of data alone is chosen; no words where more is."""
    data = read_override(typed.get("data", ""))
    return [f"name={data}"] if data and not {"experiment", "name"} & typed.keys() else []


def _read_experiment(ckpt: str | None, run: str | None, experiments: Sequence[str]) -> str:
    # With torch, which a mistyped word does not wait for.
    from lit_data.app.checkpoints import find_checkpoint
    from lit_data.app.exported import is_exported, read_exported_record
    from lit_data.app.record import read_record
    from lit_data.datamodules.source import find_cache

    checkpoint = find_checkpoint(ckpt, run, Path("runs"), Path(find_cache()))
    read = read_exported_record if is_exported(checkpoint) else read_record
    record = read(checkpoint)
    name = "" if record is None else str(record["experiment"])
    if name not in experiments:
        fault = "does not tell its experiment"
        if name:
            fault = f"is of {escape(name)}, which is not here"
        raise ConfigError(
            f"{show_path(checkpoint)} {fault}: add experiment=NAME, or --config-dir FOLDER with yours"
        )
    return name


def _recognise(root: str) -> Iterator[str]:
    """Yield the experiments that a folder may be for, the likeliest first; no image is decoded."""
    from lit_data.datasets.layouts import find_inspection_set

    folder = Path(root).expanduser().resolve()
    if is_remote(root) or not folder.is_dir():
        return
    images = None
    with suppress(DataError):
        images = find_inspection_set(folder)
    if images is None or all(map(_is_volume, images.images)):
        yield from recognise(folder, has_images=False)
        return
    if images.layout in _MASKED:
        yield "segmentation"
    yield from recognise(folder, has_images=True)
    kinds = dict(zip(images.images, images.kinds, strict=True))
    trained = {kind for path, kind in kinds.items() if "train" in path.relative_to(folder).parts}
    if images.layout == "anomaly" or (trained or set(images.kinds)) == {"good"}:
        yield "anomaly"
    elif images.layout == "none" and len(set(images.kinds) - {""}) > 1:
        yield "classification"
    if images.layout != "none":
        yield "segmentation"


def _is_volume(path: Path) -> bool:
    """Return True for an array that is no image of one or some channels."""
    if path.suffix != ".npy":
        return False
    shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
    return (len(shape) == 3 and shape[-1] > _MOST_CHANNELS) or len(shape) > 3
