"""Reading ``.npz`` archives that may come from anybody."""

import os
import re
import zipfile

import numpy as np

from lit_data.errors import DataError
from lit_data.io.header_npy import MAX_HEADER_BYTES, read_array_header
from lit_data.io.source import naming, open_source
from lit_data.types import Array

_NAME = re.compile(r"[A-Za-z0-9_]+\.npy")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # flag bit


def read_npz(path: str | os.PathLike[str], *, max_total_bytes: int = 2**30) -> dict[str, Array]:
    """Read all arrays of an archive after holding each header against the size its directory declares.

    Args:
        path: The archive.
        max_total_bytes: Most bytes of all members together, unpacked.

    Returns:
        Arrays by name, in the order of the archive.

    Raises:
        DataError: not an archive, damaged, larger than allowed, or with a member that is not a plain array of numbers
            or text under a name of letters, digits and underscores.
    """
    with open_source(path) as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise DataError("not an .npz archive")
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            check_directory(members, max_total_bytes)
            return {member.filename[:-4]: _read_member(archive, member) for member in members}


def check_directory(members: list[zipfile.ZipInfo], max_total_bytes: int) -> None:
    """Refuse an archive by its directory, before anything of it is unpacked.

    Raises:
        DataError: See `read_npz`.
    """
    total_bytes = sum(member.file_size for member in members)
    if total_bytes > max_total_bytes:
        raise DataError(
            f"{total_bytes} bytes unpacked, more than max_total_bytes={max_total_bytes}; raise that if the archive is "
            "meant to be so large"
        )
    seen: set[str] = set()
    for member in members:
        name = member.filename
        if name in seen:
            raise DataError(f"two members are named {name!r}")
        seen.add(name)
        if not _NAME.fullmatch(name):
            raise DataError(f"member {name!r}; names are letters, digits and underscores with .npy")
        if member.compress_type not in _METHODS or member.flag_bits & _ENCRYPTED:
            raise DataError(f"member {name!r} is encrypted or packed by method {member.compress_type}; save with numpy")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with naming(member.filename), archive.open(member) as stream:
        read_array_header(stream, member.file_size)
        stream.seek(0)
        array: Array = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=MAX_HEADER_BYTES)
        return array
