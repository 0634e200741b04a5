"""Writing a set of shards: images are decoded, packed and sent shard by shard, and what is there already stays."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np
from rich.filesize import decimal

from lit_data.checks import check_count
from lit_data.errors import DataError
from lit_data.files import find_sha256
from lit_data.grid import Ints
from lit_data.io.images.decoders import Decoder, ImageSource
from lit_data.io.images.header_scan import OnBad, Survey, survey_sources
from lit_data.io.images.image_source import ImageBank
from lit_data.io.progress import count_threads, limit_threads, ordered_map, track
from lit_data.io.remote.transport import Transport
from lit_data.io.shards.index import FORMAT, PLACE, POINTER, Shard, ShardIndex, join_key
from lit_data.io.store.arrays import ArrayFolder, ArrayWriter, publish
from lit_data.io.store.build import BuildOptions, Recipe, write_store
from lit_data.io.store.files import explain_errors, is_there, write_tar
from lit_data.io.store.pixels import StoreOptions
from lit_data.io.store.sources import SourceTable, list_below
from lit_data.io.store.store import DecodedStore
from lit_data.io.temp import sweep, temp_folder
from lit_data.types import Array

log = logging.getLogger(__name__)

Entry = TypeVar("Entry")

_DECODERS: Final = 2  # threads for a shard, beside those of other shards
_NOTE: Final = "note"


class SetWriter:
    """Brings the files of a set to where it will be.

    Args:
        transport: To that place.
        scratch: A folder for what is under way, and for notes of what is written; it is made.

    Attributes:
        there: Name of each shard that is there already, by its key.
    """

    def __init__(self, transport: Transport, scratch: Path) -> None:
        self.transport = transport
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        sweep(scratch)
        self._sizes = transport.list_sizes("shards")
        # Names of shards are KEY-SUM.tar.
        self.there = {name.partition("-")[0]: name for name in self._sizes}

    def bring(
        self,
        key: str,
        build: Callable[[Path], Path],
        describe: Callable[[Shard, Path], Entry],
        *,
        nbytes: int = 0,
    ) -> Entry | DataError:
        """Bring a shard to its place if it is not there.

        Args:
            key: Of the shard.
            build: Writes a folder of what is in it below an empty one, and returns it.
            describe: Reads what the index says of a shard from its local copy.
            nbytes: That building takes on the disk.

        Returns:
            What is described; the error of `build` where what the shard holds is bad.

        Raises:
            DataError: The place does not answer, which is nothing to skip, or holds damaged shards.
        """
        with temp_folder(self.scratch) as temp, explain_errors(self.scratch, nbytes):
            tar = temp / "shard.tar"
            if key in self.there:
                return describe(self._fetch_shard(key, tar), tar)
            try:
                folder = build(temp)
            except DataError as error:
                return error
            write_tar({path.name: path for path in folder.iterdir()}, tar)
            shard = Shard(key, find_sha256(tar), tar.stat().st_size)
            self.transport.put(tar, shard.name)
            return describe(shard, tar)

    def finish(
        self,
        shards: Sequence[Shard],
        write_index: Callable[[Path], None],
        files: Mapping[str, Path],
    ) -> dict[str, int]:
        """Send what makes shards a set.

        Args:
            shards: All of them, which are there.
            write_index: Writes the index into an empty folder.
            files: What is read beside, by its path below the root.

        Returns:
            Numbers for a report.
        """
        with temp_folder(self.scratch) as temp:
            write_index(temp)
            sums = {"index": self._send({path.name: path for path in temp.iterdir()}, "index")}
        sums["files"] = self._send(files, "files")
        # Last, so that readers find the old set until all of the new one is there.
        pointer = self.scratch / POINTER
        pointer.write_text(json.dumps({"format": FORMAT, **sums}), encoding="utf-8")
        self.transport.put(pointer, POINTER)
        kept_count = sum(shard.key in self.there for shard in shards)
        nbytes = sum(shard.nbytes for shard in shards)
        size = decimal(nbytes)
        log.info("%s: %d shards, %s; %d were there", self.transport, len(shards), size, kept_count)
        return {"shards": len(shards), "shards_kept": kept_count, "bytes": nbytes}

    def _fetch_shard(self, key: str, tar: Path) -> Shard:
        """Fetch a shard that is there, as what the index says of it is found in it alone.

        Raises:
            DataError: It is damaged.
        """
        name = f"shards/{self.there[key]}"
        self.transport.get(name, tar, self._sizes[self.there[key]])
        shard = Shard(key, find_sha256(tar), tar.stat().st_size)
        if shard.name != name:
            raise DataError(
                f"{self.transport}/{name} is damaged: remove it there and run this again"
            )
        return shard

    def _send(self, files: Mapping[str, Path], part: str) -> str:
        """Send files in a tar; return its SHA-256 sum."""
        with temp_folder(self.scratch) as temp:
            tar = temp / f"{part}.tar"
            write_tar(files, tar)
            sha256 = find_sha256(tar)
            self.transport.put(tar, f"{part}-{sha256}.tar")
            return sha256


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of writing shards.

    Args:
        shard_bytes: Decoded bytes of the images of a shard, of at least one image.
        store: How images lie in a shard.
        on_bad: As `BuildOptions` has it.
        summarise: What is remembered of the images of a shard, [values]; `group` makes of those of
            all shards the number of a group of each image.
        group: See there.
    """

    shard_bytes: int = 2**25
    store: StoreOptions
    on_bad: OnBad = "error"
    summarise: Callable[[ImageBank], Array] | None = None
    group: Callable[[Array], Ints] | None = None

    def __post_init__(self) -> None:
        check_count("prepare.shard_bytes", self.shard_bytes, 1)


