"""The ``.inspect`` file: a zip of uncompressed parts, followed by the SHA-256 of all previous bytes."""

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import BoardError, UsageError, describe_error
from lit_inspect.files import open_regular
from lit_inspect.npy import read_array

FORMAT: Final = 1
MANIFEST = "inspect.json"
NET = "net.onnx"
_DIGEST_BYTES = 64  # hexadecimal digits, the comment of the zip
_MOST_BYTES = 2**31  # which a net in ONNX cannot exceed
_MOST_MANIFEST_BYTES = 2**24
_MOST_PARTS = 1000
_ENTRY_BYTES = 256  # of a part in the directory
_PIECE_BYTES = 2**20
_END = struct.Struct("<4s4H2LH")
_LOCATOR_BYTES = 20  # before the end record, in a zip with a second directory of 64 bits


@dataclass(frozen=True, slots=True)
class Board:
    """Parts of a file whose digests have been checked.

    Attributes:
        manifest: Content of ``inspect.json``.
        parts: Bytes of the other parts, by name.
    """

    manifest: Mapping[str, Any]
    parts: Mapping[str, bytes]

    def load_array(self, name: str) -> NDArray[Any]:
        """Return a part as an array.

        Raises:
            KeyError: There is no such part.
            ValueError: It is damaged, or not an array of numbers.
        """
        data = self.parts[name]
        return read_array(BytesIO(data), len(data))


def encode_array(array: NDArray[Any]) -> bytes:
    """Return an array as the bytes of a ``.npy`` file."""
    stream = BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def encode_board(manifest: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a file; equal parts give equal bytes.

    Args:
        manifest: Plain data; the format and the SHA-256 of each part are added.
        parts: Bytes by name.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    content = {"format": FORMAT, **manifest, "sha256": digests}
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        # ZipInfo has the date 1980-01-01, so nothing depends on the time.
        text = json.dumps(content, indent=1, sort_keys=True)
        archive.writestr(zipfile.ZipInfo(MANIFEST), text)
        for name, data in parts.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.comment = bytes(_DIGEST_BYTES)
    data = stream.getvalue()[:-_DIGEST_BYTES]
    return data + hashlib.sha256(data).hexdigest().encode()


def read_board(path: str | os.PathLike[str]) -> Board:
    """Read a file, and check its digests.

    Nothing is unpacked to disk or decompressed: compressed parts are refused.

    Raises:
        UsageError: There is no such file.
        BoardError: The file is damaged, has another format, or has a newer version of it.
    """
    path = Path(path)
    try:
        stream = open_regular(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BoardError(f"{path}: {error}") from error
    with stream:
        try:
            _check_digest(stream)
            return _read_parts(stream)
        except BoardError as error:
            raise BoardError(f"{path}: {error}") from error
        except Exception as error:  # a foreign zip or JSON can cause any error in its reader
            raise BoardError(f"{path}: not an .inspect file ({describe_error(error)})") from error


def _check_digest(stream: BinaryIO) -> None:
    """Compare the SHA-256 of a file with its last bytes."""
    missing = os.fstat(stream.fileno()).st_size - _DIGEST_BYTES
    if missing > _MOST_BYTES:
        raise BoardError(f"more than {_MOST_BYTES} bytes, which no .inspect file has")
    digest = hashlib.sha256()
    while missing > 0 and (piece := stream.read(min(missing, _PIECE_BYTES))):
        digest.update(piece)
        missing -= len(piece)
    if stream.read(_DIGEST_BYTES) != digest.hexdigest().encode():
        raise BoardError(
            "damaged, or not an .inspect file: its SHA-256 differs; copy or export it again"
        )


def _read_parts(stream: BinaryIO) -> Board:
    size_bytes = _check_directory(stream)
    with zipfile.ZipFile(stream) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        is_packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
        if is_packed or sum(info.file_size for info in infos) > size_bytes:
            raise BoardError("its parts are compressed, but must be stored uncompressed")
        if archive.getinfo(MANIFEST).file_size > _MOST_MANIFEST_BYTES:
            raise BoardError(f"inspect.json has more than {_MOST_MANIFEST_BYTES} bytes")
        contents = {name: archive.read(name) for name in names}
    manifest = json.loads(contents.pop(MANIFEST))
    if manifest["format"] != FORMAT:
        raise BoardError(
            f"of format {manifest['format']!r:.40}, but this release reads {FORMAT}: install the "
            "lit_inspect of the release of lit_data that exported it, or export the run again"
        )
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in contents.items()}
    if digests != manifest["sha256"] or len(names) != len(digests) + 1:
        raise BoardError("its parts are not those that inspect.json lists")
    return Board(manifest, contents)


def _check_directory(stream: BinaryIO) -> int:
    """Refuse a directory of too many parts before it is read; return the bytes of the zip."""
    size_bytes = os.fstat(stream.fileno()).st_size - _DIGEST_BYTES
    start = max(0, size_bytes - _END.size - _LOCATOR_BYTES)
    stream.seek(start)
    locator, end = stream.read(_LOCATOR_BYTES), stream.read(_END.size)
    if len(end) == _END.size and end.startswith(b"PK\x05\x06") and b"PK\x06\x07" not in locator:
        count, directory_bytes = _END.unpack(end)[4:6]
        if count <= _MOST_PARTS and directory_bytes <= _MOST_PARTS * _ENTRY_BYTES:
            return size_bytes
    raise BoardError(f"not an .inspect file: it is not a zip file of at most {_MOST_PARTS} parts")
