"""`Source`: where the files of a set lie, on a disk, on a server, or made on first use, and how images are stored."""

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, get_args

from typing_extensions import override

from lit_data.checks import check_choice, check_types
from lit_data.errors import ConfigError
from lit_data.io.discovery import compile_exclusion, find_images, name_below
from lit_data.io.images.decoders import Decoder, ImageDecoder, ImageSource
from lit_data.io.images.header_scan import SKIPPING, OnBad, find_faults
from lit_data.io.images.image_source import DecodedFiles, ImageBank
from lit_data.io.images.options import ReadOptions
from lit_data.io.remote import RemoteOptions, Root, Scope, check_root
from lit_data.io.remote.objects import open_objects
from lit_data.io.shards.index import is_sharded
from lit_data.io.shards.publish import ImagePublisher, PublishOptions, SetWriter
from lit_data.io.shards.root import ShardedImages, ShardedRoot
from lit_data.io.store.bands import WHOLE, StoreOptions
from lit_data.io.store.store import DecodedStore

log = logging.getLogger(__name__)

Sharded = TypeVar("Sharded", bound=ShardedRoot)


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A root or its mirror; without one, a drawn set. A subclass names the set, and the wanted
    files of a server.

    Args:
        root: A folder or an address, such as ``s3://bucket/folder`` or ``https://host/folder``;
            `None` makes the drawn set once in the cache.
        on_bad: `error` lists all bad files and ends; `skip` leaves them out and lists them.
        cache_dir: Where stores, mirrors and drawn sets lie.
        samples: Parameters of the drawn set.
        remote: How a server is read.

    Raises:
        ConfigError: The root is empty, or an address that cannot be read; or an option is out of
            its range.
    """

    root: str | None
    on_bad: OnBad
    cache_dir: str | None
    samples: Mapping[str, Any] = field(default_factory=dict)
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    draw: ClassVar[Callable[..., Path] | None] = None
    """Makes the drawn set in a folder of its own below one, if it is not there, and says which."""

    takes_shards: ClassVar[bool] = False
    """Whether a root may be a set of shards; of images where samples are those of a `BankDataset`."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Made of the arguments of a datamodule with the names of the fields; `None` takes the
        default of a field.

        A path becomes text, a list a tuple.
        """
        options = {}
        for option in fields(cls):
            has_default = option.default is not MISSING or option.default_factory is not MISSING
            value = given[option.name]
            if value is not None or not has_default:
                value = tuple(value) if isinstance(value, list | range) else value
                options[option.name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        return cls(**cast(Any, options))

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        if not isinstance(self.root, str | None):
            raise ConfigError(
                f"root is {self.root!r}: give one folder or address; data.patterns choose its files"
            )
        if self.root is not None and not self.root.strip():
            raise ConfigError(
                "root is empty: is it a shell variable that is not set? Name a folder, or leave root out for the drawn "
                "set"
            )
        if not isinstance(self.samples, Mapping):
            raise ConfigError(
                f"samples={self.samples!r} must hold names and values: in a shell, quote the braces, "
                "'data.samples={count: 16}'"
            )
        check_choice("on_bad", self.on_bad, get_args(OnBad))
        check_root(self.root)
        if is_sharded(self.root) and not self.takes_shards:
            raise ConfigError(
                f"root={self.root}: this kind of data does not read sets of shards; give its folder"
            )

    @cached_property
    def folder(self) -> Path:
        """The root or its mirror; without one, the drawn set; the first call makes what is not there."""
        if self.shards is not None:
            return self.shards.folder
        return self._root.folder if self.root else self._make_samples()

    def refresh(self) -> None:
        """Bring the mirror of a root on a server, or what is known of a set of shards, up to date."""
        if self.shards is not None:
            self.shards.refresh()
        elif self.root:
            self._root.refresh()

    @cached_property
    def shards(self) -> ShardedRoot | None:
        """The set of shards, where the root is one."""
        return None

    @abstractmethod
    def check(self) -> dict[str, int]:
        """Read every file strictly and keep nothing; return how many there are.

        Raises:
            DataError: Files are bad; all of them are listed.
        """

    def publish(self, address: str, shard_bytes: int) -> dict[str, int]:
        """Write the set in shards, or what is not there yet of it; nothing is kept here.

        Args:
            address: A folder or an address whose name ends with ``.shards``.
            shard_bytes: Decoded bytes of the images of a shard.

        Returns:
            Numbers for a report.

        Raises:
            ConfigError: The address is no name of a set of shards, or this set is one already, or
                cannot be one.
            DataError: Files are bad, or the address cannot be written.
        """
        check_root(address)
        if not self.takes_shards or self.shards is not None or not is_sharded(address):
            raise ConfigError(
                f"prepare.store={address}: give a folder or an address whose name ends with .shards, and as data.root "
                "the files of a set, of a kind that can lie in shards"
            )
        self.refresh()
        return self._publish(
            SetWriter(open_objects(address, self.remote), self.store_folder / "publish"),
            shard_bytes,
        )

    def _publish(self, writer: SetWriter, shard_bytes: int) -> dict[str, int]:
        """Write the set, of a kind that can lie in shards."""
        raise NotImplementedError

    def _refuse_shards(self) -> None:
        if self.shards is not None:
            raise ConfigError(
                "prepare.check reads files, and a set of shards has none: set prepare.verify=true"
            )

    def _find_shards(self, kind: Callable[..., Sharded], max_bytes: int) -> Sharded | None:
        if self.root is None or not is_sharded(self.root):
            return None
        return kind(self.root, self._cache / "shards", self.remote, max_bytes)

    @property
    def store_folder(self) -> Path:
        """Where the stores of this set lie: one folder for each root and way of finding its files."""
        digest = hashlib.sha256(
            (self._identity + self._exclusion).encode("utf-8", "surrogateescape")
        ).hexdigest()[:12]
        return self._cache / "stores" / f"{self.folder.name}-{digest}"

    def name(self, path: str | Path) -> str:
        """A path relative to the root, with forward slashes."""
        name = name_below(self.folder, path)
        is_plain = name is not None and ".." not in name
        return name if is_plain else Path(os.path.relpath(path, self.folder)).as_posix()  # type: ignore[return-value]

    @property
    def _identity(self) -> str:
        """What tells one set from another in the cache."""
        return os.path.realpath(self.folder)

    @property
    def _exclusion(self) -> str:
        """What tells a set apart from the same one with all of its files."""
        return ""

    def _make_samples(self) -> Path:
        if self.draw is None:
            raise ConfigError("there is no drawn set for this kind of data: set data.root")
        draw = partial(self.draw, self._cache / "samples")
        check_types(draw, self.samples, "samples")
        return draw(**self.samples)

    @property
    def _scope(self) -> Scope | None:
        """The wanted files of a server; none for all."""
        return None

    @property
    def _cache(self) -> Path:
        return cache_folder(self.cache_dir)

    @cached_property
    def _root(self) -> Root:
        return Root(self.root or "", self._cache / "remote", self.remote, self._scope)


@dataclass(frozen=True, kw_only=True)
class ImageSet(Source):
    """Images, which may lie in shards.

    Args:
        read: How files are read: page, alpha, EXIF, limits, OpenCV's channel order.
        cache_bytes: Bound of the `lru` cache, if there is one, and of local copies of shards.
        exclude: Globs below the root of files that are left out; a folder stands for all in it.

    Raises:
        ConfigError: A pattern leaves the root or cannot be understood, or the root is a set of
            shards.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    cache_bytes: int
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        compile_exclusion(self.exclude)
        if self.exclude and is_sharded(self.root):
            raise ConfigError(
                f"exclude={list(self.exclude)}: a set of shards is read as it was written: give data.exclude to the "
                "`python -m lit_data prepare` that writes it with prepare.store"
            )

    @property
    @override
    def _exclusion(self) -> str:
        return repr(self.exclude) if self.exclude else ""

    @property
    @abstractmethod
    def decoder(self) -> Decoder:
        """How one image is made from its files."""

    @abstractmethod
    def _find_images(self) -> Sequence[ImageSource]:
        """The files of each image."""

    @cached_property
    @override
    def shards(self) -> ShardedImages | None:
        return self._find_shards(ShardedImages, self.cache_bytes)

    def list_images(self) -> Sequence[ImageSource]:
        """The files of each image; of a set of shards those that were, which are not here.

        Raises:
            DataError: There are none.
        """
        return self.shards.list_images() if self.shards is not None else self._find_images()

    @override
    def _publish(self, writer: SetWriter, shard_bytes: int) -> dict[str, int]:
        sources = self.list_images()
        names = {path: self.name(path) for source in sources for path in source.paths}
        publisher = ImagePublisher(
            writer, self.decoder, names, self._choose_publishing(shard_bytes)
        )
        return publisher.write(sources, self.list_beside(writer.scratch))

    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """What is read beside the images, for a set of shards: local files by their paths below the
        root.

        Args:
            scratch: Folder for files that have to be written for it.
        """
        return {}

    def _choose_publishing(self, shard_bytes: int) -> PublishOptions:
        return PublishOptions(
            shard_bytes=shard_bytes, store=self._layout or WHOLE, on_bad=self.on_bad
        )

    @override
    def check(self) -> dict[str, int]:
        self._refuse_shards()
        self.refresh()
        sources = self.list_images()
        problems = find_faults(sources, self.decoder)
        problems.raise_if_any(f"{len(problems)} of {len(sources)} images are bad", SKIPPING)
        return {"images": len(sources)}

    @property
    def _layout(self) -> StoreOptions | None:
        """How decoded images lie on the disk; by default whole."""
        return None


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageSet):
    """Images that are stored as they are.

    Args:
        patterns: Globs below the root.
        cache: `store` decodes every file once into a memory-mapped store; `device` puts that store
            into the memory of the device once and cuts patches there; `lru` decodes on access and
            keeps `cache_bytes`; `none` decodes on each access.
    """

    patterns: tuple[str, ...]
    cache: str

    caches: ClassVar[Sequence[str]] = ("store", "lru", "none")

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, self.caches)
        super().__post_init__()
        if is_sharded(self.root) and self.cache != "store":
            raise ConfigError(f"cache={self.cache}: a set of shards is read with data.cache=store")

    part: ClassVar[str] = "images"
    """Name of the store of the images."""

    @property
    @override
    def decoder(self) -> Decoder:
        return ImageDecoder(self.read)

    @override
    def _find_images(self) -> Sequence[ImageSource]:
        found = find_images(self.folder, patterns=self.patterns, exclude=self.exclude)
        return [ImageSource((str(path),)) for path in found.paths]

    def open_images(self) -> ImageBank:
        """The decoded images; the first call with `cache=store` decodes them.

        Raises:
            DataError: Files are bad, or not all have one dtype and number of channels.
        """
        if self.shards is not None:
            return self.shards.open_images(self.decoder.fingerprint)
        return self._open_bank(self.list_images(), self.decoder, self.part)

    def names(self, bank: ImageBank) -> list[str]:
        """Path of each image relative to the root, with forward slashes."""
        return [self.name(bank.name(number)) for number in range(len(bank))]

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns)

    @property
    @override
    def _identity(self) -> str:
        return repr((os.path.realpath(self.folder), self.patterns))

    def _open_bank(self, sources: Sequence[ImageSource], decoder: Decoder, part: str) -> ImageBank:
        if self.cache in ("store", "device"):
            layout = (
                self._layout if self.cache == "store" else None
            )  # a device cuts patches out of whole images
            if self.shards is not None and layout is not None and layout.compression == "none":
                layout = replace(
                    layout, compression="lz4"
                )  # masks: a hundredth of the disk, which may be small
            folder = self.store_folder / part
            return DecodedStore.build(
                sources, folder, decoder=decoder, on_bad=self.on_bad, store=layout
            )
        cache_bytes = self.cache_bytes if self.cache == "lru" else 0
        return DecodedFiles(sources, decoder, cache_bytes=cache_bytes, on_bad=self.on_bad)


def cache_folder(cache_dir: str | None) -> Path:
    """Where lit_data keeps what it can make again: `cache_dir`, else LIT_DATA_CACHE, else ~/.cache/lit_data."""
    return Path(
        cache_dir or os.environ.get("LIT_DATA_CACHE") or Path.home() / ".cache" / "lit_data"
    ).expanduser()
