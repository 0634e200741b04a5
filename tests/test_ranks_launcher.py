"""What a process of several knows of itself before it trains: from torchrun, from srun, and from a script of srun."""

import os
import subprocess
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import TCPStore

from lit_data.app.build import build_trainer
from lit_data.app.configuration.compose import check_run, compose
from lit_data.app.configuration.tree import open_hydra
from lit_data.app.launcher import (
    check_alone,
    check_resume,
    is_first_of_machine,
    is_first_rank,
    place_run,
)
from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions, MicroBatchLoader

SCRIPT = Path(__file__).resolve().parents[1] / "conf" / "cluster" / "slurm.sh"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
TORCHRUN |= {"WORLD_SIZE": "4", "MASTER_ADDR": "::1"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "71"}
SRUN |= {"SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
STARTED = ("RANK", "NODE_RANK", "GROUP_", "LOCAL_", "WORLD_", "MASTER_")
STARTED += ("TORCHELASTIC_", "SLURM_", "JSM_")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # run folders are claimed there
    for name in os.environ:
        if name.startswith(STARTED):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "first", "of_machine"),
    [
        ({}, True, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, True, True),
        ({"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, False, True),
        ({"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, False, False),
        ({"NODE_RANK": "0", "LOCAL_RANK": "0"}, True, True),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False, False),
        ({"NODE_RANK": "1"}, False, True),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, False, True),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, False, False),
    ],
    ids=str,
)
def test_a_process_knows_whether_it_is_the_first(
    variables: dict[str, str], first: bool, of_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (is_first_rank(), is_first_of_machine()) == (first, of_machine)


def _place(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *words: str) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open_hydra(None) as hydra:
        cfg, overrides = check_run(hydra, "fit", ["+experiment=stripe", *words])
        check_resume(cfg)
        return place_run(cfg, overrides)


def test_all_tasks_of_srun_write_into_the_folder_of_their_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = "hydra.run.dir='runs/fit/stripe/slurm_71'"
    first = SRUN | {"SLURM_PROCID": "0"}
    (alone,) = _place(monkeypatch, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert "slurm" not in alone
    assert _place(monkeypatch, first) == [folder]
    assert _place(monkeypatch, first, "hydra.run.dir=mine")[0] == "hydra.run.dir='mine'"
    others = [folder, "hydra.job.name=rank_3", "hydra.output_subdir=null"]
    assert _place(monkeypatch, SRUN | {"SLURM_PROCID": "3"}) == others
    second_step = _place(monkeypatch, SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1"})
    assert second_step == ["hydra.run.dir='runs/fit/stripe/slurm_71_1'"]
    (of_a_shell,) = _place(monkeypatch, SRUN | {"SLURM_JOB_NAME": "interactive"})
    assert "slurm" not in of_a_shell


def test_processes_of_torchrun_take_the_folder_that_the_first_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    first = _place(monkeypatch, variables | {"RANK": "0"}, "paths.runs=here")
    second = _place(monkeypatch, variables | {"RANK": "1"}, "paths.runs=elsewhere")
    assert first[0].startswith("hydra.run.dir='here/fit/stripe/2")
    assert second == [*first, "hydra.job.name=rank_1", "hydra.output_subdir=null"]


def test_a_sweep_is_started_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^torchrun started 4 processes, .*: start the sweep alone and let trainer=ddp start"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_alone()


@pytest.mark.parametrize(
    ("trainer", "variables", "devices", "machines"),
    [
        ("ddp", {}, "auto", 1),
        ("ddp_cpu", {}, 2, 1),
        ("ddp", {"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}, 8, 4),
        ("ddp_cpu", SRUN, 2, 2),
        ("fsdp", SRUN, 2, 2),
    ],
)
def test_devices_and_machines_are_those_that_were_started(
    trainer: str,
    variables: dict[str, str],
    devices: object,
    machines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cfg = compose("fit", ["+experiment=stripe", f"trainer={trainer}", "paths.run=here"])
    assert (cfg.trainer.devices, cfg.trainer.num_nodes) == (devices, machines)


def test_fsdp_leaves_out_what_it_cannot_do() -> None:
    cfg = compose(
        "fit", ["+experiment=stripe", "trainer=fsdp", "callbacks=low_memory", "paths.run=here"]
    )
    assert cfg.callbacks.adaptive is None
    assert cfg.trainer.gradient_clip_val is None


@pytest.mark.parametrize(("experiment", "is_told"), [("gan", True), ("stripe", False)])
def test_ddp_is_told_of_nets_that_learn_in_turn(experiment: str, is_told: bool) -> None:
    words = [f"+experiment={experiment}", "trainer=ddp_cpu", "paths.run=here"]
    trainer = build_trainer(compose("fit", words), logger=False, callbacks=[])
    strategy = trainer.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) is is_told


class Numbers:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_of_all_ranks_takes_the_same_samples_for_any_number_of_them(world_size: int) -> None:
    options = LoaderOptions(global_batch_size=8, num_workers=0, seed=1)
    ranks = {"shuffle": True, "world_size": world_size}
    loaders = [MicroBatchLoader(Numbers(), options, rank=n, **ranks) for n in range(world_size)]
    options = LoaderOptions(batch_size=8, num_workers=0, seed=1)
    alone = MicroBatchLoader(Numbers(), options, shuffle=True)
    steps = [
        sorted(number for batch in parts for number in batch.tolist())
        for parts in zip(*loaders, strict=True)
    ]
    assert steps == [sorted(batch.tolist()) for batch in alone]
    assert {loader.batch_size for loader in loaders} == {8 // world_size}


def test_a_global_batch_that_cannot_be_shared_is_refused() -> None:
    message = r"^global_batch_size=8 cannot be shared evenly by 3 ranks: choose a multiple of 3"
    with pytest.raises(ConfigError, match=message):
        MicroBatchLoader(Numbers(), LoaderOptions(global_batch_size=8), rank=0, world_size=3)
    with pytest.raises(ConfigError, match="global_batch_size=0 is not usable"):
        LoaderOptions(global_batch_size=0)


FAKES = {
    "srun": 'printf "%s\\n" "$@" > srun.txt; mkdir -p run/checkpoints; eval "$TASK"',
    "scancel": 'echo "$@" > scancel.txt',
    "scontrol": 'echo "$@" > scontrol.txt',
}


def _submit(folder: Path, task: str, *words: str) -> int:
    """Run the script for SLURM where SLURM's commands are stand-ins; `task` is what srun does."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "71", "TASK": task}
    environment = os.environ | variables | {"LIT_DATA_RUN": f"{folder}/run"}
    return subprocess.run(["bash", str(SCRIPT), *words], cwd=folder, env=environment).returncode


SAVE = "sleep 0.01; touch run/checkpoints/interrupted.ckpt"
WARN = "kill -USR1 $PPID; until [ -s scancel.txt ]; do :; done"


def test_the_script_starts_tasks_that_share_a_folder(tmp_path: Path) -> None:
    assert _submit(tmp_path, "exit 3", "+experiment=stripe", "name=two words") == 3
    words = (tmp_path / "srun.txt").read_text().splitlines()
    started = ["python", "-m", "lit_data", "fit", "+experiment=stripe", "name=two words"]
    assert words[words.index("python") :] == [
        *started,
        f"hydra.run.dir='{tmp_path}/run'",
        "resume=auto",
    ]
    assert not (tmp_path / "scontrol.txt").exists()


def test_the_script_stops_before_the_time_limit_and_goes_on_after_it(tmp_path: Path) -> None:
    assert _submit(tmp_path, f"{WARN}; {SAVE}; exit 143") == 143
    assert (tmp_path / "scancel.txt").read_text() == "--signal=TERM 71\n"
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 71\n"
    assert _submit(tmp_path, "exit 0") == 0
    words = (tmp_path / "srun.txt").read_text().splitlines()
    assert words[-1] == "resume=auto"


@pytest.mark.parametrize("task", [f"{SAVE}; exit 143", f"{WARN}; exit 1"])
def test_the_script_does_not_requeue_a_job_that_was_cancelled_or_failed(
    tmp_path: Path, task: str
) -> None:
    assert _submit(tmp_path, task) in (143, 1)
    assert not (tmp_path / "scontrol.txt").exists()
