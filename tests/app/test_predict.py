"""``predict`` as it is typed: exit codes, the summary, folders, and going on where a run was interrupted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import fsspec
import numpy as np
import pytest
import torch

from lit_data.app.cli import main
from lit_data.models import SegmentationModule, UNet

WORDS = ["predict", "experiment=watermark", "trainer=cpu", "model.net.width=2", "model.net.depth=1"]
QUICK = ["trainer.enable_progress_bar=false", "predict.tile_px=64", "predict.readers=1"]


pytestmark = pytest.mark.usefixtures("few_pictures")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for name in ("a/1.png", "b/1.png", "c.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / "set" / name), rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    torch.manual_seed(0)
    model = SegmentationModule(UNet(width=2, depth=1), false_alarms_per_patch=None, baseline=False)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.ckpt")
    places = [f"data.root={tmp_path}/set", f"paths.runs={tmp_path}/runs"]
    places += [f"paths.cache={tmp_path}/cache", f"ckpt={tmp_path}/model.ckpt"]
    return [*WORDS, *QUICK, *places]


def _summarise(printed: str) -> dict[str, Any]:
    return json.loads(Path(printed.splitlines()[-1]).read_text())


def test_a_bad_image_is_reported_at_the_end_by_the_exit_code(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = (tmp_path / "set" / "c.png").read_bytes()[:500]
    (tmp_path / "set" / "b" / "cut.png").write_bytes(cut)
    assert main([*words, f"predict.folder={tmp_path}/out"]) == 3
    printed = capsys.readouterr()
    assert (
        "1 input is bad and has no prediction; the predictions of all others are in" in printed.err
    )
    everything = printed.out + printed.err
    assert everything.count("b/cut.png: truncated or damaged PNG") == 1
    assert everything.count("store: 4 images") == 1  # the images are opened once
    summary = _summarise(printed.out)
    assert (summary["predict/images"], summary["predict/images_bad"]) == (3, 1)
    assert summary["seconds"] > 0
    out = tmp_path / "out"
    names = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    expected = {"predictions.png"}
    for name in ("a/1.png", "b/1.png", "c.png"):
        expected |= {f"masks/{name}.png", f"overlays/{name}.png"}
    assert names == expected
    assert main([*words, f"predict.folder={tmp_path}/none", "predict.on_bad=error"]) == 3
    assert "1 of 4 images is bad" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["masks", "overlays/a", "images.jsonl", "predictions.png"])
def test_nothing_is_written_through_a_link(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aim = tmp_path / ("precious" + Path(name).suffix)
    if aim.suffix:
        aim.write_text("mine")
    else:
        aim.mkdir()
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(aim)
    assert main([*words, f"predict.folder={tmp_path}/out", "predict.resume=true"]) == 2
    text = f"predict.folder={tmp_path}/out holds a link, {name} to {aim}: nothing is written thr"
    assert text in capsys.readouterr().err
    assert aim.read_text() == "mine" if aim.suffix else not list(aim.iterdir())


@pytest.mark.slow
def test_one_image_is_enough_and_a_run_goes_on(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*words, f"hydra.run.dir={tmp_path}/run", "predict.resume=true"]
    assert main([*run, "data.patterns=[c.png]"]) == 0
    assert _summarise(capsys.readouterr().out)["predict/images"] == 1
    log = (tmp_path / "run" / "predict.log").read_text()
    assert f"nothing to resume in {tmp_path}/run, so everything is predicted" in log
    others = ["data.split_seed=3", "data.loader.batch_size=2", "predict.batch_size=1"]
    assert main([*run, *others]) == 0
    summary = _summarise(capsys.readouterr().out)
    assert (summary["predict/images"], summary["predict/images_kept"]) == (3, 1)
    assert main([*run, "data.patterns=[c.png]"]) == 0
    log = (tmp_path / "run" / "predict.log").read_text()
    assert "run has files of 2 images that are not predicted now: " in log
    assert main([*run, "data.read.exif=apply"]) == 2
    assert "\n  data.read.exif: 'ignore', now 'apply'" in capsys.readouterr().err


@pytest.mark.slow
def test_images_are_judged_by_the_threshold_of_the_checkpoint(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = UNet(width=2, depth=1, standardise=True)
    plain = {"false_alarms_per_patch": None, "baseline": False}
    model = SegmentationModule(net, anomaly_metrics=True, **plain)
    model.image_threshold.fill_(0.0)
    model.image_threshold_fraction.fill_(0.01)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "judge.ckpt")
    judge = [word for word in words if word != "experiment=watermark"]
    judge += ["+experiment=segmentation", "model=unet", f"ckpt={tmp_path}/judge.ckpt"]
    judge.append(f"predict.folder={tmp_path}/out")
    assert main(judge) == 2
    text = "set model.image_score_fraction=0.01, or give predict.image_threshold"
    assert text in capsys.readouterr().err
    for given, verdict in (
        ("model.image_score_fraction=0.01", "defect"),
        ("predict.image_threshold=1", "good"),
    ):
        assert main([*judge, given]) == 0
        rows = (tmp_path / "out" / "images.csv").read_text().splitlines()
        assert rows[0] == "image,score,defects,verdict"
        assert [row.rpartition(",")[2] for row in rows[1:]] == [verdict] * 3
    assert main([*words, "predict.image_threshold=0.5"]) == 2
    text = "predict.image_threshold=0.5 has no effect on masks of watermarks"
    assert text in capsys.readouterr().err


def test_parts_are_predicted_in_any_order_and_finished(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = (tmp_path / "set" / "c.png").read_bytes()[:500]
    (tmp_path / "set" / "b" / "cut.png").write_bytes(cut)
    run = [*words, f"predict.folder={tmp_path}/out"]
    assert main([*run, "predict.part=1", "predict.of=2"]) == 0
    summary = _summarise(capsys.readouterr().out)
    assert (summary["predict/part"], summary["predict/inputs"]) == ("1/2", 1)
    assert main([*run, "predict.finish=true"]) == 4
    text = (
        f"2 of 3 inputs are missing in {tmp_path}/out (a/1.png, c.png): start predict.part=0/2 ag"
    )
    assert text in capsys.readouterr().err
    assert main([*run, "predict.part=0/2"]) == 0
    capsys.readouterr()
    assert main([*run, "predict.finish=true"]) == 3
    printed = capsys.readouterr()
    assert (
        "1 input is bad and has no prediction; the predictions of all others are in" in printed.err
    )
    summary = _summarise(printed.out)
    counts = [summary[f"predict/images{ending}"] for ending in ("", "_kept", "_bad")]
    assert counts == [3, 3, 1]
    rows = (tmp_path / "out" / "marks.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["a/1.png", "b/1.png", "c.png"]
    assert "b/cut.png" in (tmp_path / "out" / "bad.csv").read_text()


ADDRESS = "memory://bucket/results"


@pytest.fixture
def store() -> Iterator[Any]:
    """The file system of memory://, empty at first."""
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    yield file_system
    file_system.store.clear()


