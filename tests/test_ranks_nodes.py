"""Whole runs on ranks that torchrun, SLURM and Lightning start: the same samples and weights as in one process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fork_server import SCRIPTS_TOO
from tests.outputs import GENERATED, NO_TIMELINES, QUICK
from tests.simulated.log import LOG

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240  # of runs that take 10 to 20 s where nothing else does

WORDS = [
    "+experiment=stripe",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.gradient_clip_val=null",  # FSDP has none
    "callbacks.amp.precision=fp32",  # weights are compared to 1e-6
    "logger=none",
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
    "data.loader.global_batch_size=8",
    "data.loader.num_workers=0",
    *NO_TIMELINES,
]
COMMAND = [sys.executable, "-W", "ignore", "-m", "lit_data"]
SAMPLES = 16  # patches of an epoch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(
    *commands: Sequence[str], cwd: Path, variables: Mapping[str, str] | None = None
) -> tuple[list[int], str]:
    """Run commands beside each other; nothing that they start outlives its time."""
    output, own = cwd / "output.txt", {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = os.environ | own | {"PYTHONWARNINGS": "ignore"} | dict(variables or {})
    with output.open("w") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": cwd}
        options |= {"env": environment, "start_new_session": True}
        processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {LIMIT_S} s:\n{output.read_text()}")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return codes, output.read_text()


def _fit(folder: Path, *words: str, cache: str | None = None) -> list[str]:
    places = [f"paths.runs={folder}/runs", f"paths.cache={cache or folder / 'cache'}"]
    return ["fit", *WORDS, *places, *words]


Fitted = tuple[dict[str, Any], dict[str, Any]]


def _read(folder: Path) -> Fitted:
    """Summary and last weights of the one run of a folder."""
    (path,) = (folder / "runs").rglob("summary.json")
    last = path.parent / "checkpoints" / "last.ckpt"
    weights = torch.load(last, map_location="cpu", weights_only=True)["state_dict"]
    return json.loads(path.read_text()), weights


def _assert_same(found: Fitted, wanted: Fitted) -> None:
    assert found[0]["samples_sha256"] == wanted[0]["samples_sha256"]
    assert found[0]["train/samples_hashed"] == wanted[0]["train/samples_hashed"] == SAMPLES
    assert found[1].keys() == wanted[1].keys()
    for name, weights in wanted[1].items():
        assert torch.allclose(found[1][name], weights, atol=1e-6, rtol=0), name
    for name, score in wanted[0].items():
        if name.startswith(("val/", "test/")):
            assert found[0][name] == pytest.approx(score, abs=1e-4), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("alone")
    codes, output = _run([*COMMAND, *_fit(folder, "trainer=cpu")], cwd=folder)
    assert codes == [0], output
    return _read(folder)


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("per_node", "shared_cache", "stores"), [(1, True, 1), (2, False, 2)])
def test_two_agents_of_torchrun_train_as_one_process(
    per_node: int, shared_cache: bool, stores: int, alone: Fitted, tmp_path: Path
) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    agent += [f"--nproc-per-node={per_node}", f"--rdzv-endpoint=127.0.0.1:{_find_port()}"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=test", "--local-addr=127.0.0.1", "-m", "lit_data"]
    caches = [str(tmp_path / f"cache{0 if shared_cache else node}") for node in (0, 1)]
    agents = [[*agent, *_fit(tmp_path, "trainer=ddp_cpu", cache=cache)] for cache in caches]
    codes, output = _run(*agents, cwd=tmp_path)
    assert codes == [0, 0], output
    _assert_same(_read(tmp_path), alone)
    assert output.count("store: 6 images") == stores
    assert len(list((tmp_path / "runs" / "fit" / "stripe").iterdir())) == 1


def test_fsdp_trains_as_one_process_and_its_checkpoints_serve_any_run(
    alone: Fitted, tmp_path: Path
) -> None:
    cut = ["trainer.strategy._target_=tests.helpers.fsdp_on_cpu.ShardsOnCPU", "--package", "tests"]
    cut += ["trainer.strategy.auto_wrap_policy.min_num_params=100"]
    cut += ["trainer.accelerator=cpu", "trainer.devices=2"]
    codes, output = _run([*COMMAND, *_fit(tmp_path, "trainer=fsdp", *cut)], cwd=tmp_path)
    assert codes == [0], output
    _assert_same(found := _read(tmp_path), alone)
    (path,) = (tmp_path / "runs").rglob("predictions.png")
    best, last = (path.parent / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    words = [*_fit(tmp_path / "next", "trainer=fsdp", *cut, f"ckpt={last}"), "trainer.max_epochs=2"]
    scores = ["validate", *_fit(tmp_path / "scored", "trainer=cpu", f"ckpt={best}")[1:]]
    codes, output = _run([*COMMAND, *words], [*COMMAND, *scores], cwd=tmp_path)
    assert codes == [0, 0], output
    assert _read(tmp_path / "next")[0]["train/samples_hashed"] == 2 * SAMPLES
    (summary,) = (tmp_path / "scored" / "runs").rglob("summary.json")
    score = json.loads(summary.read_text())["val/average_precision"]
    assert score == pytest.approx(found[0]["val/average_precision"], abs=1e-6)


@pytest.mark.usefixtures("without_pictures")
def test_a_gan_trains_as_in_one_process(tmp_path: Path) -> None:
    words = ["fit", "+experiment=gan", *QUICK, *GENERATED, *NO_TIMELINES, "model.r1_every=2"]
    words += ["data.samples.count=24", "data.loader.global_batch_size=4", f"paths.cache={tmp_path}"]
    words += ["callbacks.amp.precision=fp32", "callbacks.metrics.every_n_steps=100", "logger=none"]
    weights = []
    for trainer in ("cpu", "ddp_cpu"):
        runs = f"paths.runs={tmp_path}/{trainer}/runs"
        codes, output = _run([*COMMAND, *words, f"trainer={trainer}", runs], cwd=tmp_path)
        assert codes == [0], output
        weights.append(_read(tmp_path / trainer)[1])
    alone, ranked = weights
    for name in alone.keys() - {"last_r1"}:  # which each rank has of its own part
        assert torch.allclose(ranked[name], alone[name], atol=1e-6, rtol=0), name


@pytest.mark.usefixtures("without_pictures")
def test_each_job_of_a_sweep_starts_its_own_ranks(tmp_path: Path) -> None:
    sweep = [*COMMAND, *_fit(tmp_path, "trainer=ddp_cpu", "seed=1,2"), "-m"]
    codes, output = _run(sweep, cwd=tmp_path)
    assert codes == [0], output
    paths = (tmp_path / "runs").rglob("[01]/summary.json")
    summaries = [json.loads(path.read_text()) for path in paths]
    assert [summary["train/samples_hashed"] for summary in summaries] == [SAMPLES] * 2
    assert len({summary["samples_sha256"] for summary in summaries}) == 2


# Two tasks on one machine; after the first epoch SLURM warns of the time limit, if there is still
# something to do.
SRUN = """#!/bin/bash
while [ "$1" != python ]; do shift; done
shift
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$PYTHON" "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" > tasks.txt
if [ ! -e scontrol.txt ]; then
    until [ -e run/checkpoints/last.ckpt ] || ! kill -0 "${tasks[0]}"; do sleep 0.1; done
    kill -USR1 $PPID
