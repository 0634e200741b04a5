"""Every file in conf/ is composed, and run at toy size."""

import csv
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lit_data.commands import COMMANDS
from lit_data.commands.configuration.compose import compose
from lit_data.commands.configuration.names import resolve_target

CONF = Path(__file__).resolve().parents[2] / "conf"
NOT_OPTIONS = (
    "benchmark",
    "experiment",
    "hparams_search",
    "hydra",
)  # groups that a command starts without
FILES = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.rglob("*.yaml"))
SHARED = [path for path in FILES if path.parts[0] == "data" and path.stem.startswith("base")]
OPTIONS = [
    path
    for path in FILES
    if len(path.parts) == 2 and path.parts[0] not in NOT_OPTIONS and path not in SHARED
]
BENCHMARKS = sorted(path.stem for path in (CONF / "benchmark").glob("*.yaml"))
ALIASES = {"inspection": "segmentation", "labelled": "classification"}
EXPERIMENTS = sorted(
    path.stem for path in (CONF / "experiment").glob("*.yaml") if path.stem not in ALIASES
)
EXAMPLES = CONF.parent / "docs" / "examples"
EXAMPLE_NAMES = sorted(path.stem for path in (EXAMPLES / "experiment").glob("*.yaml"))
NEEDS_CUDA = [Path(f"trainer/{name}") for name in ("ddp", "fsdp", "gpu")]
STARTS_RANKS = [Path("trainer/ddp_cpu")]  # from its own command line: see tests/test_ranks.py


def _data_of(experiment: str) -> str:
    """The kind of data of an experiment, or of the one that it goes on from."""
    for entry in OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml").get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            return _data_of(entry)
        if "override /data" in entry:
            return str(entry["override /data"])
    return "stripe"


KINDS = {name: _data_of(name) for name in EXPERIMENTS}
FIRST = ["stripe", "detection", "ct", "watermark", "gan", *ALIASES.values()]  # of each kind of data
STRIPES, DETECTION, VOLUMES, WATERMARK, GENERATED, INSPECTION, LABELLED = (
    [name for name, kind in KINDS.items() if kind == wanted]
    for wanted in ("stripe", "detection", "ct", "watermark", "gan", "inspection", "labelled")
)
FOR_DETECTION = [Path("data/detection"), Path("model/detector")]
FOR_WATERMARK = [Path("data/watermark"), Path("model/unet"), Path("synthesis/watermark")]
FOR_INSPECTION = [
    Path(name) for name in ("data/inspection", "data/labelled", "model/anomaly", "model/classifier")
]
FOR_NETS = [  # of packages that need not be installed: see tests/modules/test_pretrained.py and tests/test_strangers.py
    Path(f"model/{name}")
    for name in (
        "smp_unet",
        "timm_classifier",
        "torchvision_classifier",
        "torchvision_detector",
        "torchvision_segmentation",
    )
]
FOR_VOLUMES = [Path("data/ct"), Path("model/voxel_autoencoder"), Path("model/voxel_vqvae")]
FOR_GENERATED = [
    Path(name)
    for name in ("callbacks/gan", "callbacks/gan_lowmem", "data/gan", "model/gan", "model/gan_rays")
]

QUICK = [
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "data.loader.batch_size=4",
    "data.loader.num_workers=0",
]
TOY = [
    *QUICK,
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
]
TOY_BOXES = [
    *QUICK,
    "data.samples={count: 8, size_px: [64, 80]}",
    "data.size_px=64",
    "data.mosaic.close_epochs=0",
    "model.net.width=8",
]
TOY_VOLUMES = [
    *QUICK,
    "data.samples={count: 6, shape: [24, 24, 24]}",
    "data.max_points=100",
    "data.processes=1",
    "model.net.grid=8",
    "model.net.width=4",
    "model.net.hidden=8",
]

TOY_MARKS = [
    *QUICK,
    "data.samples={count: 6, size_px: [96, 96]}",
    "data.patch_px=64",
    "data.samples_per_image=2",
    "data.progressive=[[0,32],[1,64]]",
]

TOY_OBJECTS = [
    *QUICK,
    "data.samples={count: 6, size_px: [16, 16], tiles: 2}",
    "data.image_px=16",
]

pytestmark = [
    # Whether a toy run on this machine could be faster is not the question here.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings(
        "ignore:SWA is currently only supported every epoch"
    ),  # it takes a schedule's place
]

Run = Callable[..., dict[str, Any]]


