"""Files that were found but are not used, counted by cause and logged in a few lines."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_data.core.errors import escape, show_path
from lit_inspect.counts import inflect

log = logging.getLogger(__name__)

Unread = Mapping[str, Sequence[str]]
"""Files of types that are not read, by their extension; names are relative to the root."""

_MOST_LINES = 6
_MOST_NAMES = 3
_IMAGES = (
    ".jp2",
    ".j2k",
    ".jpx",
    ".jxl",
    ".webp",
    ".avif",
    ".heic",
    ".heif",
    ".gif",
    ".tga",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".exr",
    ".hdr",
    ".psd",
    ".svg",
    ".pdf",
    ".raw",
    ".dng",
    ".cr2",
    ".nef",
    ".arw",
    ".jfif",
    ".ico",
    ".dds",
    ".svs",
    ".ndpi",
    ".czi",
    ".nd2",
)
_READ_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")  # not in datasets of volumes
_READ_VOLUMES = (".nii", ".nii.gz", ".dcm", ".ima")  # not in datasets of images
_ARCHIVES = (
    ".zip",
    ".tar",
    ".gz",
    ".tgz",
    ".bz2",
    ".xz",
    ".7z",
    ".rar",
    ".tfrecord",
    ".tfrecords",
    ".parquet",
    ".h5",
    ".hdf5",
    ".lmdb",
    ".mdb",
    ".pkl",
)
_TYPES = (
    (
        "[image has|images have] a type that is not read",
        _IMAGES,
        "save [it|them] as PNG or TIFF",
    ),
    ("[archive is|archives are] not read", _ARCHIVES, "unpack [it|them] into files"),
    (
        "[video is|videos are] not read",
        (".mp4", ".avi", ".mov", ".mkv"),
        "save [its|their] frames as images",
    ),
    (
        "[image is not a volume|images are not volumes]",
        _READ_IMAGES,
        "experiment=segmentation reads [it|them]",
    ),
    (
        "[volume is not an image|volumes are not images]",
        _READ_VOLUMES,
        "experiment=ct_segmentation reads [it|them]",
    ),
    (
        "[volume has|volumes have] a type that is not read",
        (".nrrd", ".mha", ".mhd", ".mgz"),
        "save [it|them] as NIfTI",
    ),
)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files that are not used for the same cause.

    Attributes:
        cause: The words after the count, such as ``images have no label file``.
        names: First names of the files, relative to the root.
        count: Number of files.
        cure: Key or command that would use them, or how they are treated.
    """

    cause: str
    names: tuple[str, ...]
    count: int
    cure: str

    def describe(self) -> str:
        """Return ``3 archives are not read: a.zip, b.zip, c.zip; unpack them into files``."""
        names = ", ".join(map(escape, self.names))
        if self.count > len(self.names):
            names += f" and {self.count - len(self.names)} more"
        return f"{self.count} {self.cause}: {names}; {self.cure}"


class Leftovers:
    """Files in the folder of a dataset that are not used, as reported by its readers.

    Attributes:
        unread: Files of types that are not read.
        outside: Images that match no pattern of the reader.
    """

    def __init__(self) -> None:
        self.unread: Unread = {}
        self.outside: Sequence[str] = ()
        self._folder = ""
        self._entries: dict[str, Leftover] = {}
        self._logged: set[str] = set()

    def take(self, folder: Path, unread: Unread, read: Collection[str]) -> None:
        """Take the files that a walk skipped, and add those with images or volumes.

        Args:
            folder: The root.
            unread: All skipped files.
            read: Extensions of the files that are read.
        """
        self._folder, self.unread = show_path(folder), unread
        packed = unread.get(".gz", ())
        volumes = [name for name in packed if name.lower().endswith(".nii.gz")]
        others = sorted(set(packed) - set(volumes))
        names_of = {**unread, ".gz": others, ".nii.gz": volumes}
        for cause, extensions, cure in _TYPES:
            names: list[str] = []
            for extension in set(extensions).difference(read):
                names += names_of.get(extension, ())
            self.add(cause, sorted(names), cure)

    def add(self, cause: str, names: Sequence[str], cure: str) -> None:
        """Add files, and replace those that were added for the same cause.

        Args:
            cause: See `Leftover`, for one file and for several, as `inflect` reads it:
                ``[image has|images have] no label file``.
            names: Names of the files, relative to the root.
            cure: See `Leftover`, for one file and for several; FILE becomes the first name.
        """
        count = len(names)
        if count:
            advice = inflect(cure, count).replace("FILE", names[0])
            first = tuple(names[:_MOST_NAMES])
            self._entries[cause] = Leftover(inflect(cause, count), first, count, advice)

    def add_split(
        self, split: str, names: Sequence[str], label: str, *, is_left_out: bool = False
    ) -> None:
        """Add all images of a split, none of which has a mask or a label."""
        cure = (
            f"add [a {label}|{label}s], or choose other data.splits: without any, scores of "
            f"{split} mean nothing"
        )
        if is_left_out:
            cure = (
                "[it is skipped, because it is unknown whether it is good|they are skipped, because "
                f"it is unknown which are good]: add a {label}[| for each], or choose other "
                "data.splits"
            )
        self.add(
            f"[image is|images are] all of the split {split} and [has|have] no {label}", names, cure
        )

    def extend(self, others: "Leftovers") -> None:
        """Add the leftovers of another reader of the folder."""
        self._folder = others._folder
        self._entries |= others._entries

    def describe(self) -> list[str]:
        """Return a line for each cause, ordered from most to fewest files."""
        entries = sorted(self._entries.values(), key=lambda entry: -entry.count)
        return [entry.describe() for entry in entries[:_MOST_LINES]]

    def quote(self) -> str:
        """Return all causes as lines of a message, which are then not logged again."""
        lines = self.describe()
        self._logged.update(lines)
        return "".join(f"\n  {line}" for line in lines)

    def log(self) -> None:
        """Log the causes that were not logged before."""
        for line in self.describe():
            if line not in self._logged:
                log.info("%s: %s", self._folder, line)
                self._logged.add(line)
