"""Writing of datasets in shards: images are decoded, packed and sent shard by shard; existing shards are kept."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_data.core.addresses import is_remote, parse_address
from lit_data.core.errors import DataError, list_problems, show_path
from lit_data.core.files import short_digest
from lit_data.core.progress import ProgressBar, count_threads, limit_threads, ordered_map, track
from lit_data.core.types import Ints
from lit_data.images.decoders import ImageSource
from lit_data.images.header_scan import (
    Survey,
    check_alike,
    find_all_faults,
    raise_bad,
    scan_headers,
)
from lit_data.images.roots import PublishedImages, ShardOptions
from lit_data.images.scope import Scope
from lit_data.images.store.build import BuildOptions, Recipe, name_below_root, write_store
from lit_data.images.store.sources import SourceTable, join_tables, list_below
from lit_data.images.store.store import DecodedStore
from lit_data.wings.remote.outline import Outline
from lit_data.wings.remote.shards.groups import (
    Group,
    Reference,
    WrittenGroup,
    WrittenShard,
    count_group_images,
    cut_groups,
    cut_shards,
    name_note,
    take_images,
)
from lit_data.wings.remote.shards.index import PLACE, Shard, ShardIndex, join_key
from lit_data.wings.remote.shards.packed import pack, unpack
from lit_data.wings.remote.shards.writer import READERS, Holding, Packing, SetWriter
from lit_data.wings.remote.transport import open_transport
from lit_inspect.counts import counted_of

if TYPE_CHECKING:
    from lit_data.datamodules.source import Source

FIRST_IMAGES = 15  # whose headers determine how many images a group has


def write_shards(source: "Source", address: str, options: ShardOptions) -> dict[str, int]:
    """Write the dataset of a source in shards, except those that already exist.

    Args:
        source: Source of the dataset.
        address: A folder or an address.
        options: Options of the shards, and the part to write.

    Returns:
        Numbers for a report.

    Raises:
        DataError: Files are bad, the address cannot be written, or shards of other parts are
            missing.
    """
    # Temporary files of different datasets must be separate.
    scratch = source.cache_folder / "shards" / f"written-{short_digest(address)}"
    writer = SetWriter(open_transport(address, source.remote), scratch, options.encoding)
    with _outlining(source, scratch) as outline:
        if outline is not None:
            outlined = source.in_folder(outline.folder)
            return outlined.write_into(WrittenSet(writer, options, outline.holding))
    source.refresh()
    return source.write_into(WrittenSet(writer, options, _hold_local))


def _outlining(source: "Source", scratch: Path) -> AbstractContextManager[Outline | None]:
    """Outline a root on a server; None for others, or if a mirror is needed to list it."""
    root = source.root or ""
    is_listed = source.late_suffixes and is_remote(root) and source.remote.offline != "always"
    if not is_listed:
        return nullcontext()
    return Outline.open(
        parse_address(root),
        source.remote,
        scope=source.scope or Scope(),
        late_suffixes=source.late_suffixes,
        scratch=scratch,
    )


def _hold_local(paths: Iterable[str]) -> AbstractContextManager[None]:
    """Do nothing for files that are all on this machine."""
    return nullcontext()


@dataclass(frozen=True)
class WrittenSet:
    """A dataset of shards that is being written.

    Args:
        writer: Sends files to the address.
        options: Options of the shards, and the part to write.
        holding: Has remote files here while a block runs.
    """

    writer: SetWriter
    options: ShardOptions
    holding: Holding

    @property
    def scratch(self) -> Path:
        """Local folder for temporary files."""
        return self.writer.scratch

    def write_images(self, images: PublishedImages) -> dict[str, int]:
        """Write missing shards, then the index, and then the pointer that makes them a dataset.

        Raises:
            DataError: Images are bad, the address cannot be written, or parts are missing there.
        """
        return _ImagePublisher(self, images).write()


class _ImagePublisher:
    """Writes a dataset of images.

    Args:
        shards: The dataset to write, and the part of it.
        images: The images, and their layout in a shard.
    """

    def __init__(self, shards: WrittenSet, images: PublishedImages) -> None:
        self.images = images
        self.writer = shards.writer
        self.options = shards.options
        self.holding = shards.holding

    def write(self) -> dict[str, int]:
        """Write the images; see `WrittenSet.write_images`."""
        sources = self.images.sources
        part = self.options.part
        files = {} if part is not None else self.images.list_beside()
        reference, group_images = self._read_first(sources)
        groups = self._cut_groups(sources, group_images)
        if part is not None:
            groups = [groups[number] for number in part.take(len(groups))]
        if self.options.finish:
            written = self._read_notes(groups)
        else:
            written = self._write_groups(groups, reference)
        skipped = [pair for group in written for pair in group.skipped]
        shards = [shard for group in written for shard in group.shards]
        counts = {
            "images": sum(sum(group.counts) for group in written),
            "skipped": len(skipped),
        }
        if part is not None:
            return counts | self.writer.report(shards, f"part {part}: ")
        if not shards:
            raise_bad(skipped, len(skipped), "skip")
        index = self._index(written, skipped)
        with self.holding(map(str, files.values())):
            return counts | self.writer.finish(index.shards, index.write, files)

    def _read_first(self, sources: Sequence[ImageSource]) -> tuple[Reference, int]:
        """Return the first good image, and the number of images of a group.

        Raises:
            DataError: No image is good.
        """
        all_bad: list[tuple[str, str]] = []
        for begin in range(0, len(sources), FIRST_IMAGES):
            some = sources[begin : begin + FIRST_IMAGES]
            with self.holding(path for source in some for path in source.paths):
                rows, bad = scan_headers(some, self.images.decoder, progress=False)
            good = np.flatnonzero(rows[:, 0])
            if good.size:
                reference = Reference(some[good[0]], rows[good[0]])
                return reference, count_group_images(rows[good], self.options.shard_bytes)
            all_bad += bad
        headline = counted_of(len(all_bad), len(sources), "image", "is bad", "are bad")
        raise list_problems(all_bad).make_error(headline)

    def _cut_groups(self, sources: Sequence[ImageSource], group_images: int) -> list[Group]:
        options = self.options
        table = list_below(sources, self.images.names)
        # Of each image, whose files are consecutive.
        file_bytes = np.add.reduceat(table.files["size_bytes"], table.firsts)
        groups = []
        for images in cut_groups(file_bytes, group_images):
            of_group = table.take(np.arange(images.start, images.stop))
            recipe = self._make_recipe(of_group)
            has_summary = self.images.summarise is not None
            key = name_note(recipe, options.shard_bytes, has_summary, options.encoding)
            groups.append(Group(key, sources[images.start : images.stop]))
        return groups

    def _read_notes(self, groups: Sequence[Group]) -> list[WrittenGroup]:
        """Return the notes of all groups.

        Raises:
            DataError: Groups have not been written yet.
        """
        read = ordered_map(self._find_note, groups, READERS)
        notes = list(track(read, "reading notes", len(groups)))
        missing = [group for group, note in zip(groups, notes, strict=True) if note is None]
        if missing:
            first_name = self.images.names[missing[0].paths[0]]
            raise DataError(
                f"{self.writer.transport}: "
                f"{counted_of(len(missing), len(groups), 'group', 'of images is', 'of images are')} "
                f"not written with these options, the first begins with {show_path(first_name)}: "
                "run their parts again, or prepare.shards without a part, which writes what is "
                "missing"
            )
        return [note for note in notes if note is not None]

    def _find_note(self, group: Group) -> WrittenGroup | None:
        """Return the note of a group; None if it, or a shard of it, does not exist."""
        read = partial(WrittenGroup.unpack, scratch=self.writer.scratch)
        note = self.writer.find_note(f"{group.key}.tar", read)
        if note is None or note.key != group.key or not all(map(self.writer.has, note.shards)):
            return None
        return note

    def _write_groups(self, groups: Sequence[Group], reference: Reference) -> list[WrittenGroup]:
        """Write the groups that do not exist, each in a thread.

        Raises:
            DataError: Images are bad, and are not to be skipped; all of them are listed.
        """
        image_count = sum(len(group.sources) for group in groups)
        threads = count_threads(self.options.shard_bytes)
        at_once = max(1, min(threads, len(groups)))

        def write(group: Group) -> WrittenGroup | Sequence[tuple[str, str]]:
            # Few groups share all cores.
            with limit_threads(threads // at_once):
                result = self._write_group(group, reference)
            bar.advance(len(group.sources))
            return result

        written: list[WrittenGroup] = []
        bad: list[tuple[str, str]] = []
        with ProgressBar("writing shards", image_count) as bar:
            for result in ordered_map(write, groups, at_once):
                if isinstance(result, WrittenGroup):
                    written.append(result)
                else:
                    bad += result
        if bad:
            raise_bad(bad, image_count, "error")
        return written

    def _write_group(
        self, group: Group, reference: Reference
    ) -> WrittenGroup | Sequence[tuple[str, str]]:
        """Write a group and its note; return (path, fault) of bad images instead.

        Raises:
            DataError: The images do not match others of the dataset.
        """
        note = self._find_note(group)
        if note is not None:
            return note
        with self.holding(group.paths):
            rows, bad = scan_headers(group.sources, self.images.decoder, progress=False)
            good = np.flatnonzero(rows[:, 0])
            good_sources = [group.sources[number] for number in good.tolist()]
            check_alike(np.vstack((reference.row, rows[good])), [reference.source, *good_sources])
            if bad and self.images.on_bad == "error":
                return find_all_faults(group.sources, self.images.decoder, bad)
            results = []
            if good.size:
                results = self._write_shards(good_sources, Survey.of(rows, bad))
        written: list[WrittenShard] = []
        for result in results:
            if isinstance(result, WrittenShard):
                written.append(result)
            elif not result.problems:
                raise result
            else:  # no image of the shard is good, or bad ones are not to be skipped
                bad += result.problems
        if bad and self.images.on_bad == "error":
            return bad
        named = name_below_root(bad, str(self.images.root))
        joined = WrittenGroup.join(group.key, reference, written, named)
        self.writer.send_note(f"{group.key}.tar", joined.pack(self.writer.scratch))
        return joined

    def _write_shards(
        self, sources: Sequence[ImageSource], survey: Survey
    ) -> list[WrittenShard | DataError]:
        shard_bytes = self.options.shard_bytes

        def write(chunk: Ints) -> WrittenShard | DataError:
            chosen = [sources[number] for number in chunk.tolist()]
            with limit_threads(1):  # beside those of other shards
                return self._write_shard(chosen, take_images(survey, chunk))

        return list(ordered_map(write, cut_shards(survey, shard_bytes), count_threads(shard_bytes)))

    def _write_shard(
        self, sources: Sequence[ImageSource], survey: Survey
    ) -> WrittenShard | DataError:
        """Publish a shard; return an error if its images are bad."""
        images = self.images
        recipe = self._make_recipe(list_below(sources, images.names))

        def build(temp: Path) -> Path:
            folder = temp / "store"
            folder.mkdir()
            write_store(folder, sources, images.decoder, recipe, survey, self._building)
            return folder

        def describe(shard: Shard, tar: Path) -> WrittenShard:
            return WrittenShard.of(shard, DecodedStore.open(tar), images.summarise)

        def pack_files(temp: Path, store: Path) -> Path:
            folder = temp / "packed"
            folder.mkdir()
            pack(folder, sources, recipe, survey, store)
            return folder

        def unpack_files(tar: Path, temp: Path) -> Path:
            return unpack(tar, temp, survey.pixels_bytes, decoder=images.decoder)

        nbytes, packing = survey.pixels_bytes, None
        if self.options.encoding == "source":
            packing = Packing(pack_files, unpack_files)
        return self.writer.bring(recipe.key, build, describe, nbytes=nbytes, packing=packing)

    def _make_recipe(self, table: SourceTable) -> Recipe:
        images = self.images
        return Recipe(table, images.decoder.fingerprint, images.on_bad, images.store)

    @property
    def _building(self) -> BuildOptions:
        """Options of the store of a shard."""
        on_bad, store = self.images.on_bad, self.images.store
        return BuildOptions(on_bad=on_bad, progress=False, store=store, root=str(self.images.root))

    def _index(
        self, written: Sequence[WrittenGroup], skipped: Sequence[tuple[str, str]]
    ) -> ShardIndex:
        counts = [count for group in written for count in group.counts]
        places = np.zeros(sum(counts), PLACE)
        places["shard"] = np.repeat(np.arange(len(counts)), counts)
        # Images of a shard are in their order.
        places["row"] = np.concatenate([np.arange(count) for count in counts])
        sizes_px = np.concatenate([group.sizes_px for group in written])
        places["height_px"], places["width_px"] = sizes_px.T
        table = join_tables([group.sources for group in written])
        places["first_source"] = table.firsts
        facts = {
            "dtype": written[0].dtype,
            "channels": written[0].channels,
            "decoder": self.images.decoder.fingerprint,
            "skipped": skipped,
        }
        shards = tuple(shard for group in written for shard in group.shards)
        similar = None
        if self.images.group is not None:
            summaries = [group.summary for group in written if len(group.summary)]
            similar = self.images.group(np.concatenate(summaries))
        return ShardIndex(Path(), join_key(shards), facts, places, shards, table, similar)
