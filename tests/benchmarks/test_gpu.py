"""`python -m benchmarks gpu`: what is answered, and what is not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import run
from benchmarks.gpu import answer_part, format_table


def test_the_benchmark_of_a_gpu_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.chdir(tmp_path)
    assert run(["gpu"]) == 2
    assert "suite=gpu needs a CUDA device, and there is none here" in capsys.readouterr().err


def test_what_fails_is_a_row_of_the_table() -> None:
    def ask(scene: Any) -> Iterator[tuple[str, float, str]]:
        yield "first", 1.5, "ms"
        raise ValueError("no\nluck")

    lines = [{"part": "x", **line} for line in answer_part(ask, None)]  # type: ignore[arg-type]
    table = format_table(lines, {"device": "a device", "torch": "2"})
    assert "| x | first | 1.5 ms |" in table
    assert "| x | failed | ValueError: no luck |" in table


def test_an_unknown_suite_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["mosaics"]) == run([]) == 2
    suites = sorted(
        path.stem for path in (Path(__file__).parents[2] / "benchmarks/conf/suite").iterdir()
    )
    assert f"suites: {', '.join(suites)}" in capsys.readouterr().err
