"""Temporary folders of processes that were killed are removed by the next."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from lit_data.core.temp import scratch_folder


def _leave(folder: str) -> None:
    tempfile.tempdir = folder
    context = scratch_folder()
    context.__enter__()
    os._exit(9)


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("fork").Process(target=_leave, args=(str(tmp_path),))
    process.start()
    process.join()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(tmp_path.iterdir())
