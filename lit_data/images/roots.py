"""Roots that are not local folders: mirrors of servers, stores of results, and sharded datasets.

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
    """Local side of a root on a server."""

    @property
    def folder(self) -> Path:
        """Local folder of the root."""

    def refresh(self) -> None:
        """Check for changes, and download new files.

        Raises:
            LitDataError: The root cannot be reached or read.
        """


class Store(Protocol):
    """Folder of results at an address; a context manager that closes the connection.

    Its methods raise a `DataError` if the server does not answer, or refuses.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def get(self, name: str, path: Path, most_bytes: int) -> None:
        """Copy a file to a new local one, and stop if it is larger than allowed."""

    def put(self, path: Path, name: str) -> None:
        """Copy a local file to the store, in place of a file of that name."""

    def put_all(self, paths: Sequence[Path], folder: Path) -> None:
        """Copy local files to the store, under their paths below a folder."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a small file, and refuse a larger one."""

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file of a folder, by name."""

    def list_times(self, scope: Scope) -> dict[str, float]:
        """Return the time at which each file of a scope was written, seconds since 1970, by path."""


class ImageRoot(Root, Protocol):
    """Local side of a sharded set of images."""

    def list_images(self) -> list[ImageSource]:
        """Return the files that each image was made from, which are not local."""

    def open_images(self, decoder: Decoder) -> ImageBank:
        """Return the images, which are downloaded when they are needed.

        Raises:
            ConfigError: Another decoder than the requested one decoded them.
        """


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options for writing a dataset in shards, and the part of it to write.

    Args:
        shard_bytes: Decoded bytes of the images of a shard, which has at least one image.
        part: Part of the shards to write; None writes all shards, and the files that join them
            into a dataset.
        finish: Write only the files that join the shards of all parts into a dataset.
        encoding: `decoded` pixels, or the `source` files, which are decoded when they are
            needed.
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
    """Images to write in shards.

    Args:
        sources: The files of each image; bad ones may be among them.
        root: Local folder of the files.
        names: Path of each file below the root, by its local path.
        decoder: Decodes one source.
        store: Layout of images in a shard.
        on_bad: As in `BuildOptions`.
        list_beside: Returns local files that are read beside the images, by their paths below the
            root.
        summarise: Returns values [values] to keep about the images of a shard.
        group: Returns the number of the group of each image, from the values of all shards.
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
    """Sharded dataset that is being written."""

    @property
    def options(self) -> ShardOptions:
        """Options, and the part to write."""

    @property
    def scratch(self) -> Path:
        """Local folder for unfinished files."""

    def write_images(self, images: PublishedImages) -> dict[str, int]:
        """Write images in shards, and return numbers for a report.

        Raises:
            DataError: Images are bad, or the dataset cannot be written or lacks parts.
        """
