"""Commands at toy size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.cli import main

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(*words: str) -> dict[str, Any]:
        places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
        assert main([*words, *places]) == 0
        newest = max(
            (tmp_path / "runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns
        )
        summary = json.loads(newest.read_text())
        return summary | {"folder": newest.parent}

    return call
