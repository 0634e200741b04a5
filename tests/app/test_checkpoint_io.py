"""A kill while a checkpoint is written leaves the one before, and nothing in TMPDIR is needed."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from lit_data.app.checkpoints import AtomicCheckpointIO

SAVING = """
    import sys, torch
    from lit_data.app.checkpoints import AtomicCheckpointIO

    io, number = AtomicCheckpointIO(), 0
    while True:
        number += 1
        io.save_checkpoint({"number": number, "weights": torch.full((2_000_000,), float(number))}, sys.argv[1])
        print(number, flush=True)
"""


def test_what_is_saved_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/last.ckpt"
    for number in (1, 2):
        AtomicCheckpointIO().save_checkpoint({"number": number}, path)
    assert torch.load(path, weights_only=True) == {"number": 2}
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"number": 1}, path)
    with pytest.raises(AttributeError):
        AtomicCheckpointIO().save_checkpoint({"number": lambda: 2}, path)
    assert torch.load(path, weights_only=True) == {"number": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("delay_ms", [0, 7, 13, 29])
def test_a_kill_leaves_a_whole_one(delay_ms: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVING), str(path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(delay_ms / 1000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = torch.load(path, weights_only=True)
    assert found["number"] >= 3
    assert torch.equal(found["weights"], torch.full((2_000_000,), float(found["number"])))
