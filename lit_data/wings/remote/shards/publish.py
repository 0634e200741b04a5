"""Writing a set of shards: images are decoded, packed and sent shard by shard, and what is there already stays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lit_data.core.errors import DataError, list_problems, show_path
from lit_data.core.progress import ProgressBar, count_threads, limit_threads, ordered_map, track
from lit_data.core.types import Array, Ints
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import (
    OnBad,
    Survey,
    check_alike,
    find_all_faults,
    raise_bad,
    scan_headers,
)
from lit_data.images.store.build import BuildOptions, Recipe, name_below_root, write_store
from lit_data.images.store.pixels import StoreOptions
from lit_data.images.store.sources import join_tables, list_below
from lit_data.images.store.store import DecodedStore
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
from lit_data.wings.remote.shards.writer import READERS, Holding, Packing, SetWriter, ShardOptions

FIRST_IMAGES = 15  # whose headers say how many images a group has


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of writing images in shards.

    Args:
        shards: How large, and which of them.
        store: How images lie in a shard.
        on_bad: As `BuildOptions` has it.
        summarise: What is remembered of the images of a shard, [values]; `group` makes of those of
            all shards the number of a group of each image.
        group: See there.
    """

    shards: ShardOptions
    store: StoreOptions
    on_bad: OnBad = "error"
    summarise: Callable[[ImageBank], Array] | None = None
    group: Callable[[Array], Ints] | None = None


