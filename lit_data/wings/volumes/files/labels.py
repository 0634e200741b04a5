"""Labels of volumes, matched by names of files and folders: beside a volume, or in a folder such as ``labelsTr``."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lit_data.core.errors import Problems, escape, show_path
from lit_data.core.names import find_mask_ending, find_mask_start, is_mask_folder
from lit_data.images.discovery import name_below
from lit_data.images.pairing import Nouns, Pairing

log = logging.getLogger(__name__)

StemOf = Callable[[Path], str]
"""Function that returns the name of a file without its extension."""

_NOUNS = Nouns(
    "labels without a volume of their name", "volumes have their name", "second labels of"
)
_WHOLE_STEMS = ("segmentation", "labels", "label", "seg", "mask")
_CHANNEL = re.compile(r"_(\d{4})$")
"""Channel number of a case of nnU-Net, which its labels do not have."""
_SEVERAL = (
    "channel {} of a case with several channels: only one is read, so move the others out of "
    "the folder"
)


def say_labels(stem: str) -> bool:
    """Return True if a file's name, without its extension, says that it contains labels."""
    return bool(find_mask_ending(stem) or find_mask_start(stem)) or stem.lower() in _WHOLE_STEMS


def pair_labels(
    root: Path, paths: Sequence[Path], stem_of: StemOf, problems: Problems
) -> dict[Path, Path | None]:
    """Match volumes with labels, which are None if a volume has none.

    Args:
        root: Folder of the dataset.
        paths: Volumes and labels.
        stem_of: See `StemOf`.
        problems: Collects labels that match no volume or several, second labels, and volumes of
            several channels.
    """
    folders = {path: _find_label_folder(root, path) for path in paths}
    in_folders = [path for path in paths if folders[path]]
    others = [path for path in paths if not folders[path]]
    volumes = [path for path in others if not say_labels(stem_of(path))]
    beside = [path for path in others if say_labels(stem_of(path))]
    labels: dict[Path, Path | None] = dict.fromkeys(volumes)
    if beside:
        pairing = Pairing(root, volumes, beside, stem_of=stem_of, nouns=_NOUNS)
        _add_labels(pairing, labels, problems)
    if in_folders:
        _refuse_channels(volumes, stem_of, problems)
        pairing = Pairing(
            root,
            volumes,
            in_folders,
            mask_folders=sorted(set(filter(None, folders.values()))),
            stem_of=lambda path: _CHANNEL.sub("", stem_of(path)),
            nouns=_NOUNS,
        )
        _add_labels(pairing, labels, problems)
    return labels


def _find_label_folder(root: Path, path: Path) -> Path | None:
    """Return the outermost folder on the way to a file whose name says that it contains labels."""
    parts = (name_below(root, path) or "").split("/")[:-1]
    for depth, part in enumerate(parts, 1):
        if is_mask_folder(part):
            return root.joinpath(*parts[:depth])
    return None


def _refuse_channels(volumes: Sequence[Path], stem_of: StemOf, problems: Problems) -> None:
    cases = set()
    for path in volumes:
        match = _CHANNEL.search(stem_of(path))
        case = path.parent, _CHANNEL.sub("", stem_of(path))
        if match and case in cases:
            problems.add(path, _SEVERAL.format(match[1]))
        cases.add(case)


def _add_labels(pairing: Pairing, labels: dict[Path, Path | None], problems: Problems) -> None:
    matching = pairing.match()
    if matching.pair:
        log.info("%s: labels are %s, and so on", show_path(pairing.folder), escape(matching.pair))
    problems.extend(matching.problems)
    for volume, path in matching.mask_of.items():
        first = labels[volume]
        if first is not None:
            problems.add(path, f"{_NOUNS.second} {volume.name}, beside {first.name}")
        labels[volume] = path
