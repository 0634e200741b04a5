"""Every file in conf/ is composed, and run at toy size."""

import csv
import importlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from lit_data.app import COMMANDS
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.names import resolve_target
from lit_data.core.checks import read_arguments
from tests import outputs

CONF = Path(__file__).resolve().parents[2] / "conf"
# Groups that a command starts without.
NOT_OPTIONS = ("benchmark", "experiment", "hparams_search", "hydra")
FILES = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.rglob("*.yaml"))
SHARED = [path for path in FILES if path.parts[0] == "data" and path.stem.startswith("base")]
CHOSEN = [path for path in FILES if len(path.parts) == 2 and path.parts[0] not in NOT_OPTIONS]
OPTIONS = [path for path in CHOSEN if path not in SHARED]
BENCHMARKS = sorted(path.stem for path in (CONF / "benchmark").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
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
STRIPES = [name for name, kind in KINDS.items() if kind == "stripe"]
MADE_BY = {  # option files that are for an experiment of their kind alone
    "data/detection": "detection",
    "model/detector": "detection",
    "data/watermark": "watermark",
    "model/unet": "watermark",
    "model/unet_lite0": "segmentation",
    "synthesis/watermark": "watermark",
    "data/ct": "ct",
    "model/voxel_autoencoder": "ct",
    "augment/volume": "ct_segmentation",
    "model/volume_unet": "ct_segmentation",
    "data/gan": "gan",
    "model/gan": "gan",
    "model/gan_rays": "gan_rays",
    "callbacks/gan": "gan",
    "callbacks/gan_lowmem": "gan_lowmem",
    "data/anomaly": "anomaly",
    "data/segmentation": "segmentation",
    "data/classification": "classification",
    "model/classifier": "classification",
    "model/classifier_lite0": "classification",
    "model/detector_lite0": "detection",
    "model/anomaly": "anomaly",
    "model/anomaly_texture": "anomaly",
}
# Nets of packages that need not be installed: see tests/models/test_pretrained.py.
FOREIGN_NETS = ("smp_unet", "timm_classifier", "torchvision_classifier")
FOREIGN_NETS += ("torchvision_detector", "torchvision_segmentation", "monai")
# Of packages that need not be installed: see tests/augment/test_host.py and tests/app/test_loggers.py.
FOREIGN = [Path("augment/albumentations"), Path("augment/torchvision"), Path("logger/comet")]
APART = [
    *FOREIGN,
    *map(Path, MADE_BY),
    *(Path(f"model/{name}") for name in ("voxel_vqvae", *FOREIGN_NETS)),
]
# Each is named in a test below, in test_gan_configs or in tests/app.
NAMED = {"anomaly", "classification", "ct", "ct_100k", "ct_500k", "segmentation", "watermark"}
NAMED |= {"bccd", "ct_segmentation", "detection"}
NAMED |= {"gan", "gan_images", "gan_lowmem", "gan_rays"}
QUICK = (*outputs.QUICK, *outputs.NO_TIMELINES)
TOY = [*outputs.QUICK, *outputs.STRIPES]
BOXES = [*QUICK, *outputs.BOXES]
VOLUMES = [*QUICK, *outputs.VOLUMES]

pytestmark = [
    # Whether a toy run on this machine could be faster is not the question here.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore:SWA is currently only supported every epoch"
    ),  # it takes a schedule's place
]

CELL = """<annotation><size><width>64</width><height>48</height></size><object><name>{name}</name>
<bndbox><xmin>20</xmin><ymin>14</ymin><xmax>44</xmax><ymax>34</ymax></bndbox></object></annotation>"""

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
                pixels = rng.integers(0, 4096, (128, 128), dtype=np.uint16)
                cv2.imwrite(str(folder / f"{number}_{role}.tif"), pixels)
    elif experiment == "bccd":
        for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(60, 180, (48, 64, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / "JPEGImages" / f"{number}.jpg"), pixels)
            boxes = CELL.format(name=("RBC", "WBC", "Platelets")[number % 3])
            (folder / "Annotations" / f"{number}.xml").write_text(boxes)
        for split, numbers in {"train": range(4), "val": (4, 5), "test": (6, 7)}.items():
            lines = "".join(f"{number}\n" for number in numbers)
            (folder / "ImageSets/Main" / f"{split}.txt").write_text(lines)
    else:
        return []
    return [f"data.root={folder}"]