@dataclass(frozen=True)
class ImagePublisher:
    """Writes a set of images.

    Args:
        writer: Brings it to its place.
        decoder: Decodes one source.
        root: Local folder that the images lie in.
        names: Path of each file below the root, by its local path.
        options: How.
        holding: Has files here while a block runs, if they lie elsewhere.
    """

    writer: SetWriter
    decoder: Decoder
    root: Path
    names: Mapping[str, str]
    options: PublishOptions
    holding: Holding

    def write(
        self, sources: Sequence[ImageSource], list_beside: Callable[[], Mapping[str, Path]]
    ) -> dict[str, int]:
        """Write the shards that are not there, then the index, and then what makes it the set.

        Args:
            sources: The images.
            list_beside: Returns what is read beside them, by its path below the root.

        Returns:
            Numbers for a report.

        Raises:
            DataError: Images are bad; or the address cannot be written; or parts are missing there.
        """
        part = self.options.shards.part
        files = {} if part is not None else list_beside()
        reference, group_images = self._read_first(sources)
        groups = self._cut_groups(sources, group_images)
        if part is not None:
            groups = [groups[number] for number in part.take(len(groups))]
        if self.options.shards.finish:
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
        """Return the first good image, and how many images a group has.

        Raises:
            DataError: No image is good.
        """
        all_bad: list[tuple[str, str]] = []
        for begin in range(0, len(sources), FIRST_IMAGES):
            some = sources[begin : begin + FIRST_IMAGES]
            with self.holding(path for source in some for path in source.paths):
                rows, bad = scan_headers(some, self.decoder, progress=False)
            good = np.flatnonzero(rows[:, 0])
            if good.size:
                reference = Reference(some[good[0]], rows[good[0]])
                return reference, count_group_images(rows[good], self.options.shards.shard_bytes)
            all_bad += bad
        raise list_problems(all_bad).make_error(f"{len(all_bad)} of {len(sources)} images are bad")

    def _cut_groups(self, sources: Sequence[ImageSource], group_images: int) -> list[Group]:
        options = self.options
        table = list_below(sources, self.names)
        # Of each image, whose files follow one another.
        file_bytes = np.add.reduceat(table.files["size_bytes"], table.firsts)
        groups = []
        for images in cut_groups(file_bytes, group_images):
            of_group = table.take(np.arange(images.start, images.stop))
            recipe = Recipe(of_group, self.decoder.fingerprint, options.on_bad, options.store)
            has_summary = options.summarise is not None
            shards = options.shards
            key = name_note(recipe, shards.shard_bytes, has_summary, shards.encoding)
            groups.append(Group(key, sources[images.start : images.stop]))
        return groups

    def _read_notes(self, groups: Sequence[Group]) -> list[WrittenGroup]:
        """Return what is noted of all groups.

        Raises:
            DataError: Groups are not written yet.
        """
        read = ordered_map(self._find_note, groups, READERS)
        notes = list(track(read, "reading notes", len(groups)))
        missing = [group for group, note in zip(groups, notes, strict=True) if note is None]
        if missing:
            first_name = self.names[missing[0].paths[0]]
            raise DataError(
                f"{self.writer.transport}: {len(missing)} of {len(groups)} groups of images are not "
                f"written as these options have it, the first begins with {show_path(first_name)}: "
                "run their parts again, or prepare.shards without a part, which writes what is missing"
            )
        return [note for note in notes if note is not None]

    def _find_note(self, group: Group) -> WrittenGroup | None:
        """Return the note of a group; None where it, or a shard of it, is not there."""
        read = partial(WrittenGroup.unpack, scratch=self.writer.scratch)
        note = self.writer.find_note(f"{group.key}.tar", read)
        if note is None or note.key != group.key or not all(map(self.writer.has, note.shards)):
            return None
        return note

    def _write_groups(self, groups: Sequence[Group], reference: Reference) -> list[WrittenGroup]:
        """Write the groups that are not there, each in a thread.

        Raises:
            DataError: Images are bad, and are not to be skipped: all of them are listed.
        """
        image_count = sum(len(group.sources) for group in groups)
        threads = count_threads(self.options.shards.shard_bytes)
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
        """Write a group and its note; return (path, what is wrong) of bad images instead.

        Raises:
            DataError: The images are unlike others of the dataset.
        """
        note = self._find_note(group)
        if note is not None:
            return note
        with self.holding(group.paths):
            rows, bad = scan_headers(group.sources, self.decoder, progress=False)
            good = np.flatnonzero(rows[:, 0])
            good_sources = [group.sources[number] for number in good.tolist()]
            check_alike(np.vstack((reference.row, rows[good])), [reference.source, *good_sources])
            if bad and self.options.on_bad == "error":
                return find_all_faults(group.sources, self.decoder, bad)
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
        if bad and self.options.on_bad == "error":
            return bad
        named = name_below_root(bad, str(self.root))
        joined = WrittenGroup.join(group.key, reference, written, named)
        self.writer.send_note(f"{group.key}.tar", joined.pack(self.writer.scratch))
        return joined

    def _write_shards(
        self, sources: Sequence[ImageSource], survey: Survey
    ) -> list[WrittenShard | DataError]:
        shard_bytes = self.options.shards.shard_bytes

        def write(chunk: Ints) -> WrittenShard | DataError:
            chosen = [sources[number] for number in chunk.tolist()]
            with limit_threads(1):  # beside those of other shards
                return self._write_shard(chosen, take_images(survey, chunk))

        return list(ordered_map(write, cut_shards(survey, shard_bytes), count_threads(shard_bytes)))

    def _write_shard(
        self, sources: Sequence[ImageSource], survey: Survey
    ) -> WrittenShard | DataError:
        """Bring a shard to its place; return an error where its images are bad."""
        options = self.options
        table = list_below(sources, self.names)
        recipe = Recipe(table, self.decoder.fingerprint, options.on_bad, options.store)

        def build(temp: Path) -> Path:
            folder = temp / "store"
            folder.mkdir()
            write_store(folder, sources, self.decoder, recipe, survey, self._building)
            return folder

        def describe(shard: Shard, tar: Path) -> WrittenShard:
            return WrittenShard.of(shard, DecodedStore.open(tar), options.summarise)

        def pack_files(temp: Path, store: Path) -> Path:
            folder = temp / "packed"
            folder.mkdir()
            pack(folder, sources, recipe, survey, store)
            return folder

        def unpack_files(tar: Path, temp: Path) -> Path:
            return unpack(tar, temp, survey.pixels_bytes, decoder=self.decoder)

        nbytes, packing = survey.pixels_bytes, None
        if options.shards.encoding == "source":
            packing = Packing(pack_files, unpack_files)
        return self.writer.bring(recipe.key, build, describe, nbytes=nbytes, packing=packing)

    @property
    def _building(self) -> BuildOptions:
        """Options of the store of a shard."""
        on_bad, store = self.options.on_bad, self.options.store
        return BuildOptions(on_bad=on_bad, progress=False, store=store, root=str(self.root))

    def _index(
        self, written: Sequence[WrittenGroup], skipped: Sequence[tuple[str, str]]
    ) -> ShardIndex:
        counts = [count for group in written for count in group.counts]
        places = np.zeros(sum(counts), PLACE)
        places["shard"] = np.repeat(np.arange(len(counts)), counts)
        # Images of a shard lie in their order.
        places["row"] = np.concatenate([np.arange(count) for count in counts])
        sizes_px = np.concatenate([group.sizes_px for group in written])
        places["height_px"], places["width_px"] = sizes_px.T
        table = join_tables([group.sources for group in written])
        places["first_source"] = table.firsts
        facts = {
            "dtype": written[0].dtype,
            "channels": written[0].channels,
            "decoder": self.decoder.fingerprint,
            "skipped": skipped,
        }
        shards = tuple(shard for group in written for shard in group.shards)
        similar = None
        if self.options.group is not None:
            summaries = [group.summary for group in written if len(group.summary)]
            similar = self.options.group(np.concatenate(summaries))
        return ShardIndex(Path(), join_key(shards), facts, places, shards, table, similar)
