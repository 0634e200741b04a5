"""Hydra's launcher of submitit runs jobs of ours; that of joblib is in test_gpus.py."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.families import ROOT, run_family

SCORE = "def run(cfg):\n    return {'test/score': float(cfg.seed), 'test/own': float(cfg.paths.run.endswith('0'))}\n"


@pytest.mark.slow
def test_submitit_runs_the_jobs(site: Callable[[str], None], tmp_path: Path) -> None:
    site(SCORE)
    folder = tmp_path / "it's, a=b {c} ü"
    words = ["show", "+experiment=stripe", "-m", "hydra/launcher=slurm_local", "seed=1,2"]
    words += [f'hydra.sweep.dir="{folder}"', "sweep.metric=test/score", "sweep.mode=max"]
    paths = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    program = [sys.executable, "-W", "ignore", "-m", "lit_data", *words]
    code, out = run_family(program, limit_s=280, cwd=tmp_path, PYTHONPATH=paths, COLUMNS="200")
    assert code == 0, out
    assert out.endswith(f"{folder}/sweep.json\n")
    summary = json.loads((folder / "sweep.json").read_text())
    assert (summary["jobs_done"], summary["best_job"]) == (2, 1)
    own = [json.loads((folder / f"{number}/summary.json").read_text()) for number in (0, 1)]
    assert [values["test/own"] for values in own] == [1.0, 0.0]
