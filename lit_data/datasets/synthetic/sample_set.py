"""Synthetic datasets that are made once, in a folder of their own: whole or not at all."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError, StoreError
from lit_data.core.progress import track
from lit_data.core.temp import build_lock, sweep, temp_folder
from lit_data.datasets.split_names import SPLITS

MARKER = "samples.json"
LOCK_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Recipe of a dataset of images or volumes of one size; equal specs give equal samples.

    A subclass has a field for the size and defaults for all fields.

    Args:
        count: Samples, divided 70 : 15 : 15 into train, val and test.
        seed: Each sample is a function of (seed, its number, size) alone.

    Raises:
        ConfigError: A value is not allowed.
    """

    kind: ClassVar[str]
    size_name: ClassVar[str] = "size_px"
    axes: ClassVar[Sequence[str]] = ("height", "width")
    sides: ClassVar[tuple[int, int]]
    """The smallest and the largest side."""
    format_version: ClassVar[int] = 1
    """Raised with every change of a pixel or of the layout."""
    folders: ClassVar[Sequence[str]] = SPLITS
    readme: ClassVar[str] = ""

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("count", self.count, 3, 9999)
        check_count("seed", self.seed, 0, 2**63 - 1)
        size = getattr(self, self.size_name)
        if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != len(self.axes):
            raise ConfigError(f"{self.size_name} is {size!r}; allowed: ({', '.join(self.axes)})")
        for side in size:
            check_count(f"a side of {self.size_name}", side, *self.sides)

    @property
    def size(self) -> tuple[int, ...]:
        """Size of a sample, one number for each of `axes`."""
        return tuple(getattr(self, self.size_name))

    @property
    def folder_name(self) -> str:
        """Name of its folder: datasets of different specs lie side by side."""
        return f"{self.kind}-{self.count}x{'x'.join(map(str, self.size))}-seed{self.seed}"

    def split_of(self, number: int) -> str:
        """Return ``train``, ``val`` or ``test`` for the number of a sample; 160 samples give 112, 24 and 24."""
        # Test and validation are the last samples, so that a larger set keeps the first ones.
        part = max(1, round(self.count * 0.15))
        return SPLITS[max(0, 2 - (self.count - 1 - number) // part)]

    @property
    def recipe(self) -> dict[str, Any]:
        """Content of the marker file, as JSON gives it back."""
        recipe = {"format": self.format_version, "made_from": asdict(self)}
        plain: dict[str, Any] = json.loads(json.dumps(recipe))
        return plain

    def ensure(self, folder: Path) -> Path:
        """Make the dataset once and return its own folder.

        A complete one is recognized by its marker file and used as it is, also from a read-only
        folder. A new one is made in a temporary folder and renamed, so a killed run leaves nothing
        half-made, and two processes at once end with one.

        Args:
            folder: Holds all synthetic datasets, each in a folder of its own.

        Raises:
            StoreError: The folder cannot be written.
            StoreBusyError: Another process has been making the same dataset for ten minutes.
        """
        folder = Path(folder)
        root = folder / self.folder_name
        if self.is_complete(root):
            return root
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Another process may finish the dataset while this one waits.
            with build_lock(folder, wait_s=LOCK_WAIT_S, is_done=lambda: self.is_complete(root)):
                if not self.is_complete(root):
                    sweep(folder)
                    self._publish(root)
        except OSError as error:
            raise StoreError(
                f"cannot make the {self.kind} samples in {folder} ({error}); name another folder"
            ) from error
        return root

    def is_complete(self, root: Path) -> bool:
        """Return True if a dataset was sealed for this recipe and its files still have their sizes."""
        try:
            marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
            sizes = {name: (root / name).stat().st_size for name in marker["files_bytes"]}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(marker == {**self.recipe, "files_bytes": sizes})

    def write(self, root: Path) -> None:
        """Write the whole dataset into a folder that is not there yet, and its marker last."""
        for name in self.folders:
            (root / name).mkdir(parents=True)
        numbers = track(range(self.count), f"making {self.kind} samples", self.count)
        self.write_samples(root, numbers)
        if self.readme:
            (root / "README.txt").write_text(self.readme, encoding="utf-8")
        paths = sorted(root.rglob("*.*"))
        sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in paths}
        marker = {**self.recipe, "files_bytes": sizes}
        (root / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")

    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        """Write the files of samples below `folders`.

        Args:
            root: Own folder of the dataset.
            numbers: Those of all samples.
        """
        raise NotImplementedError

    def _publish(self, root: Path) -> None:
        with temp_folder(root.parent) as temp:
            folder = temp / "made"
            self.write(folder)
            # Published by another process, on a file system whose locks do nothing.
            if self.is_complete(root):
                return
            if root.exists():
                root.rename(temp / "incomplete")
            folder.rename(root)


def open_streams(seed: int, number: int, count: int) -> list[np.random.Generator]:
    """Return random streams of a sample, of which none depends on how much another one draws."""
    streams = []
    for stream in range(count):
        bits = np.random.Philox(key=[seed, number], counter=[0, 0, 0, stream])
        streams.append(np.random.Generator(bits))
    return streams
