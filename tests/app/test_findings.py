"""Each check, given facts of a machine that is in order and of one that is not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lit_data.app import diagnosis, doctor
from lit_data.app.diagnosis import Finding

GIB = 2**30

AUTO, BF16 = "callbacks.amp.precision=auto", partial(diagnosis.judge_precision, has_bf16=True)
NO_BF16 = partial(diagnosis.judge_precision, has_bf16=False)
BOTH_OPENCV = ["opencv-python", "opencv-python-headless"]

CASES = [
    (diagnosis.judge_system, ("linux",), "ok", ""),
    (diagnosis.judge_system, ("darwin",), "note", "worker_kind=thread"),
    (diagnosis.judge_cores, (8, 8, 1.0), "ok", ""),
    (diagnosis.judge_cores, (2, 8, 1.0), "note", "data.cache=device"),
    (diagnosis.judge_cores, (8, 8, 13.0), "warning", "other programs"),
    (diagnosis.judge_threads, (4, 4), "ok", ""),
    (diagnosis.judge_threads, (2, 64), "warning", "OMP_NUM_THREADS=2"),
    (diagnosis.judge_host_memory, (8 * GIB, 16 * GIB, 0), "ok", ""),
    (diagnosis.judge_host_memory, (GIB, 16 * GIB, 0), "warning", "low_memory"),
    (diagnosis.judge_host_memory, (4 * GIB, 16 * GIB, 5 * GIB), "warning", "low_memory"),
    (diagnosis.judge_shared, (8 * GIB,), "ok", ""),
    (diagnosis.judge_shared, (64 * 2**20,), "note", "--shm-size"),
    (diagnosis.judge_files, (65536, 9), "ok", ""),
    (diagnosis.judge_files, (256, 9), "warning", "ulimit -n"),
    (diagnosis.judge_files, (-1, 9), "ok", ""),  # no limit
    (diagnosis.judge_temp, ("/tmp",), "ok", ""),
    (diagnosis.judge_temp, ("/" + "t" * 80,), "warning", "TMPDIR"),
    (diagnosis.judge_room, ("paths.cache", "c", 100 * GIB, 200 * GIB), "ok", ""),
    (diagnosis.judge_room, ("paths.cache", "c", GIB, 200 * GIB), "warning", "paths.cache=FOLDER"),
    (diagnosis.judge_room, ("paths.runs", "r", 30 * GIB, 4000 * GIB), "warning", "paths.runs=FOL"),
    (diagnosis.judge_kind, ("paths.cache", "ext4"), "ok", ""),
    (diagnosis.judge_kind, ("paths.cache", "nfs4"), "warning", "on a disk of this machine"),
    (diagnosis.judge_kind, ("paths.runs", "nfs4"), "ok", ""),
    (diagnosis.judge_kind, ("paths.runs", "tmpfs"), "warning", "RAM"),
    (diagnosis.judge_device_memory, ("GPU", 79 * GIB, 80 * GIB), "ok", ""),
    (diagnosis.judge_device_memory, ("GPU", 40 * GIB, 80 * GIB), "warning", "nvidia-smi"),
    (diagnosis.judge_kernels, ((9, 0), ["sm_80", "sm_90"]), "ok", ""),
    (diagnosis.judge_kernels, ((8, 9), ["sm_80", "sm_90"]), "ok", ""),
    (diagnosis.judge_kernels, ((12, 0), ["sm_90", "compute_90"]), "ok", ""),
    (diagnosis.judge_kernels, ((12, 0), ["sm_80", "sm_90a"]), "fault", "sm_80, sm_90a"),
    (diagnosis.judge_kernels, ((6, 1), ["sm_75", "sm_120"]), "fault", "install a build"),
    (diagnosis.judge_pinning, (True,), "ok", ""),
    (diagnosis.judge_pinning, (False,), "warning", "pin_memory=auto"),
    (partial(BF16, used="auto"), ("cpu",), "ok", ""),
    (partial(BF16, used="bf16-mixed"), ("cpu",), "ok", ""),
    (partial(NO_BF16, used="auto"), ("cpu",), "ok", ""),
    (partial(BF16, used="fp32"), ("cpu",), "note", AUTO),
    (partial(BF16, used="fp16"), ("cuda",), "note", AUTO),
    (partial(NO_BF16, used="bf16"), ("cpu",), "warning", AUTO),
    (diagnosis.judge_share, (16, 2), "ok", ""),
    (diagnosis.judge_share, (6, 2), "warning", "data.cache=device"),
    (doctor.judge_opencv, (["opencv-python-headless"],), "ok", ""),
    (doctor.judge_opencv, (BOTH_OPENCV,), "warning", "pip uninstall opencv-python"),
    (doctor.judge_distributions, (["lit-data-inspect"],), "ok", ""),
    (
        doctor.judge_distributions,
        (["lit-data-inspect", "lit_data"],),
        "warning",
        "pip uninstall -y lit-data-inspect lit_data; ",
    ),
    (
        doctor.judge_distributions,
        (["lit-data-inspect", "lit_inspect"],),
        "warning",
        "pip uninstall -y lit-data-inspect lit_inspect; ",
    ),
    (doctor.judge_distributions, ([],), "warning", "pip install -e ."),
    (doctor.judge_requirements, ([Requirement("numpy>=2.0")],), "ok", ""),
    (doctor.judge_requirements, ([Requirement("numpy>=99")],), "fault", "pip install"),
    (doctor.judge_requirements, ([Requirement("lit-data-no-such")],), "fault", "pip install"),
]


@pytest.mark.parametrize(("judge", "facts", "level", "remedy"), CASES)
def test_a_check_tells_good_from_bad(
    judge: Callable[..., Finding], facts: tuple[object, ...], level: str, remedy: str
) -> None:
    finding = judge(*facts)
    assert finding.level == level
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("facts", "level", "remedy"),
    [
        ({"has_driver": False, "built_for": None}, "note", "on the CPU"),
        ({"has_driver": True, "built_for": None}, "fault", "CUDA build"),
        ({"has_driver": True, "built_for": "13.0"}, "fault", "driver is too old"),
    ],
)
def test_says_why_there_is_no_gpu(facts: dict[str, object], level: str, remedy: str) -> None:
    finding = diagnosis.judge_absence(**facts)  # type: ignore[arg-type]
    assert finding.level == level
    assert remedy in finding.remedy


def test_looks_at_each_gpu_and_at_how_the_run_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda number: f"GPU {number}",
        "mem_get_info": lambda number: ((79 - 60 * number) * GIB, 80 * GIB),
        "get_device_capability": lambda number: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)
    found = list(diagnosis.check_devices(2, pins=False, accelerator="cpu"))
    warned = [finding.what for finding in found if finding.level == "warning"]
    assert warned == ["GPU", "pinned batches", "cores for each GPU", "trainer"]
    assert any("GPU 1: 19.0 GiB" in finding.found for finding in found)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, [("warning", "CUDA_LAUNCH_BLOCKING")]),
        ({"RANK": "0", "MASTER_ADDR": "host"}, []),
        ({"RANK": "0"}, [("fault", "ranks")]),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "train"}, []),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "bash"}, [("warning", "ranks")]),
    ],
)
def test_finds_variables_that_hurt(
    environ: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    found = [(finding.level, finding.what) for finding in doctor.check_environment(environ)]
    assert [item for item in found if item[0] != "ok"] == expected


@pytest.mark.parametrize(("version", "faults"), [("2.6.2", 1), ("2.6.6", 0)])
def test_names_malicious_uploads(
    version: str, faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"lightning": version}
    monkeypatch.setattr(doctor, "find_version", versions.get)
    assert [finding.level for finding in doctor.find_malicious()] == ["fault"] * faults


def install(folder: Path, name: str, requirement: str) -> None:
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 0.1.0", "Provides-Extra: lamps"]
    (info / "METADATA").write_text("\n".join([*lines, f"Requires-Dist: {requirement}", ""]))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/data/x", "nfs4"), ("/data", "nfs4"), ("/database/x", "ext4"), ("/data/local/x", "xfs")],
)
def test_a_path_lies_on_the_deepest_mount_above_it(path: str, kind: str) -> None:
    mounts = [("/", "ext4"), ("/data", "autofs"), ("/data", "nfs4"), ("/data/local", "xfs")]
    assert diagnosis.find_kind(path, mounts) == kind  # of two at one place the later one counts
    assert diagnosis.find_kind(path, []) == ""
