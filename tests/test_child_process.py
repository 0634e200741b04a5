"""Processes that are started in a foreign folder import nothing of it."""

import subprocess
from pathlib import Path

import lit_data
from lit_data.child_process import python_command, python_environment


def test_a_package_of_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "lit_data").mkdir()
    (tmp_path / "lit_data" / "__init__.py").write_text("raise SystemExit(9)")
    words = python_command(
        "-c", "import lit_data, os; print(lit_data.__file__, os.environ['GIVEN'])"
    )
    environment = python_environment({"GIVEN": "1"})
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [lit_data.__file__, "1"]