fi
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


def test_a_job_of_slurm_stops_before_its_time_limit_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fakes = {"srun": SRUN, "scancel": "#!/bin/bash\nkill -TERM $(cat tasks.txt)\n"}
    fakes["scontrol"] = '#!/bin/bash\necho "$@" > scontrol.txt\n'
    for name, text in fakes.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHON": sys.executable}
    variables |= {"LIT_DATA_RUN": "run", "SLURM_JOB_ID": "71", "SLURM_NTASKS": "2"}
    variables |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    variables |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(_find_port())}
    script = ["bash", str(ROOT / "conf/cluster/slurm.sh")]
    script += _fit(tmp_path, "trainer=ddp_cpu", "report=false")[1:]
    codes, output = _run([*script, "trainer.max_epochs=1000"], cwd=tmp_path, variables=variables)
    assert codes == [143], output
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 71\n"
    stopped = torch.load(tmp_path / "run" / "checkpoints" / "interrupted.ckpt", weights_only=True)
    longer = f"trainer.max_epochs={stopped['epoch'] + 3}"
    codes, output = _run([*script, longer], cwd=tmp_path, variables=variables)
    assert codes == [0], output
    assert output.count("summary.json") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train/samples_hashed"] == (stopped["epoch"] + 3) * SAMPLES


DIES = """
import os, sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_data.app.job import watching_ranks
from lit_data.core.errors import LitDataError
from tests.simulated.log import LOG

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 2:
            os.kill(os.getpid(), 9)
        return super().training_step(batch, batch_idx)

quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
try:
    with watching_ranks():
        L.Trainer(accelerator="cpu", devices=3, strategy="ddp", max_epochs=1, **quiet).fit(Model())
except LitDataError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


def test_a_rank_that_is_killed_while_it_trains_is_named(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    command = [sys.executable, "-W", "ignore", "dies.py"]
    codes, output = _run(command, cwd=tmp_path, variables=SCRIPTS_TOO)
    assert codes == [6], output
    assert "rank 2 of this machine was killed by SIGKILL" in output


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_gpus_train_and_are_scored(trainer: str, tmp_path: Path) -> None:
    if LOG.installed:
        pytest.skip("other processes have no simulated device")
    codes, output = _run([*COMMAND, *_fit(tmp_path, f"trainer={trainer}")], cwd=tmp_path)
    assert codes == [0], output
    assert _read(tmp_path)[0]["train/samples_hashed"] == SAMPLES