def test_no_file_is_forgotten() -> None:
    known = {Path(command) for command in COMMANDS} | {Path("base")} | {*OPTIONS, *SHARED}
    known |= {path for path in FILES if path.parts[0] in NOT_OPTIONS}
    assert set(FILES) == known
    assert {*STRIPES, *NAMED} == set(EXPERIMENTS)


@cache
def _compose(experiment: str) -> DictConfig:
    return compose("fit", [f"+experiment={experiment}", "data.root=images", "paths.run=run"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_constructor_argument_is_there(experiment: str) -> None:
    checked = 0
    for key, node in _nodes(OmegaConf.to_container(_compose(experiment))):
        if node["_target_"].startswith("lit_data."):
            arguments = read_arguments(resolve_target(node["_target_"], key)).hints.keys()
            assert arguments == node.keys() - {"_target_", "_partial_"}, key
            checked += 1
    assert checked >= 8


TOGETHER = [path for path in OPTIONS if path not in [*NEEDS_CUDA, *STARTS_RANKS, *APART]]


def _deal(options: list[Path]) -> list[list[str]]:
    """The options of each run: one of each group, until all had their turn; a group that is through
    repeats its first.

    Those of debug switch off what others are for, so they run alone.
    """
    groups = {}
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
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("options", _deal(TOGETHER), ids=" ".join)
def test_every_option_runs(options: list[str], run: Run, tmp_path: Path) -> None:
    words = [*TOY, *(f"+{option}" if option.startswith("debug=") else option for option in options)]
    if "synthesis=none" in options:
        words += _masked_data(tmp_path / "images")
    if options[0].startswith("debug="):
        words.remove("trainer.log_every_n_steps=1")
        words.append("+experiment=stripe")
    summary = run("fit", *words)
    if "logger=wandb" in options:
        # Its service is a child of this process, which later tests may end under an open run.
        importlib.import_module("wandb").teardown()
    assert summary["command"] == "fit"
    # The digest of the samples is the work of a callback.
    assert bool(summary.get("samples_sha256")) == ("callbacks=none" not in options)


def test_no_option_is_left_out() -> None:
    assert set().union(*_deal(TOGETHER)) == {f"{path.parts[0]}={path.name}" for path in TOGETHER}


@pytest.mark.gpu
def test_the_gpu_option_runs(run: Run) -> None:
    assert run("fit", "+experiment=stripe", *TOY, "trainer=gpu")["samples_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("option", BENCHMARKS)
def test_every_benchmark_runs(option: str, run: Run) -> None:
    words = ["benchmark.steps=2", "benchmark.repeats=1", "benchmark.samples_per_row=4"]
    words += ["benchmark.warmup_batches=1", "benchmark.workers=[1]", "benchmark.batch_sizes=[4]"]
    words += ["benchmark.micro_batch_sizes=[2]", "trainer=cpu"]
    summary = run("benchmark", "+experiment=stripe", f"+benchmark={option}", *TOY, *words)
    assert summary.get("benchmark/batch_size", 4) == 4
    named = {"headroom": "headroom_samples_per_s"}
    assert summary[f"benchmark/{named.get(option, 'best_samples_per_s')}"] > 0


@pytest.mark.parametrize(("option", "experiment"), MADE_BY.items())
def test_an_option_makes_its_experiment(option: str, experiment: str) -> None:
    cfg = _compose(experiment)
    own = OmegaConf.load(CONF / f"{option}.yaml")
    assert isinstance(own, DictConfig)
    group = option.partition("/")[0]
    node = cfg.data[group] if group in ("augment", "synthesis") else cfg[group]
    assert own.get("_target_") == node.get("_target_")
    assert own.keys() - {"defaults"} <= node.keys()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", STRIPES + EXAMPLE_NAMES)
def test_every_experiment_goes_all_the_way(experiment: str, run: Run, tmp_path: Path) -> None:
    words = [f"+experiment={experiment}", *TOY, *_real_data(experiment, tmp_path / "images")]
    if experiment in EXAMPLE_NAMES:
        words += ["--config-dir", str(EXAMPLES)]
    if experiment == "stripe":
        words.append("data.synthesis.probability=1.0")  # its validation is four patches
    else:
        words += outputs.NO_TIMELINES
    fitted = run("fit", *words)
    _check_fit(fitted, experiment)
    assert 0 <= fitted["val/average_precision_baseline"] <= 1
    assert fitted["data_wait_fraction"] is not None
    loaders = json.loads((fitted["folder"] / "loader.json").read_text())
    assert loaders.keys() - {"defects"} == {"train", "val", "test"}
    assert loaders["train"]["kind"] in ("inline", "thread", "process")
    assert loaders["train"]["reason"]
    assert list((fitted["folder"] / "tensorboard").rglob("events*"))
    assert (fitted["folder"] / "csv" / "metrics.csv").is_file()
    assert 0 <= fitted["test/average_precision"] <= 1
    pictures = {path.name for path in fitted["folder"].rglob("*.png")}
    assert ({"memory.png", "throughput.png"} <= pictures) == (experiment == "stripe")
    predicted = run("predict", *words)
    maps = list((predicted["folder"] / "maps").rglob("*.png"))
    assert len(maps) == predicted["predict/images"] == 6
    assert cv2.imread(str(maps[0]), cv2.IMREAD_UNCHANGED).dtype == np.uint16
    assert (predicted["folder"] / "predictions.png").is_file()
    header = (predicted["folder"] / "defects.csv").read_text().splitlines()[0]
    assert header == "image,y,x,area_px,score,height_px,width_px"


def _check_fit(fitted: dict[str, Any], experiment: str) -> None:
    """A run of an experiment left pictures and checkpoints."""
    assert fitted["experiment"] == experiment
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 500
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()


@pytest.mark.slow
def test_cells_in_files_of_voc_go_all_the_way(run: Run, tmp_path: Path) -> None:
    words = ["+experiment=bccd", *BOXES, *_real_data("bccd", tmp_path / "images")]
    fitted = run("fit", *words)
    _check_fit(fitted, "bccd")
    assert 0 <= fitted["test/map"] <= fitted["test/map50"]
    predicted = run("predict", *words, "predict.threshold=0", "model.score_threshold=0")
    assert predicted["predict/images"] == predicted["predict/images_with_objects"] == 8
    assert predicted["predict/objects"] > 8


@pytest.mark.slow
def test_a_net_of_monai_segments_volumes_all_the_way(run: Run) -> None:
    pytest.importorskip("monai")
    net = [
        "model=monai",
        "model.net.options={init_filters: 8, blocks_down: [1, 1], blocks_up: [1]}",
    ]
    words = ["+experiment=ct_segmentation", *QUICK, *outputs.VOXELS[:4], *net]
    fitted = run("fit", *words)
    _check_fit(fitted, "ct_segmentation")
    tested = run("test", *words)
    scores = {name: value for name, value in tested.items() if name.startswith("test/")}
    assert scores == pytest.approx({name: fitted[name] for name in scores}, abs=1e-6)
    assert scores.keys() >= {"test/dice_tumour", "test/volume_ml_tumour", "test/mean_true_ml"}
    predicted = run("predict", *words)
    assert predicted["predict/volumes"] == 6
    assert cv2.imread(str(predicted["folder"] / "predictions.png")).shape[1] > 1000
    resumed = run("fit", *words, f"resume={fitted['folder']}", "trainer.max_epochs=2")
    with (resumed["folder"] / "csv" / "metrics.csv").open(newline="") as file:
        epochs = {row["epoch"] for row in csv.DictReader(file)}
    assert "1" in epochs
    assert "0" not in epochs  # that was the first run's


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_the_second_stage_goes_on_from_the_first(run: Run) -> None:
    first = run("fit", "+experiment=ct_100k", *VOLUMES)
    words = [*VOLUMES, "trainer.max_epochs=2", f"ckpt={first['folder']}/checkpoints/last.ckpt"]
    second = run("fit", "+experiment=ct_500k", *words)
    rows = (second["folder"] / "csv" / "metrics.csv").read_text().splitlines()
    epochs = {line.split(",")[rows[0].split(",").index("epoch")] for line in rows[1:]}
    assert "1" in epochs
    assert "0" not in epochs  # that was the first stage's


@pytest.mark.slow
def test_volumes_can_be_learned_as_codes_and_cut_into_windows(run: Run) -> None:
    assert run("fit", "+experiment=ct", "model=voxel_vqvae", *VOLUMES)["val/perplexity"] >= 1
    words = ["+experiment=ct", *VOLUMES, "data.sample=windows", "data.windows.size=8"]
    assert run("prepare", *words)["prepare/volumes"] == 6


def _nodes(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        for name, child in value.items():
            yield from _nodes(child, f"{key}.{name}")


def _masked_data(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    (folder / "masks").mkdir(parents=True)
    mask = np.zeros((64, 64), np.uint8)
    mask[10:20, 30:40] = 255
    for number in range(6):
        image = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), image)
        cv2.imwrite(str(folder / "masks" / f"{number}.png"), mask)
    return [f"data.root={folder}", "data.masks=masks", "data.mask_splits=[train,val,test]"]
