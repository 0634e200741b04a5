"""Synthetic datasets that are generated once, each in its own folder, completely or not at all."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError, StoreError
from lit_data.core.files import describe_unwritable
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
        count: Number of samples, divided 70 : 15 : 15 into train, val and test.
        seed: Seed; each sample is a function of only (seed, its number, size).

    Raises:
        ConfigError: A value is not allowed.
    """

    kind: ClassVar[str]
    size_name: ClassVar[str] = "size_px"
    axes: ClassVar[Sequence[str]] = ("height", "width")
    sides: ClassVar[tuple[int, int]]
    """Smallest and largest side."""
    format_version: ClassVar[int] = 1
    """Version that increases with every change of a pixel or of the layout."""
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
        """Size of a sample, with one number for each of `axes`."""
        return tuple(getattr(self, self.size_name))

    @property
    def folder_name(self) -> str:
        """Name of the folder of the dataset, which differs by spec."""
        return f"{self.kind}-{self.count}x{'x'.join(map(str, self.size))}-seed{self.seed}"

    def split_of(self, number: int) -> str:
        """Return ``train``, ``val`` or ``test`` for the number of a sample; 160 samples give 112, 24 and 24."""
        # Test and validation are the last samples, so that a larger set keeps the first ones.
        part = max(1, round(self.count * 0.15))
        return SPLITS[max(0, 2 - (self.count - 1 - number) // part)]

    @property
    def recipe(self) -> dict[str, Any]:
        """Content of the marker file, as read back from JSON."""
        recipe = {"format": self.format_version, "made_from": asdict(self)}
        plain: dict[str, Any] = json.loads(json.dumps(recipe))
        return plain

    def ensure(self, folder: Path) -> Path:
        """Generate the dataset once and return its own folder.

        A complete dataset is recognized by its marker file and reused, even from a read-only
        folder. A new one is generated in a temporary folder and renamed, so that a killed run
        leaves no partial dataset, and two processes at once end up with one.

        Args:
            folder: Folder of all synthetic datasets, each in a folder of its own.

        Raises:
            StoreError: The folder cannot be written.
            StoreBusyError: Another process has been generating the same dataset for ten minutes.
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
            content = f"the synthetic {self.kind} dataset"
            raise StoreError(describe_unwritable(folder, content, error)) from error
        return root

    def is_complete(self, root: Path) -> bool:
        """Return True if a dataset was completed for this recipe and its files still have their sizes."""
        try:
            marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
            sizes = {name: (root / name).stat().st_size for name in marker["files_bytes"]}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(marker == {**self.recipe, "files_bytes": sizes})

    def write(self, root: Path) -> None:
        """Write the whole dataset into a folder that does not exist yet, and the marker file last."""
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
            root: Folder of the dataset.
            numbers: Numbers of all samples.
        """
        raise NotImplementedError

    def _publish(self, root: Path) -> None:
        with temp_folder(root.parent) as temp:
            folder = temp / "made"
            self.write(folder)
            # Published by another process, on a file system whose locks have no effect.
            if self.is_complete(root):
                return
            if root.exists():
                root.rename(temp / "incomplete")
            folder.rename(root)


def open_streams(seed: int, number: int, count: int) -> list[np.random.Generator]:
    """Return independent random streams of a sample."""
    streams = []
    for stream in range(count):
        bits = np.random.Philox(key=[seed, number], counter=[0, 0, 0, stream])
        streams.append(np.random.Generator(bits))
    return streams