def _real_data(experiment: str, folder: Path) -> list[str]:
    """Images of the kind an experiment is for, where it has none of its own."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    if experiment == "steel":
        for number in range(6):
            grey = rng.integers(60, 180, (128, 128), dtype=np.uint8)
            cv2.imwrite(str(folder / f"{number}.jpg"), cv2.merge([grey] * 3))
    elif experiment == "phantom":
        for number in range(6):
            for role in ("ub1mm", "ub5mm", "ya1mm"):
                cv2.imwrite(
                    str(folder / f"{number}_{role}.tif"),
                    rng.integers(0, 4096, (128, 128), dtype=np.uint16),
                )
    elif experiment == "bccd":
        for name in ("images", "labels"):
            (folder / name).mkdir()
        (folder / "classes.txt").write_text("RBC\nWBC\nPlatelets\n")
        for number in range(8):
            cv2.imwrite(
                str(folder / "images" / f"{number}.jpg"),
                rng.integers(60, 180, (48, 64, 3), dtype=np.uint8),
            )
            (folder / "labels" / f"{number}.txt").write_text(
                f"{number % 3} 0.5 0.5 0.4 0.4\n2 0.5 0.5 0 0\n"
            )
        for split, numbers in {"train": range(4), "val": (4, 5), "test": (6, 7)}.items():
            (folder / f"{split}.txt").write_text("".join(f"{number}\n" for number in numbers))
    else:
        return []
    return [f"data.root={folder}"]


def test_no_file_is_forgotten() -> None:
    known = {Path(command) for command in COMMANDS} | {Path("base")} | {*OPTIONS, *SHARED}
    known |= {path for path in FILES if path.parts[0] in NOT_OPTIONS}
    assert set(FILES) == known
    assert (
        sorted(STRIPES + DETECTION + VOLUMES + WATERMARK + GENERATED + INSPECTION + LABELLED)
        == EXPERIMENTS
    )


@pytest.mark.parametrize(("alias", "experiment"), ALIASES.items())
def test_an_alias_composes_the_same(alias: str, experiment: str, tmp_path: Path) -> None:
    first, second = (
        compose("fit", [f"+experiment={name}", f"paths.run={tmp_path}"])
        for name in (alias, experiment)
    )
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("experiment", FIRST)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command: str, experiment: str, tmp_path: Path) -> None:
    cfg = compose(command, [f"+experiment={experiment}", f"paths.run={tmp_path}"])
    assert cfg.command == command


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_constructor_argument_is_there(experiment: str, tmp_path: Path) -> None:
    cfg = compose(
        "fit", [f"+experiment={experiment}", f"data.root={tmp_path}", f"paths.run={tmp_path}"]
    )
    nodes = [
        (key, node)
        for key, node in _nodes(OmegaConf.to_container(cfg))
        if node["_target_"].startswith("lit_data.")
    ]
    assert len(nodes) >= 8
    for key, node in nodes:
        arguments = set(inspect.signature(resolve_target(node["_target_"], key)).parameters)
        assert arguments == node.keys() - {"_target_", "_partial_"}, key


TOGETHER = [
    path
    for path in OPTIONS
    if path
    not in [
        *(*NEEDS_CUDA, *STARTS_RANKS, *FOR_DETECTION, *FOR_VOLUMES, *FOR_WATERMARK),
        *(*FOR_GENERATED, *FOR_INSPECTION, *FOR_NETS),
    ]
]


def _deal(options: list[Path]) -> list[list[str]]:
    """The options of each run: one of each group, until all had their turn; a group that is through
    repeats its first.

    Those of debug switch off what others are for, so they run alone.
    """
    groups: dict[str, list[str]] = {}
    for path in options:
        groups.setdefault(path.parts[0], []).append(f"{path.parts[0]}={path.name}")
    debug = groups.pop("debug")
    rows = zip_longest(*groups.values())
    together = [
        [option or names[0] for option, names in zip(row, groups.values(), strict=True)]
        for row in rows
    ]
    return together + [[option] for option in debug]


@pytest.mark.slow
@pytest.mark.parametrize("options", _deal(TOGETHER), ids=" ".join)
def test_every_option_runs(options: list[str], run: Run, tmp_path: Path) -> None:
    words = [*TOY, *(f"+{option}" if option.startswith("debug=") else option for option in options)]
    if "synthesis=none" in options:
        words += _masked_data(tmp_path / "images")
    if options[0].startswith("debug="):
        words.remove("trainer.log_every_n_steps=1")
    summary = run("fit", *words)
    if "logger=wandb" in options:
        # Its service is a child of this process, which later tests may end under an open run.
        importlib.import_module("wandb").teardown()
    assert summary["command"] == "fit"
    assert summary["samples_sha256"]


def test_no_option_is_left_out() -> None:
    assert set().union(*_deal(TOGETHER)) == {f"{path.parts[0]}={path.name}" for path in TOGETHER}


@pytest.mark.gpu
def test_the_gpu_option_runs(run: Run) -> None:
    assert run("fit", *TOY, "trainer=gpu")["samples_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("option", BENCHMARKS)
def test_every_benchmark_runs(option: str, run: Run) -> None:
    sizes = ["benchmark.steps=2"]
    times = ["benchmark.repeats=1", "benchmark.samples_per_row=4", "benchmark.warmup_batches=1"]
    words = [
        "benchmark.workers=[1]",
        "benchmark.batch_sizes=[4]",
        "benchmark.micro_batch_sizes=[2]",
    ]
    summary = run("benchmark", f"+benchmark={option}", "trainer=cpu", *TOY, *sizes, *times, *words)
    assert summary.get("benchmark/batch_size", 4) == 4
    named = {"headroom": "headroom_samples_per_s", "callbacks": "step_us"}
    assert summary[f"benchmark/{named.get(option, 'best_samples_per_s')}"] > 0


@pytest.mark.parametrize("option", FOR_DETECTION + FOR_VOLUMES[:2], ids=str)
def test_the_options_of_an_experiment_make_it(option: Path, tmp_path: Path) -> None:
    experiment = "detection" if option in FOR_DETECTION else "ct"
    cfg = compose(
        "fit", [f"+experiment={experiment}", f"data.root={tmp_path}", f"paths.run={tmp_path}"]
    )
    own = OmegaConf.load(CONF / option.with_suffix(".yaml"))
    assert isinstance(own, DictConfig)
    own.pop("defaults", None)
    assert cfg[option.parts[0]]["_target_"] == own["_target_"]
    assert own.keys() <= cfg[option.parts[0]].keys()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", STRIPES + EXAMPLE_NAMES)
def test_every_experiment_goes_all_the_way(experiment: str, run: Run, tmp_path: Path) -> None:
    words = [f"+experiment={experiment}", *TOY, *_real_data(experiment, tmp_path / "images")]
    if experiment in EXAMPLE_NAMES:
        words += ["--config-dir", str(EXAMPLES)]
    fitted = run("fit", *words)
    assert fitted["experiment"] == experiment
    assert 0 <= fitted["test/average_precision"] <= 1
    assert 0 <= fitted["val/average_precision_baseline"] <= 1
    assert fitted["data_wait_fraction"] is not None
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
    loaders = json.loads((fitted["folder"] / "loader.json").read_text())
    assert loaders.keys() - {"defects"} == {"train", "val", "test"}
    assert loaders["train"]["kind"] in ("inline", "thread", "process")
    assert loaders["train"]["reason"]
    assert list((fitted["folder"] / "tensorboard").rglob("events*"))
    assert (fitted["folder"] / "csv" / "metrics.csv").is_file()
    tested = run("test", *words)
    assert tested["test/average_precision"] == pytest.approx(
        fitted["test/average_precision"], abs=1e-6
    )
    assert "val/average_precision" in run("validate", *words)
    predicted = run("predict", *words)
    maps = list((predicted["folder"] / "maps").rglob("*.png"))
    assert len(maps) == predicted["predict/images"] == 6
    assert cv2.imread(str(maps[0]), cv2.IMREAD_UNCHANGED).dtype == np.uint16
    assert (predicted["folder"] / "predictions.png").is_file()
    header = (predicted["folder"] / "defects.csv").read_text().splitlines()[0]
    assert header == "image,y,x,area_px,score,height_px,width_px"
    shown = run("show", *words, "show.count=3")
    assert shown["show/patches"] == 3
    assert run("prepare", *words, "prepare.check=true", "data.on_bad=skip")["prepare/images"] == 6
    prepared = run("prepare", *words, "prepare.verify=true")
    assert (prepared["prepare/images"], prepared["prepare/skipped"]) == (6, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", [name for name in INSPECTION if name != "anomaly"]
)  # tests/commands
def test_every_inspection_goes_all_the_way(experiment: str, run: Run) -> None:
    sizes = ["data.samples={count: 12, size_px: [96, 96]}", "data.patch_px=64", "model.net.width=4"]
    words = [f"+experiment={experiment}", *QUICK, *sizes]
    fitted = run("fit", *words)
    assert 0 <= fitted["test/average_precision"] <= 1
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    tested = run("test", *words)
    assert tested["test/average_precision"] == pytest.approx(
        fitted["test/average_precision"], abs=1e-6
    )
    predicted = run("predict", *words)
    assert (
        len(list((predicted["folder"] / "maps").rglob("*.png")))
        == predicted["predict/images"]
        == 12
    )
    assert (predicted["folder"] / "defects.csv").is_file()
    with (predicted["folder"] / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert all(0 <= float(row["score"]) <= 1 for row in rows)
    weights = torch.load(fitted["folder"] / "checkpoints" / "best.ckpt", weights_only=True)[
        "state_dict"
    ]
    chosen = json.loads((predicted["folder"] / "fingerprint.json").read_text())["predict"]
    assert chosen["threshold"] == pytest.approx(float(weights["predict_threshold"]))
    assert chosen["threshold"] == pytest.approx(fitted["val/f1_max_threshold"])
    least = chosen["image_threshold"]
    if least is None:  # all images of this validation show a defect
        assert float(weights["image_threshold"]) == -1
        assert all((row["verdict"] == "defect") == (int(row["defects"]) > 0) for row in rows)
    else:
        assert least == pytest.approx(fitted["val/image_f1_max_threshold"])
        clear = [row for row in rows if abs(float(row["score"]) - least) > 1e-6]
        assert all((row["verdict"] == "defect") == (float(row["score"]) >= least) for row in clear)
    shown = run("show", *words, "show.count=3")
    assert shown["show/patches"] == 3
    assert (shown["folder"] / "augment.png").is_file()
    assert run("prepare", *words, "prepare.check=true")["prepare/images"] == 12
    assert run("prepare", *words, "prepare.verify=true")["prepare/layout"] == "beside"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", LABELLED)
def test_every_label_goes_all_the_way(experiment: str, run: Run) -> None:
    sizes = ["data.samples={count: 24, size_px: [96, 96]}", "data.size_px=32", "model.net.width=4"]
    words = [f"+experiment={experiment}", *QUICK, *sizes]
    fitted = run("fit", *words)
    assert 0 <= fitted["test/accuracy"] <= 1
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 300
    with (fitted["folder"] / "splits.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 24
    given_back = run(
        "test", *words, f"data.splits={fitted['folder'] / 'splits.csv'}", "data.split_seed=9"
    )
    assert given_back["test/accuracy"] == pytest.approx(fitted["test/accuracy"], abs=1e-6)
    confusions = []
    for folder in (fitted["folder"], given_back["folder"]):
        confusions.append(json.loads((folder / "confusion.json").read_text()))
    assert confusions[0]["test"] == confusions[1]["test"]
    assert confusions[0].keys() == {"classes", "val", "test"}
    predicted = run("predict", *words)
    with (predicted["folder"] / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == predicted.get("predict/good", 0) + predicted.get("predict/defect", 0) == 24
    assert {row["truth"] for row in rows} == {"good", "defect"}
    right = sum(row["label"] == row["truth"] for row in rows)
    assert predicted["predict/accuracy"] == pytest.approx(right / 24, abs=1e-4)
    assert run("show", *words, "show.count=3")["show/patches"] == 3
    assert run("prepare", *words, "prepare.check=true")["prepare/images"] == 24


@pytest.mark.slow
@pytest.mark.parametrize("experiment", DETECTION)
def test_every_detector_goes_all_the_way(experiment: str, run: Run, tmp_path: Path) -> None:
    words = [f"+experiment={experiment}", *TOY_BOXES, *_real_data(experiment, tmp_path / "images")]
    fitted = run("fit", *words)
    assert fitted["experiment"] == experiment
    assert 0 <= fitted["test/map"] <= fitted["test/map50"] <= 1
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
    tested = run("test", *words)
    assert tested["test/map50"] == pytest.approx(fitted["test/map50"], abs=1e-6)
    assert "val/map50" in run("validate", *words)
    predicted = run("predict", *words, "predict.threshold=0", "model.score_threshold=0")
    assert predicted["predict/images"] == predicted["predict/images_with_objects"] == 8
    assert predicted["predict/objects"] > 8
    shown = run("show", *words, "show.count=3")
    assert shown["show/patches"] == 3
    assert (shown["folder"] / "augment.png").is_file()
    assert run("prepare", *words, "prepare.check=true")["prepare/images"] == 8
    prepared = run("prepare", *words, "prepare.verify=true")
    assert (prepared["prepare/images"], prepared["prepare/skipped"]) == (8, 0)
    assert prepared["prepare/classes"].count(", ") == 2


@pytest.mark.slow
def test_the_experiment_of_volumes_goes_all_the_way(run: Run) -> None:
    words = ["+experiment=ct", *TOY_VOLUMES]
    fitted = run("fit", *words)
    assert fitted["experiment"] == "ct"
    assert 0 <= fitted["test/iou"] <= fitted["test/f1"] <= 1
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
    tested = run("test", *words)
    assert tested["test/iou"] == pytest.approx(fitted["test/iou"], abs=1e-6)
    assert "val/iou" in run("validate", *words)
    predicted = run("predict", *words)
    assert predicted["predict/volumes"] == 6
    assert run("show", *words, "show.count=3")["show/patches"] == 3
    prepared = run("prepare", *words)
    assert (prepared["prepare/volumes"], prepared["prepare/refused"]) == (6, 0)
    assert (
        run("prepare", *words, "prepare.check=true")["prepare/points"] == prepared["prepare/points"]
    )
    assert run("prepare", *words, "prepare.verify=true")["prepare/refused"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_the_second_stage_goes_on_from_the_first(run: Run) -> None:
    first = run("fit", "+experiment=ct_100k", *TOY_VOLUMES)
    words = [*TOY_VOLUMES, "trainer.max_epochs=2", f"ckpt={first['folder']}/checkpoints/last.ckpt"]
    second = run("fit", "+experiment=ct_500k", *words)
    rows = (second["folder"] / "csv" / "metrics.csv").read_text().splitlines()
    epochs = {line.split(",")[rows[0].split(",").index("epoch")] for line in rows[1:]}
    assert "1" in epochs
    assert "0" not in epochs  # that was the first stage's


@pytest.mark.slow
def test_volumes_can_be_learned_as_codes_and_cut_into_windows(run: Run) -> None:
    assert run("fit", "+experiment=ct", "model=voxel_vqvae", *TOY_VOLUMES)["val/perplexity"] >= 1
    words = ["+experiment=ct", *TOY_VOLUMES, "data.sample=windows", "data.windows.size=8"]
    assert run("prepare", *words)["prepare/volumes"] == 6


@pytest.mark.parametrize("option", FOR_WATERMARK, ids=str)
def test_the_options_of_watermarks_make_their_experiment(option: Path, tmp_path: Path) -> None:
    cfg = compose("fit", ["+experiment=watermark", f"paths.run={tmp_path}"])
    own = OmegaConf.load(CONF / option.with_suffix(".yaml"))
    assert isinstance(own, DictConfig)
    own.pop("defaults", None)
    node = cfg.data.synthesis if option.parts[0] == "synthesis" else cfg[option.parts[0]]
    assert node["_target_"] == own["_target_"]
    assert own.keys() <= node.keys()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", WATERMARK)
def test_watermarks_are_learned_and_shown(experiment: str, run: Run) -> None:
    words = [f"+experiment={experiment}", *TOY_MARKS]
    fitted = run("fit", *words)
    assert fitted["experiment"] == experiment
    assert 0 <= fitted["test/dice"] <= 1
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    tested = run("test", *words)
    assert tested["test/dice"] == pytest.approx(fitted["test/dice"], abs=1e-6)
    assert run("show", *words, "show.count=3")["show/defects"] >= 1
    assert run("prepare", *words)["prepare/images"] == 6
    assert run("prepare", *words, "prepare.check=true")["prepare/images"] == 6
    assert run("prepare", *words, "prepare.verify=true")["prepare/skipped"] == 0


def _nodes(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        for name, child in value.items():
            yield from _nodes(child, f"{key}.{name}")


def _masked_data(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    (folder / "masks").mkdir(parents=True)
    for number in range(6):
        cv2.imwrite(
            str(folder / f"{number}.png"), rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        )
        mask = np.zeros((64, 64), np.uint8)
        mask[10:20, 30:40] = 255
        cv2.imwrite(str(folder / "masks" / f"{number}.png"), mask)
    return [f"data.root={folder}", "data.masks=masks", "data.mask_splits=[train,val,test]"]
