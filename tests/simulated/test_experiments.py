"""Every experiment on a device, at toy size: it trains, is scored and predicts, and no training step waits."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.accelerators.mps import MPSAccelerator

from benchmarks.__main__ import run as measure
from benchmarks.gpu_parts import PARTS
from lit_data.app.cli import main
from lit_data.core.errors import ConfigError
from tests.benchmarks.suites import GPU_TOY
from tests.outputs import BOXES, MARKS, OBJECTS, QUICK, STRIPES, VOLUMES
from tests.simulated.log import LOG
from tests.simulated.phases import Phases, counting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]  # Lightning remarks on toy sizes

ALLOWED = {
    "wings/detection/model/targets.py": "how many places learn an object decides the length of the loss",
    "callbacks/image_features.py": "ImageMetrics looks at the first images of a training alone",
    "callbacks/image_metrics.py": "its net goes to the device once",
    "core/devices.py": "small constants go to the device once",
    "synthesis/families/base.py": "so do the arrays that families read from",
}
"""Places of a training step where the host may wait, and why."""
SMALL = ["trainer.log_every_n_steps=50", "callbacks.memory.plot=false"]
SMALL += ["trainer.limit_val_batches=2", "trainer.limit_test_batches=1"]
NARROW = ["data.loader.batch_size=2", "model.net.width=4"]
TARGETS = [*QUICK, *STRIPES, *NARROW]
SURFACES = ["data.samples={count: 12, size_px: [96, 96]}", "data.patch_px=64", *NARROW]
DRAWN = "segmentation model=unet synthesis=library"
TOYS = {
    "stripe": TARGETS,
    "stripe data.cache=device": TARGETS,
    "detection": [*QUICK, *BOXES, "data.loader.batch_size=2"],
    "watermark": [*QUICK, *MARKS, *NARROW],
    "segmentation": SURFACES,
    DRAWN: [*SURFACES, "data.sampling.paste=0.5"],
    "segmentation model=unet data.classes=[defect] model.class_weights=balanced": SURFACES,
    "classification": [
        "model=classifier",
        "data.samples={count: 24, size_px: [96, 96]}",
        "data.size_px=32",
        *NARROW,
    ],
    "ct": [*QUICK, *VOLUMES, "data.loader.batch_size=2"],
    "gan": [*QUICK, *OBJECTS, "data.loader.batch_size=2"],
}
TOYS["gan_rays"] = [*TOYS["gan"], "model.generator.plane_px=8", "model.generator.points=4"]


def _run(
    command: str, experiment: str, *words: str, devices: str = "[0]", accelerator: str = "gpu"
) -> Phases:
    sizes = [*TOYS[experiment], *SMALL, "paths.runs=runs", f"trainer.accelerator={accelerator}"]
    where = [f"trainer.devices={devices}"] if accelerator == "gpu" else ["trainer.devices=1"]
    with counting() as phases:
        LOG.clear()
        assert main([command, *f"+experiment={experiment}".split(), *sizes, *where, *words]) == 0
    return phases


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("experiment", TOYS)
def test_no_training_step_waits_for_the_device(experiment: str) -> None:
    phases = _run("fit", experiment, "trainer.max_epochs=2", "trainer.limit_train_batches=2")
    assert phases.steps == 4
    places = [place for (_, place), _ in phases.waits["train"].items()]
    assert [place for place in places if not place.startswith(tuple(ALLOWED))] == []
    if experiment == "stripe":
        for command in ("validate", "test", "predict"):
            _run(command, experiment, "ckpt=last")


def test_a_run_on_the_processor_leaves_the_gpu_asleep() -> None:
    _run("fit", "stripe", "trainer.limit_train_batches=2", accelerator="cpu")
    assert not [what for what, _ in LOG.notes if what.startswith("cudaHostRegister")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "experiment",
    ["stripe", "detection", "watermark", DRAWN, "classification", "ct", "gan"],
)
def test_another_device_and_deterministic_algorithms_do_as_well(experiment: str) -> None:
    try:
        words = ["trainer.limit_train_batches=3", "trainer.deterministic=true"]
        _run("fit", experiment, *words, devices="[1]")
        checkpoint = next(Path("runs").rglob("*.ckpt"))
        for command in ("validate", "test", "predict") if experiment != "stripe" else ("predict",):
            _run(command, experiment, f"ckpt={checkpoint}", devices="[1]")
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_what_has_no_deterministic_gradient_says_so_before_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["+experiment=gan_rays", *TOYS["gan_rays"], "paths.runs=runs"]
    words += ["trainer.accelerator=gpu", "trainer.devices=1"]
    try:
        assert main(["fit", *words, "trainer.deterministic=true"]) == ConfigError.exit_code
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert "RayGenerator trains through grid_sample" in capsys.readouterr().err


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    "experiment",
    ["stripe", "detection", "watermark", DRAWN, "classification", "ct", "gan", "gan_rays"],
)
def test_an_apple_gpu_without_float64_scores_and_predicts(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run("fit", experiment, "trainer.limit_train_batches=1", accelerator="cpu")
    words = [f"ckpt={next(Path('runs').rglob('*.ckpt'))}"]
    for name in ("is_available", "is_built"):
        monkeypatch.setattr(torch.backends.mps, name, lambda: True)
    for name, value in {"device_count": 1, "empty_cache": None, "synchronize": None}.items():
        monkeypatch.setattr(torch.mps, name, lambda found=value: found)
    for name in ("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory"):
        monkeypatch.setattr(torch.mps, name, lambda: 2**30)
    monkeypatch.setattr(torch.mps, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: None)
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for command in ("validate", "test", "predict"):  # its gradients are beyond the simulation
        _run(command, experiment, *words, accelerator="mps")


@pytest.mark.timeout(300)
def test_the_benchmark_of_a_first_gpu_answers_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    larger = ["data.loader.batch_size=32", "suite.batch_size=32"]  # than the weights
    assert measure(["gpu", *GPU_TOY, *larger, "paths.runs=runs"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line[2:].split(" | ") for line in table[1:]]
    assert not [line for line in table if "too much" in line]
    # here nothing compiles, nor is page-locked in the thread of a DataLoader
    failing = {part for part in PARTS if "compiled" in part or "a DataLoader" in part}
    assert {part for part, what, _ in rows if what == "failed"} <= failing
    left_out = {part for part, what, _ in rows if what == "left out"}
    assert left_out <= {"bf16, MONAI's ThreadDataLoader of decoded images"}
    assert list(dict.fromkeys(part for part, _, _ in rows)) == list(PARTS)
    assert "| copies | equal on the device | true |" in table
