"""Roots that are no folder of this machine: mirrors of servers, stores of results, and sets of shards.

A wing opens and writes them; `lit_data.core.wings.find_part` finds it by the names of its ``ROOTS``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, get_args

from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError
from lit_data.core.parts import Part
from lit_data.core.types import Array, Ints
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import OnBad
from lit_data.images.scope import Scope
from lit_data.images.store.pixels import StoreOptions

Encoding = Literal["decoded", "source"]


class Root(Protocol):
    """Local side of a root that lies elsewhere."""

    @property
    def folder(self) -> Path:
        """Its local folder."""

    def refresh(self) -> None:
        """Ask for changes, and bring what is new here.

        Raises:
            LitDataError: It cannot be reached or read.
        """


class Store(Protocol):
    """Folder at an address that results lie in; a context manager, which closes the connection.

    Its methods raise a `DataError` where the server does not answer, or refuses.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def get(self, name: str, path: Path, most_bytes: int) -> None:
        """Copy a file to a new local one, and stop where it is larger than it may be."""

    def put(self, path: Path, name: str) -> None:
        """Copy a local file there, in place of one of its name."""

    def put_all(self, paths: Sequence[Path], folder: Path) -> None:
        """Copy local files there, under their paths below a folder."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a small file, which is refused if it is larger."""

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size of each file of a folder, bytes, by name."""

    def list_times(self, scope: Scope) -> dict[str, float]:
        """Return when each file of a scope was written, seconds since 1970, by its path."""


class ImageRoot(Root, Protocol):
    """Local side of a set of images in shards."""

    def list_images(self) -> list[ImageSource]:
        """The files that each image was made from; they are not here."""

    def open_images(self, decoder: Decoder) -> ImageBank:
        """The images, which come when they are needed.

        Raises:
            ConfigError: They were decoded by another decoder than the one that is asked for.
        """


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of writing a dataset in shards, and which part of it is written.

    Args:
        shard_bytes: Decoded bytes of the images of a shard, of at least one image.
        part: The part of the shards that is written; None writes all, and what makes them a
            dataset.
        finish: Write only what makes the shards of all parts a dataset.
        encoding: `decoded` pixels, or the `source` files, which machines decode when they need
            them.
    """

    shard_bytes: int = 2**25
    part: Part | None = None
    finish: bool = False
    encoding: Encoding = "decoded"

    def __post_init__(self) -> None:
        check_count("prepare.shard_bytes", self.shard_bytes, 1)
        check_choice("prepare.encoding", self.encoding, get_args(Encoding))
        if self.finish and self.part is not None:
            raise ConfigError(
                f"prepare.finish=true joins all parts: remove prepare.part={self.part}"
            )


@dataclass(frozen=True, kw_only=True)
class PublishedImages:
    """Images that are written in shards.

    Args:
        sources: The files of each image; bad ones may be among them.
        root: Local folder that they lie in.
        names: Path of each file below the root, by its local path.
        decoder: Decodes one source.
        store: How images lie in a shard.
        on_bad: As `BuildOptions` has it.
        list_beside: Returns local files that are read beside the images, by their paths below the
            root.
        summarise: What is remembered of the images of a shard, [values]; `group` makes of those of
            all shards the number of a group of each image.
        group: See there.
    """

    sources: Sequence[ImageSource]
    root: Path
    names: Mapping[str, str]
    decoder: Decoder
    store: StoreOptions
    on_bad: OnBad
    list_beside: Callable[[], Mapping[str, Path]]
    summarise: Callable[[ImageBank], Array] | None = None
    group: Callable[[Array], Ints] | None = None


class ShardSet(Protocol):
    """A set of shards that is being written."""

    @property
    def options(self) -> ShardOptions:
        """How, and which part of it."""

    @property
    def scratch(self) -> Path:
        """Local folder for what is under way."""

    def write_images(self, images: PublishedImages) -> dict[str, int]:
        """Write images in shards, and return numbers for a report.

        Raises:
            DataError: Images are bad; or the set cannot be written, or lacks parts.
        """
