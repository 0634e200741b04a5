"""`PredictionWriter`, and what a run of ``predict`` has done so far, so that another one can go on from there."""

import json
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from typing_extensions import override

from lit_data.errors import ConfigError, StoreError, show_path
from lit_data.files import PART, write_json, write_table
from lit_data.io.images.image_source import ImageBank
from lit_data.io.shards.store import ShardedStore
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun

log = logging.getLogger(__name__)


FINGERPRINT: Final = "fingerprint.json"
JOURNAL: Final = "images.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One image that is done.

    Attributes:
        image: Its name.
        stamp: Numbers that change with its file, such as size and time.
        files: For each file written for it, below the folder, its length.
        rows: Of the table.
        score: How sure the model is of what it found, for the choice of pictures.
    """

    image: str
    stamp: Sequence[int]
    files: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]
    score: float


class Journal:
    """Record of finished images, one line each in ``images.jsonl``.

    A line is written when the files of its image are complete.

    Which weights and options made them stands in ``fingerprint.json``. A line that was cut short
    does not count.

    Args:
        folder: Of the predictions; it is made.
        identity: What decides the predictions, as plain data.
        resume: Keep what is done; otherwise begin anew.

    Raises:
        ConfigError: What is done was made by other weights or options.
        StoreError: The folder cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self._folder, self._path = folder, folder / JOURNAL
        self._entries: dict[str, Entry] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / FINGERPRINT).is_file():  # else there was no run of ours that left anything
                _remove_parts(folder)
            if resume and (folder / FINGERPRINT).exists():
                _check_identity(folder / FINGERPRINT, identity)
                self._read()
            else:
                self._path.unlink(missing_ok=True)
                write_json(folder / FINGERPRINT, identity)
        except OSError as error:
            raise StoreError(
                f"cannot write into {show_path(folder)}: {error.strerror}. Set predict.folder."
            ) from error

    def holds(self, image: str, stamp: Sequence[int]) -> bool:
        """Whether an image is done, its source as it was then and its files as they were left."""
        entry = self._entries.get(image)
        return (
            entry is not None
            and list(entry.stamp) == list(stamp)
            and all(map(self._is_whole, entry.files.items()))
        )

    def add(self, entry: Entry) -> None:
        """Note an image whose files are complete."""
        line = json.dumps(asdict(entry)).encode() + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise StoreError(
                f"cannot write {show_path(self._path)}: {error.strerror}. Free the disk."
            ) from error
        self._entries[entry.image] = entry

    def entries(self, images: Sequence[str]) -> list[Entry]:
        """Those of some images that are done, in their order."""
        return [self._entries[image] for image in images if image in self._entries]

    def drop(self, image: str) -> None:
        """Forget an image that is to be done again."""
        self._entries.pop(image, None)

    def measure(self, files: Sequence[Path]) -> dict[str, int]:
        """The lengths of files that were just written, by their names below the folder."""
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def _read(self) -> None:
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(self._path, whole)
            for line in content[:whole].splitlines():
                try:
                    entry = _check_entry(Entry(**json.loads(line)))
                except (ValueError, TypeError, RecursionError) as error:
                    raise StoreError(
                        f"{show_path(self._path)} is damaged: remove it, or begin anew with predict.resume=false"
                    ) from error
                self._entries[entry.image] = entry

    def _is_whole(self, file: tuple[str, int]) -> bool:
        with suppress(OSError, ValueError):  # names that no file can have
            return (self._folder / file[0]).stat().st_size == file[1]
        return False


class Written(NamedTuple):
    """What was written of one input.

    Attributes:
        files: Paths.
        rows: Of the table; plain values that JSON can hold.
        score: How sure the model is of what it found, for the choice of pictures.
    """

    files: Sequence[Path]
    rows: Sequence[Mapping[str, Any]]
    score: float = 0.0


