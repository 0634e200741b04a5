"""Models, batches and datamodules that nobody here wrote, through the command line: each run ends
well.

Small stand-ins have the metric names, batches and answers of the libraries; the libraries
themselves are used where they are installed (mark `strangers`).
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from lit_data.app.cli import main
from lit_data.callbacks import SampleDigest
from lit_data.core.errors import ConfigError
from tests.outputs import NO_TIMELINES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs, not ours
    pytest.mark.timeout(240),
]

MODULES = """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset


    class Base(L.LightningModule):
        def __init__(self, width=4, loss="bce"):
            super().__init__()
            assert loss == "bce", "a value that our model's file has under the same name"
            self.net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)


    class Segmenter(Base):  # names as in the examples of segmentation_models_pytorch
        def step(self, batch, stage):
            loss = nn.functional.binary_cross_entropy_with_logits(self.net(batch["image"]), batch["mask"])
            self.log_dict({f"{stage}_dataset_iou": 1 - loss.detach(), f"{stage}_loss": loss.detach()}, prog_bar=True)
            return loss

        def training_step(self, batch, batch_idx): return self.step(batch, "train")
        def validation_step(self, batch, batch_idx): self.step(batch, "valid")
        def test_step(self, batch, batch_idx): self.step(batch, "test")
        def predict_step(self, batch): return {"probability": self.net(batch["image"]).sigmoid()}


    class Geo(Base):  # as torchgeo's tasks: masks [B, H, W] int64, probabilities alone
        def step(self, batch, stage):
            assert batch["mask"].dtype == torch.int64 and batch["mask"].ndim == 3
            loss = nn.functional.binary_cross_entropy_with_logits(self.net(batch["image"])[:, 0], batch["mask"].float())
            self.log(f"{stage}_BinaryJaccardIndex", loss.detach(), batch_size=len(batch["image"]))
            return loss

        def training_step(self, batch, batch_idx): return self.step(batch, "train")
        def validation_step(self, batch, batch_idx): self.step(batch, "val")
        def test_step(self, batch, batch_idx): self.step(batch, "test")
        def predict_step(self, batch, batch_idx): return self.net(batch["image"]).sigmoid()


    class Detector(Base):  # as torchvision's: lists in, a list of dicts with labels out
        def training_step(self, batch, batch_idx):
            images, targets = batch
            assert isinstance(images, list) and images[0].ndim == 3 and targets[0]["boxes"].shape[1] == 4
            return sum(self.net(image[None]).square().mean() for image in images)

        def validation_step(self, batch, batch_idx):
            self.log("val_boxes", float(sum(len(target["labels"]) for target in batch[1])), batch_size=len(batch[0]))

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            box, one = torch.tensor([[1.0, 1, 9, 9]]), torch.tensor([1])
            return [{"boxes": box, "labels": one, "scores": 0.9 * one} for image in batch[0]]


    class Yolo(Base):  # as Ultralytics' losses
        def training_step(self, batch, batch_idx):
            assert batch["batch_idx"].max() < len(batch["img"]) == len(batch["im_file"])
            return self.net(batch["img"]).square().mean() + 0 * batch["bboxes"].sum() + 0 * batch["cls"].sum()


    class Silent(Base):  # logs nothing, has no validation, and its test fails
        def training_step(self, batch, batch_idx): return self.net(batch["image"]).square().mean()
        def test_step(self, batch, batch_idx): raise TypeError("Invalid shape (64,)")
        def predict_step(self, batch, batch_idx): raise KeyError("a key that is not ours")


    class Plain(Base):
        def training_step(self, batch, batch_idx): return self.net(batch[0]).square().mean()
        def validation_step(self, batch, batch_idx): self.log("loss", self.training_step(batch, 0))
        def test_step(self, batch, batch_idx): self.log("loss", 2 * self.training_step(batch, 0))


    class PlainData(L.LightningDataModule):
        def __init__(self, root="here", samples=12):
            super().__init__()
            assert root == "here", "a value that our datamodule's file has under the same name"
            self.set = TensorDataset(torch.rand(samples, 3, 8, 8))

        def train_dataloader(self): return DataLoader(self.set, 4)
        def val_dataloader(self): return DataLoader(self.set, 4)
        def test_dataloader(self): return DataLoader(self.set, 4)
