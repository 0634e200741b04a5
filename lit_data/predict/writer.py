"""`PredictionWriter`, and `Work`: the inputs that a process predicts, and the tables of all of them."""

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from lit_data.annotations.writing import ImageLabels, Kind
from lit_data.core.errors import ConfigError, StoreError, list_some, show_path
from lit_data.core.files import explaining, replacing, write_table
from lit_data.images.bank import ImageBank
from lit_data.predict.journal import FINGERPRINT, Entry, Journal
from lit_data.predict.label_files import check_form, write_label_files
from lit_data.predict.options import Predicted, PredictOptions, PredictRun
from lit_inspect.counts import counted, counted_of
from lit_inspect.verdicts import describe_counts

log = logging.getLogger(__name__)

_NAMED = 5  # missing inputs in a message


class Written(NamedTuple):
    """Files and rows that were written for one input.

    Attributes:
        files: Paths of the files.
        rows: Rows of the table, with plain values that JSON can hold.
        score: Confidence of the model, for the choice of pictures.
        note: Note for the tables.
    """

    files: Sequence[Path]
    rows: Sequence[Mapping[str, Any]]
    score: float = 0.0
    note: str = ""


class PredictionWriter(ABC):
    """Writes the prediction of each input immediately, and tables and pictures of all at the end.

    The numbers of inputs are those of the samples in the predict stage, unless several `samples`
    show one input, whose answers `join` combines. A resumed run (``predict.resume=true``) keeps the
    files of finished inputs, and several processes may each write some of the inputs. Therefore
    `finish` gets the rows of all inputs, and must not rely on what `write` remembers.

    Attributes:
        expects: Description of what `predict_step` must return.
        names: Unique name of each input, which is the same in the next run.
        bad: (path, problem) of skipped inputs.
        has_many: True if there are too many inputs for one folder, and tables are Parquet; see
            `folder_of` and `write_rows`.
        bring: Function that returns the path of a written file, see `PredictRun`.
        labels: What `label` returns; None if there is nothing to label.
        class_names: Names of the classes that `label` returns.
        verdicts: Images by their verdicts, or by their classes if there are none, once `finish`
            knows them.
    """

    expects: ClassVar[str] = "answers, one for each sample"
    names: Sequence[str]
    bad: Sequence[tuple[str, str]] = ()
    has_many: bool = False
    bring: Callable[[Path], Path] = staticmethod(Path)
    labels: ClassVar[Kind | None] = None
    class_names: Sequence[str] = ()
    verdicts: Mapping[str, int] = {}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Number of each input by its name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def stems(self) -> Mapping[str, str]:
        """Path of each input by its name, without the suffix unless inputs differ only in that."""
        stems = {name: PurePath(name).with_suffix("").as_posix() for name in self.names}
        counts = Counter(stems.values())
        return {name: stem if counts[stem] == 1 else name for name, stem in stems.items()}

    def folder_of(self, folder: Path, name: str) -> Path:
        """Return the folder for the file of an input: `folder`, or one of 256 folders in it.

        Args:
            folder: Folder for the files of one kind.
            name: Name of the input; its digest decides, so its place does not depend on others.
        """
        if not self.has_many:
            return folder
        return folder / hashlib.sha256(os.fsencode(name)).hexdigest()[:2]

    def write_rows(
        self, stem: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
    ) -> Path:
        """Write a table as CSV, or as Parquet if there are many inputs.

        Args:
            stem: Path without the suffix.
            columns: Names of the columns to write.
            rows: Cells of each row by name.

        Returns:
            The path of the file.

        Raises:
            StoreError: The file cannot be written.
        """
        suffix = ".parquet" if self.has_many else ".csv"
        path = stem.with_name(stem.name + suffix)
        write = write_parquet if self.has_many else write_table
        write(path, columns, rows)
        return path

    def stamp(self, number: int) -> Sequence[int]:
        """Return integers that change when an input does; by default none."""
        return ()

    def read(self, outputs: Any, batch: Any) -> Sequence[Any] | None:  # noqa: ANN401 - a module's outputs and batch
        """Return an answer for each sample of a batch from the outputs of `predict_step`.

        The result is None if the outputs do not have the form of `expects`.
        """
        return None

    def path(self, number: int) -> str:
        """Return the path of an input, for messages; by default its name."""
        return self.names[number]

    def samples(self, number: int) -> Sequence[int]:
        """Return the samples of the predict stage that show an input; by default the one of its number."""
        return (number,)

    def join(self, number: int, answers: Sequence[Any]) -> Any:  # noqa: ANN401 - as `read` gives them
        """Return the answer for an input from those for its samples; by default that for the only one."""
        return answers[0]

    def label(self, entry: Entry) -> ImageLabels:
        """Return the labels of an input, for labeling tools."""
        raise NotImplementedError

    def measure_margin(self, entry: Entry) -> float:
        """Return the margin of an input to another answer; inputs with low margins need review first."""
        raise NotImplementedError

    @abstractmethod
    def write(self, number: int, answer: Any, seconds: float) -> Written:  # noqa: ANN401 - one of `read`
        """Write the answer of `join` for one input; `seconds` is the time since the one before."""

    @abstractmethod
    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write tables and pictures of all finished inputs, and return numbers for summary.json."""


class BankWriter(PredictionWriter):
    """Writes predictions of the images of a bank.

    Args:
        bank: The images.
        names: Names of the images.
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
    """Finished, waiting and bad inputs of a run.

    If several processes predict, each has a share of the inputs, and the leading one writes the
    tables of all of them.

    Args:
        writer: Writer of the predictions.
        run: Run with its folder and the share of this process.
        options: Options, which decide whether the run resumes.
        chosen: Numbers of the inputs of the run.
        block: Number of inputs that stay together when they are shared; with that of a batch, each
            batch is the same as in a single process.

    Attributes:
        waiting: Numbers of the inputs to predict.
        bad: Problems of inputs that could not be read.

    Raises:
        ConfigError: The folder holds predictions of another run, or none that could be finished.
        StoreError: The folder cannot be written, or another process writes there.
    """

    def __init__(
        self,
        writer: PredictionWriter,
        run: PredictRun,
        options: PredictOptions,
        chosen: Sequence[int],
        *,
        block: int = 1,
    ) -> None:
        self.writer = writer
        self.bad: dict[int, str] = {}
        self._run = run
        self._share = run.share
        self._options = options
        if options.to is not None and run.share.leads:
            check_form(writer.labels, run.folder, options)
        self._is_joint = options.finish or run.share.count > 1
        self._chosen = chosen
        self._block = block
        self.restart_clock()
        writer.bring = run.bring
        writer.has_many = len(writer.names) >= options.many_inputs
        if writer.has_many and find_spec("pyarrow") is None:
            raise ConfigError(
                f"tables of {len(writer.names)} inputs are written as Parquet, which needs pyarrow: "
                "pip install pyarrow, or set predict.many_inputs to more"
            )
        self._journal = self._open_journal(options)
        self._warn_of_others(self._journal.earlier - {writer.names[number] for number in chosen})
        share_numbers = self._share.take(chosen, block)
        # Only the process that writes the tables reads the inputs of the others.
        visible = chosen if self._share.leads else share_numbers
        self._pending = self._find_pending(visible)
        self._kept = len(visible) - len(self._pending)
        self.waiting: list[int] = []
        if not options.finish:
            self.waiting = sorted(set(share_numbers) & self._pending.keys())
        if self._kept:
            done = counted_of(self._kept, len(visible), "input", "is", "are")
            log.info("%s done already", done)
        # No rank adds to its journal before all have read what was done.
        self._share.wait()

    def _warn_of_others(self, images: Set[str]) -> None:
        """Warn of files of images that are not predicted now."""
        if images:
            log.warning(
                "%s has files of %s not predicted now: %s; they stay with the new ones: remove them, or "
                "choose another predict.folder",
                show_path(self._run.folder),
                counted(len(images), "image that is", "images that are"),
                list_some(sorted(images)),
            )

    def _open_journal(self, options: PredictOptions) -> Journal:
        """Open the folder, after the first rank has done so."""
        folder = self._run.folder
        if options.finish and not (folder / FINGERPRINT).exists():
            raise ConfigError(
                f"predict.finish=true: no part was predicted in {show_path(folder)}; name the folder "
                "of the parts, predict.folder=FOLDER"
            )
        identity = {**self._run.identity, "predict": options.identity()}
        if self.writer.has_many:
            identity["layout"] = "folders by prefix"
        resume = options.resume or options.finish
        if not self._share.leads:
            self._share.wait()
        sizes = self._run.remote_sizes
        journal = Journal(folder, identity, resume=resume, share=self._share, remote_sizes=sizes)
        if self._share.leads:
            self._share.wait()
        return journal

    def _find_pending(self, numbers: Sequence[int]) -> dict[int, Sequence[int]]:
        """Return the stamps of the unfinished inputs, by their numbers.

        They are taken before an input is read, so one that changes later is predicted again.
        """
        pending: dict[int, Sequence[int]] = {}
        for number in numbers:
            name = self.writer.names[number]
            stamp = self.writer.stamp(number)
            if not self._journal.holds(name, stamp):
                self._journal.drop(name)
                pending[number] = stamp
        return pending

    def restart_clock(self) -> None:
        """Start to time the next input now."""
        self._start_s = time.perf_counter()

    def write(self, number: int, answer: Any) -> None:  # noqa: ANN401 - what the writer takes
        """Write the answer for one input, and note that it is done."""
        seconds = time.perf_counter() - self._start_s
        self.restart_clock()  # writing counts for the input after this one
        written = self.writer.write(number, answer, seconds)
        entry = Entry(
            image=self.writer.names[number],
            stamp=self._pending[number],
            files=self._journal.measure(written.files),
            rows=written.rows,
            score=written.score,
            note=written.note,
        )
        self._journal.add(entry)

    def note_bad(self, number: int, reason: str) -> None:
        """Note an input that cannot be read, also for the process that writes the tables."""
        self.bad[number] = reason
        entry = Entry(
            image=self.writer.names[number],
            stamp=self._pending[number],
            files={},
            rows=[],
            score=0.0,
            bad=reason,
        )
        self._journal.add(entry)

    def finish(self) -> Predicted:
        """Write tables and pictures of all inputs, and ``bad.csv``.

        Returns:
            Numbers of the run and its bad inputs; for a part only its numbers, and nothing on ranks
            other than the first.

        Raises:
            StoreError: Inputs of other processes are missing.
        """
        self._share.wait()  # until the files of all ranks are written
        if not self._share.leads:
            return Predicted(self._count_share())
        if self._is_joint:
            self._take_others()
        names = self.writer.names
        entries = self._journal.entries([names[number] for number in self._chosen])
        bad = list(self.writer.bad)
        rows = [{"image": self._name(path), "reason": reason} for path, reason in bad]
        for number, reason in sorted(self.bad.items()):
            bad.append((self.writer.path(number), reason))
            rows.append({"image": names[number], "reason": reason})
        write_table(self._run.folder / "bad.csv", ("image", "reason"), rows)
        counts = {"predict/images_kept": self._kept, "predict/images_bad": len(bad)}
        metrics = {**self.writer.finish(entries), **counts}
        if self._options.to is not None:
            write_label_files(self.writer, entries, self._run.folder, self._options)
        if verdicts := self.writer.verdicts:
            text = describe_counts({**verdicts, "bad": len(bad)})
            log.info("%s; %s", text, show_path(self._run.folder))
        return Predicted(metrics, bad)

    def _name(self, path: str) -> str:
        """Return the path of an input relative to the root, as tables have it, if inputs are named so."""
        for number, name in enumerate(self.writer.names[:1]):
            full = self.writer.path(number)
            if full.endswith(f"/{name}"):
                return path.removeprefix(full.removesuffix(name))
        return path

    def _count_share(self) -> dict[str, Any]:
        if self.bad:
            bad = counted(
                len(self.bad),
                "input of this part is bad and has",
                "inputs of this part are bad and have",
            )
            log.warning("%s no prediction", bad)
        return {
            "predict/part": str(self._share),
            "predict/inputs": self._kept + len(self._pending),
            "predict/images_kept": self._kept,
            "predict/images_bad": len(self.bad),
        }

    def _take_others(self) -> None:
        """Take over what other processes have noted.

        Raises:
            StoreError: Inputs are missing.
        """
        self._journal.read()
        missing = []
        for number, stamp in self._pending.items():
            name = self.writer.names[number]
            if self._journal.holds(name, stamp):
                continue
            fault = self._journal.find_fault(name, stamp)
            if fault:
                self.bad[number] = fault
            else:
                missing.append(number)
        if missing:
            raise StoreError(self._describe_missing(missing))

    def _describe_missing(self, missing: Sequence[int]) -> str:
        names = [show_path(self.writer.names[number]) for number in missing[:_NAMED]]
        if len(missing) > _NAMED:
            names.append("...")
        shares = self._journal.count_shares() - {1}
        advice = ""
        if len(shares) == 1:  # which part would have had them is known
            count = shares.pop()
            parts = sorted({number // self._block % count for number in missing})
            advice = (
                f"start predict.part={','.join(f'{part}/{count}' for part in parts)} again, or "
            )
        return (
            counted_of(len(missing), len(self._chosen), "input", "is", "are")
            + f" missing in {show_path(self._run.folder)} ({', '.join(names)}): {advice}"
            "predict them in one run with predict.resume=true"
        )


def write_parquet(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the columns of a table as Parquet, completely or not at all.

    Missing cells of a row are null. This needs pyarrow.

    Raises:
        StoreError: The table cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    cells: dict[str, list[Any]] = {name: [] for name in columns}
    for row in rows:
        for name, column in cells.items():
            column.append(_decodable(row.get(name)))
    table = pyarrow.table(cells)
    with explaining(path), replacing(path) as file:
        parquet.write_table(table, file)


def _decodable(value: Any) -> Any:  # noqa: ANN401 - a cell of any type
    """Return a cell with Unicode text, in which bytes of names that are not UTF-8 become escapes."""
    if not isinstance(value, str):
        return value
    return os.fsencode(value).decode("utf-8", "backslashreplace")
