"""`FileOptions` and `Source`: where the files of a dataset lie, on a disk, on a server, or made on first use."""

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypedDict, TypeVar, get_args

from lit_data.core.addresses import RemoteOptions, check_root, is_remote, is_sharded
from lit_data.core.checks import check_choice, check_types
from lit_data.core.errors import ConfigError, DataError, StoreError, show_path
from lit_data.core.files import explaining, short_digest
from lit_data.core.leftovers import Leftovers
from lit_data.core.parts import Part
from lit_data.core.temp import ABANDONED_S, remove_folder
from lit_data.core.types import NEUTRAL, Ints, PathText
from lit_data.core.wings import find_part
from lit_data.datasets.splits import Splits, find_named_splits, split_images
from lit_data.datasets.synthetic.sample_set import SampleSpec
from lit_data.images.discovery import may_be_imported, name_below
from lit_data.images.header_scan import OnBad
from lit_data.images.roots import Encoding, Root, ShardOptions, ShardSet
from lit_data.images.scope import Scope
from lit_inspect.replacement import replacing_by_path

Sharded = TypeVar("Sharded", bound=Root)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of the files of a dataset: location, splits and caches.

    A datamodule takes the options as keywords, see `FileKeywords`, and makes its `Source` of them.

    Args:
        root: A folder or an address, such as ``s3://bucket/folder`` or ``https://host/folder``;
            `None` makes the synthetic dataset once in the cache.
        splits: Whole images, objects or volumes to train, val and test: `auto`, `folders`,
            fractions, or lists; see `lit_data.datasets.splits.split_images`.
        split_seed: Seed of the random choice where splits are fractions.
        on_bad: `error` lists all bad files and stops; `skip` skips and lists them.
        cache_dir: Folder of stores, mirrors and synthetic datasets.
        cache_bytes: Limit of the `lru` cache, if there is one, and of local copies of shards.
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
        """Make the options from the keywords of a datamodule.

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
                "root is empty: is it a shell variable that is not set? Name a folder, or "
                "remove root to use the synthetic dataset"
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
        """The root or its mirror; without one, the synthetic dataset; the first call makes what is not there.

        A root that is one file stands for a folder with that file alone.
        """
        if not self.root:
            return self._make_samples()
        folder = Path(self.root) if self._elsewhere is None else self._elsewhere.folder
        return self._hold_alone(folder) if folder.is_file() else folder

    def refresh(self) -> None:
        """Update the mirror of a root on a server, or the index of a set of shards."""
        if self._elsewhere is not None:
            self._elsewhere.refresh()

    @cached_property
    def shards(self) -> Root | None:
        """The set of shards, where the root is one."""
        return None

    @cached_property
    def _elsewhere(self) -> Root | None:
        """Local side of a root that is no folder of images of this machine; None for others."""
        if self.shards is not None or self.root is None:
            return self.shards
        if not is_remote(self.root):
            if not may_be_imported(self.root):
                return None
            find_import: Callable[..., Root | None] = find_part("ROOTS", "imported")
            return find_import(self.root, self.cache_folder / "imported")
        open_mirror: Callable[..., Root] = find_part("ROOTS", "mirror")
        return open_mirror(self.root, self.cache_folder / "remote", self.remote, self.scope)

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
        """Write the set in shards, or the missing part of it; nothing is stored locally.

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
            ConfigError: The address is not the name of a set of shards, or this set already is one,
                or cannot be one.
            DataError: Files are bad, the address cannot be written, or shards of other parts are
                missing.
        """
        options = ShardOptions(shard_bytes=shard_bytes, part=part, finish=finish, encoding=encoding)
        check_root(address)
        if not self.takes_shards or self.shards is not None or not is_sharded(address):
            raise ConfigError(
                f"prepare.shards={address}: give a folder or an address whose name ends with "
                ".shards, and as data.root the files of a set, of a kind that can be stored in "
                "shards"
            )
        write_shards: Callable[..., dict[str, int]] = find_part("ROOTS", "write_shards")
        return write_shards(self, address, options)

    def in_folder(self, folder: Path) -> Self:
        """Return this source with its files in another folder, of which nothing was listed so far."""
        moved = replace(self)
        object.__setattr__(moved, "folder", folder)
        return moved

    def write_into(self, shards: ShardSet) -> dict[str, int]:
        """Write the set in shards, of a kind that can lie in them; return numbers for a report."""
        raise NotImplementedError

    def _refuse_shards(self) -> None:
        if self.shards is not None:
            raise ConfigError(
                "prepare.check reads files, and a set of shards has none: set prepare.verify=true"
            )

    def open_shards(self, kind: Callable[..., Sharded]) -> Sharded:
        """Open the set of shards at the root, of a kind."""
        return kind(self.root, self.cache_folder / "shards", self.remote, self.cache_bytes)

    @property
    def kept_folder(self) -> Path:
        """Folder for results of reading a whole dataset."""
        return self.store_folder / "found"

    @property
    def store_folder(self) -> Path:
        """Folder of the stores: one for each root and way of finding its files."""
        digest = short_digest(self._identity + self._exclusion)
        return self.cache_folder / "stores" / f"{self.folder.name}-{digest}"

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

    def _hold_alone(self, path: Path) -> Path:
        """Return a folder of the cache with one file: linked, or copied where it cannot be.

        So neither masks nor labels nor lists of splits that lie beside it are looked at. Those of other
        files that were not asked for within a day are removed, and their stores.
        """
        if not os.access(path, os.R_OK):
            raise DataError(f"{show_path(path)}: not readable by this user")
        folder = self.cache_folder / "single" / short_digest(str(path.absolute()))
        with explaining(folder, "set paths.cache"):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing_by_path(folder / path.name.lstrip(".")) as part:  # else it is hidden
                try:
                    os.link(path.resolve(), part)
                except OSError:
                    shutil.copy2(path, part)
        for other in folder.parent.iterdir():
            # Each use writes into its folder; whoever else removes it at the same time is as good.
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > ABANDONED_S:
                    for stores in self.cache_folder.glob(f"stores/{other.name}-*"):
                        remove_folder(stores)
                    remove_folder(other)
        return folder

    def _make_samples(self) -> Path:
        if self.sample_spec is None:
            raise ConfigError("there is no synthetic dataset for this kind of data: set data.root")
        check_types(self.sample_spec, self.samples, "samples")  # they come from a configuration
        return self.sample_spec(**self.samples).ensure(self.cache_folder / "samples")

    @property
    def scope(self) -> Scope | None:
        """The wanted files of a server; none for all."""
        return None

    @property
    def cache_folder(self) -> Path:
        """Folder of stores, mirrors and synthetic datasets."""
        folder = Path(self.cache_dir or find_cache()).expanduser()
        with suppress(PermissionError):  # said where the cache is written
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not existing.is_dir():
                raise StoreError(
                    f"paths.cache={show_path(folder)}: {show_path(existing)} is not a folder; "
                    "choose another"
                )
        return folder


def find_cache() -> Path:
    """Return the folder of stores of this user, where none is chosen."""
    return Path(os.environ.get("LIT_DATA_CACHE") or Path.home() / ".cache" / "lit_data")
