"""Writing a set of shards: images are decoded, packed and sent shard by shard, and what is there already stays."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
from rich.filesize import decimal

from lit_data.checks import check_count
from lit_data.errors import DataError
from lit_data.files import find_sha256
from lit_data.grid import Ints
from lit_data.io.images.decoders import Decoder, ImageSource
from lit_data.io.images.header_scan import OnBad, Survey, survey_sources
from lit_data.io.images.image_source import ImageBank
from lit_data.io.progress import ordered_map, track
from lit_data.io.remote.objects import Objects
from lit_data.io.shards.index import FORMAT, PLACE, POINTER, Shard, ShardIndex, join_key
from lit_data.io.store.arrays import ArrayFolder, ArrayWriter, publish
from lit_data.io.store.bands import StoreOptions
from lit_data.io.store.build import BuildOptions, Recipe, write_store
from lit_data.io.store.files import explain_errors, is_there, write_tar
from lit_data.io.store.sources import SourceTable, list_below
from lit_data.io.store.store import DecodedStore
from lit_data.io.temp import sweep, temp_folder
from lit_data.types import Array

log = logging.getLogger(__name__)

_WORKERS: Final = 2
_NOTE: Final = "note"


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


@dataclass(frozen=True, slots=True)
class _Written:
    """A shard that is at its place, and what the index says of it."""

    shard: Shard
    sizes_px: Ints
    sources: SourceTable
    skipped: tuple[tuple[str, str], ...]
    summary: Array

    @classmethod
    def of(
        cls, shard: Shard, store: DecodedStore, summarise: Callable[[ImageBank], Array] | None
    ) -> Self:
        sizes_px, table = np.stack((store.heights_px, store.widths_px), axis=1), store.sources
        # The store is not kept.
        table = SourceTable(table.names.copy(), table.files.copy(), table.firsts.copy())
        return cls(
            shard, sizes_px, table, store.skipped, summarise(store) if summarise else np.zeros(0)
        )

    def write(self, note: Path) -> None:
        """Note what is written, so that a run that goes on need not read it again."""
        note.parent.mkdir(exist_ok=True)
        with temp_folder(note.parent) as temp:
            writer, table = ArrayWriter(temp), self.sources
            arrays = {
                "sizes": self.sizes_px.reshape(-1),
                "files": table.files,
                "names": table.names,
            }
            for name, array in (arrays | {"firsts": table.firsts, "summary": self.summary}).items():
                writer.add(name, array)
            shard = {"sha256": self.shard.sha256, "nbytes": self.shard.nbytes}
            writer.finish(_NOTE, 1, self.shard.key, shard | {"skipped": self.skipped})
            publish(temp, note)

    @classmethod
    def read(cls, note: Path) -> Self:
        folder = ArrayFolder(note, _NOTE, 1)
        sizes, files, names, firsts, summary = (
            np.array(folder.map(name, check=True))
            for name in ("sizes", "files", "names", "firsts", "summary")
        )
        shard = Shard(folder.key, folder.facts["sha256"], folder.facts["nbytes"])
        skipped = tuple((path, fault) for path, fault in folder.facts["skipped"])
        return cls(shard, sizes.reshape(-1, 2), SourceTable(names, files, firsts), skipped, summary)


class SetWriter:
    """Brings the files of a set to where it will be.

    Args:
        objects: That place.
        scratch: A folder for what is under way, and for notes of what is written; it is made.

    Attributes:
        there: Name of each shard that is there already, by its key.
    """

    def __init__(self, objects: Objects, scratch: Path) -> None:
        self.objects, self.scratch = objects, scratch
        scratch.mkdir(parents=True, exist_ok=True)
        sweep(scratch)
        self._sizes = objects.list_sizes("shards")
        self.there = {name.partition("-")[0]: name for name in self._sizes}

    def send_shard(self, folder: Path, key: str, tar: Path) -> Shard:
        """Pack a folder into a new file and send that."""
        write_tar({path.name: path for path in folder.iterdir()}, tar)
        shard = Shard(key, find_sha256(tar), tar.stat().st_size)
        self.objects.put(tar, shard.name)
        return shard

    def fetch_shard(self, key: str, tar: Path) -> Shard:
        """A shard that is there; it is read, as what the index says of it is found in it alone.

        Raises:
            DataError: It is damaged.
        """
        name = f"shards/{self.there[key]}"
        self.objects.get(name, tar, self._sizes[self.there[key]])
        shard = Shard(key, find_sha256(tar), tar.stat().st_size)
        if shard.name != name:
            raise DataError(f"{self.objects}/{name} is damaged: remove it there and run this again")
        return shard

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
        pointer = self.scratch / POINTER
        pointer.write_text(json.dumps({"format": FORMAT, **sums}), encoding="utf-8")
        self.objects.put(pointer, POINTER)
        kept_count, nbytes = (
            sum(shard.key in self.there for shard in shards),
            sum(shard.nbytes for shard in shards),
        )
        log.info(
            "%s: %d shards, %s; %d were there",
            self.objects,
            len(shards),
            decimal(nbytes),
            kept_count,
        )
        return {"shards": len(shards), "shards_kept": kept_count, "bytes": nbytes}

    def _send(self, files: Mapping[str, Path], part: str) -> str:
        with temp_folder(self.scratch) as temp:
            tar = temp / f"{part}.tar"
            write_tar(files, tar)
            sum_ = find_sha256(tar)
            self.objects.put(tar, f"{part}-{sum_}.tar")
            return sum_


class ImagePublisher:
    """Writes a set of images.

    Args:
        writer: Brings it to its place.
        decoder: Decodes one source.
        names: Path of each file below the root, by its local path.
        options: How.
    """

    def __init__(
        self, writer: SetWriter, decoder: Decoder, names: Mapping[str, str], options: PublishOptions
    ) -> None:
        self._writer, self._decoder, self._names, self._options = writer, decoder, names, options

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
        survey = survey_sources(
            sources, self._decoder, workers=_WORKERS, on_bad=self._options.on_bad, progress=True
        )
        chunks = list(_cut(survey, self._options.shard_bytes))

        def write(chunk: Ints) -> _Written | str:
            return self._write_shard(
                [sources[survey.images[n]] for n in chunk.tolist()], _take(survey, chunk)
            )

        results = list(track(ordered_map(write, chunks, _WORKERS), "writing shards", len(chunks)))
        written = [entry for entry in results if not isinstance(entry, str)]
        if not written:
            raise DataError(f"all images are bad, such as: {results[0]}")
        lost = [
            (sources[survey.images[n]].paths[0], fault)
            for chunk, fault in zip(chunks, results, strict=True)
            if isinstance(fault, str)
            for n in chunk.tolist()
        ]
        index = self._index(survey, written, [*survey.skipped, *lost])
        counts = {"images": len(index.places), "skipped": len(index.facts["skipped"])}
        return counts | self._writer.finish(index.shards, index.write, files)

    def _write_shard(self, sources: Sequence[ImageSource], survey: Survey) -> _Written | str:
        """A shard that is at its place now, or under `on_bad=skip` why none of its images is good."""
        options, there, scratch = self._options, self._writer.there, self._writer.scratch
        table = list_below(sources, self._names)
        target = Recipe(table, self._decoder.fingerprint, options.on_bad, options.store)
        note = scratch / "notes" / target.key
        if target.key in there and is_there(note):
            return _Written.read(note)
        with temp_folder(scratch) as temp, explain_errors(scratch, survey.pixels_bytes):
            tar = temp / "shard.tar"
            if target.key in there:
                shard = self._writer.fetch_shard(target.key, tar)
            else:
                try:
                    self._build(sources, survey, target, temp / "store")
                except (
                    DataError
                ) as error:  # of the images: a server that does not answer is nothing to skip
                    if options.on_bad == "error":
                        raise
                    return str(error)
                shard = self._writer.send_shard(temp / "store", target.key, tar)
            written = _Written.of(shard, DecodedStore.open(tar), options.summarise)
            written.write(note)
            return written

    def _build(
        self, sources: Sequence[ImageSource], survey: Survey, target: Recipe, folder: Path
    ) -> None:
        folder.mkdir()
        build = BuildOptions(
            on_bad=target.on_bad,  # type: ignore[arg-type]
            workers=_WORKERS,
            progress=False,
            store=target.store,
        )
        write_store(folder, sources, self._decoder, target, survey, build)

    def _index(
        self, survey: Survey, written: Sequence[_Written], skipped: Sequence[tuple[str, str]]
    ) -> ShardIndex:
        counts = [len(entry.sizes_px) for entry in written]
        places = np.zeros(sum(counts), PLACE)
        places["shard"] = np.repeat(np.arange(len(written)), counts)
        places["row"] = np.concatenate([np.arange(count) for count in counts])
        places["height_px"], places["width_px"] = np.concatenate(
            [entry.sizes_px for entry in written]
        ).T
        table = _join([entry.sources for entry in written])
        places["first_source"] = table.firsts
        left_out = [*skipped, *(pair for entry in written for pair in entry.skipped)]
        facts = {
            "dtype": survey.dtype,
            "channels": survey.channels,
            "decoder": self._decoder.fingerprint,
            "skipped": [(self._names.get(path, path), fault) for path, fault in left_out],
        }
        shards = tuple(entry.shard for entry in written)
        group = self._options.group
        similar = group(np.concatenate([entry.summary for entry in written])) if group else None
        return ShardIndex(Path(), join_key(shards), facts, places, shards, table, similar)


def _cut(survey: Survey, shard_bytes: int) -> Iterator[Ints]:
    """The images of each shard, in order."""
    sizes = survey.heights_px * survey.widths_px * survey.channels * np.dtype(survey.dtype).itemsize
    before = np.cumsum(sizes) - sizes
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
    files = [table.files.copy() for table in tables]
    names_before = np.cumsum([0, *(len(table.names) for table in tables)])
    files_before = np.cumsum([0, *map(len, files)])
    for part, before in zip(files, names_before, strict=False):
        part["name_end"] += np.uint64(before)
    firsts = [table.firsts + before for table, before in zip(tables, files_before, strict=False)]
    return SourceTable(
        np.concatenate([table.names for table in tables]),
        np.concatenate(files),
        np.concatenate(firsts),
    )
