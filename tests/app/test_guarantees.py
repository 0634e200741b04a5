"""``calibrate`` and ``pod`` on one small trained run."""

import csv
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks.__main__ import run as measure
from lit_data.app.cli import main
from lit_data.app.rerun import take_run
from lit_data.core.errors import ConfigError
from lit_data.datamodules import InspectionDataModule, StripeDataModule
from lit_data.predict import InspectionTask, PredictOptions, StripeTask, Task
from lit_data.synthesis import DefectSpec
from lit_data.wings.quality.calibrate import CalibrateOptions, KnownImages
from lit_data.wings.quality.pod import fit_kinds, summarise, warn_of_few_images
from lit_data.wings.quality.targets import Target, judge_defects, separate_defects
from lit_inspect.__main__ import main as inspect
from lit_inspect.board import read_board
from tests.outputs import NO_TIMELINES
from tests.predict.running import Marker, make_run, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")

_QUICK = (
    "trainer=cpu",
    "trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "data.patch_px=32",
    "data.loader.batch_size=16",
    "data.loader.num_workers=0",
    "model=unet",
    "model.net.width=4",
    "trainer.max_epochs=6",
    "data.samples={count: 72, size_px: [64, 64]}",
    *NO_TIMELINES,
)


def _target(size_px: float, hit: bool, kind: str = "spot") -> Target:
    return Target(kind, "a.png", 1.0, 1.0, size_px, hit)


def test_folders_that_do_not_tell_are_no_truth(tmp_path: Path) -> None:
    for kind in ("A", "B"):
        (tmp_path / "set" / kind).mkdir(parents=True)
        for number in range(4):
            noise = np.random.default_rng([number, *kind.encode()]).integers(0, 255, (32, 32))
            cv2.imwrite(str(tmp_path / "set" / kind / f"{number}.png"), noise)
    data = InspectionDataModule(tmp_path / "set", cache="none", train_on="good", patch_px=32)
    data.setup("predict")
    with pytest.raises(ConfigError, match="no folder is known to hold good parts"):
        KnownImages.open(_prediction(InspectionTask(data), None), None)


def _prediction(task: Task[Any], chosen: Sequence[int] | None) -> Any:
    return SimpleNamespace(task=task, run=SimpleNamespace(chosen=chosen))


def test_images_without_masks_are_known_by_the_defects_drawn_into_them(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for number in range(4):
        noise = np.random.default_rng(number).integers(90, 150, (48, 48, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "set" / f"lot{number % 2}_{number}.png"), noise)
    options = {"cache": "none", "splits": {"train": 1.0}, "patch_px": 32}
    data = StripeDataModule(tmp_path / "set", synthesis=DefectSpec(amplitude=(0.3, 0.4)), **options)
    data.setup("predict")
    task = StripeTask(data)
    drawn = task.draw_truth("train")
    images = KnownImages.open(_prediction(task, range(8)), "lot.", drawn)
    assert images.is_defective.tolist() == [False] * 4 + [True] * 4
    assert images.lots is not None
    assert images.lots.tolist() == [0, 0, 1, 1] * 2
    assert images.is_drawn
    assert images.select(images.names[4:]).numbers.tolist() == [0, 1, 2, 3]
    found = task.predict(Marker(), make_run(tmp_path / "run"), PredictOptions())
    assert found.metrics["predict/images"] == 8
    rows = read_rows(tmp_path / "run" / "images.csv")
    assert [row["kind"] for row in rows] == ["good"] * 4 + ["synthetic"] * 4
    plain = StripeDataModule(tmp_path / "set", **options)
    plain.setup("predict")
    assert StripeTask(plain).draw_truth("train") is None
    with pytest.raises(ConfigError, match="it is unknown which images show a defect"):
        KnownImages.open(_prediction(StripeTask(plain), range(4)), None)


def test_kinds_without_a_curve_say_why() -> None:
    sizes = [2.0, 8.0] * 30
    targets = [_target(size, hit=False, kind="never") for size in sizes]
    targets += [_target(size, hit=True, kind="always") for size in sizes]
    targets += [_target(size, hit=number % 3 == 0) for number, size in enumerate(sizes)]
    result = summarise(fit_kinds(targets), (1, 40))
    rows = {row["kind"]: row for row in result["kinds"]}
    assert rows["never"]["note"] == "no a90: never found, detection at most 0.05"
    assert rows["always"]["note"] == "always found, detection at least 0.95"
    assert rows["spot"]["note"].startswith("no a90")
    assert {row["a90_95_px"] for row in rows.values()} == {None}
    assert result["false_call_rate"] == 0.025
    assert result["false_call_bound"] == pytest.approx(0.1132, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"miss": 0}, "miss=0 must be above 0 and below 1"),
        ({"confidence": 1.0}, "confidence=1.0 must be above 0"),
        ({"false_alarms": float("nan")}, "false_alarms=nan must be above 0"),
    ],
)
def test_rates_are_checked(change: dict[str, Any], message: str) -> None:
    values = {"miss": 0.02, "false_alarms": 0.05, "confidence": 0.95, "groups": None}
    with pytest.raises(ConfigError, match=message):
        CalibrateOptions(**(values | {"images": "val"} | change))


