"""Predictions at an address: worked on in a folder of the run, and copied from there at its end.

A run that goes on, a part, and the joining of parts bring only journals from the address, and
compare with the sizes of the files there. Nothing there is replaced by another model's predictions.
"""

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lit_data.app.launcher import is_first_rank
from lit_data.app.remote_runs import explaining_server, open_store, put_files
from lit_data.core.errors import ConfigError, DataError, LitDataError, StoreError, show_path
from lit_data.images.discovery import is_hidden
from lit_data.images.scope import find_fault
from lit_data.predict.journal import FINGERPRINT, JOURNALS
from lit_data.predict.options import PredictOptions, Share
from lit_inspect.counts import counted
from lit_inspect.replacement import replacing_by_path

log = logging.getLogger(__name__)

_KEY = "predict.folder"
_MOST_BYTES = 2**24  # of a fingerprint


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Folder of a run whose files are copied to an address; a `LocalFolder` has the same methods.

    Args:
        path: Of the local folder.
        address: That its files are copied to.

    Attributes:
        sizes: Bytes of the files at the address, by their names below it, before any were copied.
    """

    path: Path
    address: str
    sizes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.address

    def bring(self, path: Path) -> Path:
        """Return the path of a file of the folder, which comes from the address if it is not here.

        Raises:
            DataError: It is not there, or its name leads elsewhere.
        """
        if path.exists():
            return path
        name = path.relative_to(self.path).as_posix()
        fault = find_fault(name)
        if fault is not None or name not in self.sizes:
            raise DataError(f"{self}/{name}: {fault or 'no longer there'}; predict it again")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            explaining_server(_KEY),
            open_store(self.address, _KEY) as server,
            replacing_by_path(path) as part,  # no half of it may be copied back
        ):
            server.get(name, part, self.sizes[name])
        return path

    @contextmanager
    def copying(self, options: PredictOptions, share: Share) -> Iterator[None]:
        """Copy the files to the address when the block has ended.

        Args:
            options: Whether the run goes on there.
            share: Of this process.

        Raises:
            ConfigError: There are predictions, and the run is to begin anew.
            StoreError: The address cannot be written, or files are missing there at the end.
        """
        fetched = self._fetch_records(options)
        if not is_first_rank():  # the first one copies for all ranks of this machine
            yield
            return
        journal = self.path / f"images{share.suffix}.jsonl"
        journal.touch()  # copied at once, so that an address that cannot be written is seen early
        self._put([journal])
        try:
            yield
        except BaseException as error:
            if isinstance(error, LitDataError) and not isinstance(error.__cause__, OSError):
                error.args = (str(error).replace(show_path(self.path), self.address),)
            try:
                self._put_new(fetched)
            except StoreError as fault:
                log.warning("%s", fault)  # the error of the block says more
            raise
        self._put_new(fetched)
        self._check_fingerprint()

    def _put_new(self, fetched: Collection[str]) -> None:
        """Copy the files that are not as they are at the address, records behind what they name.

        Raises:
            StoreError: One cannot be written there.
        """
        inner: list[Path] = []
        tables: list[Path] = []
        journals: list[Path] = []
        for path in filter(Path.is_file, self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            is_fetched = name in fetched and path.stat().st_size == self.sizes[name]
            if is_hidden(path.name) or is_fetched:
                continue
            if JOURNALS.fullmatch(name):
                journals.append(path)
            else:
                (inner if "/" in name else tables).append(path)
        files = len(inner) + len(tables) + len(journals)
        log.info("copying %s to %s", counted(files, "file"), self)
        folder = show_path(self.path)
        for paths in (inner, tables, journals):
            self._put(
                paths, f"; all predictions are in {folder}: copy that folder to {self.address}"
            )

    def _put(self, paths: Sequence[Path], remark: str = "") -> None:
        try:
            put_files(paths, self.path, self.address, _KEY)
        except DataError as error:
            raise StoreError(f"cannot write {error}{remark}") from error

    def _fetch_records(self, options: PredictOptions) -> set[str]:
        """Bring the records of what is done at the address into an empty folder; return their names."""
        goes_on = options.resume or options.finish or options.chosen_part is not None
        with explaining_server(_KEY), open_store(self.address, _KEY) as server:
            self.sizes.update(server.list_sizes(""))
            if FINGERPRINT in self.sizes and not goes_on:
                raise ConfigError(
                    f"{_KEY}={self} holds predictions: resume with predict.resume=true, or "
                    "choose another address"
                )
            if not is_first_rank():
                return set()
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            records = {
                name for name in self.sizes if name == FINGERPRINT or JOURNALS.fullmatch(name)
            }
            for name in records:
                server.get(name, self.path / name, self.sizes[name])
        return records

    def _check_fingerprint(self) -> None:
        """Compare the record of weights and options at the address, which another part may have replaced.

        Raises:
            StoreError: There are predictions of several models now.
        """
        path = self.path / FINGERPRINT
        if not path.exists():
            return
        with explaining_server(_KEY), open_store(self.address, _KEY) as server:
            content = server.read(FINGERPRINT, _MOST_BYTES)
        if json.loads(content) != json.loads(path.read_bytes()):
            raise StoreError(
                f"{self} holds predictions of other weights or options too, started at the same "
                "time: predict both again, at two addresses"
            )