def _read_all(folder: Path, store: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return all files of a folder, and those at the address, without journals and what has times."""
    local, remote = {}, {}
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".jsonl":
            local[path.relative_to(folder).as_posix()] = path.read_bytes()
    del local["marks.csv"]
    for key in store.find("/bucket/results"):
        if not key.endswith((".jsonl", "/marks.csv")):
            remote[key.removeprefix("/bucket/results/")] = store.cat(key)
    return local, remote


def test_parts_and_runs_that_go_on_predict_at_an_address(
    words: list[str], tmp_path: Path, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"predict.folder={ADDRESS}"
    assert main([*words, f"predict.folder={tmp_path}/alone"]) == 0
    assert main([*words, folder, "predict.part=0/2"]) == 0
    assert main([*words, folder, "predict.finish=true"]) == 4
    assert f"1 of 3 inputs is missing in {ADDRESS} (" in capsys.readouterr().err
    assert main([*words, folder, "predict.part=1/2"]) == 0
    assert main([*words, folder, "predict.finish=true"]) == 0
    assert _summarise(capsys.readouterr().out)["predict/images_kept"] == 3
    local, remote = _read_all(tmp_path / "alone", store)
    assert remote == local
    # Nothing that is there is taken for what another run began, and nothing is begun anew.
    assert main([*words, folder]) == 2
    assert (
        f"{ADDRESS} holds predictions: resume with predict.resume=true" in capsys.readouterr().err
    )
    assert main([*words, folder, "predict.threshold=0.3", "predict.resume=true"]) == 2
    assert f"{ADDRESS} holds predictions of another run" in capsys.readouterr().err
    assert _read_all(tmp_path / "alone", store)[1] == local
    # A file that is lost or cut short is predicted again.
    store.pipe_file("/bucket/results/masks/c.png.png", b"cut")
    store.rm("/bucket/results/overlays/a/1.png.png")
    assert main([*words, folder, "predict.resume=true"]) == 0
    assert _summarise(capsys.readouterr().out)["predict/images_kept"] == 1
    assert _read_all(tmp_path / "alone", store)[1] == local


def test_records_of_strangers_at_an_address_lead_nowhere(
    words: list[str], tmp_path: Path, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"predict.folder={ADDRESS}"
    (tmp_path / "secret").write_text("secret")
    store.pipe_file("/bucket/results/images-x-of-2.jsonl", b"{}")
    store.pipe_file("/bucket/results/../../images.jsonl", b"{}")
    assert main([*words, folder, "predict.part=0/2"]) == 0
    store.pipe_file("/bucket/results/images-1-of-2.jsonl", b"[1]\n")
    assert main([*words, folder, "predict.part=1/2"]) == 4
    assert f"{ADDRESS}/images-1-of-2.jsonl is damaged" in capsys.readouterr().err
    assert main([*words, "predict.folder=sftp://host/results"]) == 2
    assert "results need an object store (s3://" in capsys.readouterr().err
