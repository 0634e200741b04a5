"""A dataset that is prepared in parts, of which one dies once, and what must come of it."""

from pathlib import Path

from tests.scale.recipes import list_bytes, run_python, write_boards

PARTS = 3
DYING_PART = 1

DYING = f"""
import os
import signal
from pathlib import Path


def die_once(part):
    marker = Path(__file__).with_name("died")
    if part == {DYING_PART} and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def write_dying(folder: Path) -> None:
    """Write the dataset, and the module ``dying`` that kills a process of one part."""
    write_boards(folder / "boards")
    (folder / "dying.py").write_text(DYING)


def check_parts(folder: Path, *, died: bool = True) -> None:
    """Check that shards of parts are those of one process, to the byte."""
    assert (folder / "died").exists() == died
    words = ["prepare", "+experiment=segmentation", f"data.root={folder}/boards"]
    run_python(["-m", "lit_data", *words, f"prepare.shards={folder}/alone.shards"], folder)
    alone = list_bytes(folder / "alone.shards")
    assert "set.json" in alone
    assert list_bytes(folder / "boards.shards") == alone
