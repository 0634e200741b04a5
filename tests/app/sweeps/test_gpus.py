"""GPUs are handed out to jobs that run side by side: none sees another's."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lit_data.app.sweeps import gpus as sweep_gpus
from lit_data.app.sweeps.gpus import count_gpus, holding_gpus, list_gpus, share_gpus
from lit_data.core.errors import ConfigError
from tests.helpers.families import ROOT, run_family

SEEING = """
import os, pathlib, sys, time, types
def run(cfg):
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    pathlib.Path(f"seen-{gpu}").touch()
    until_s = time.monotonic() + 200
    while len(list(pathlib.Path().glob("seen-*"))) < 2:  # the other job runs beside this one
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return {"test/gpu": float(gpu)}
sys.modules["lit_data.app.evaluate"] = types.SimpleNamespace(run=run)
"""
CONTROLLER = """
import sys
from lit_data.app.cli import main
from lit_data.app.sweeps import gpus
gpus.list_gpus = lambda: ("5", "7")
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_gpus, "POLL_S", 0.005)


@pytest.mark.parametrize(
    ("command", "trainer", "count"),
    [
        ("fit", {"accelerator": "auto", "devices": 1}, 1),
        ("fit", {"accelerator": "gpu", "devices": 2}, 2),
        ("predict", {"accelerator": "cuda", "devices": "3"}, 3),
        ("fit", {"accelerator": "auto", "devices": "auto"}, 4),
        ("fit", {"accelerator": "gpu", "devices": -1}, 4),
        ("fit", {"accelerator": "gpu", "devices": 9}, 4),
        ("fit", {"accelerator": "cpu", "devices": 2}, 0),
        ("prepare", {"accelerator": "auto", "devices": 1}, 0),
        ("fit", {}, 4),
    ],
)
def test_a_job_takes_as_many_as_its_trainer(
    command: str, trainer: dict[str, object], count: int
) -> None:
    cfg = OmegaConf.create({"command": command, "trainer": trainer})
    assert count_gpus(cfg, "0123") == count
    assert count_gpus(cfg, ()) == 0


@pytest.mark.parametrize("devices", [[0], "0,1", [1, 3]])
def test_a_trainer_that_names_gpus_is_refused(devices: object) -> None:
    cfg = OmegaConf.create({"command": "fit", "trainer": {"devices": devices}})
    with pytest.raises(ConfigError, match="names GPUs, but the sweep assigns GPUs"):
        count_gpus(cfg, "01")


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (2, "4, 6", ("4", "6")),
        (1, "GPU-8932f937", ("GPU-8932f937",)),
        (0, "", ()),
        (1, "2,99", ("2",)),  # CUDA stops at the first that there is not
    ],
)
def test_gpus_have_the_names_by_which_they_are_seen(
    count: int, visible: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list_gpus() == names


@pytest.mark.parametrize("count", [1, 2])
def test_no_two_jobs_hold_one_gpu(count: int, tmp_path: Path) -> None:
    gpus = ("0", "GPU-a/b", "2")
    busy = set()
    most = []

    def work() -> None:
        with holding_gpus(tmp_path, gpus, count) as variables:
            mine = set(variables["CUDA_VISIBLE_DEVICES"].split(","))
            assert len(mine) == count
            assert not mine & busy
            busy.update(mine)
            most.append(len(busy))
            time.sleep(0.03)
            busy.difference_update(mine)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6
    assert max(most) == (3 if count == 1 else 2)


@pytest.mark.slow
def test_jobs_side_by_side_see_different_gpus(site: Callable[[str], None], tmp_path: Path) -> None:
    site(SEEING)
    words = ["validate", "+experiment=stripe", "-m", "seed=1,2", "hydra/launcher=parallel"]
    words += ["hydra.sweep.dir=out", "sweep.metric=test/gpu", "sweep.mode=max"]
    # In a process of its own: joblib leaves semaphores in the one that it is called from.
    program = [sys.executable, "-W", "ignore", "-c", CONTROLLER, *words]
    paths = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    code, output = run_family(program, limit_s=280, cwd=tmp_path, PYTHONPATH=paths)
    assert code == 0, output
    assert sorted(path.name for path in tmp_path.glob("seen-*")) == ["seen-5", "seen-7"]
    summary = json.loads((tmp_path / "out/sweep.json").read_text())
    assert (summary["jobs_done"], summary["best_value"]) == (2, 7.0)


@pytest.mark.parametrize(
    ("isolate", "devices", "message"),
    [
        ("none", 1, r"sweep\.isolate=none keeps jobs in processes that stay on"),
        ("process", [0], r"trainer\.devices=\[0\] names GPUs, but the sweep assigns GPUs"),
    ],
)
def test_what_would_share_gpus_is_refused_where_there_are_some(
    isolate: str, devices: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_gpus, "list_gpus", lambda: ("0",))
    launcher = {"_target_": "hydra_plugins.hydra_joblib_launcher.JoblibLauncher", "n_jobs": 2}
    node = {"command": "fit", "trainer": {"devices": devices}, "hydra": {"launcher": launcher}}
    cfg = OmegaConf.create(node)
    with pytest.raises(ConfigError, match=message):
        share_gpus(cfg, isolate=isolate)
    cfg.hydra.launcher.n_jobs = 1
    assert share_gpus(cfg, isolate=isolate) == ()
