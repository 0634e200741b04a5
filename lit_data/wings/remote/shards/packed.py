"""Packed shards: original files of images, decoded into the cache of a machine on demand.

A packed shard is decoded to exactly the store, byte for byte, that was decoded on writing: the
index has the SHA-256 sums of both.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_data.core.errors import ConfigError, DataError, show_path
from lit_data.core.types import Array
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import DTYPES, Survey
from lit_data.images.store.arrays import ArrayFolder, ArrayWriter, is_count
from lit_data.images.store.build import BuildOptions, Recipe, write_store
from lit_data.images.store.files import TAR_SUFFIX, corrupt, write_tar
from lit_data.images.store.pixels import StoreOptions
from lit_data.images.store.sources import SOURCE_RECORD, SourceTable
from lit_data.images.store.store import DecodedStore
from lit_data.wings.remote.shards.index import locate_below

_KIND = "packed"
_VERSION = 1
_MOST_SIDE_PX = 2**20


def pack(
    folder: Path, sources: Sequence[ImageSource], recipe: Recipe, survey: Survey, store: Path
) -> None:
    """Write the files of images into the arrays of an empty folder.

    Args:
        folder: Folder for the arrays.
        sources: The images.
        recipe: Recipe of their store.
        survey: Sizes of the images.
        store: Store that they were decoded to.

    Raises:
        DataError: A file is not the one that was decoded.
    """
    decoded = DecodedStore.open(store).sources
    crc_of = {decoded.name(row): crc for row, crc in enumerate(decoded.files["crc32"].tolist())}
    table = recipe.sources
    paths = [path for source in sources for path in source.paths]
    writer = ArrayWriter(folder)
    with writer.stream("bytes", np.dtype(np.uint8)) as stream:
        for row, path in enumerate(paths):
            content = np.fromfile(path, np.uint8)
            crc = crc_of.get(table.name(row))  # None for a bad one
            if len(content) != table.files["size_bytes"][row] or crc not in (
                None,
                zlib.crc32(content.data),
            ):
                raise DataError(f"{show_path(path)}: it changed while it was read")
            stream.append(content)
    writer.add("files", table.files)
    writer.add("names", table.names)
    writer.add("firsts", table.firsts)
    writer.add("heights", survey.heights_px)
    writer.add("widths", survey.widths_px)
    facts = {
        "dtype": survey.dtype,
        "channels": survey.channels,
        "on_bad": recipe.on_bad,
        "band_px": recipe.store.band_px,
    }
    writer.finish(_KIND, _VERSION, recipe.key, facts)


def unpack(tar: Path, temp: Path, most_bytes: int, *, decoder: Decoder) -> Path:
    """Decode a packed shard.

    Args:
        tar: The shard.
        temp: A folder for temporary files.
        most_bytes: Maximum bytes of pixels, including bad images.
        decoder: Decodes one image.

    Returns:
        A tar of the store, in `temp`.

    Raises:
        StoreError: It cannot be read, or is not a packed shard.
        DataError: Images are bad.
    """
    packed = _Packed.open(tar)
    if packed.survey.pixels_bytes > most_bytes:
        raise corrupt(tar, f"more than the allowed {most_bytes} bytes of pixels")
    root = temp / "sources"
    _write_files(packed, root, tar)
    sources = []
    for image in range(len(packed.table.firsts)):
        paths = [locate_below(root, name) for name in packed.table.paths(image)]
        sources.append(ImageSource(tuple(paths)))
    recipe = Recipe(packed.table, decoder.fingerprint, packed.options.on_bad, packed.options.store)
    store = temp / "store"
    store.mkdir()
    options = BuildOptions(
        on_bad=packed.options.on_bad,
        progress=False,
        store=packed.options.store,
        root=str(root),
    )
    write_store(store, sources, decoder, recipe, packed.survey, options)
    target = temp / f"decoded{TAR_SUFFIX}"
    write_tar({path.name: path for path in store.iterdir()}, target)
    return target


class _Packed(NamedTuple):
    """Content of a packed shard, which is not trusted."""

    content: Array
    table: SourceTable
    survey: Survey
    options: BuildOptions

    @classmethod
    def open(cls, tar: Path) -> "_Packed":
        folder = ArrayFolder(tar, _KIND, _VERSION)
        facts = folder.facts
        files = folder.map("files", SOURCE_RECORD, check=True)
        names = folder.map("names", "u1", check=True)
        firsts = folder.map("firsts", "<i8", check=True)
        heights_px = folder.map("heights", "<i8", check=True)
        widths_px = folder.map("widths", "<i8", check=True)
        content = folder.map("bytes", "u1", check=True)
        is_right = (
            _is_table(files, names, firsts)
            and int(files["size_bytes"].sum()) == len(content)
            and len(firsts) == len(heights_px) == len(widths_px)
            and int(min(heights_px.min(), widths_px.min())) > 0
            and int(max(heights_px.max(), widths_px.max())) < _MOST_SIDE_PX
            and facts.get("dtype") in list(DTYPES)
            and is_count(facts.get("channels"))
        )
        if not is_right:
            raise corrupt(tar, "no packed shard")
        try:
            store = StoreOptions(band_px=facts["band_px"])
            options = BuildOptions(on_bad=facts["on_bad"], store=store)
        except (ConfigError, KeyError, TypeError) as error:
            raise corrupt(tar, f"no packed shard ({error!s:.80})") from error
        survey = Survey(
            images=np.arange(len(firsts)),
            heights_px=heights_px,
            widths_px=widths_px,
            channels=facts["channels"],
            dtype=facts["dtype"],
            skipped=(),
        )
        return cls(content, SourceTable(names, files, firsts), survey, options)


def _is_table(files: Array, names: Array, firsts: Array) -> bool:
    """Return True if the arrays are a table of sources, with a size for each file."""
    if not len(firsts) or not len(files):
        return False
    ends = files["name_end"]
    return (
        int(firsts[0]) == 0
        and bool(np.all(np.diff(firsts) > 0))
        and int(firsts[-1]) < len(files)
        and bool(np.all(files["size_bytes"] >= 0))
        and int(ends[-1]) == len(names)
        and bool(np.all(ends[1:] >= ends[:-1]))
    )


def _write_files(packed: _Packed, root: Path, tar: Path) -> None:
    """Write the files of a shard into a folder, none of them outside."""
    begin = 0
    for row, size in enumerate(packed.table.files["size_bytes"].tolist()):
        path = Path(locate_below(root, packed.table.name(row)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed.content[begin : begin + size].data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise corrupt(tar, "a file has the name of a folder") from error
        begin += size
