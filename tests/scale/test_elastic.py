"""docs/scale/elastic.md: three agents of torchrun, of which one dies and another joins."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from tests.scale.recipes import ROOT, SMALL, list_commands, read_blocks, run_python

EPOCHS = 20
WAIT_S = 150.0
TOY = [
    *SMALL[1:],
    f"trainer.max_epochs={EPOCHS}",
    f"trainer.check_val_every_n_epoch={EPOCHS}",
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
    "+callbacks.slow._target_=slow.Slow",
    "report=false",
]

# Says how many ranks start at which step, and leaves time for what happens to them.
SLOW = """
import time
from pathlib import Path

import lightning as L


class Slow(L.Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            with open("starts.txt", "a") as file:
                file.write(f"{trainer.world_size} {trainer.global_step}\\n")

    def on_train_batch_end(self, *_):
        if not Path("hurry").exists():
            time.sleep(1)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("without_pictures"),
]


@pytest.fixture
def started() -> Iterator[list[psutil.Popen]]:
    """Agents; at the end no process that they started is left."""
    agents = []
    yield agents
    for agent in agents:
        _kill(agent)


def _kill(agent: psutil.Popen) -> None:
    """Kill a machine: its agent and all ranks at once."""
    family = [agent]
    if agent.is_running():
        family += agent.children(recursive=True)
    for process in family:
        if process.is_running():
            process.kill()
    agent.wait()


def _list_starts(folder: Path) -> list[list[int]]:
    path = folder / "starts.txt"
    if not path.exists():
        return []
    return [list(map(int, line.split())) for line in path.read_text().splitlines()]


def _wait_for(condition: Callable[[], object], output: Path) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            pytest.fail(f"nothing happened in {WAIT_S:.0f} s:\n{output.read_text()}")
        time.sleep(0.2)


def _shorten(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Command of an agent as the page has it, for the CPU of this machine, and its variables."""
    [code] = read_blocks("elastic", "bash")
    variables = dict(
        line.removeprefix("export ").split("=")
        for line in code.splitlines()
        if line.startswith("export ")
    )
    agent, _, _ = code.partition("-m lit_data")
    words = agent.partition("torchrun ")[2].replace("\\\n", " ").split()
    words = [f"127.0.0.1:{port}" if word.startswith("host0:") else word for word in words]
    words[words.index("--nproc-per-node") + 1] = "1"
    words += ["--local-addr", "127.0.0.1"]
    words += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1"]
    return [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *words], variables


def _list_words(folder: Path) -> list[str]:
    [[command, *words]] = list_commands("elastic")
    changed = {"trainer": "ddp_cpu", "data.loader.global_batch_size": "12"}
    changed["hydra.run.dir"] = str(folder / "night")
    words = [word for word in words if word.partition("=")[0] not in changed]
    words += [f"{key}={value}" for key, value in changed.items()]
    return [command, "--package", "slow", *words, *TOY]


def _count_epochs(folder: Path) -> float:
    path = folder / "night/checkpoints/last.ckpt"
    return path.stat().st_mtime if path.exists() else 0.0


def test_three_agents_become_two_and_three_again(
    tmp_path: Path, started: list[psutil.Popen]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent, variables = _shorten(tmp_path, port)
    output = tmp_path / "output.txt"
    environment = os.environ | variables | {"OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    environment |= {"LIT_DATA_CACHE": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"}

    def start() -> psutil.Popen:
        with output.open("a") as file:
            words = [*agent, "-m", "lit_data", *_list_words(tmp_path)]
            process = psutil.Popen(
                words, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        started.append(process)
        return process

    def trains(ranks: int) -> bool:
        """Return True if so many ranks have written a checkpoint since they started."""
        starts = _list_starts(tmp_path)
        if not starts or starts[-1][0] != ranks:
            return False
        return _count_epochs(tmp_path) > (tmp_path / "starts.txt").stat().st_mtime

    machines = [start()]
    _wait_for(lambda: _answers(port), output)  # the first one keeps the rendezvous
    machines += [start() for _ in range(2)]
    _wait_for(lambda: trains(3), output)
    _kill(machines.pop())
    _wait_for(lambda: trains(2), output)
    machines.append(start())
    _wait_for(lambda: trains(3), output)
    (tmp_path / "hurry").touch()
    codes = [machine.wait(WAIT_S) for machine in machines]
    assert codes == [0, 0, 0], output.read_text()
    starts = _list_starts(tmp_path)
    assert [ranks for ranks, _ in groupby(starts, key=lambda line: line[0])] == [3, 2, 3]
    assert starts[-1][1] > starts[0][1] == 0
    summary = json.loads((tmp_path / "night/summary.json").read_text())
    words = [word.replace("ddp_cpu", "cpu") for word in _list_words(tmp_path / "alone")]
    run_python(["-m", "lit_data", *words], tmp_path)
    alone = json.loads((tmp_path / "alone/night/summary.json").read_text())
    for key in ("samples_sha256", "train/samples_hashed"):
        assert summary[key] == alone[key]
    assert alone["train/samples_hashed"] == EPOCHS * 16


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
