"""Pictures of a run folder, scaled down to stand in a page."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_data.app.untrusted import open_inside
from lit_data.core.errors import first_line
from lit_inspect.counts import counted

_QUALITY = 80
_MOST_PICTURES = 12
_MOST_PICTURE_BYTES = 2**27
_MOST_PX = 10**8
_MOST_HEIGHT_PX = 8000
_CAPTIONS = {
    "predictions": "What the best checkpoint predicts",
    "worst": "Missed or nearly missed defects, and below the false alarms with the highest scores",
    "worst_images": "Images with a defect of the lowest scores, and below good ones with the highest",
    "samples": "Samples as the model sees them",
    "families": "Each family of defects on its own",
    "pod": "Probability of detection over the size of a defect, by kind",
    "augment": "Samples before and after augmentation",
    "memory": "Memory and batch size over time, with events",
    "throughput": "Samples per second, batch size, and where the time of each step goes",
    "sweep": "The jobs of the sweep",
}
_ENDINGS = (".png", ".jpg", ".jpeg")
_RESULTS = ("predictions", "worst", "worst_images", "pod")
_TIMELINES = ("memory", "throughput")
_DIAGRAMS = (*_TIMELINES, "sweep")


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
    def part(self) -> str:
        """Part of the page: ``results`` of the model, ``data``, or ``machine``."""
        if self.name in _TIMELINES:
            return "machine"
        return "results" if self.name in _RESULTS else "data"

    @property
    def is_diagram(self) -> bool:
        """Return True if it is drawn on white with few colors, so that it can be turned dark."""
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
        more = counted(len(paths) - _MOST_PICTURES, "more picture is", "more pictures are")
        notes.append(f"{more} in the folder")
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
