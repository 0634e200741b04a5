"""`FileOptions` and `Source`: where the files of a dataset lie, on a disk, on a server, or made on first use."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypedDict, TypeVar, get_args

from lit_data.core.addresses import RemoteOptions, check_root, is_remote, parse_address
from lit_data.core.checks import check_choice, check_types
from lit_data.core.errors import ConfigError, StoreError, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.core.parts import Part
from lit_data.core.types import NEUTRAL, Ints, PathText
from lit_data.datasets.splits import Splits, find_named_splits, split_images
from lit_data.datasets.synthetic.sample_set import SampleSpec
from lit_data.images.discovery import name_below
from lit_data.images.header_scan import OnBad
from lit_data.images.scope import Scope
from lit_data.wings.remote import Root
from lit_data.wings.remote.outline import Outline
from lit_data.wings.remote.shards.index import is_sharded
from lit_data.wings.remote.shards.store import ShardedRoot
from lit_data.wings.remote.shards.writer import Encoding, Holding, SetWriter, ShardOptions
from lit_data.wings.remote.transport import open_transport

Sharded = TypeVar("Sharded", bound=ShardedRoot)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of the files of a dataset: place, splits, and what is kept of them.

    A datamodule takes the options as keywords, see `FileKeywords`, and makes its `Source` of them.

    Args:
        root: A folder or an address, such as ``s3://bucket/folder`` or ``https://host/folder``;
            `None` makes the synthetic dataset once in the cache.
        splits: Whole images, objects or volumes to train, val and test: `auto`, `folders`,
            fractions, or lists; see `lit_data.datasets.splits.split_images`.
        split_seed: Seed of the random choice where splits are fractions.
        on_bad: `error` lists all bad files and ends; `skip` leaves them out and lists them.
        cache_dir: Folder of stores, mirrors and synthetic datasets.
        cache_bytes: Bound of the `lru` cache, if there is one, and of local copies of shards.
        samples: Parameters of the synthetic dataset.
        remote: Connections, retries and limits where the root is on a server.
    """

    root: str | None = None
    splits: Splits = "auto"
    split_seed: int = 0
    on_bad: OnBad = "error"
    cache_dir: str | None = None
    cache_bytes: int = 2**30
    samples: Mapping[str, Any] = field(default_factory=dict)
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    @classmethod
    def of(cls, **options: Any) -> Self:  # noqa: ANN401 - see `FileKeywords`
        """Make the options of the keywords of a datamodule.

        A list becomes a tuple, a path text, and None the default where that is an object.
        """
        has_object = {each.name for each in fields(cls) if each.default_factory is not MISSING}
        plain = {}
        for name, value in options.items():
            if value is None and name in has_object:
                continue  # null in YAML stands for the default
            if isinstance(value, list | range):
                value = tuple(value)
            elif isinstance(value, os.PathLike):
                value = os.fspath(value)
            plain[name] = value
        return cls(**plain)


class FileKeywords(TypedDict, total=False):
    """Keywords of all datamodules: `FileOptions` but for the root."""

    splits: Annotated[Splits, NEUTRAL]
    split_seed: Annotated[int, NEUTRAL]
    on_bad: Annotated[OnBad, NEUTRAL]
    cache_dir: Annotated[PathText | None, NEUTRAL]
    cache_bytes: Annotated[int, NEUTRAL]
    samples: Mapping[str, Any] | None
    remote: RemoteOptions | None


