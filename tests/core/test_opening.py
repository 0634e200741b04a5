"""What a failure to read says of a file: nothing, where the machine is at fault."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import DataError, MachineError
from lit_data.core.opening import open_source
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.store.store import DecodedStore
from lit_data.images.writing import write_png


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Let a file fail when it is opened."""
    real = os.open

    def opening(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, r"raise the limit of open files \(ulimit -n\)"),
        (errno.ESTALE, "a network disk does not respond: try again"),
        (errno.ENOMEM, "memory ran out"),
    ],
)
def test_what_the_machine_cannot_do_now_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    write_png(tmp_path / "a.png", np.zeros((4, 4), np.uint8))
    fail_at(monkeypatch, "a.png", number)
    with pytest.raises(
        MachineError, match=rf"a.png: cannot be read, {errno.errorcode[number]} .*{advice}"
    ):
        open_source(tmp_path / "a.png").__enter__()
    assert MachineError.exit_code == 4


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_no_store_is_made_without_an_image_that_could_not_be_read_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad: Any
) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in paths:
        write_png(path, np.zeros((4, 4), np.uint8))

    def build() -> DecodedStore:
        sources = [ImageSource((str(path),)) for path in paths]
        decoder = ImageDecoder()
        return DecodedStore.build(sources, tmp_path / "store", decoder=decoder, on_bad=on_bad)

    with monkeypatch.context() as patch:
        fail_at(patch, "2.png", errno.ESTALE)
        with pytest.raises(MachineError, match=r"2.png: cannot be read, ESTALE"):
            build()
    assert len(build()) == 4


def test_a_bad_sector_is_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_png(tmp_path / "a.png", np.zeros((4, 4), np.uint8))
    fail_at(monkeypatch, "a.png", errno.EIO)
    with pytest.raises(DataError, match=r"a.png: cannot be read, EIO"):
        open_source(tmp_path / "a.png").__enter__()
