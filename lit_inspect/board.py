"""The ``.inspect`` file: a zip of stored parts behind which lies the SHA-256 of all bytes before it."""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import BoardError, UsageError

FORMAT = 1
MANIFEST = "inspect.json"
NET = "net.onnx"
_DIGEST_BYTES = 64  # hexadecimal digits, the comment of the zip
_MOST_BYTES = 2**32


@dataclass(frozen=True, slots=True)
class Board:
    """Parts of a file whose digests are right.

    Attributes:
        manifest: What ``inspect.json`` holds.
        parts: Bytes of the others by name.
    """

    manifest: Mapping[str, Any]
    parts: Mapping[str, bytes]

    def load_array(self, name: str) -> NDArray[Any]:
        """Return a part that is an array."""
        array: NDArray[Any] = np.load(BytesIO(self.parts[name]), allow_pickle=False)
        return array


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
    """Read a file and hold it against its digests.

    Nothing is unpacked onto the disk, and nothing is decompressed: a part that is not stored as it
    is, is refused.

    Raises:
        UsageError: There is no such file.
        BoardError: It is damaged, no such file, or of a newer format.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BoardError(f"{path}: more than {_MOST_BYTES} bytes, which no such file has")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    digest = hashlib.sha256(data[:-_DIGEST_BYTES]).hexdigest().encode()
    if data[-_DIGEST_BYTES:] != digest:
        raise BoardError(
            f"{path}: damaged, or no .inspect file: its SHA-256 is another; copy or export it again"
        )
    try:
        return _read_parts(data)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BoardError(f"{path}: no .inspect file ({error})") from error
    except BoardError as error:
        raise BoardError(f"{path}: {error}") from error


def _read_parts(data: bytes) -> Board:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        is_packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
        if is_packed or sum(info.file_size for info in infos) > len(data):
            raise BoardError("its parts are compressed, and must be stored as they are")
        contents = {name: archive.read(name) for name in names}
    manifest = json.loads(contents.pop(MANIFEST))
    if manifest["format"] != FORMAT:
        raise BoardError(
            f"of format {manifest['format']}, and this release reads {FORMAT}: install the "
            "lit_inspect of the release of lit_data that exported it, or export the run again"
        )
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in contents.items()}
    if digests != manifest["sha256"] or len(names) != len(digests) + 1:
        raise BoardError("its parts are not those that inspect.json lists")
    return Board(manifest, contents)
