"""Index of images by the names that lists and annotations have for them."""

import os
import posixpath
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote

from lit_data.core.errors import DataError, escape, show_path
from lit_data.core.names import is_image_folder
from lit_data.core.types import PathText
from lit_data.datasets.split_names import find_split, split_of

_FEW = 8  # images of one name that are compared one by one


class NameIndex:
    """Index of images by the names in lists and label files.

    A name is any end of the path, with or without extension.

    Args:
        images: Paths of the images.
        excluded: Paths of excluded images, whose numbers follow those of the images. An image with
            the same name takes precedence.

    Attributes:
        count: Number of images; higher numbers are those of excluded ones.
    """

    def __init__(self, images: Sequence[PathText], excluded: Sequence[PathText] = ()) -> None:
        self.count = len(images)
        self._paths = [root_path(os.fspath(path)) for path in (*images, *excluded)]
        folders = [posixpath.dirname(path) for path in self._paths] or ["/"]
        # A common folder of all images does not tell a split.
        self._common = len(posixpath.commonpath(folders))
        self._folder_names = set(map(posixpath.basename, folders))
        self._counts = Counter(folders)  # of the images in each folder and below it
        for folder, count in list(self._counts.items()):
            for parent in _list_parents(folder):
                self._counts[parent] += count
        self._numbers: dict[str, list[int]] = defaultdict(list)
        self._tails: dict[str, dict[str, list[int]]] = {}  # for names that many images have
        for number, path in enumerate(self._paths):
            name = posixpath.basename(path)
            for key in {name, posixpath.splitext(name)[0]}:
                self._numbers[key].append(number)

    def find_path(self, path: str) -> int | None:
        """Return the number of the image with a whole path, or None if there is none."""
        target = root_path(path)
        for number in self._numbers.get(posixpath.basename(target), ()):
            if self._paths[number] == target:
                return number
        return None

    def name(self, number: int) -> str:
        """Return the path of an image, with composed accents."""
        return self._paths[number]

    def has(self, name: str) -> bool:
        """Return True if at least one image has a name."""
        return bool(self._match(name))

    def find(self, name: str, split: str | None = None, source: PathText | None = None) -> int:
        """Return the number of the image with a name.

        Args:
            name: `a`, `a.jpg`, `train/a.jpg`, `./images/train/a.jpg` or a whole path; composed and
                decomposed accents are equal.
            split: Split to choose among images of one name in folders of several splits.
            source: Path of the file with the name; among images of one name, the one in the same folder
                is meant, or in the first folder above that has any. A name without folders means no
                image of another split, none of another folder if a folder of images has the name of
                the file's, and none beyond the first folder above that has other images.

        Raises:
            DataError: There is no such image, or more than one.
        """
        known = matches = self._match(name)
        if len(matches) > 1:
            matches = [n for n in matches if split and self._split(n) == split] or matches
        if source is not None:
            is_bare = "/" not in root_path(name)[1:]
            if is_bare:
                matches = self._list_meant(matches, split, os.fspath(source))
            matches = self._list_nearest(matches, os.fspath(source), is_bare=is_bare)
        # An image takes precedence over excluded ones, any of which will do.
        matches = [n for n in matches if n < self.count] or matches[:1]
        if not matches:
            raise DataError(f"no image is named {escape(name)!r}{self._describe_distant(known)}")
        if len(matches) > 1:
            stems = {self._stem(number) for number in matches}
            cure = "name them with their folder"
            if len(stems) == 1:
                cure = "they differ only in their type: rename one, or add the type to the name"
            first, second = map(show_path, map(self.name, matches[:2]))
            raise DataError(
                f"{len(matches)} images are named {escape(name)!r}; {cure} ({first}, {second})"
            )
        return matches[0]

    def find_named(self, name: str, split: str | None, source: PathText) -> int | None:
        """Return the number of the image that a label file names, or None if there is none.

        Args:
            name: Path relative to the file, or a path of another machine, whose last part counts.
            split: Split of the label file.
            source: Path of the label file.

        Raises:
            DataError: There is more than one such image.
        """
        path = name.strip().replace("\\", "/")
        folder = posixpath.dirname(root_path(os.fspath(source)))
        number = self.find_path(posixpath.join(folder, path))
        last = posixpath.basename(path)
        for text in (last, posixpath.splitext(last)[0]):
            if number is None and self.has(text):
                number = self.find(text, split, source)
        return number

    def find_below(self, name: str, split: str | None) -> int | None:
        """Return the number of the image with a name without its outer folders, or None if there is none.

        Labeling tools write ``data/obj_train_data/a.jpg`` wherever the image is. An image in the
        folder of another split is not meant.

        Raises:
            DataError: There is more than one.
        """
        for shorter in list_shorter(name):
            if self.has(shorter):
                number = self.find(shorter, split)
                return number if self._split(number) in (None, split) else None
        return None

    def _list_meant(self, numbers: list[int], split: str | None, source: str) -> list[int]:
        """Return the images of the split, and of a folder with the name, of a file that names them."""
        folder = posixpath.dirname(root_path(source))
        folder_name = posixpath.basename(folder)
        meant = []
        for number in numbers:
            path = self._paths[number]
            is_in_split = not split or self._split(number) in (split, None)
            is_parallel = (
                folder_name not in self._folder_names
                or posixpath.basename(posixpath.dirname(path)) == folder_name
            )
            if is_in_split and (is_parallel or path.startswith(f"{folder}/")):
                meant.append(number)
        return meant

    def _list_nearest(self, numbers: list[int], source: str, *, is_bare: bool) -> list[int]:
        """Return the images in the innermost folder around a file that has any of them.

        None is meant by a bare name if a folder on the way has other images: the image is lost, and
        another one, of another split or camera, has its name.
        """
        for folder in _list_parents(root_path(source)):
            nearest = [n for n in numbers if self._paths[n].startswith(f"{folder}/")]
            if nearest:
                return nearest
            if is_bare and self._counts[folder] > 1:  # one may be a preview
                return []
        return numbers

    def _describe_distant(self, numbers: Sequence[int]) -> str:
        """Return a clause on an image that has the name, but in another folder."""
        if not numbers:
            return ""
        distant = show_path(self._paths[numbers[0]])
        return f" except for {distant}, which is in the folder of another split or of other images"

    def _match(self, name: str) -> list[int]:
        """Return the numbers of the images with a name."""
        # Tools that serve images over the web encode blanks and accents of their names.
        return self._list_matches(root_path(name)) or self._list_matches(root_path(unquote(name)))

    def _list_matches(self, target: str) -> list[int]:
        """Return the numbers of the images whose path ends with a target, with or without extension."""
        name = posixpath.basename(target)
        known: Sequence[int] = self._numbers.get(name, ())
        if len(known) > _FEW:
            known = self._find_tail(name, target, known)
        matches = []
        for number in known:
            if self._paths[number].endswith(target) or self._stem(number).endswith(target):
                matches.append(number)
        return matches

    def _find_tail(self, name: str, target: str, numbers: Sequence[int]) -> Sequence[int]:
        """Look up the images whose path ends with a target, among many images of one name."""
        if name not in self._tails:
            tails = self._tails[name] = defaultdict(list)
            for number in numbers:
                for path in {self._paths[number], self._stem(number)}:
                    for start, letter in enumerate(path):
                        if letter == "/":
                            tails[path[start:]].append(number)
        return self._tails[name].get(target, ())

    def _stem(self, number: int) -> str:
        return posixpath.splitext(self._paths[number])[0]

    def _split(self, number: int) -> str | None:
        return split_of(self._paths[number][self._common :])


def list_shorter(name: str) -> list[str]:
    """Return a name without its outer folders, one by one, if they only say that they hold images or a split."""
    shorter = []
    folder, _, rest = root_path(name)[1:].partition("/")
    while rest and (folder == "data" or find_split(folder) or is_image_folder(folder)):
        shorter.append(rest)
        folder, _, rest = rest.partition("/")
    return shorter


def describe_clash(names: Iterable[PathText], key: str) -> str:
    """Return why a label file is refused that is named after one image, and names another one by a key."""
    image, other = names
    return (
        f"has the name of {show_path(image)}, but its {key} is {show_path(other)}, which has no label "
        f"file: rename the file, or correct {key}"
    )


def _list_parents(path: str) -> Iterator[str]:
    """Yield the folders of a path, the innermost first, without the root of all."""
    while (path := posixpath.dirname(path)) != "/":
        yield path


def root_path(name: str) -> str:
    """Return a name as a path from the root, with composed accents and without ``./``."""
    normal = unicodedata.normalize("NFC", name.replace("\\", "/"))  # lists written on Windows
    return "/" + posixpath.normpath(normal).lstrip("/")
