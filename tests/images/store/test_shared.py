"""Shared memory, and pickles that point into it."""

import gc
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, WorkerDiedError
from lit_data.core.shared_arrays import INLINE_BYTES, SharedMemory, attach, share_state

BIG = INLINE_BYTES + 1


class Holder:
    def __init__(self, **fixed: Any) -> None:
        vars(self).update(fixed)
        self.epoch = 0
        self._fixed = tuple(fixed)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, self._fixed)


def test_what_is_written_later_is_seen_by_who_attached() -> None:
    memory = SharedMemory(100)
    reader, writer = attach(memory.handle, writable=False), attach(memory.handle, writable=True)
    writer[:3] = b"abc"
    assert memory.map[:4] == reader[:4] == b"abc\0"
    with pytest.raises(TypeError, match="readonly"):
        reader[0] = 1


def test_a_number_that_now_belongs_to_other_memory_is_refused() -> None:
    memory = SharedMemory(100)
    handle = memory.handle
    other = SharedMemory(100)
    os.dup2(other.handle.fd, handle.fd)
    with pytest.raises(WorkerDiedError, match=r"\(it was released\)"):
        attach(handle, writable=False)


ARRAYS = {
    "many": np.arange(BIG),
    "empty": np.zeros((0, 3)),
    "records": np.zeros(5, [("a", "<u8"), ("b", "<u4")]),
    "columns": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "every_other": np.arange(10)[::2],
    "bytes": np.frombuffer(b"abc", np.uint8),
}


def test_large_arrays_come_back_as_read_only_views() -> None:
    holder = Holder(**ARRAYS, name="x")
    pickled = pickle.dumps(holder)
    assert len(pickled) < 512
    found = pickle.loads(pickled)
    assert found.name == "x"
    for name, array in ARRAYS.items():
        other = getattr(found, name)
        assert_array_equal(other, array)
        assert other.dtype == array.dtype
    assert not found.many.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        found.many[0] = 1
    assert found.many.ctypes.data % 64 == 0


def test_another_process_reads_it() -> None:
    holder = Holder(many=ARRAYS["many"], few=np.arange(10))
    code = "import pickle, sys; fixed = pickle.load(sys.stdin.buffer)[0]; print(*map(sum, fixed.values()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(share_state(holder, ("many", "few"))),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert [int(text) for text in done.stdout.split()] == [ARRAYS["many"].sum(), 45]


def test_without_shared_memory_all_travels_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="set worker_kind=thread"):
        SharedMemory(1)
    pickled = pickle.dumps(Holder(many=ARRAYS["many"]))
    assert len(pickled) > ARRAYS["many"].nbytes
    assert_array_equal(pickle.loads(pickled).many, ARRAYS["many"])


def test_a_pickle_without_its_maker_is_refused() -> None:
    pickled = pickle.dumps(Holder(many=ARRAYS["many"]))
    gc.collect()
    with pytest.raises(WorkerDiedError, match="cannot be opened"):
        pickle.loads(pickled)
