"""`Bank`: common base of images and volumes by number, local or remote."""

from abc import ABC, abstractmethod
from pathlib import Path

from lit_data.core.types import Ints, LookAhead


class Bank(ABC):
    """Items by number, in groups that are read together.

    The defaults are for items with local files: each item is a group of its own, and nothing has to
    be fetched.

    Attributes:
        skipped: (path, what is wrong) of each skipped item.
        fetches: True if groups are downloaded when they are needed; the files that the items were
            made from are then not local.
        fits: True if all groups fit here at once.
        window_bytes: Most bytes of the groups that an order may mix; None for no limit.
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
        """Return [n] group numbers of the given items."""
        return numbers

    @abstractmethod
    def count_bytes(self, numbers: Ints) -> Ints:
        """Return [n] bytes that are read with each of the given items, which are those of its group."""

    def look_ahead(self, numbers: Ints) -> LookAhead | None:
        """Begin to fetch the groups of items, given in the order of their use.

        Returns:
            The fetcher, or None if nothing has to be fetched.
        """
        return None

    def stamp(self, index: int) -> list[int]:
        """Return integers that change with an item: size and times of its file.

        A folder has none, since its time tells nothing about the files in it.
        """
        path = Path(self.name(index))
        status = path.stat()
        if path.is_dir():
            return []
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]

    def check_size(self) -> None:  # noqa: B027 - most banks have nothing to check
        """Check that no mapped file changed its length, which is cheap.

        A read past the end of a file kills a process, which cannot be caught.

        Raises:
            StoreCorruptError: A file has another length than it should.
        """