class PredictionWriter(ABC):
    """Writes what a model says of each input, at once, and what is said of all of them at the end.

    The numbers of inputs are those of the samples of the predict stage. What is written of one is
    kept by a run that goes on (``predict.resume=true``), so `finish` gets the rows of all of them
    back, not what `write` remembers.

    Attributes:
        expects: What `predict_step` must return, in words.
        names: Of each input: unlike, and the same in the next run.
        bad: (path, what is wrong) of inputs that were left out.
    """

    expects: ClassVar[str] = "answers, one for each sample"
    names: Sequence[str]
    bad: Sequence[tuple[str, str]] = ()

    def stamp(self, number: int) -> Sequence[int]:
        """Whole numbers that change when an input does; by default nothing says so."""
        return ()

    def read(self, outputs: Any, batch: Any) -> Sequence[Any] | None:  # noqa: ANN401 - a module's outputs and batch
        """One answer for each sample of a batch, from what `predict_step` returned; `None` if it is nothing of ours."""
        return None

    def path(self, number: int) -> str:
        """Where an input lies, for messages; by default its name."""
        return self.names[number]

    @abstractmethod
    def write(self, number: int, answer: Any, seconds: float) -> Written:  # noqa: ANN401 - one of `read`
        """Write what is said of one input; `seconds` is the time since the one before."""

    @abstractmethod
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write tables and pictures of all inputs that are done; return the numbers for summary.json."""


def stamp_of(path: str) -> list[int]:
    """Size and time of a file, which change with it."""
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns]


class BankWriter(PredictionWriter):
    """Writes what is said of the images of a bank.

    Args:
        bank: The images.
        names: Of the images.
    """

    def __init__(self, bank: ImageBank, names: Sequence[str]) -> None:
        self.bank, self.names, self.bad = bank, names, bank.skipped

    @override
    def stamp(self, number: int) -> Sequence[int]:
        """Numbers that change with the file of an image, or with the shard that holds it."""
        return (
            self.bank.stamp(number)
            if isinstance(self.bank, ShardedStore)
            else stamp_of(self.path(number))
        )

    @override
    def path(self, number: int) -> str:
        return self.bank.name(number)


class Work:
    """Inputs of a run: finished, waiting, and bad ones.

    Args:
        writer: Writes what is predicted.
        run: Where.
        options: Whether the run goes on.
        chosen: Numbers of the inputs that are wanted.

    Attributes:
        waiting: Numbers of the inputs to predict.
        bad: What is wrong with inputs that could not be read.
    """

    def __init__(
        self,
        writer: PredictionWriter,
        run: PredictRun,
        options: PredictOptions,
        chosen: Sequence[int],
    ) -> None:
        self.writer, self.bad = writer, dict[int, str]()
        self._run, self._chosen = run, chosen
        self._stamps = {
            number: writer.stamp(number) for number in chosen
        }  # from before the inputs were read
        self._journal = Journal(
            run.folder, {**run.identity, "predict": options.identity()}, resume=options.resume
        )
        self.waiting = [
            n for n in chosen if not self._journal.holds(writer.names[n], self._stamps[n])
        ]
        for number in self.waiting:
            self._journal.drop(writer.names[number])
        if len(self.waiting) < len(chosen):
            log.info(
                "%d of %d inputs are done already", len(chosen) - len(self.waiting), len(chosen)
            )

    def write(self, number: int, answer: Any, seconds: float) -> None:  # noqa: ANN401 - what the writer takes
        """Write what is said of one input, and note that it is done."""
        written, name = self.writer.write(number, answer, seconds), self.writer.names[number]
        measured, stamp = self._journal.measure(written.files), self._stamps[number]
        self._journal.add(
            Entry(image=name, stamp=stamp, files=measured, rows=written.rows, score=written.score)
        )

    def finish(self) -> Predicted:
        """Write what is said of all inputs, and ``bad.csv``."""
        names = self.writer.names
        entries = self._journal.entries([names[number] for number in self._chosen])
        bad = [
            *self.writer.bad,
            *((self.writer.path(number), reason) for number, reason in sorted(self.bad.items())),
        ]
        rows = [{"image": path, "reason": why} for path, why in bad]
        write_table(self._run.folder / "bad.csv", ("image", "reason"), rows)
        kept = {
            "predict/images_kept": len(self._chosen) - len(self.waiting),
            "predict/images_bad": len(bad),
        }
        return Predicted({**self.writer.finish(entries), **kept}, bad)


def _check_entry(entry: Entry) -> Entry:
    """Refuse a line whose parts are of other kinds than ours.

    Raises:
        TypeError: They are.
    """
    is_good = (
        isinstance(entry.image, str)
        and isinstance(entry.stamp, list)
        and isinstance(entry.files, dict)
        and all(isinstance(size, int) for size in entry.files.values())
        and isinstance(entry.rows, list)
        and all(isinstance(row, dict) for row in entry.rows)
        and isinstance(entry.score, int | float)
    )
    if not is_good:
        raise TypeError("its parts are of other kinds")
    return entry


def _remove_parts(folder: Path) -> None:
    """Remove what an interrupted run was writing: files of names that only we give, in real folders only."""
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names if PART.fullmatch(name)):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink(missing_ok=True)


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    try:
        before, now = (dict(_flatten(part)) for part in (json.loads(path.read_bytes()), identity))
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{show_path(path)} is damaged: begin anew with predict.resume=false"
        ) from error
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        changes = [f"{key}: {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
        raise ConfigError(
            f"{show_path(path.parent)} holds predictions of another run: choose another predict.folder, or begin anew "
            "with predict.resume=false\n  " + "\n  ".join(changes)
        )


def _flatten(node: object, key: str = "") -> list[tuple[str, object]]:
    if isinstance(node, Mapping):
        return [
            pair
            for name, value in node.items()
            for pair in _flatten(value, f"{key}.{name}" if key else str(name))
        ]
    if isinstance(node, list | tuple):
        return [(key, json.dumps(node))]
    return [(key, node)]