"""
STRIPE = ["experiment=stripe", "data.samples={count: 6, height_px: 128, width_px: 128}"]
STRIPE += ["data.patch_px=64", "data.stride_px=64"]
STRIPE += ["data.loader.batch_size=4", "data.loader.num_workers=0"]
BOXES = ["experiment=detection", "data.samples={count: 12, size_px: [64, 64]}", "data.size_px=64"]
BOXES += ["data.mosaic=null", "data.loader.num_workers=0"]
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=3"]
SHORT += ["trainer.enable_progress_bar=false", "report=false"]
SHORT += NO_TIMELINES
PLAIN = ["data._target_=strangers.PlainData", "--package", "strangers"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory, with the package `strangers` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "strangers.py").write_text(textwrap.dedent(MODULES))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("strangers", None)


def _run(command: str, module: str, *words: str) -> dict[str, Any]:
    """The summary of a run that ended well."""
    package = module.partition(".")[0]
    assert main([command, f"model._target_={module}", "--package", package, *words]) == 0
    found = _read_newest()
    assert found["command"] == command
    return found


def _read_newest() -> dict[str, Any]:
    """The newest summary, with the folder of its run."""
    newest = max(Path("runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text()) | {"folder": newest.parent}


@pytest.mark.slow
@pytest.mark.parametrize("sanity", [0, 2])
def test_a_segmenter_with_its_own_names_is_trained_tested_and_predicts(
    sanity: int, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = f"trainer.num_sanity_val_steps={sanity}"
    summary = _run("fit", "strangers.Segmenter", *STRIPE, *SHORT, steps)
    assert {"valid_dataset_iou", "valid_loss", "test_dataset_iou", "test_loss"} <= summary.keys()
    missing = "the model logs no val/average_precision in validation (it logs "
    assert missing in capsys.readouterr().out
    assert (summary["folder"] / "checkpoints/best.ckpt").is_file()
    if sanity:
        assert "test_dataset_iou" in _run("test", "strangers.Segmenter", *STRIPE, SHORT[2])
        assert _run("predict", "strangers.Segmenter", *STRIPE)["predict/images"] == 6
        assert list(Path("runs").rglob("predictions.png"))


@pytest.mark.slow
def test_cross_entropy_gets_classes_and_probabilities_are_taken_alone() -> None:
    words = [*STRIPE, "data.batch_format=classes"]
    assert "test_BinaryJaccardIndex" in _run("fit", "strangers.Geo", *words, *SHORT)
    assert _run("predict", "strangers.Geo", *words)["predict/images"] == 6


@pytest.mark.slow
def test_a_detector_of_torchvision_gets_lists_and_its_labels_are_read() -> None:
    words = [*BOXES, "data.batch_format=torchvision"]
    summary = _run("fit", "strangers.Detector", *words, *SHORT)
    assert summary["val_boxes"] > 0
    found = _run("predict", "strangers.Detector", *words)
    assert 0 < found["predict/objects"] <= found["predict/images"] == 12


def test_a_loss_of_ultralytics_gets_its_dict_also_in_pieces() -> None:
    words = [*BOXES, "data.batch_format=ultralytics", "callbacks.adaptive.initial_size=2", *SHORT]
    assert _run("fit", "strangers.Yolo", *words)["batch/size"] == 2


@pytest.mark.slow
def test_what_fails_after_training_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    summary = _run("fit", "strangers.Silent", *STRIPE, *SHORT)
    assert summary["seconds"] > 0
    out = capsys.readouterr().out
    assert "scores of test: TypeError: Invalid shape (64,); training itself is done" in out
    assert "predictions.png could not be drawn: KeyError" in out


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        # Weights and pictures are those of the best checkpoint.
        pytest.param(["fit.load_weights"], {"predictions.png"}, marks=pytest.mark.slow),
        (["fit.draw_predictions", "fit.join_scores", "fit.hand_over_file"], {"predictions.png"}),
        pytest.param(["job.write_summary"], {"summary.json"}, marks=pytest.mark.slow),
    ],
)
def test_a_thing_that_fails_after_training_loses_no_other(
    broken: list[str],
    lost: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(name: str, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, f"{name} is broken")

    for name in broken:
        monkeypatch.setattr(f"lit_data.app.{name}", partial(fail, name))
    monkeypatch.setattr(SampleDigest, "summary", partial(fail, "the digest"))
    words = [word for word in SHORT if word != "report=false"]
    assert main(["fit", *STRIPE, *words, "hydra.run.dir=run"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} is broken" in out for name in broken)
    assert "what the callbacks measured: OSError: [Errno 28] the digest is broken" in out
    names = {"samples.png", "predictions.png", "loader.json", "machine.json", "summary.json"}
    assert names - {path.name for path in Path("run").iterdir()} == lost
    assert Path("run/report.html").is_file()
    if "summary.json" not in lost:
        summary = json.loads(Path("run/summary.json").read_text())
        assert summary["samples_sha256"] is None
        assert summary["samples_per_s"] > 0


def test_early_stopping_goes_by_what_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PLAIN, "model._target_=strangers.Plain", *SHORT]
    assert main(["fit", *words, "extra_callbacks=early_stopping"]) == 2
    cure = "any of the following: `loss`: set callbacks.early_stopping.monitor=NAME"
    assert cure in capsys.readouterr().err
    chosen = ["callbacks.early_stopping.monitor=loss", "callbacks.early_stopping.mode=min"]
    assert main(["fit", *words, "extra_callbacks=[early_stopping,ema]", *chosen]) == 0


@pytest.mark.slow
def test_any_datamodule_is_trained_on_and_scored() -> None:
    words = ["data._target_=strangers.PlainData", "name=plain"]
    summary = _run("fit", "strangers.Plain", *words, *SHORT)
    # The model calls both the same.
    assert summary["test/loss"] == pytest.approx(2 * summary["loss"])
    assert _run("test", "strangers.Plain", *words)["loss"] == pytest.approx(summary["test/loss"])
    assert "loss" in _run("validate", "strangers.Plain", *words)


def test_commands_that_need_a_datamodule_of_ours_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *PLAIN]) == 2
    text = "show needs one that derives from lit_data.datamodules.base.BaseDataModule; fit, val"
    assert text in capsys.readouterr().err


# --- the libraries themselves

REAL = {
    "segmentation_models_pytorch": """
        import lightning as L, torch, segmentation_models_pytorch as smp
        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = smp.create_model("Unet", "resnet18", encoder_weights=None, in_channels=3, classes=1)
                self.loss = smp.losses.DiceLoss("binary")
            def training_step(self, batch, batch_idx): return self.loss(self.net(batch["image"]), batch["mask"])
            def validation_step(self, batch, batch_idx): self.log("valid_loss", self.training_step(batch, 0))
            def test_step(self, batch, batch_idx): self.log("test_loss", self.training_step(batch, 0))
            def predict_step(self, batch, batch_idx): return {"probability": self.net(batch["image"]).sigmoid()}
            def configure_optimizers(self): return torch.optim.Adam(self.parameters())
    """,
    "torchgeo": """
        from torchgeo.trainers import SemanticSegmentationTask
        class Net(SemanticSegmentationTask):
            def __init__(self):
                super().__init__(model="unet", backbone="resnet18", in_channels=3, task="binary", loss="bce")
    """,
    "anomalib": """
        from anomalib.models import Padim
        class Net(Padim):
            def __init__(self):
                super().__init__("resnet18", layers=["layer1"], pre_trained=False, n_features=16, visualizer=False)
    """,
    "torchvision": """
        import lightning as L, torch, torchvision
        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
                self.net = make(weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=64)
            def training_step(self, batch, batch_idx): return sum(self.net(*batch).values())
            def test_step(self, batch, batch_idx): self.log("found", float(len(self.net(batch[0]))), batch_size=1)
            def predict_step(self, batch, batch_idx): return self.net(batch[0])
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.001)
    """,
}
WORDS = {
    "segmentation_models_pytorch": STRIPE,
    "torchgeo": [*STRIPE, "data.batch_format=classes"],
    "anomalib": [*STRIPE, "data.batch_format=anomalib", "trainer.num_sanity_val_steps=0"],
    "torchvision": [*BOXES, "data.batch_format=torchvision"],
}


@pytest.mark.strangers
@pytest.mark.parametrize("library", REAL)
def test_the_libraries_themselves(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (tmp_path / "strangers.py").write_text(textwrap.dedent(REAL[library]))
    words = WORDS[library]
    assert _run("fit", "strangers.Net", *words, *SHORT)["seconds"] > 0
    assert _run("test", "strangers.Net", *words)["seconds"] > 0
    assert _run("predict", "strangers.Net", *words)["predict/images"] > 0
    swept = ["seed=1,2", "sweep.isolate=none", "name=swept", *SHORT, "--package", "strangers"]
    assert main(["fit", "-m", "model._target_=strangers.Net", *words, *swept]) == 0
    folder = max(Path("runs/fit/swept").iterdir())
    assert main(["report", str(folder)]) == 0


# --- nets of other libraries as groups of the configuration

PATCHES = ["experiment=segmentation", "data.samples={count: 12, size_px: [96, 96]}"]
PATCHES.append("data.patch_px=64")
LABELS = ["experiment=classification", "data.samples={count: 24, size_px: [96, 96]}"]
LABELS.append("data.size_px=32")
FOUND = ["predict.threshold=0", "model.score_threshold=0"]
NETS = {
    "smp_unet": ("segmentation_models_pytorch", "encoder_name=resnet18", PATCHES, "test/dice"),
    "torchvision_segmentation": (
        "torchvision",
        "model_name=lraspp_mobilenet_v3_large",
        PATCHES,
        "test/dice",
    ),
    "timm_classifier": ("timm", "model_name=resnet18", LABELS, "test/accuracy"),
    "torchvision_classifier": ("torchvision", "model_name=resnet18", LABELS, "test/accuracy"),
    "torchvision_detector": (
        "torchvision",
        "model_name=fasterrcnn_mobilenet_v3_large_320_fpn",
        BOXES,
        "test/map50",
    ),
}
ALONE = ["trainer=cpu", "data.loader.num_workers=0", "data.loader.batch_size=4"]


def _run_group(command: str, group: str, *words: str) -> dict[str, Any]:
    """The summary of a run of a group, with its folder."""
    _, net, data, _ = NETS[group]
    assert main([command, *data, f"model={group}", f"model.net.{net}", *ALONE, *words]) == 0
    return _read_newest()


@pytest.mark.strangers
@pytest.mark.parametrize("group", NETS)
def test_a_group_is_trained_scored_and_predicts(group: str) -> None:
    library, _, _, metric = NETS[group]
    pytest.importorskip(library)
    fitted = _run_group("fit", group, "model.net.weights=null", *SHORT[:3])
    assert 0 <= fitted[metric] <= 1
    assert (fitted["folder"] / "report.html").is_file()
    # Weights by name are not asked for: all come from the checkpoint.
    assert _run_group("test", group)[metric] == pytest.approx(fitted[metric], abs=1e-5)
    predicted = _run_group("predict", group, *(FOUND if group == "torchvision_detector" else []))
    assert predicted["predict/images"] == (
        24 if predicted["experiment"] == "classification" else 12
    )
    if group == "torchvision_detector":
        assert predicted["predict/objects"] > 0
        assert len(list((predicted["folder"] / "labels").rglob("*.txt"))) == 12


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("group", "word", "message"),
    [
        ("smp_unet", "architecture=unit", "architecture='unit' is unknown: choose one of unet, "),
        ("smp_unet", "weights=imagnet", "weights='imagnet' is unknown: choose imagenet"),
        ("smp_unet", "options={depth: 3}", "unet with resnet18 cannot be built: TypeError"),
        ("timm_classifier", "model_name=hf-hub:a/b", "model_name='hf-hub:a/b' is unknown"),
        ("torchvision_classifier", "model_name=resnet", "='resnet' is unknown: choose one of "),
        ("torchvision_detector", "weights=no.pt", "weights=no.pt: no such file"),
    ],
)
def test_wrong_names_of_a_group_are_one_line(
    group: str, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library, net, data, _ = NETS[group]
    pytest.importorskip(library)
    given = [] if "model_name" in word else [f"model.net.{net}"]
    words = [*given, "model.net.weights=null", *ALONE, f"model.net.{word}"]
    assert main(["fit", *data, f"model={group}", *words]) in (2, 3)
    assert message in capsys.readouterr().err


@pytest.mark.strangers
def test_a_server_that_is_not_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    from lit_data.models import TorchvisionClassifier

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Name or service not known")

    weights = torchvision.models.ResNet18_Weights.DEFAULT
    monkeypatch.setattr(weights.__class__, "get_state_dict", fail)
    refused = "^weights=imagenet of resnet18 are not on this machine and could not be fetched"
    with pytest.raises(ConfigError, match=refused):
        TorchvisionClassifier(3, weights="imagenet")


@pytest.mark.strangers
@pytest.mark.parametrize("freeze_norm", [True, False])
def test_normalization_is_frozen_in_the_mode_that_a_net_was_made_in(freeze_norm: bool) -> None:
    pytest.importorskip("torchvision")
    from lit_data.wings.detection import TorchvisionDetector

    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    net = TorchvisionDetector(model_name=name, freeze_norm=freeze_norm)
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    box = {"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    net([torch.rand(3, 64, 64)] * 2, [box] * 2)
    assert {norm.training for norm in norms} == {not freeze_norm}


@pytest.mark.strangers
@pytest.mark.parametrize("channels", [1, 4])
def test_any_architecture_takes_any_size_and_number_of_channels(channels: int) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    from lit_data.models import SmpNet

    for architecture in ("unet", "fpn", "pspnet", "deeplabv3plus", "pan", "segformer"):
        options = {"encoder_name": "resnet18", "channels": channels}
        net = SmpNet(["a", "b"], architecture=architecture, **options)
        assert net.eval()(torch.rand(2, channels, 33, 70)).shape == (2, 3, 33, 70)
        assert net.train()(torch.rand(1, channels, 1, 1)).shape == (1, 3, 1, 1)


@pytest.mark.strangers
def test_the_recipe_for_anomalib_runs(tmp_path: Path) -> None:
    """docs/pretrained.md, with weights from a file: defects that are seen at once are told from good patches."""
    pytest.importorskip("anomalib")
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet18").state_dict(), "resnet18.pth")
    rng = np.random.default_rng(0)
    for number in range(18):
        is_good = number < 12
        pixels = rng.integers(90, 110, (64, 64, 3), dtype=np.uint8)
        mask = np.zeros((64, 64), np.uint8)
        folder = Path("images") / ("good" if is_good else "scratch")
        folder.mkdir(parents=True, exist_ok=True)
        if not is_good:
            top, left = rng.integers(
                4, 40, 2
            )  # elsewhere in each: images that look alike share a split
            for values, value in ((mask, 255), (pixels, 250)):
                values[top : top + 20, left : left + 20] = value
            cv2.imwrite(str(folder / f"{number:02}.png"), mask)
        cv2.imwrite(str(folder / f"{number:02}.jpg"), pixels)
    text = (Path(__file__).resolve().parents[1] / "docs/pretrained.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}
    code = code.replace("patch_px=224", "patch_px=64")
    exec(code.replace("sampling_ratio=0.02", "sampling_ratio=0.1"), names)
    assert names["scores"]["image_AUROC"] == 1
    assert names["scores"]["pixel_AUROC"] > 0.9
