"""Files of a run folder that may be anybody's: texts, data and pictures of bounded size.

Secrets are taken out of them.
"""

import base64
import csv
import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lit_data.errors import DataError, first_line
from lit_data.files import open_regular
from lit_data.io.remote.secrets import (
    MASK,
    cut_secrets,
    ends_in_secret,
    find_other_halves,
    holds_key_id,
    names_secret,
)

_LEAST_KNOWN = 6  # a shorter secret would be found inside of ordinary words

_MOST_BYTES = 2**24
_QUALITY = 80
_MOST_PICTURES = 12
_MOST_PICTURE_BYTES = 2**27
_MOST_PX = 10**8
_MOST_HEIGHT_PX = 8000
_CAPTIONS = {
    "samples": "Samples as the model sees them",
    "predictions": "Samples, their masks, and what the best checkpoint finds",
    "worst": "Defects that were missed or nearly so, and below the surest false alarms",
    "families": "Each family of defects on its own",
    "pod": "Probability of detection over the size of a defect, by family",
    "places": "Places of the images where fewer defects are found than elsewhere",
    "augment": "Samples before and after augmentation",
    "memory": "Memory and batch size over time, with what happened meanwhile",
    "throughput": "Samples per second, batch size, and where the time of each step goes",
    "sweep": "The jobs of the sweep",
}
_ENDINGS = (".png", ".jpg", ".jpeg")
_TIMELINES = ("memory", "throughput")
_DIAGRAMS = (*_TIMELINES, "sweep")


class Masker:
    """Takes secrets out of configurations and texts.

    Values found under the key of a secret are taken out of all later texts too, wherever they
    stand.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._has_key_id = False

    def mask_tree(self, tree: Any) -> Any:  # noqa: ANN401 - what YAML or JSON may hold
        """Return a copy of dicts and lists without secrets.

        All that lies below the key of a secret is one. A number is a secret only where the key ends
        in the word, so ``max_tokens: 512`` stays. Where the public half of an AWS key stands
        anywhere, what looks like the secret half is taken out everywhere.
        """
        texts = list(_list_texts(tree))
        self._has_key_id |= any(map(holds_key_id, texts))
        for text in texts:
            self._learn_halves(text)
        return self._mask_node(tree)

    def mask_text(self, text: str) -> str:
        """Return a text without known secrets, and without those that `cut_secrets` sees."""
        self._has_key_id |= holds_key_id(text)
        self._learn_halves(text)
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return cut_secrets(text)

    def _learn_halves(self, text: str) -> None:
        if self._has_key_id:
            self._known.update(find_other_halves(text))

    def _mask_node(self, node: Any) -> Any:  # noqa: ANN401
        if isinstance(node, dict):
            masked = {}
            for key, value in node.items():
                masked[self.mask_text(str(key))] = self._mask_entry(str(key), value)
            return masked
        if isinstance(node, list):
            return [self._mask_node(value) for value in node]
        return self.mask_text(node) if isinstance(node, str) else node

    def _mask_entry(self, key: str, value: Any) -> Any:  # noqa: ANN401
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number:
            is_secret = ends_in_secret(key)
        else:
            is_secret = isinstance(value, str | dict | list) and names_secret(key)
        if not is_secret:
            return self._mask_node(value)
        self._learn(value)
        return MASK if value not in ("", {}, []) else value

    def _learn(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._learn(part)
        elif isinstance(value, str) and len(value) >= _LEAST_KNOWN and not value.startswith("${"):
            self._known.add(value)


def _list_texts(tree: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield all texts of dicts and lists."""
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _list_texts(part)
    elif isinstance(tree, str):
        yield tree


def open_inside(folder: Path, path: Path, *, most_bytes: int = _MOST_BYTES) -> BinaryIO:
    """Open a file of a folder for reading.

    Args:
        folder: Of a run or a sweep; it may itself be a link.
        path: The file; nothing below the folder may be a link.
        most_bytes: Its largest size.

    Raises:
        OSError: It is missing, a link, no regular file, or too large.
    """
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, "it lies behind a link", str(path))
    try:
        file = open_regular(path, links=False)
    except DataError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if os.fstat(file.fileno()).st_size > most_bytes:
        file.close()
        raise OSError(errno.EINVAL, "it is too large", str(path))
    return file


def read_text(folder: Path, path: Path) -> str:
    """Return the text of a file of a folder; see `open_inside`."""
    with open_inside(folder, path) as file:
        return file.read(_MOST_BYTES).decode("utf-8", "replace")