def test_parts_of_a_mask_are_defects_with_a_size() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[2, 3:8] = 1
    mask[3, 8] = 2  # touches the line at a corner
    mask[12:16, 29] = 255  # ignored
    mask[19, 29] = 1
    line, corner = separate_defects(mask)
    assert (line.size_px, corner.size_px) == (6, 1)
    assert (corner.y, corner.x) == (19, 29)
    assert line.near.shape == (7, 12)


def test_a_defect_is_found_near_it_and_if_its_image_is_not_called_good() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[5, 5] = mask[5, 20] = 1
    values = np.zeros((20, 30), np.float32)
    values[8, 6:8] = 0.6  # 3 px below the first, 12 px from the second
    writer: Any = SimpleNamespace(names=["a.png", "b.png"], read_map=lambda name: values)
    defects = dict.fromkeys((0, 1, 2), separate_defects(mask))
    options = PredictOptions(threshold=0.5, min_area_px=2)
    verdicts = {0: "review", 1: "good"}  # the third image is bad
    targets = judge_defects(defects, verdicts, ["", "scratch"], writer, options)
    assert [(target.image, target.kind, target.x, target.hit) for target in targets] == [
        ("a.png", "defect", 5, True),
        ("a.png", "defect", 20, False),
        ("b.png", "scratch", 5, False),
        ("b.png", "scratch", 20, False),
    ]
    values[8, 7] = 0.4  # one pixel is less than the smallest area
    assert not any(target.hit for target in judge_defects(defects, verdicts, [], writer, options))


def test_few_images_with_defects_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_few_images(29)
    assert not caplog.records
    warn_of_few_images(28)
    assert "only 28 images have labeled defects" in caplog.text
    assert "it needs at least 29" in caplog.text


def _call(command: str, *words: str, code: int = 0) -> dict[str, Any]:
    folder = Path.cwd() / command
    shutil.rmtree(folder, ignore_errors=True)
    places = [f"paths.run={folder}", f"hydra.run.dir={folder}"]
    assert main([command, *words, *places]) == code
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write_images(folder: Path, source: Path, gain: float) -> None:
    folder.mkdir()
    for path in sorted(source.glob("*.png"))[:16]:
        pixels = np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED))
        cv2.imwrite(str(folder / path.name), (gain * pixels).clip(0, 255).astype(np.uint8))


def _check_exported(words: Sequence[str], folder: Path) -> None:
    """The file of a calibrated run is scored as the run, and says of images what `predict` said."""
    assert main(["export", "fit", "board.inspect"]) == 0
    (folder / "line").mkdir()
    for path in (folder / "brighter").glob("????.png"):  # without the masks
        shutil.copy(path, folder / "line" / path.name)
    assert inspect(["board.inspect", "line", "--out", "verdicts"]) == 0
    inspected, predicted = (_read(folder / name / "images.csv") for name in ("verdicts", "predict"))
    for row, other in zip(inspected, predicted, strict=True):
        assert row == {name: other[name] for name in row}
    assert {row["guarantee"] for row in inspected} == {"withdrawn"}
    by_run = _call("test", *words, "callbacks.amp.precision=fp32")  # some processors take bfloat16
    plain = ["+experiment=segmentation", *_QUICK]
    by_file = _call("test", *plain, "ckpt=board.inspect")
    scores = [name for name in by_run if name.startswith("test/")]
    assert "test/average_precision" in scores
    for name in scores:
        assert by_file[name] == pytest.approx(by_run[name], abs=1e-4), name
    int8 = ["export", "fit", "int8.inspect", "int8=true", "int8_images=16"]
    assert main([*int8, "int8_drop=1"]) == 0
    manifest = read_board("int8.inspect").manifest
    assert manifest["precision"] == "int8"
    # The calibration is one of scores in float32.
    assert manifest["guarantee"] is manifest["review"] is None
    in_int8 = _call("test", *plain, "ckpt=int8.inspect")
    difference = in_int8["test/average_precision"] - by_run["test/average_precision"]
    assert 0 < abs(difference) < 0.1
    suite = ["exported", "suite.file=int8.inspect", f"suite.root={folder}/line"]
    assert measure([*suite, f"hydra.run.dir={folder}/measured"]) == 0
    measured = json.loads((folder / "measured/summary.json").read_text())
    assert measured["benchmark/calls"] == 3 * measured["benchmark/images"] == 3 * len(inspected)
    assert measured["benchmark/p99_ms"] >= measured["benchmark/median_ms"] > 0
    _call("predict", *plain, "ckpt=board.inspect", code=2)
    _call("benchmark", *plain, "ckpt=board.inspect", code=2)