class _Written:
    """A shard of images that is at its place, and what the index says of it.

    Args:
        shard: The shard.
        arrays: ``sizes`` [2 n] px, ``files``, ``names`` and ``firsts`` of its sources, and
            ``summary``.
        skipped: (path, what is wrong) of each image that was left out.
    """

    def __init__(
        self, shard: Shard, arrays: Mapping[str, Array], skipped: Sequence[tuple[str, str]]
    ) -> None:
        self.shard = shard
        self.arrays = arrays
        self.skipped = skipped
        self.sizes_px = arrays["sizes"].reshape(-1, 2)
        self.sources = SourceTable(arrays["names"], arrays["files"], arrays["firsts"])

    @classmethod
    def of(
        cls, shard: Shard, store: DecodedStore, summarise: Callable[[ImageBank], Array] | None
    ) -> Self:
        """Describe a shard by its store, of which nothing is kept open."""
        arrays = {
            "sizes": np.stack((store.heights_px, store.widths_px), axis=1).reshape(-1),
            # Copies, as the arrays of a store are views of its map.
            "files": store.sources.files.copy(),
            "names": store.sources.names.copy(),
            "firsts": store.sources.firsts.copy(),
            "summary": summarise(store) if summarise else np.zeros(0),
        }
        return cls(shard, arrays, store.skipped)

    def write(self, note: Path) -> None:
        """Note what is written, so that a run that goes on need not read it again."""
        note.parent.mkdir(exist_ok=True)
        facts = {"sha256": self.shard.sha256, "nbytes": self.shard.nbytes, "skipped": self.skipped}
        with temp_folder(note.parent) as temp:
            writer = ArrayWriter(temp)
            for name, array in self.arrays.items():
                writer.add(name, array)
            writer.finish(_NOTE, 1, self.shard.key, facts)
            publish(temp, note)

    @classmethod
    def read(cls, note: Path) -> Self:
        """Read a note."""
        folder = ArrayFolder(note, _NOTE, 1)
        facts = folder.facts
        arrays = {name: np.array(folder.map(name, check=True)) for name in folder.arrays}
        skipped = [(path, fault) for path, fault in facts["skipped"]]
        return cls(Shard(folder.key, facts["sha256"], facts["nbytes"]), arrays, skipped)


