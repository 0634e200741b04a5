"""docs/scale/cloud.md: the commands of its YAML files, run as a pod and as two machines would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers.families import run_family
from tests.scale.parts import PARTS, check_parts
from tests.scale.recipes import (
    LIMIT_S,
    ROOT,
    SMALL,
    list_commands,
    read_blocks,
    run_python,
    settle,
    write_boards,
)
from tests.test_ranks_nodes import _find_port as find_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB, TASK = (yaml.safe_load(text) for text in read_blocks("cloud", "yaml"))


def _make_shell(folder: Path) -> dict[str, str]:
    """Variables of a shell whose ``python`` and ``torchrun`` are those of the tests."""
    (folder / "bin").mkdir(exist_ok=True)
    programs = {"python": "", "torchrun": "-m torch.distributed.run"}
    for name, words in programs.items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/bash\nexec {sys.executable} -W ignore {words} "$@"\n')
        path.chmod(0o755)
    return {
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LIT_DATA_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def test_pods_of_an_indexed_job_prepare_parts(tmp_path: Path) -> None:
    write_boards(tmp_path / "boards")
    spec = JOB["spec"]
    assert spec["completionMode"] == "Indexed"
    [container] = spec["template"]["spec"]["containers"]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert mounts == [volume["name"] for volume in spec["template"]["spec"]["volumes"]]
    [line] = container["args"]
    line = settle(line, {"/data": str(tmp_path), f"of={spec['completions']}": f"of={PARTS}"})
    for part in range(PARTS):
        code, output = run_family(
            [*container["command"], line],
            limit_s=LIMIT_S,
            cwd=tmp_path,
            **_make_shell(tmp_path),
            JOB_COMPLETION_INDEX=str(part),
        )
        assert code == 0, output
    [finish] = [words for words in list_commands("cloud") if "prepare.finish=true" in words]
    words = [word.replace("/data", str(tmp_path)) for word in finish]
    run_python(["-m", "lit_data", *words], tmp_path)
    check_parts(tmp_path, died=False)


def _start_machines(folder: Path, script: str) -> list[psutil.Popen]:
    variables = os.environ | _make_shell(folder)
    variables |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    variables["SKYPILOT_NODE_IPS"] = "127.0.0.1\n127.0.0.1"
    machines = []
    for rank in range(TASK["num_nodes"]):
        with (folder / "output.txt").open("a") as file:
            machine = psutil.Popen(
                ["bash", "-c", script],
                cwd=folder,
                env=variables | {"SKYPILOT_NODE_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        machines.append(machine)
    return machines


def test_a_run_on_spot_machines_goes_on_where_they_were_taken_away(tmp_path: Path) -> None:
    write_boards(tmp_path / "boards.shards")
    (tmp_path / "boards.shards").rename(tmp_path / "boards")
    script = settle(
        TASK["run"],
        {
            "/data/boards.shards": "/data/boards",
            "trainer=ddp": "trainer=ddp_cpu",
            "batch_size=512": "batch_size=8",
            "29500": str(find_port()),
        },
    )
    short = ["data.patch_px=64", *SMALL[1:], "trainer.max_epochs=$EPOCHS", "report=false"]
    script = f"{script.replace('/data', str(tmp_path)).rstrip()} {' '.join(short)}"
    checkpoints = tmp_path / "runs/night/checkpoints"
    machines = _start_machines(tmp_path, script.replace("$EPOCHS", "1000"))
    try:
        until_s = time.monotonic() + 150
        while not (checkpoints / "last.ckpt").exists() and time.monotonic() < until_s:
            time.sleep(0.2)
        [agent] = machines[1].children() or machines[1:]
        agent.send_signal(signal.SIGTERM)
        assert all(machine.wait(120) for machine in machines)
    finally:
        for machine in machines:
            if machine.is_running():
                for process in [*machine.children(recursive=True), machine]:
                    process.kill()
    assert (checkpoints / "interrupted.ckpt").exists(), (tmp_path / "output.txt").read_text()
    import torch

    stopped = torch.load(checkpoints / "interrupted.ckpt", weights_only=True)
    epochs = stopped["epoch"] + 2
    machines = _start_machines(tmp_path, script.replace("$EPOCHS", str(epochs)))
    codes = [machine.wait(LIMIT_S) for machine in machines]
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()
    summary = json.loads((tmp_path / "runs/night/summary.json").read_text())
    assert summary["train/samples_hashed"] > stopped["callbacks"]["SampleDigest"]["samples"]