@dataclass(frozen=True, kw_only=True)
class Source(FileOptions, ABC):
    """A root or its mirror; without one, a synthetic dataset.

    A subclass names the dataset, and which files of a server are mirrored. Args are those of
    `FileOptions`.

    Raises:
        ConfigError: The root is empty, or an address that cannot be read; or an option is out of
            its range.
    """

    sample_spec: ClassVar[type[SampleSpec] | None] = None
    """Recipe of the synthetic dataset."""

    takes_shards: ClassVar[bool] = False
    """True lets a root be a set of shards; of images where samples are those of a `BankDataset`."""

    late_suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of files of a server whose content is not needed to list the dataset."""

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        if not isinstance(self.root, str | None):
            raise ConfigError(
                f"root is {self.root!r}: give one folder or address; data.patterns choose its files"
            )
        if self.root is not None and not self.root.strip():
            raise ConfigError(
                "root is empty: is it a shell variable that is not set? Name a folder, or leave root out for "
                "the synthetic dataset"
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
        """The root or its mirror; without one, the synthetic dataset; the first call makes what is not there."""
        return (self.shards or self._root).folder if self.root else self._make_samples()

    def refresh(self) -> None:
        """Bring the mirror of a root on a server, or what is known of a set of shards, up to date."""
        if self.root:
            (self.shards or self._root).refresh()

    @cached_property
    def shards(self) -> ShardedRoot | None:
        """The set of shards, where the root is one."""
        return None

    @cached_property
    def leftovers(self) -> Leftovers:
        """Files of the folder that are not used, as far as it was read."""
        return Leftovers()

    def split(self, names: Sequence[str], others: Sequence[str] = ()) -> dict[str, Ints]:
        """Return for each of train, val and test the ascending numbers of its images.

        Args:
            names: Their paths relative to the root.
            others: See `split_images`.

        Raises:
            ConfigError: The splits cannot be made so.
            DataError: Lists of splits do not fit the images.
        """
        return split_images(
            names,
            self.splits,
            seed=self.split_seed,
            root=self.folder,
            others=others,
            leftovers=self.leftovers,
        )

    def find_members(self, names: Sequence[str], others: Sequence[str] = ()) -> Sequence[int]:
        """Return the numbers of the images that belong to a set.

        Where lists or folders of the set name its splits, these are the images of a split.

        Args:
            names: Paths of all images relative to the root.
            others: See `split_images`.

        Raises:
            ConfigError: Folders do not tell the splits.
            DataError: Lists of splits do not fit the images.
        """
        named = None
        if self.splits == "auto":
            named = find_named_splits(names, root=self.folder, others=others)
        if named is None:
            return range(len(names))
        named.add_left_out(self.leftovers, names)
        return sorted(number for part in named.numbers.values() for number in part.tolist())

    @abstractmethod
    def check(self) -> dict[str, int]:
        """Read every file strictly and keep nothing; return how many there are.

        Raises:
            DataError: Files are bad; all of them are listed.
        """

    def publish(
        self,
        address: str,
        shard_bytes: int = 2**25,
        *,
        part: Part | None = None,
        finish: bool = False,
        encoding: Encoding = "decoded",
    ) -> dict[str, int]:
        """Write the set in shards, or what is not there yet of it; nothing is kept here.

        Args:
            address: A folder or an address whose name ends with ``.shards``.
            shard_bytes: Decoded bytes of the images of a shard.
            part: The part of the shards that is written; by default all, and what makes them a set.
            finish: Write only what makes the shards of all parts a set.
            encoding: `decoded` pixels, or the `source` files of images, which machines decode when
                they need them.

        Returns:
            Numbers for a report.

        Raises:
            ConfigError: The address is no name of a set of shards, or this set is one already, or
                cannot be one.
            DataError: Files are bad, or the address cannot be written; or shards of other parts are
                not there.
        """
        options = ShardOptions(shard_bytes=shard_bytes, part=part, finish=finish, encoding=encoding)
        check_root(address)
        if not self.takes_shards or self.shards is not None or not is_sharded(address):
            raise ConfigError(
                f"prepare.shards={address}: give a folder or an address whose name ends with .shards, and as data.root "
                "the files of a set, of a kind that can lie in shards"
            )
        # Temporary files of several sets must not meet.
        digest = hashlib.sha256(address.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        scratch = self._cache / "shards" / f"written-{digest}"
        writer = SetWriter(open_transport(address, self.remote), scratch, encoding)
        with self._open_outline(scratch) as outline:
            if outline is not None:
                outlined = replace(self)  # without what was listed so far
                object.__setattr__(outlined, "folder", outline.folder)
                return outlined._publish(writer, options, outline.holding)
        self.refresh()
        return self._publish(writer, options, _hold_local)

    def _open_outline(self, scratch: Path) -> AbstractContextManager[Outline | None]:
        """Outline a root on a server; None for others, and where a mirror is needed to list it."""
        root = self.root or ""
        is_listed = self.late_suffixes and is_remote(root) and self.remote.offline != "always"
        if not is_listed:
            return nullcontext()
        return Outline.open(
            parse_address(root),
            self.remote,
            scope=self._scope or Scope(),
            late_suffixes=self.late_suffixes,
            scratch=scratch,
        )

    def _publish(
        self, writer: SetWriter, options: ShardOptions, holding: Holding
    ) -> dict[str, int]:
        """Write the set, of a kind that can lie in shards.

        Args:
            writer: Brings it to its place.
            options: How, and which part.
            holding: Has files here while a block runs.
        """
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
    def kept_folder(self) -> Path:
        """Folder of what was found by reading a whole dataset."""
        return self.store_folder / "found"

    @property
    def store_folder(self) -> Path:
        """Folder of the stores: one for each root and way of finding its files."""
        # Paths may hold bytes that are no UTF-8.
        digest = hashlib.sha256(
            (self._identity + self._exclusion).encode("utf-8", "surrogateescape")
        ).hexdigest()[:12]
        return self._cache / "stores" / f"{self.folder.name}-{digest}"

    def name(self, path: str | Path) -> str:
        """Return a path relative to the root, with forward slashes."""
        name = name_below(self.folder, path)
        # Masks and listed files may lie beside the root.
        is_plain = name is not None and ".." not in name
        return name if is_plain else Path(os.path.relpath(path, self.folder)).as_posix()  # type: ignore[return-value]

    @property
    def _identity(self) -> str:
        """Text that differs between datasets, for the cache."""
        return os.path.realpath(self.folder)

    @property
    def _exclusion(self) -> str:
        """Text that differs where files are left out; empty without any."""
        return ""

    def _make_samples(self) -> Path:
        if self.sample_spec is None:
            raise ConfigError("there is no synthetic dataset for this kind of data: set data.root")
        check_types(self.sample_spec, self.samples, "samples")  # they come from a configuration
        return self.sample_spec(**self.samples).ensure(self._cache / "samples")

    @property
    def _scope(self) -> Scope | None:
        """The wanted files of a server; none for all."""
        return None

    @property
    def _cache(self) -> Path:
        folder = Path(self.cache_dir or find_cache()).expanduser()
        with suppress(PermissionError):  # said where the cache is written
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not existing.is_dir():
                raise StoreError(
                    f"paths.cache={show_path(folder)}: {show_path(existing)} is no folder; name another"
                )
        return folder

    @cached_property
    def _root(self) -> Root:
        return Root(self.root or "", self._cache / "remote", self.remote, self._scope)


def _hold_local(paths: Iterable[str]) -> AbstractContextManager[None]:
    """Leave files alone that are all on this machine."""
    return nullcontext()


def find_cache() -> Path:
    """Return the folder of stores of this user, where none is chosen."""
    return Path(os.environ.get("LIT_DATA_CACHE") or Path.home() / ".cache" / "lit_data")