@dataclass(frozen=True)
class ImagePublisher:
    """Writes a set of images.

    Args:
        writer: Brings it to its place.
        decoder: Decodes one source.
        names: Path of each file below the root, by its local path.
        options: How.
    """

    writer: SetWriter
    decoder: Decoder
    names: Mapping[str, str]
    options: PublishOptions

    def write(self, sources: Sequence[ImageSource], files: Mapping[str, Path]) -> dict[str, int]:
        """Write the shards that are not there, then the index, and then what makes it the set.

        Args:
            sources: The images.
            files: What is read beside them, by its path below the root.

        Returns:
            Numbers for a report.

        Raises:
            DataError: Images are bad; or the address cannot be written.
        """
        survey = survey_sources(sources, self.decoder, on_bad=self.options.on_bad, progress=True)
        chunks = list(_cut(survey, self.options.shard_bytes))

        def write(chunk: Ints) -> _Written | DataError:
            chosen = [sources[survey.images[number]] for number in chunk.tolist()]
            with limit_threads(_DECODERS):
                return self._write_shard(chosen, _take(survey, chunk))

        threads = count_threads(self.options.shard_bytes)
        results = track(ordered_map(write, chunks, threads), "writing shards", len(chunks))
        written: list[_Written] = []
        skipped = list(survey.skipped)
        for chunk, result in zip(chunks, results, strict=True):
            if isinstance(result, _Written):
                written.append(result)
                continue
            for number in chunk.tolist():  # no image of the shard is good
                skipped.append((sources[survey.images[number]].paths[0], str(result)))
        if not written:
            raise DataError(f"all images are bad, such as: {skipped[-1][1]}")
        index = self._index(survey, written, skipped)
        counts = {"images": len(index.places), "skipped": len(index.facts["skipped"])}
        return counts | self.writer.finish(index.shards, index.write, files)

    def _write_shard(self, sources: Sequence[ImageSource], survey: Survey) -> _Written | DataError:
        """Bring a shard to its place; return an error where none of its images is good.

        Raises:
            DataError: Images are bad, and are not to be skipped.
        """
        options = self.options
        table = list_below(sources, self.names)
        recipe = Recipe(table, self.decoder.fingerprint, options.on_bad, options.store)
        # Without a note a shard that is there is fetched again, to be described.
        note = self.writer.scratch / "notes" / recipe.key
        if recipe.key in self.writer.there and is_there(note):
            return _Written.read(note)

        def build(temp: Path) -> Path:
            folder = temp / "store"
            folder.mkdir()
            building = BuildOptions(on_bad=options.on_bad, progress=False, store=options.store)
            write_store(folder, sources, self.decoder, recipe, survey, building)
            return folder

        def describe(shard: Shard, tar: Path) -> _Written:
            written = _Written.of(shard, DecodedStore.open(tar), options.summarise)
            written.write(note)
            return written

        result = self.writer.bring(recipe.key, build, describe, nbytes=survey.pixels_bytes)
        if isinstance(result, DataError) and options.on_bad == "error":
            raise result
        return result

    def _index(
        self, survey: Survey, written: Sequence[_Written], skipped: Sequence[tuple[str, str]]
    ) -> ShardIndex:
        counts = [len(entry.sizes_px) for entry in written]
        places = np.zeros(sum(counts), PLACE)
        places["shard"] = np.repeat(np.arange(len(written)), counts)
        # Images of a shard lie in their order.
        places["row"] = np.concatenate([np.arange(count) for count in counts])
        sizes_px = np.concatenate([entry.sizes_px for entry in written])
        places["height_px"], places["width_px"] = sizes_px.T
        table = _join([entry.sources for entry in written])
        places["first_source"] = table.firsts
        left_out = list(skipped)
        for entry in written:
            left_out += entry.skipped
        facts = {
            "dtype": survey.dtype,
            "channels": survey.channels,
            "decoder": self.decoder.fingerprint,
            "skipped": [(self.names.get(path, path), fault) for path, fault in left_out],
        }
        shards = tuple(entry.shard for entry in written)
        similar = None
        if self.options.group is not None:
            summaries = [entry.arrays["summary"] for entry in written]
            similar = self.options.group(np.concatenate(summaries))
        return ShardIndex(Path(), join_key(shards), facts, places, shards, table, similar)


def _cut(survey: Survey, shard_bytes: int) -> Iterator[Ints]:
    """Yield the numbers of the images of each shard, in order."""
    item_bytes = survey.channels * np.dtype(survey.dtype).itemsize
    sizes = survey.heights_px * survey.widths_px * item_bytes
    before = np.cumsum(sizes) - sizes
    # A shard begins with each image that starts behind another multiple of its size.
    edges = np.flatnonzero(np.diff(before // shard_bytes, prepend=-1))
    return iter(np.split(np.arange(len(sizes)), edges[1:]))


def _take(survey: Survey, images: Ints) -> Survey:
    """Return the part of a survey that is about some images."""
    return replace(
        survey,
        images=np.arange(len(images)),
        heights_px=survey.heights_px[images],
        widths_px=survey.widths_px[images],
        skipped=(),
    )


def _join(tables: Sequence[SourceTable]) -> SourceTable:
    """Join tables of sources, whose offsets count from the beginning of each."""
    names, files, firsts = [], [], []
    name_bytes = file_count = 0
    for table in tables:
        moved_files = table.files.copy()
        # Ends of names count bytes of all names before.
        moved_files["name_end"] += np.uint64(name_bytes)
        names.append(table.names)
        files.append(moved_files)
        firsts.append(table.firsts + file_count)
        name_bytes += len(table.names)
        file_count += len(table.files)
    return SourceTable(np.concatenate(names), np.concatenate(files), np.concatenate(firsts))
