"""`PredictionWriter`, and the journal from which an interrupted run of ``predict`` goes on."""

import json
import logging
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from typing_extensions import override

from lit_data.errors import ConfigError, StoreError, show_path
from lit_data.files import PART, flatten, write_json, write_table
from lit_data.io.images.image_source import ImageBank
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
        score: Confidence of the model, for the choice of pictures.
    """

    image: str
    stamp: Sequence[int]
    files: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]
    score: float


class Journal:
    """Record of finished images, one line each in ``images.jsonl``.

    A line is written when the files of its image are complete; one that was cut short does not
    count. Weights and options that decide the predictions are noted in ``fingerprint.json``.

    Args:
        folder: Of the predictions; it is made.
        identity: What decides the predictions, as plain data.
        resume: Keep the images that are done; otherwise begin anew.

    Raises:
        ConfigError: They were predicted with other weights or options.
        StoreError: The folder cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self._folder = folder
        self._path = folder / JOURNAL
        self._entries: dict[str, Entry] = {}
        fingerprint = folder / FINGERPRINT
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fingerprint.is_file():  # in a folder without one no run has left parts of files
                _remove_parts(folder)
            if resume and fingerprint.exists():
                _check_identity(fingerprint, identity)
                self._read()
            else:
                # The journal goes first: it must never lie beside the fingerprint of another run.
                self._path.unlink(missing_ok=True)
                write_json(fingerprint, identity)
        except OSError as error:
            raise StoreError(
                f"cannot write into {show_path(folder)}: {error.strerror}. Set predict.folder."
            ) from error

    def holds(self, image: str, stamp: Sequence[int]) -> bool:
        """Return True if an image is done, and its source and its files are unchanged since."""
        entry = self._entries.get(image)
        if entry is None or list(entry.stamp) != list(stamp):
            return False
        return all(self._has_size(name, size) for name, size in entry.files.items())

    def add(self, entry: Entry) -> None:
        """Note an image whose files are complete."""
        line = json.dumps(asdict(entry)).encode() + b"\n"
        try:
            # One unbuffered write: a run that is killed leaves the line whole, or cut at the end.
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise StoreError(
                f"cannot write {show_path(self._path)}: {error.strerror}. Free the disk."
            ) from error
        self._entries[entry.image] = entry

    def entries(self, images: Sequence[str]) -> list[Entry]:
        """Return the entries of those images that are done, in the order of the images."""
        return [self._entries[image] for image in images if image in self._entries]

    def drop(self, image: str) -> None:
        """Forget an image that is to be done again."""
        self._entries.pop(image, None)

    def measure(self, files: Sequence[Path]) -> dict[str, int]:
        """Return the sizes of written files, bytes, by their names below the folder."""
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def _read(self) -> None:
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
            complete_bytes = content.rfind(b"\n") + 1
            if complete_bytes < len(content):  # so that the next line does not continue a cut one
                os.truncate(self._path, complete_bytes)
            for line in content[:complete_bytes].splitlines():
                try:
                    entry = _check_entry(Entry(**json.loads(line)))
                except (ValueError, TypeError, RecursionError) as error:
                    raise StoreError(
                        f"{show_path(self._path)} is damaged: remove it, or begin anew with "
                        "predict.resume=false"
                    ) from error
                self._entries[entry.image] = entry

    def _has_size(self, name: str, size: int) -> bool:
        with suppress(OSError, ValueError):  # ValueError: a name that no file can have
            return (self._folder / name).stat().st_size == size
        return False


class Written(NamedTuple):
    """Files and rows that were written for one input.

    Attributes:
        files: Paths.
        rows: Of the table; plain values that JSON can hold.
        score: Confidence of the model, for the choice of pictures.
    """

    files: Sequence[Path]
    rows: Sequence[Mapping[str, Any]]
    score: float = 0.0


