"""Every notebook runs from top to bottom and gives what is stored with it.

``python tests/test_notebooks.py`` runs them and stores what they give.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [
    "attach_to_your_module",
    "design_a_synthesis",
    "feed_the_gpu",
    "large_images",
    "memory_and_batch_size",
    "own_folder_to_verdicts",
    "quick_start",
    "several_machines",
]
PLACES = re.compile(
    rf"(?:{re.escape(tempfile.gettempdir())}/tmp\w+|{re.escape(str(FOLDER.parent))})/"
)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


def run(path: Path) -> Any:
    """The notebook with its outputs, without what belongs to one machine: warnings, times, places."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(FOLDER.parent)}}
    ).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [nbformat.from_dict(_clean(output)) for output in kept]
    return notebook


def _clean(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _clean(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_clean(value) for value in found]
    return PLACES.sub("", found) if isinstance(found, str) else found


def _kinds(notebook: Any) -> list[list[str]]:
    """What each cell of code gives: text, tables, pictures."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    kinds = (
        [", ".join(sorted(out.get("data", {"text": 0}))) for out in cell.outputs] for cell in cells
    )
    return [list(dict.fromkeys(kind)) for kind in kinds]  # a text may come in several parts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_without_errors_and_places(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert not re.search(r"/(tmp|home|root|work)/", str(outputs))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client, not of ours
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_notebook_runs_and_gives_what_is_stored(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path))
    # On a busy machine some work takes long enough for a bar.
    no_bars = "import lit_data.core.progress\n\nlit_data.core.progress.DELAY_S = float('inf')\n"
    (tmp_path / "no_bars.py").write_text(no_bars)
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "no_bars.py"))
    assert _kinds(run(path)) == _kinds(nbformat.read(path, as_version=4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LIT_DATA_CACHE"] = cache
        for stored in NOTEBOOKS:
            nbformat.write(run(stored), stored)
