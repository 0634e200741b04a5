"""What the C library keeps of freed memory."""

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
    ],
)
def test_freed_memory_is_kept_where_asked(
    calls: str, variables: dict[str, str], keeps: bool
) -> None:
    command = [sys.executable, "-c", COUNT_FAULTS.format(calls=calls)]
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(keeps)]