class PredictionWriter(ABC):
    """Writes the prediction of each input at once, and tables and pictures of all at the end.

    The numbers of inputs are those of the samples of the predict stage. A run that goes on
    (``predict.resume=true``) keeps the files of inputs that are done, so `finish` gets the rows of
    all of them back, and must not rely on what `write` remembers.

    Attributes:
        expects: What `predict_step` must return, in words.
        names: Of each input: unlike, and the same in the next run.
        bad: (path, what is wrong) of inputs that were left out.
    """

    expects: ClassVar[str] = "answers, one for each sample"
    names: Sequence[str]
    bad: Sequence[tuple[str, str]] = ()

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Number of each input by its name."""
        return {name: number for number, name in enumerate(self.names)}

    def stamp(self, number: int) -> Sequence[int]:
        """Return whole numbers that change when an input does; by default none."""
        return ()

    def read(self, outputs: Any, batch: Any) -> Sequence[Any] | None:  # noqa: ANN401 - a module's outputs and batch
        """Return an answer for each sample of a batch from the outputs of `predict_step`.

        None if the outputs have another form than `expects`.
        """
        return None

    def path(self, number: int) -> str:
        """Return the path of an input, for messages; by default its name."""
        return self.names[number]

    @abstractmethod
    def write(self, number: int, answer: Any, seconds: float) -> Written:  # noqa: ANN401 - one of `read`
        """Write the answer for one input; `seconds` is the time since the one before."""

    @abstractmethod
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write tables and pictures of all inputs that are done; return numbers for summary.json."""


class BankWriter(PredictionWriter):
    """Writes predictions of the images of a bank.

    Args:
        bank: The images.
        names: Of the images.
    """

    def __init__(self, bank: ImageBank, names: Sequence[str]) -> None:
        self.bank = bank
        self.names = names
        self.bad = bank.skipped

    @override
    def stamp(self, number: int) -> Sequence[int]:
        """Return numbers that change with an image."""
        return self.bank.stamp(number)

    @override
    def path(self, number: int) -> str:
        return self.bank.name(number)


class Work:
    """Inputs of a run: finished, waiting, and bad ones.

    Args:
        writer: Writes what is predicted.
        run: Where.
        options: Whether the run goes on.
        chosen: Numbers of the inputs of the run.

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
        self.writer = writer
        self.bad: dict[int, str] = {}
        self.waiting: list[int] = []
        self._run = run
        self._chosen = chosen
        self.restart_clock()
        # From before an input is read: one that changes meanwhile is predicted again.
        self._stamps = {number: writer.stamp(number) for number in chosen}
        identity = {**run.identity, "predict": options.identity()}
        self._journal = Journal(run.folder, identity, resume=options.resume)
        for number in chosen:
            name = writer.names[number]
            if not self._journal.holds(name, self._stamps[number]):
                self._journal.drop(name)
                self.waiting.append(number)
        done = len(chosen) - len(self.waiting)
        if done:
            log.info("%d of %d inputs are done already", done, len(chosen))

    def restart_clock(self) -> None:
        """Let the seconds of the next input begin now."""
        self._start_s = time.perf_counter()

    def write(self, number: int, answer: Any) -> None:  # noqa: ANN401 - what the writer takes
        """Write the answer for one input, and note that it is done."""
        seconds = time.perf_counter() - self._start_s
        self.restart_clock()  # writing counts for the input after this one
        written = self.writer.write(number, answer, seconds)
        entry = Entry(
            image=self.writer.names[number],
            stamp=self._stamps[number],
            files=self._journal.measure(written.files),
            rows=written.rows,
            score=written.score,
        )
        self._journal.add(entry)

    def finish(self) -> Predicted:
        """Write tables and pictures of all inputs, and ``bad.csv``."""
        names = self.writer.names
        entries = self._journal.entries([names[number] for number in self._chosen])
        bad = list(self.writer.bad)
        for number, reason in sorted(self.bad.items()):
            bad.append((self.writer.path(number), reason))
        rows = [{"image": path, "reason": reason} for path, reason in bad]
        write_table(self._run.folder / "bad.csv", ("image", "reason"), rows)
        counts = {
            "predict/images_kept": len(self._chosen) - len(self.waiting),
            "predict/images_bad": len(bad),
        }
        return Predicted({**self.writer.finish(entries), **counts}, bad)


def _check_entry(entry: Entry) -> Entry:
    """Return a line of the journal if its values have the types of ours.

    Raises:
        TypeError: They have others.
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
    """Remove the partial files of an interrupted run.

    They have names that nothing else has; no link is followed or removed.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            if PART.fullmatch(name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink(missing_ok=True)


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Compare the fingerprint of the folder with that of this run.

    Raises:
        ConfigError: They differ.
        StoreError: The file is damaged.
    """
    try:
        before = flatten(json.loads(path.read_bytes()))
        now = flatten(json.loads(json.dumps(identity)))  # with lists in the place of tuples
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{show_path(path)} is damaged: begin anew with predict.resume=false"
        ) from error
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        changes = [f"{key}: {before.get(key)!r}, now {now.get(key)!r}" for key in differing]
        raise ConfigError(
            f"{show_path(path.parent)} holds predictions of another run: choose another "
            "predict.folder, or begin anew with predict.resume=false\n  " + "\n  ".join(changes)
        )
