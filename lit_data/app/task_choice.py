"""Experiment of a command line that names none: that of its checkpoint, or a proposal by its folder."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lit_data.app.configuration.tree import ConfigTree
from lit_data.app.configuration.words import read_key, read_override
from lit_data.core.addresses import is_remote
from lit_data.core.errors import ConfigError, DataError, escape, show_path
from lit_data.core.opening import open_source
from lit_data.core.wings import recognize
from lit_data.images.npy import read_array_header
from lit_inspect.layouts import ROLES

if TYPE_CHECKING:
    from lit_data.datasets.layouts import InspectionSet

_OF_TRAINED = ("validate", "test", "predict", "calibrate", "pod", "benchmark")
"""Commands that take a checkpoint."""
_NAMED = ("best", "last", "latest")
_MOST_CHANNELS = 4
_MASKED = ("folder", "beside")
"""Layouts of inspection images with masks."""
_TARGETS = re.compile("targets?")
_REFERENCES = re.compile("(ref(erence)?s?|golden|templates?)[ _-]?[12]?")


def choose_experiment(tree: ConfigTree, words: Sequence[str]) -> str:
    """Return the experiment of the checkpoint that is typed.

    Args:
        tree: What the configuration is composed from.
        words: The overrides, which choose no data.

    Raises:
        ConfigError: Nothing tells the experiment; it says which one the folder looks like.
        DataError: There is no such checkpoint.
        StoreError: It is damaged.
    """
    tree.parse(words)  # what is misspelt is named first
    experiments = tree.options("experiment")
    texts = {read_key(word): read_override(word) for word in words}
    ckpt, run = texts.get("ckpt"), texts.get("run")
    has_checkpoint = any(text is not None and text not in _NAMED for text in (ckpt, run))
    if tree.command in _OF_TRAINED and has_checkpoint:
        return _read_experiment(ckpt, run, experiments)
    root = texts.get("data.root")
    for name, *options in () if root is None else _recognize(root):
        if name in experiments:
            line = shlex.join(["lit-data", tree.command, f"experiment={name}", *options, *words])
            raise ConfigError(
                f"no experiment is chosen, and {show_path(root or '')} looks like {name}: {line}"
            )
    where = "" if root is None else f", and {show_path(root)} does not look like any"
    raise ConfigError(
        f"no experiment is chosen{where}: add experiment=NAME, one of {', '.join(experiments)}; "
        "lit-data --help describes them"
    )


def _read_experiment(ckpt: str | None, run: str | None, experiments: Sequence[str]) -> str:
    # With torch, which a mistyped word does not wait for.
    from lit_data.app.checkpoints import find_checkpoint
    from lit_data.app.record import read_record
    from lit_data.datamodules.source import find_cache

    checkpoint = find_checkpoint(ckpt, run, Path("runs"), Path(find_cache()))
    record = read_record(checkpoint)
    name = "" if record is None else str(record["experiment"])
    if name not in experiments:
        fault = "does not record its experiment"
        if name:
            fault = f"is from {escape(name)}, which does not exist here"
        raise ConfigError(
            f"{show_path(checkpoint)} {fault}: add experiment=NAME, or --config-dir FOLDER with yours"
        )
    return name


def _recognize(root: str) -> Iterator[Sequence[str]]:
    """Yield the experiments that a folder may be for, each with the options that it needs, the likeliest first."""
    folder = Path(root).expanduser().resolve()
    if is_remote(root) or not folder.is_dir():
        return
    options = _find_references(folder)
    if options:
        yield "stripe", *options
    for name in _recognize_images(folder):
        yield (name,)


def _find_references(folder: Path) -> list[str]:
    """Return the layout of a folder of targets beside one or two of references; empty for others."""
    targets, references = list[str](), list[str]()
    for path in sorted(folder.iterdir()):
        if path.is_dir() and _TARGETS.fullmatch(path.name.lower()):
            targets.append(path.name)
        elif path.is_dir() and _REFERENCES.fullmatch(path.name.lower()):
            references.append(path.name)
    layout = {1: "pairs", 2: "files"}.get(len(references))
    if len(targets) != 1 or layout is None:
        return []
    globs = []
    for role, name in zip(ROLES, [*targets, *references], strict=False):
        globs.append(f'{role}: "{name}/*"')
    return [f"data.layout={layout}", f"data.files={{{', '.join(globs)}}}"]


def _recognize_images(folder: Path) -> Iterator[str]:
    """Yield the experiments that the images of a folder may be for; none of them is decoded."""
    from lit_data.datasets.layouts import find_inspection_set

    images = None
    with suppress(DataError):
        images = find_inspection_set(folder)
    if images is None or all(map(_is_volume, images.images)):
        yield from recognize(folder, has_images=False)
        return
    if images.layout in _MASKED:
        yield "segmentation"
    yield from recognize(folder, has_images=True)
    kinds = dict(zip(images.images, images.kinds, strict=True))
    trained = {kind for path, kind in kinds.items() if "train" in path.relative_to(folder).parts}
    if images.layout == "anomaly" or (trained or set(images.kinds)) == {"good"}:
        yield "anomaly"
    elif images.layout == "none" and _has_labels(folder, images):
        yield "classification"
    if images.layout != "none":
        yield "segmentation"


def _has_labels(folder: Path, images: "InspectionSet") -> bool:
    """Return True if folders, a table or lists name at least two classes of images."""
    from lit_data.annotations.tables import read_labels, read_list_labels

    labels: Sequence[str] = images.kinds
    if len(set(labels)) < 2:
        try:
            listed = read_labels(folder, images.images, images.excluded)
            listed = listed or read_list_labels(folder, images.images, images.excluded)
        except DataError:  # the command lists what is wrong with them
            return True
        if listed is None:
            return False
        labels = listed.labels
    return len(set(labels) - {""}) > 1


def _is_volume(path: Path) -> bool:
    """Return True for an array that is no image of one or some channels, and can be read."""
    if path.suffix.lower() != ".npy":
        return False
    try:
        with open_source(path) as stream:
            shape = read_array_header(stream, path.stat().st_size).shape
    except (DataError, OSError):
        return False
    return (len(shape) == 3 and shape[-1] > _MOST_CHANNELS) or len(shape) > 3
