"""Pairing of images and masks, or of volumes and labels, by their names.

A mask belongs to the image of the same stem, with or without an ending such as ``_mask``, and with
or without leading zeros in numbers. If no mask fits this way, the parts that all images share at
the ends of their names are removed, and likewise for the masks: ``1_sat`` and ``1_mask``,
``image_1`` and ``gt_1``.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

from lit_data.core.errors import Problems, show_path
from lit_data.core.names import (
    IMAGE_WORDS,
    MASK_WORDS,
    compose,
    plain_number,
    plain_stem,
    strip_folder,
    strip_mask_word,
)
from lit_data.images.discovery import name_below

Folders = tuple[str, ...]

_TOKEN = re.compile(r"\d+|[^\W\d_]+|[\W_]+")
_MOST_NAMED = 3


_Key = tuple[str, ...]


class _Way(NamedTuple):
    """A way to compare a mask and an image.

    Attributes:
        folders_of: Returns the folders that both have in common.
        image_stem: Returns the part of the stem of an image that it shares with its mask.
        mask_stem: Returns the same part of the stem of a mask.
        stem_of: Returns the stem of a file.
    """

    folders_of: Callable[[Path], Folders]
    image_stem: Callable[[str], str]
    mask_stem: Callable[[str], str]
    stem_of: Callable[[Path], str]

    def exact_key(self, image: Path) -> _Key:
        return (*self.folders_of(image), "exact", compose(self.stem_of(image)))

    def plain_key(self, image: Path) -> _Key:
        return (*self.folders_of(image), "plain", self.image_stem(self.stem_of(image)))

    def mask_keys(self, mask: Path) -> list[_Key]:
        """Return the keys that the image of a mask may have, the most certain first."""
        folders, stem = self.folders_of(mask), compose(self.stem_of(mask))
        return [
            (*folders, "exact", stem),
            (*folders, "exact", strip_mask_word(stem)),
            (*folders, "plain", self.mask_stem(stem)),
        ]


class Nouns(NamedTuple):
    """Words of messages.

    Attributes:
        lost: About a mask that fits no image.
        several: About a mask that fits several images, after their number.
        second: About a second mask of an image.
    """

    lost: str
    several: str
    second: str


_OF_IMAGES = Nouns(
    "a mask without an image of its name", "images have its name", "a second mask of"
)


class Matching(NamedTuple):
    """Images and masks that match.

    Attributes:
        mask_of: The mask of each image that has one.
        problems: Masks that fit no image or several images, and second masks of an image.
        pair: An example of a pair, if names were hard to compare.
    """

    mask_of: Mapping[Path, Path]
    problems: Problems
    pair: str = ""


def stem_of(path: Path) -> str:
    """Return the name of a file without its ending."""
    return path.stem


@dataclass(frozen=True)
class Pairing:
    """Images and masks that belong together.

    Args:
        folder: Folder of the dataset.
        images: Images of the dataset.
        masks: Masks of the dataset.
        excluded: Excluded files, whose masks are not reported.
        mask_folders: Folders of the masks; empty if masks are beside their images.
        folders_of: Returns the folders that a mask and its image have in common, if these are
            known.
        stem_of: Returns the name of a file without its ending.
        nouns: Words of messages.
    """

    folder: Path
    images: Sequence[Path]
    masks: Sequence[Path]
    excluded: Sequence[Path] = ()
    mask_folders: Sequence[Path] = ()
    folders_of: Callable[[Path], Folders] | None = None
    stem_of: Callable[[Path], str] = stem_of
    nouns: Nouns = _OF_IMAGES

    def match(self) -> Matching:
        """Match by the most certain way that fits any mask, or else by the most certain of all ways."""
        surest: Matching | None = None
        for way in self._list_ways():
            matching = self._match_by(way)
            if not len(matching.problems):
                is_sure = way.image_stem is plain_stem
                pair = "" if is_sure else _describe_pair(matching.mask_of)
                return matching._replace(pair=pair)
            if matching.mask_of:  # a partial match has single faults
                return matching
            surest = surest or matching
        return surest or Matching({}, Problems())

    def _list_ways(self) -> Iterator[_Way]:
        """Yield the ways to compare names, the most certain first."""
        for folders_of in self._list_folders(plain_stem):
            yield _Way(folders_of, plain_stem, plain_stem, self.stem_of)
        images = _list_affixes(list(map(self.stem_of, self.images)), IMAGE_WORDS)
        masks = _list_affixes(list(map(self.stem_of, self.masks)), MASK_WORDS)
        stems = list(map(self.stem_of, (*self.images, *self.excluded)))
        for image_affixes, mask_affixes in product(images, masks):
            take_off = image_affixes.take_off
            # One mask shows whether it is worthwhile to look at all of them.
            if mask_affixes.take_off(self.stem_of(self.masks[0])) in map(take_off, stems):
                for folders_of in self._list_folders(take_off):
                    yield _Way(folders_of, take_off, mask_affixes.take_off, self.stem_of)

    def _list_folders(
        self, image_stem: Callable[[str], str]
    ) -> Sequence[Callable[[Path], Folders]]:
        """Return the ways to compare folders, the most certain first."""
        if self.folders_of is not None:
            return [self.folders_of]
        counts = Counter(image_stem(self.stem_of(path)) for path in self.images)
        # Numbers often restart in each folder; then folders tell images apart.
        is_unique = len(counts) == len(self.images)
        if not self.mask_folders:
            return [_name_parent, _name_nothing] if is_unique else [_name_parent]
        return [_name_nothing] if is_unique else [self._name_kinds, self._name_places]

    def _match_by(self, way: _Way) -> Matching:
        """Match each mask with the image of its folders and its stem."""
        images_of = self._index(way)
        excluded = {way.plain_key(path) for path in self.excluded} - set(images_of)
        problems = Problems()
        mask_of: dict[Path, Path] = {}
        lost = []
        for mask in self.masks:
            keys = way.mask_keys(mask)
            if keys[-1] in excluded:  # a mask of an excluded image is not a fault
                continue
            owners = next((images_of[key] for key in keys if key in images_of), [])
            if not owners:
                lost.append(mask)
            elif len(owners) > 1:
                problems.add(mask, f"{len(owners)} {self.nouns.several}: {self._join(owners)}")
            elif owners[0] in mask_of:
                image, first_mask = show_path(owners[0]), show_path(mask_of[owners[0]])
                problems.add(mask, f"{self.nouns.second} {image}, beside {first_mask}")
            else:
                mask_of[owners[0]] = mask
        self._report_lost(lost, problems)
        return Matching(mask_of, problems)

    def _index(self, way: _Way) -> dict[_Key, list[Path]]:
        images_of: dict[_Key, list[Path]] = {}
        for path in self.images:
            for key in (way.exact_key(path), way.plain_key(path)):
                images_of.setdefault(key, []).append(path)
        return images_of

    def _report_lost(self, lost: Sequence[Path], problems: Problems) -> None:
        """Report masks without an image, and images with their names in other folders."""
        names: dict[str, list[Path]] = {}
        for path in self.images if lost else ():
            names.setdefault(plain_stem(self.stem_of(path)), []).append(path)
        for mask in lost:
            message = self.nouns.lost
            others = names.get(plain_stem(self.stem_of(mask)))
            if others:
                message += f" in a folder that fits; in others: {self._join(others)}"
            problems.add(mask, message)

    def _join(self, paths: Sequence[Path]) -> str:
        names = [name_below(self.folder, path) or str(path) for path in paths[:_MOST_NAMED]]
        return ", ".join(names) + (", ..." if len(paths) > _MOST_NAMED else "")

    def _name_kinds(self, path: Path) -> Folders:
        """Return the folders of a file, without those that say that images or masks are in them."""
        return self._name_folders(path, lambda parts: parts in self._mask_parts)

    def _name_places(self, path: Path) -> Folders:
        """Return the same as `_name_kinds`, without folders beside one of masks, which may have only images."""
        parents = {parts[:-1] for parts in self._mask_parts}
        return self._name_folders(path, lambda parts: parts[:-1] in parents)

    def _name_folders(self, path: Path, is_dropped: Callable[[Folders], bool]) -> Folders:
        parts = self._parts(path)
        names = []
        for depth, part in enumerate(parts, 1):
            is_plain = strip_folder(part) == part
            if not (is_plain and is_dropped(parts[:depth])):
                names.append(strip_folder(part).casefold())
        return tuple(filter(None, names))

    def _parts(self, path: Path) -> Folders:
        """Return the folders of a file below the dataset, or below its folder of masks elsewhere."""
        for folder in (self.folder, *self.mask_folders):
            name = name_below(folder, path)
            if name is not None:
                return tuple(name.split("/")[:-1])
        return ()

    @cached_property
    def _mask_parts(self) -> set[Folders]:
        return {self._parts(folder / "x") for folder in self.mask_folders}


def _name_parent(path: Path) -> Folders:
    return (str(path.parent),)


def _name_nothing(path: Path) -> Folders:
    return ()


def _describe_pair(mask_of: Mapping[Path, Path]) -> str:
    image, mask = next(iter(mask_of.items()))
    return f"{mask.name} for {image.name}"


@dataclass(frozen=True, slots=True)
class _Affixes:
    """Parts at the ends of names that are removed.

    Args:
        start: Words, numbers and signs that names begin with.
        end: Words, numbers and signs that names end with.
        words: Further words that may be at either end.
    """

    start: Sequence[str]
    end: Sequence[str]
    words: Collection[str]

    def take_off(self, stem: str) -> str:
        """Return the rest of a stem in lower case, with numbers without leading zeros."""
        tokens = _divide(strip_mask_word(stem))
        if tokens[: len(self.start)] == self.start:
            del tokens[: len(self.start)]
        if self.end and tokens[-len(self.end) :] == self.end:
            del tokens[-len(self.end) :]
        for end in (0, -1):
            while tokens and (tokens[end] in self.words or not tokens[end].strip("_").isalnum()):
                del tokens[end]
        return plain_number("".join(tokens))


def _list_affixes(stems: Sequence[str], words: Collection[str]) -> list[_Affixes]:
    """List the parts that may be removed from names: the words, and what all names begin or end with."""
    names = [_divide(strip_mask_word(stem)) for stem in stems]
    start, end = _find_shared(names), _find_shared([name[::-1] for name in names])[::-1]
    return [_Affixes(*ends, words) for ends in (([], []), ([], end), (start, []), (start, end))]


def _find_shared(names: Sequence[Sequence[str]]) -> list[str]:
    """Return the parts that all names begin with."""
    shared: list[str] = []
    for tokens in zip(*names, strict=False):
        if len(names) < 2 or len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return shared


def _divide(stem: str) -> list[str]:
    return _TOKEN.findall(compose(stem).casefold())
