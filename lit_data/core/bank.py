"""`Bank`: what images and volumes by number have in common, wherever they lie."""

from abc import ABC, abstractmethod
from pathlib import Path

from lit_data.core.types import Ints, LookAhead


class Bank(ABC):
    """Items by number, in groups that are read together.

    The defaults are those of items whose files lie on this machine: each is a group by itself, and
    nothing has to be fetched.

    Attributes:
        skipped: (path, what is wrong) of each item that was left out.
        fetches: True if groups come from elsewhere when they are needed. Then the files that the
            items were made from are not here.
        fits: True if all groups have room here at once.
        window_bytes: Most bytes of the groups that an order may mix; None for any number.
    """

    skipped: tuple[tuple[str, str], ...]
    fetches: bool = False

    @property
    def fits(self) -> bool:
        """See the class."""
        return True

    @property
    def window_bytes(self) -> int | None:
        """See the class."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the first source path of an item."""

    def groups_of(self, numbers: Ints) -> Ints:
        """[n] number of the group of each of some items."""
        return numbers

    @abstractmethod
    def count_bytes(self, numbers: Ints) -> Ints:
        """[n] bytes that are read with each of some items: those of its group."""

    def look_ahead(self, numbers: Ints) -> LookAhead | None:
        """Begin to fetch the groups of items, which are given in the order of their use.

        Returns:
            None where nothing has to be fetched.
        """
        return None

    def stamp(self, index: int) -> list[int]:
        """Return whole numbers that change with an item: size and time of its file.

        They are none for a folder, whose time says nothing of the files in it.
        """
        path = Path(self.name(index))
        status = path.stat()
        return [] if path.is_dir() else [status.st_size, status.st_mtime_ns]

    def check_size(self) -> None:  # noqa: B027 - most banks have nothing to check
        """Raise if a mapped file changed its length; cheap.

        Reading past its end kills a process, which cannot be caught.

        Raises:
            StoreCorruptError: A file is not as long as it should be.
        """
