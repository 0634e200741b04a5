"""What the C library keeps of freed memory, and what the collector examines."""

import ctypes
import os
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
from lit_data.core import heap

def fault():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b'x' * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{calls}
first = [fault() for _ in range(3)][0]
print(fault() < first / 5)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(
    ("calls", "variables", "keeps"),
    [
        pytest.param("", {}, False, id="as it is"),
        pytest.param("heap.keep_freed_memory()", {}, True, id="kept"),
        pytest.param("heap.keep_freed_memory()", {"GLIBC_TUNABLES": ""}, False, id="environment"),
        pytest.param(
            "heap.keep_freed_memory(); heap.return_freed_memory()", {}, False, id="in a worker"
        ),
        pytest.param(
            "block = heap.keeping_freed_memory(); block.__enter__()", {}, True, id="block"
        ),
        pytest.param("with heap.keeping_freed_memory(): pass", {}, False, id="after a block"),
        pytest.param(
            "heap.keep_freed_memory()\nwith heap.keeping_freed_memory(): pass",
            {},
            True,
            id="after a block of one that keeps it",
        ),
    ],
)
def test_freed_memory_is_kept_where_asked(
    calls: str, variables: dict[str, str], keeps: bool
) -> None:
    command = [sys.executable, "-c", COUNT_FAULTS.format(calls=calls)]
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(keeps)]


LOAD_TWICE = """
import gc
from lit_data.core.heap import load_module
{before}
load_module("json.tool")
frozen = gc.get_freeze_count()
ring = []
ring.append(ring)
load_module("json.tool")
print(gc.isenabled(), frozen > 0, gc.get_freeze_count() == frozen)
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("", "True True True"), ("gc.disable()", "False False True")],
    ids=["", "disabled by its host"],
)
def test_only_what_was_imported_first_is_exempt_from_collection(before: str, said: str) -> None:
    command = [sys.executable, "-c", LOAD_TWICE.format(before=before)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == said
