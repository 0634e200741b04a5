"""Sets that are made once, in a folder of their own: whole or not at all, whoever makes them at the same time."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError, StoreError
from lit_data.io.temp import build_lock, sweep, temp_folder

MARKER: Final = "samples.json"
LOCK_WAIT_S: Final = 600.0

Recipe = Mapping[str, Any]
"""What a set is made from, as JSON gives it back; equal recipes give equal sets."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Recipe of a dataset of images or volumes of one size; equal specs give equal samples.

    Args:
        count: Samples, divided 70 : 15 : 15 into train, val and test.
        size: Of a sample, one number for each of `axes`.
        seed: Each sample is a function of (seed, its number, size) alone.

    Raises:
        ConfigError: A value is not allowed.
    """

    kind: ClassVar[str]
    size_name: ClassVar[str] = "size_px"
    axes: ClassVar[Sequence[str]] = ("height", "width")
    sides: ClassVar[tuple[int, int]]
    """The smallest and the largest side."""

    count: int
    size: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        check_integer("count", self.count, 3, 9999)
        if (
            isinstance(self.size, str)
            or not isinstance(self.size, Sequence)
            or len(self.size) != len(self.axes)
        ):
            raise ConfigError(
                f"{self.size_name} is {self.size!r}; allowed: ({', '.join(self.axes)})"
            )
        object.__setattr__(self, "size", tuple(self.size))
        for side in self.size:
            check_integer(f"a side of {self.size_name}", side, *self.sides)
        check_integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def folder_name(self) -> str:
        """Name of the set's folder: sets of different specs lie side by side."""
        return f"{self.kind}-{self.count}x{'x'.join(map(str, self.size))}-seed{self.seed}"

    def split_of(self, number: int) -> str:
        """Return ``train``, ``val`` or ``test`` for the number of a sample; 160 samples give 112, 24 and 24."""
        # Test and validation are the last samples, so that a larger set keeps the first ones.
        part = max(1, round(self.count * 0.15))
        return SPLITS[max(0, 2 - (self.count - 1 - number) // part)]

    def recipe(self, format_version: int) -> Recipe:
        """Return the content of the marker file, as JSON gives it back."""
        made_from = {"count": self.count, self.size_name: list(self.size), "seed": self.seed}
        return {"format": format_version, "made_from": made_from}

    def ensure(self, folder: Path, format_version: int, write: Callable[[Path], None]) -> Path:
        """Make the set once in a folder of its own, and return that; see `ensure_set`.

        Args:
            folder: Folder of sets.
            format_version: Version of pixels and layout.
            write: Writes the files into a folder that is not there yet.
        """
        return write_once(
            Path(folder) / self.folder_name, self.recipe(format_version), write, self.kind
        )


def ensure_set(root: Path, recipe: Recipe, write: Callable[[Path], None], *, what: str) -> Path:
    """Make a set once and say where it is.

    A complete set is recognised by its marker file and used as it is, also from a read-only folder.
    A new set is made in a temporary folder and renamed, so a killed run leaves no half-made set,
    and two processes at once end with one.

    Args:
        root: The set's own folder.
        recipe: What it is made from.
        write: Writes it into a folder that is not there yet, and calls `seal` at its end.
        what: Of which samples, for messages.

    Raises:
        StoreError: The folder cannot be written.
        StoreBusyError: Another process has been making the same set for ten minutes.
    """
    if is_complete(root, recipe):
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        # Another process may finish the set while this one waits.
        with build_lock(root.parent, wait_s=LOCK_WAIT_S, is_done=lambda: is_complete(root, recipe)):
            if not is_complete(root, recipe):
                sweep(root.parent)
                _publish(root, recipe, write)
    except OSError as error:
        raise StoreError(
            f"cannot make the {what} samples in {root.parent} ({error}); name another folder"
        ) from error
    return root


def write_once(root: Path, recipe: Recipe, write: Callable[[Path], None], kind: str) -> Path:
    """Make a set as `ensure_set` does, and seal what `write` has written."""

    def write_and_seal(folder: Path) -> None:
        write(folder)
        seal(folder, recipe)

    return ensure_set(root, recipe, write_and_seal, what=kind)


def is_complete(root: Path, recipe: Recipe) -> bool:
    """Return True if a dataset was sealed for this recipe and its files still have their sizes."""
    try:
        marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (root / name).stat().st_size for name in marker["files_bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker == {**recipe, "files_bytes": sizes})


def seal(root: Path, recipe: Recipe) -> None:
    """Write the marker of a set whose files are all there."""
    sizes = {
        path.relative_to(root).as_posix(): path.stat().st_size for path in sorted(root.rglob("*.*"))
    }
    (root / MARKER).write_text(
        json.dumps({**recipe, "files_bytes": sizes}, indent=1), encoding="utf-8"
    )


def check_integer(name: str, value: object, least: int, most: int) -> None:
    """Refuse what is no whole number between two bounds.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; allowed: an integer from {least} to {most}")


def _publish(root: Path, recipe: Recipe, write: Callable[[Path], None]) -> None:
    with temp_folder(root.parent) as temp:
        folder = temp / "made"
        write(folder)
        # Published by another process, on a file system whose locks do nothing.
        if is_complete(root, recipe):
            return
        if root.exists():
            root.rename(temp / "incomplete")
        folder.rename(root)