def _check_pod(run: str, folder: Path) -> None:
    measured = _call("pod", run)
    targets = _read(folder / "pod/pod.csv")
    rows = _read(folder / "pod/images.csv")
    defective = {row["image"] for row in rows if row["truth"] == "defect"}
    assert {row["image"] for row in targets} == defective
    assert all(float(row["size_px"]) >= 1 for row in targets)
    (kind,) = json.loads((folder / "pod/pod.json").read_text())["kinds"]
    assert kind["targets"] == len(targets)
    assert kind["hits"] == sum(row["hit"] == "True" for row in targets) > 0
    called = [row for row in rows if row["truth"] == "good" and row["verdict"] != "good"]
    good = len(rows) - len(defective)
    assert measured["pod/false_call_rate"] == pytest.approx(len(called) / good)
    assert "Size that the model finds" in (folder / "pod/report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_a_run_is_calibrated_and_its_smallest_defect_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    _call("fit", "+experiment=segmentation", *_QUICK)
    run = "fit"
    capsys.readouterr()
    _call("calibrate", run, code=2)
    assert "2 % at 95 % needs at least 149 defective images, and images=val has" in (
        capsys.readouterr().err
    )
    rates = ["miss=0.2", "false_alarms=0.2", "confidence=0.9", "images=all"]
    calibrated = _call("calibrate", run, *rates)
    printed = capsys.readouterr()
    assert "images.csv" in printed.out + printed.err
    assert "defects.csv" not in printed.out + printed.err  # no verdict was there to list them by
    assert not (tmp_path / "calibrate/defects.csv").exists()
    assert calibrated["calibrate/miss_bound"] <= 0.2
    assert calibrated["calibrate/false_alarm_bound"] <= 0.2
    assert (tmp_path / "fit/checkpoints/best.ckpt.calibration.json").is_file()
    rows = _read(tmp_path / "calibrate/images.csv")
    missed = [row for row in rows if row["truth"] == "defect" and row["verdict"] == "good"]
    assert len(missed) == calibrated["calibrate/misses"]
    words = ["+experiment=segmentation", *_QUICK, f"run={tmp_path}/fit"]
    assert _call("predict", *words)["predict/guarantee"].startswith("misses <= 0.2")
    verdicts = {row["image"]: row["verdict"] for row in _read(tmp_path / "predict/images.csv")}
    assert verdicts == {row["image"]: row["verdict"] for row in rows}
    images = next((tmp_path / "cache/samples").rglob("*.png")).parent
    _write_images(tmp_path / "brighter", images, 1.3)
    _call("predict", *words, f"data.root={tmp_path}/brighter")
    table = _read(tmp_path / "predict/images.csv")
    assert {row["guarantee"] for row in table} == {"withdrawn"}
    _check_exported(words, tmp_path)
    _call("predict", *words, "predict.augment=flips")
    assert "guarantee" not in _read(tmp_path / "predict/images.csv")[0]
    _check_pod(run, tmp_path)


def test_a_run_of_another_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/.hydra").mkdir(parents=True)
    words = ["+experiment=segmentation", "resume=latest", "paths.runs=/mine", "seed=3"]
    hydra: dict[str, Any] = {"overrides": {"task": words}}
    hydra |= {"runtime": {"cwd": str(tmp_path)}}
    (tmp_path / "run/.hydra/hydra.yaml").write_text(json.dumps({"hydra": hydra}))
    config = tmp_path / "run/.hydra/config.yaml"
    config.write_text("command: predict\n")
    with pytest.raises(ConfigError, match="needs the folder of a run of fit, but run is a run of"):
        take_run("calibrate", "run", [])
    config.write_text("command: fit\n")
    on_run = take_run("calibrate", "run", ["seed=4"])  # its results go where others do
    place = os.path.realpath(tmp_path / "run")
    assert on_run.overrides == ("+experiment=segmentation", f"run='{place}'", "seed=4")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # Typed paths are those of the current folder, as of test and predict.
    words = [
        "data.root='new images'",
        "data.splits=lots.csv",
        "paths.runs=s3://b/runs",
        "ckpt=last",
    ]
    on_run = take_run("pod", "../run", words, cwd="..")
    here = os.path.realpath(tmp_path / "elsewhere")
    assert os.path.realpath(Path.cwd()) == os.path.realpath(tmp_path)
    absolute = [f"data.root='{here}/new images'", f"data.splits='{here}/lots.csv'", *words[2:]]
    assert on_run.overrides[1:] == ("seed=3", f"run='{place}'", *absolute)
    # The path of a checkpoint stands in the place of the run.
    on_run = take_run("pod", "run", ["ckpt=my.ckpt", "data.root=~/images"])
    assert on_run.overrides[2:] == (f"ckpt='{Path.cwd()}/my.ckpt'", "data.root=~/images")
