"""`SetWriter`: sends shards, notes, and the pointer that makes them a dataset to an address."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.filesize import decimal

from lit_data.core.errors import DataError, StoreError
from lit_data.core.files import find_sha256
from lit_data.core.temp import sweep, temp_folder
from lit_data.images.roots import Encoding
from lit_data.images.store.files import explain_errors, write_tar
from lit_data.wings.remote.shards.index import FORMAT, PACKED_SUFFIX, POINTER, Packed, Shard
from lit_data.wings.remote.transport import Transport
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

Entry = TypeVar("Entry")
Note = TypeVar("Note")

READERS = 16  # threads that wait for a server
Holding = Callable[[Iterable[str]], AbstractContextManager[None]]
"""Function that has remote files here while a block runs."""


class Packing(NamedTuple):
    """Way of sending the files of a shard instead of its store.

    Attributes:
        pack: Makes a folder of the files to send, in a temporary folder, from the folder of a
            store.
        unpack: Makes the tar of a store, in a temporary folder, from a file that was sent.
    """

    pack: Callable[[Path, Path], Path]
    unpack: Callable[[Path, Path], Path]


def _read_encoding(name: str) -> Encoding:
    """Return the encoding of a shard from its name."""
    return "source" if name.endswith(PACKED_SUFFIX) else "decoded"


class SetWriter:
    """Sends the files of a dataset to its address.

    Args:
        transport: Transport to that address.
        scratch: Folder for temporary files, created if missing.
        encoding: Encoding of the shards.

    Attributes:
        there: Names of existing shards by key.
    """

    def __init__(self, transport: Transport, scratch: Path, encoding: Encoding = "decoded") -> None:
        self.transport = transport
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        sweep(scratch)
        self._note_sizes = transport.list_sizes("notes")
        # After the notes, whose shards existed before them.
        self._sizes = transport.list_sizes("shards")
        names = [name for name in self._sizes if _read_encoding(name) == encoding]
        self.there = {name.partition("-")[0]: name for name in names}  # KEY-SUM.tar

    def bring(
        self,
        key: str,
        build: Callable[[Path], Path],
        describe: Callable[[Shard, Path], Entry],
        *,
        nbytes: int = 0,
        packing: Packing | None = None,
    ) -> Entry | DataError:
        """Publish a shard if it does not exist.

        Args:
            key: Key of the shard.
            build: Writes a folder with its content into an empty one, and returns it.
            describe: Reads the index entries of a shard from its local copy.
            nbytes: Disk space that building takes.
            packing: Packs the files of the shard, which are sent instead of its store.

        Returns:
            The result of `describe`; the error of `build` if the content of the shard is bad.

        Raises:
            DataError: The address does not answer, which cannot be skipped, or has damaged shards.
        """
        with temp_folder(self.scratch) as temp, explain_errors(self.scratch, nbytes):
            tar = temp / "shard.tar"
            if key in self.there:
                shard = self._fetch_shard(key, temp, packing)
                return describe(shard, tar)
            try:
                folder = build(temp)
            except DataError as error:
                return error
            write_tar({path.name: path for path in folder.iterdir()}, tar)
            shard = Shard(key, find_sha256(tar), tar.stat().st_size)
            file = tar
            if packing is not None:
                file = temp / "packed.tar"
                packed = packing.pack(temp, folder)
                write_tar({path.name: path for path in packed.iterdir()}, file)
                shard = shard._replace(packed=Packed(find_sha256(file), file.stat().st_size))
            self.transport.put(file, shard.name)
            return describe(shard, tar)

    def finish(
        self,
        shards: Sequence[Shard],
        write_index: Callable[[Path], None],
        files: Mapping[str, Path],
    ) -> dict[str, int]:
        """Send the index and the pointer that make shards a dataset.

        Args:
            shards: All shards, which exist.
            write_index: Writes the index into an empty folder.
            files: Files beside the images, by their paths relative to the root.

        Returns:
            Numbers for a report.
        """
        with temp_folder(self.scratch) as temp:
            write_index(temp)
            sums = {"index": self._send({path.name: path for path in temp.iterdir()}, "index")}
        sums["files"] = self._send(files, "files")
        # Last, so that readers find the old dataset until the new one is complete.
        pointer = self.scratch / POINTER
        pointer.write_text(json.dumps({"format": FORMAT, **sums}), encoding="utf-8")
        self.transport.put(pointer, POINTER)
        return self.report(shards)

    def report(self, shards: Sequence[Shard], what: str = "") -> dict[str, int]:
        """Log how many shards are written and how many existed, and return the numbers.

        Args:
            shards: Shards of the dataset, or of a part.
            what: The part, for the log.
        """
        kept_count = sum(shard.key in self.there for shard in shards)
        nbytes = sum(shard.file_bytes for shard in shards)
        size = decimal(nbytes)
        numbers = {"shards": len(shards), "shards_kept": kept_count, "bytes": nbytes}
        if any(shard.packed is not None for shard in shards):
            numbers["decoded_bytes"] = sum(shard.nbytes for shard in shards)
            size += f", decoded {decimal(numbers['decoded_bytes'])}"
        written = counted(len(shards), "shard")
        text = "%s: %s%s, %s; %d were there"
        log.info(text, self.transport, what, written, size, kept_count)
        return numbers

    def has(self, shard: Shard) -> bool:
        """Return True if a shard existed before this process wrote any."""
        return self._sizes.get(shard.name.removeprefix("shards/")) == shard.file_bytes

    def find_note(self, name: str, read: Callable[[bytes], Note]) -> Note | None:
        """Read a note; None if it does not exist, or is damaged and has to be written again.

        Args:
            name: Name of the note.
            read: Reads its content.

        Raises:
            DataError: The address does not answer.
        """
        if name not in self._note_sizes:
            return None
        try:
            return read(self.transport.read(f"notes/{name}", self._note_sizes[name]))
        except StoreError as error:
            log.warning("%s/notes/%s is not used: %s", self.transport, name, error)
            return None

    def send_note(self, name: str, content: bytes) -> None:
        """Send a note, after all shards that it lists."""
        with temp_folder(self.scratch) as temp:
            (temp / name).write_bytes(content)
            self.transport.put(temp / name, f"notes/{name}")

    def _fetch_shard(self, key: str, temp: Path, packing: Packing | None) -> Shard:
        """Fetch an existing shard, because its index entries are only in the shard itself.

        Args:
            key: Key of the shard.
            temp: Folder for its store, which becomes ``shard.tar``.
            packing: Unpacks it, if it is packed.

        Raises:
            DataError: It is damaged.
        """
        name, tar = f"shards/{self.there[key]}", temp / "shard.tar"
        file = tar if packing is None else temp / "packed.tar"
        self.transport.get(name, file, self._sizes[self.there[key]])
        sha256, nbytes = find_sha256(file), file.stat().st_size
        shard = Shard(key, sha256, nbytes)
        if packing is not None:
            packing.unpack(file, temp).rename(tar)
            shard = Shard(key, find_sha256(tar), tar.stat().st_size, Packed(sha256, nbytes))
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
