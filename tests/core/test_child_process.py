"""Processes that are started in a foreign folder import nothing of it, and end with their parent."""

import signal
import subprocess
from pathlib import Path

import lit_data
from lit_data.core.child_process import python_command, python_environment


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


_PARENT = """
import multiprocessing, os, signal, time
from lit_data.core.child_process import watch_parent

def work():
    watch_parent()
    time.sleep(60)

process = multiprocessing.get_context("fork").Process(target=work)
process.start()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_ends_soon_after_its_parent_was_killed() -> None:
    # The child holds the pipe open until it ends, so reading it to its end waits for that.
    done = subprocess.run(
        python_command("-c", _PARENT), env=python_environment(), stdout=subprocess.PIPE, timeout=30
    )
    assert done.returncode == -signal.SIGKILL
