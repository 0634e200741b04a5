"""`FileOptions` and `Source`: files of a dataset on disk, on a server, or generated on first use."""

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
    """Options for the files of a dataset: location, splits and caches.

    A datamodule takes the options as keywords, see `FileKeywords`, and creates its `Source` from them.

    Args:
        root: A folder or an address, such as ``s3://bucket/folder`` or ``https://host/folder``;
            `None` generates the synthetic dataset once in the cache.
        splits: Division of whole images, objects or volumes into train, val and test: `auto`,
            `folders`, fractions, or lists; see `lit_data.datasets.splits.split_images`.
        split_seed: Seed of the random choice if splits are fractions.
        on_bad: `error` lists all bad files and stops; `skip` lists and skips them.
        cache_dir: Folder of stores, mirrors and synthetic datasets.
        cache_bytes: Limit of the `lru` cache, if it is used, and of local copies of shards.
        samples: Parameters of the synthetic dataset.
        remote: Connections, retries and limits for a root on a server.
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
        """Create the options from the keywords of a datamodule.

        A list becomes a tuple and a path a string. None means the default for options that are objects.
        """
        has_object = {each.name for each in fields(cls) if each.default_factory is not MISSING}
        plain = {}
        for name, value in options.items():
            if value is None and name in has_object:
                continue  # null in YAML means the default
            if isinstance(value, list | range):
                value = tuple(value)
            elif isinstance(value, os.PathLike):
                value = os.fspath(value)
            plain[name] = value
        return cls(**plain)


class FileKeywords(TypedDict, total=False):
    """Keywords of all datamodules: `FileOptions` except for the root."""

    splits: Annotated[Splits, NEUTRAL]
    split_seed: Annotated[int, NEUTRAL]
    on_bad: Annotated[OnBad, NEUTRAL]
    cache_dir: Annotated[PathText | None, NEUTRAL]
    cache_bytes: Annotated[int, NEUTRAL]
    samples: Mapping[str, Any] | None
    remote: RemoteOptions | None


@dataclass(frozen=True, kw_only=True)
class Source(FileOptions, ABC):
    """Files of a root or of its mirror; without a root, those of a synthetic dataset.

    A subclass defines the synthetic dataset, and which files of a server are mirrored. Args are
    those of `FileOptions`.

    Raises:
        ConfigError: The root is empty, or an address that cannot be read; or an option is out of
            its range.
    """

    sample_spec: ClassVar[type[SampleSpec] | None] = None
    """Class of the synthetic dataset."""

    takes_shards: ClassVar[bool] = False
    """True if a root can be a set of shards; samples of a `BankDataset` need shards of images."""

    late_suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of files on a server whose content is not needed to list the dataset."""

    def __post_init__(self) -> None:
        """Check all options that can be checked without reading files."""
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
        """The root or its mirror, else the synthetic dataset; the first access creates mirror or dataset.

        A root that is a single file is treated as a folder with that file alone.
        """
        if not self.root:
            return self._make_samples()
        folder = Path(self.root) if self._elsewhere is None else self._elsewhere.folder
        return self._hold_alone(folder) if folder.is_file() else folder

    @property
    def shown_root(self) -> str:
        """The root for a message, as it was given, or the folder of the synthetic dataset."""
        if self._elsewhere is not None:
            return show_path(str(self.root))
        return show_path(Path(self.root) if self.root else self.folder)

    def refresh(self) -> None:
        """Update the mirror of a root on a server, or the index of a set of shards."""
        if self._elsewhere is not None:
            self._elsewhere.refresh()

    @cached_property
    def shards(self) -> Root | None:
        """The set of shards if the root is one, else None."""
        return None

    @cached_property
    def _elsewhere(self) -> Root | None:
        """Local side of a root that is on a server, in shards or imported; None for a plain folder."""
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
        """Files of the folder that are not used, among those that were read so far."""
        return Leftovers()

    def split(self, names: Sequence[str], others: Sequence[str] = ()) -> dict[str, Ints]:
        """Return the ascending numbers of the images of train, val and test.

        Args:
            names: Paths of the images relative to the root.
            others: See `split_images`.

        Raises:
            ConfigError: The images cannot be split as `splits` requires.
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
        """Return the numbers of the images that belong to the dataset.

        If its lists or folders define splits, these are the images of a split; otherwise all images.

        Args:
            names: Paths of all images relative to the root.
            others: See `split_images`.

        Raises:
            ConfigError: Folders do not define the splits.
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
        """Read and check every file, store nothing, and return the number of files by kind.

        Raises:
            DataError: Files are bad; the error lists all of them.
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
        """Write the dataset into shards, or a part of it; nothing is stored locally.

        Args:
            address: A folder or an address whose name ends with ``.shards``.
            shard_bytes: Bytes of the decoded images of a shard.
            part: Part of the shards to write; by default all of them, and the index.
            finish: Write only the index for the shards of all parts.
            encoding: `decoded` pixels, or the `source` files of images, which are decoded when they
                are used.

        Returns:
            Numbers for a report.

        Raises:
            ConfigError: The address is not the name of a set of shards, or this dataset is already in
                shards or cannot be.
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
        """Return a copy of this source for another folder, whose files are not listed yet."""
        moved = replace(self)
        object.__setattr__(moved, "folder", folder)
        return moved

    def write_into(self, shards: ShardSet) -> dict[str, int]:
        """Write the dataset into shards, if its kind supports them; return numbers for a report."""
        raise NotImplementedError

    def _refuse_shards(self) -> None:
        if self.shards is not None:
            raise ConfigError(
                "prepare.check reads files, and a set of shards has none: set prepare.verify=true"
            )

    def open_shards(self, kind: Callable[..., Sharded]) -> Sharded:
        """Open the shards at the root."""
        return kind(self.root, self.cache_folder / "shards", self.remote, self.cache_bytes)

    @property
    def kept_folder(self) -> Path:
        """Folder for results that required reading the whole dataset."""
        return self.store_folder / "found"

    @property
    def store_folder(self) -> Path:
        """Folder of the stores, one for each root and each way to find its files."""
        digest = short_digest(self._identity + self._exclusion)
        return self.cache_folder / "stores" / f"{self.folder.name}-{digest}"

    def name(self, path: str | Path) -> str:
        """Return a path relative to the root, with forward slashes."""
        name = name_below(self.folder, path)
        # Masks and listed files may be outside of the root.
        is_plain = name is not None and ".." not in name
        return name if is_plain else Path(os.path.relpath(path, self.folder)).as_posix()  # type: ignore[return-value]

    @property
    def _identity(self) -> str:
        """Text that differs between datasets, for the cache."""
        return os.path.realpath(self.folder)

    @property
    def _exclusion(self) -> str:
        """Text that differs if files are excluded; empty if none are."""
        return ""

    def _hold_alone(self, path: Path) -> Path:
        """Return a folder of the cache with a single file, as a link or, if that fails, as a copy.

        This ignores masks, labels and lists of splits next to the file. Folders of other files that
        were not used within a day are removed with their stores.
        """
        if not os.access(path, os.R_OK):
            raise DataError(f"{show_path(path)}: not readable by this user")
        folder = self.cache_folder / "single" / short_digest(str(path.absolute()))
        with explaining(folder, "set paths.cache"):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing_by_path(
                folder / path.name.lstrip(".")
            ) as part:  # otherwise it is hidden
                try:
                    os.link(path.resolve(), part)
                except OSError:
                    shutil.copy2(path, part)
        for other in folder.parent.iterdir():
            # Each use writes into its folder; another process may remove it at the same time.
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > ABANDONED_S:
                    for stores in self.cache_folder.glob(f"stores/{other.name}-*"):
                        remove_folder(stores)
                    remove_folder(other)
        return folder

    def _make_samples(self) -> Path:
        if self.sample_spec is None:
            raise ConfigError("there is no synthetic dataset for this kind of data: set data.root")
        check_types(self.sample_spec, self.samples, "samples")  # they are from a configuration
        return self.sample_spec(**self.samples).ensure(self.cache_folder / "samples")

    @property
    def scope(self) -> Scope | None:
        """Files of a server to mirror; None for all."""
        return None

    @property
    def cache_folder(self) -> Path:
        """Folder of stores, mirrors and synthetic datasets."""
        folder = Path(self.cache_dir or find_cache()).expanduser()
        with suppress(PermissionError):  # reported when the cache is written
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not existing.is_dir():
                raise StoreError(
                    f"paths.cache={show_path(folder)}: {show_path(existing)} is not a folder; "
                    "choose another"
                )
        return folder


def find_cache() -> Path:
    """Return this user's default folder of stores."""
    return Path(os.environ.get("LIT_DATA_CACHE") or Path.home() / ".cache" / "lit_data")
