"""Every notebook runs from top to bottom, and is committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = ["attach_to_your_module", "design_a_synthesis", "feed_the_gpu", "memory_and_batch_size", "quick_start"]
SLOW = ("feed_the_gpu", "memory_and_batch_size")


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in NOTEBOOKS],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client, not of ours
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(FOLDER.parent)}}).execute()
