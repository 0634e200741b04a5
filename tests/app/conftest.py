"""Commands of the tests' own in the place of real ones, in this process and in others."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lit_data

ROOT = Path(lit_data.__file__).parents[1]

# A site module puts a command of the test's own into the program and every process that it starts.
SITE = """
import sys, types
module = types.ModuleType("lit_data.app.show")
exec({code!r}, module.__dict__)
sys.modules[module.__name__] = module
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a function in the place of a command's module."""

    def put(run: Callable[..., dict[str, Any]], name: str = "show") -> None:
        module = ModuleType(f"lit_data.app.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the code of the command `show` to the processes that a test starts."""

    def write(code: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(SITE.format(code=code), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / "site")

    return write


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the program in a process of its own, with the modules below `site`."""

    def call(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lit_data", *words],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}/site{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own
        )

    return call