def load(folder: Path, name: str, parse: Callable[[str], Any], notes: list[str]) -> Any | None:  # noqa: ANN401 - what a file may hold
    """Return what a file of a folder holds; None where it is missing or cannot be read.

    Args:
        folder: Of a run or a sweep.
        name: Of the file below it.
        parse: Makes data of its text.
        notes: Gets a sentence if there is a file that cannot be read.
    """
    try:
        return parse(read_text(folder, folder / name))
    except FileNotFoundError:
        return None
    except (OSError, DataError, csv.Error, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {first_line(error)}")
        return None


def parse_csv(text: str) -> list[dict[str, str]]:
    """Return the rows of a table.

    Raises:
        csv.Error: It is none.
    """
    return list(csv.DictReader(io.StringIO(text, newline="")))


def as_dict(node: Any) -> dict[str, Any]:  # noqa: ANN401 - a part of plain data
    """Return a node of YAML or JSON that is a mapping; an empty one for any other."""
    return node if isinstance(node, dict) else {}


def find_config_dir(hydra: Mapping[str, Any]) -> list[str]:
    """Return the options of the command line that name the user's own folders of configurations."""
    sources = as_dict(hydra.get("runtime")).get("config_sources")
    options: list[str] = []
    for source in sources if isinstance(sources, list) else ():
        entry = as_dict(source)
        if entry.get("schema") == "file" and entry.get("path"):
            options += ["--config-dir", str(entry["path"])]
    return options


@dataclass(frozen=True)
class Picture:
    """A picture that stands in the page.

    Attributes:
        name: Its file, without folder and ending.
        uri: All of it, as a data URI.
        width_px: As it stands in the page.
        height_px: As it stands in the page.
        original_px: Width of the file.
    """

    name: str
    uri: str
    width_px: int
    height_px: int
    original_px: int

    @property
    def is_timeline(self) -> bool:
        """Return True if it is of the machine and not of samples."""
        return self.name in _TIMELINES

    @property
    def is_diagram(self) -> bool:
        """Return True if it is drawn on white with few colours, so that it can be turned dark."""
        return self.name in _DIAGRAMS

    @property
    def caption(self) -> str:
        """Sentence on what it shows."""
        return _CAPTIONS.get(self.name, self.name)

    @property
    def is_scaled(self) -> bool:
        """Return True if the file is larger."""
        return self.original_px > 1.1 * self.width_px


def read_pictures(
    folder: Path, notes: list[str], *, width_px: int, names: Sequence[str] | None = None
) -> list[Picture]:
    """Read the pictures of a folder, the known ones first.

    Args:
        folder: Of a run or a sweep.
        notes: Gets a sentence for each picture that cannot be read or is left out.
        width_px: What is wider is scaled down; 0 leaves all of them out.
        names: Only these, without their endings.
    """
    if not width_px:
        return []
    paths = _list_pictures(folder)
    if names is not None:
        paths = [path for path in paths if path.stem in names]
    if len(paths) > _MOST_PICTURES:
        notes.append(f"{len(paths) - _MOST_PICTURES} more pictures lie in the folder")
    pictures = []
    for path in paths[:_MOST_PICTURES]:
        try:
            pictures.append(_read_picture(folder, path, width_px))
        except Exception as error:  # of a damaged file any library may raise anything
            notes.append(f"{path.name} cannot be shown: {first_line(error)}")
    return pictures


def _list_pictures(folder: Path) -> list[Path]:
    """Return the pictures of a folder, those that we know first."""
    paths = [path for path in folder.glob("*") if path.suffix.lower() in _ENDINGS]
    paths += _find_latest(folder / "images")
    known = list(_CAPTIONS)
    ranks = {}
    for path in paths:
        rank = known.index(path.stem) if path.stem in known else len(known)
        ranks[path] = (rank, path.name)
    return sorted(paths, key=lambda path: ranks[path])


def _find_latest(folder: Path) -> list[Path]:
    """Return the last of each kind that is drawn every so many steps, as ``step-500.png``."""
    latest: dict[str, tuple[int, Path]] = {}
    for path in folder.glob("*-*.png"):
        kind, _, number = path.stem.rpartition("-")
        if number.isdecimal() and int(number) >= latest.get(kind, (-1, path))[0]:
            latest[kind] = (int(number), path)
    return [path for _, path in latest.values()]


def _read_picture(folder: Path, path: Path, width_px: int) -> Picture:
    from PIL import Image

    with (
        open_inside(folder, path, most_bytes=_MOST_PICTURE_BYTES) as raw,
        Image.open(raw, formats=("PNG", "JPEG")) as file,  # no rare decoder for anybody's file
    ):
        original_px = file.width
        if file.width * file.height > _MOST_PX:
            raise ValueError(f"{file.width} x {file.height} pixels are too many")
        rgba = file.convert("RGBA")
    # Transparent diagrams are meant for white.
    picture = Image.new("RGB", rgba.size, "white")
    picture.paste(rgba, mask=rgba.getchannel("A"))
    scale = min(1.0, width_px / picture.width, _MOST_HEIGHT_PX / picture.height)
    if scale < 1:
        width = max(1, round(picture.width * scale))
        height = max(1, round(picture.height * scale))
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=_QUALITY, method=2)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    uri = f"data:image/webp;base64,{data}"
    return Picture(path.stem, uri, picture.width, picture.height, original_px)
