"""docs/attach.md: every recipe is run, with small modules in the place of the user's."""

import json
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import Tensor, nn

from lit_data.app.cli import main
from lit_data.callbacks import AMP, AdaptiveBatchSize
from lit_data.core.errors import ConfigError
from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.testing import QUIET
from tests.helpers.families import run_family
from tests.helpers.fork_server import SCRIPTS_TOO
from tests.outputs import NO_TIMELINES

ROOT = Path(__file__).resolve().parents[1]
RECIPES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/attach.md").read_text(encoding="utf-8"), flags=re.DOTALL
)
LOADER, COLLATE, DATASET, CALLBACKS, WING, SCRIPT, ENGINE, KORNIA, CLI, OTHER = RECIPES

TOY_DATA = [
    "+experiment=stripe",
    "data.samples={count: 6, height_px: 128, width_px: 128}",
    "data.patch_px=64",
    "data.stride_px=64",
]
TOY = [*TOY_DATA, "trainer.max_epochs=1", "data.loader.batch_size=4", "data.loader.num_workers=0"]
TOY += ["report=false", *NO_TIMELINES]

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:No seed found"),
    pytest.mark.filterwarnings(
        "ignore:You passed in a `val_dataloader` but have no `validation_step`"
    ),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
]

MODULES = """
    import {package} as L
    import torch
    from torch import nn

    class Net(L.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.width = width
            self.net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

        def training_step(self, batch, batch_idx):
            image, mask = (batch["x"], batch["y"]) if "x" in batch else (batch["image"], batch["mask"])
            loss = nn.functional.binary_cross_entropy_with_logits(self.net(image), mask)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Scored(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.training_step(batch, batch_idx))

    class Grey(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(1, 1, 1)

        def training_step(self, batch, batch_idx):
            assert set(batch) == {{'image', 'index'}} and 0 <= batch['image'].max() <= 1
            return self.net(batch['image']).mean()

    class Wrong(Net):
        def predict_step(self, batch, batch_idx):
            raise KeyError("a key that is not ours")

    class Flat(nn.Sequential):
        def __init__(self, width=4, **options):
            assert not options, "values that the file of our net has"
            super().__init__(nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images, the working directory, with the package my_project in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    Path("images").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        cv2.imwrite(f"images/{number}.png", pixels)
    return tmp_path


@pytest.fixture
def project(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, package in {"my_project": "lightning", "their_project": "pytorch_lightning"}.items():
        (here / name).mkdir()
        (here / name / "__init__.py").write_text("")
        (here / name / "models.py").write_text(textwrap.dedent(MODULES.format(package=package)))
    monkeypatch.syspath_prepend(here)
    yield
    ours = ("my_project", "their_project")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (L, pl):
        monkeypatch.setattr(package, "Trainer", _quietly(package.Trainer))


def _quietly(trainer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: trainer(**QUIET, **options)


def _make_net(package: types.ModuleType = L) -> Any:
    names = {"__name__": "models"}
    exec(textwrap.dedent(MODULES.format(package=package.__name__)), names)
    return names["Scored"]


def _summary(here: Path) -> dict[str, Any]:
    newest = max((here / "runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text()) | {"folder": newest.parent}


def _fit_model(name: str, *words: str) -> int:
    target = f"model._target_=my_project.models.{name}"
    return main(["fit", target, "--package", "my_project", *TOY, *words])


@pytest.mark.usefixtures("project")
def test_a_target_is_enough(here: Path) -> None:
    assert _fit_model("Scored") == 0
    summary = _summary(here)
    assert summary["val/loss"] > 0
    assert (summary["folder"] / "checkpoints/best.ckpt").is_file()
    assert not (summary["folder"] / "predictions.png").exists()
    log = (summary["folder"] / "fit.log").read_text()
    assert "has no argument net, optimizer, schedule, loss" in log
    assert "logs no val/average_precision in validation (it logs train/loss, val/loss)" in log


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("key", "name", "whole"), [("model", "Scored", False), ("model.net", "Flat", True)]
)
def test_what_was_typed_for_a_class_is_known_of_its_checkpoint(
    key: str, name: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"{key}._target_=my_project.models.{name}", "--package", "my_project"]
    first = [f"{key}={{_target_: my_project.models.{name}, width: 7}}"] if whole else target
    assert main(["fit", *first, *target[1:], f"{key}.width=7", *TOY]) == 0
    assert main(["validate", *target, *TOY_DATA]) == 0
    assert main(["fit", *target, "resume=latest", *TOY, "trainer.max_epochs=2"]) == 0
    for command in (["fit", "resume=latest", *TOY], ["predict", "data.root=images", *TOY_DATA]):
        assert main(command) == 2
        assert f"name it: add {' '.join(target)}" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_without_validation_and_with_a_picture_that_fails_the_last_checkpoint_stays(
    here: Path,
) -> None:
    assert _fit_model("Wrong") == 0
    assert (_summary(here)["folder"] / "checkpoints/best.ckpt").is_file()
    log = (_summary(here)["folder"] / "fit.log").read_text()
    assert "predictions.png could not be drawn" in log
    assert "a key that is not ours" in log
    assert _summary(here)["train/samples_hashed"] > 0


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("their_project.models.Net", "pytorch_lightning.Lightning.*import lightning.pytorch as pl"),
        ("torch.nn.Identity", "must derive from lightning.LightningModule"),
    ],
)
def test_what_is_no_module_of_lightning_is_refused(
    target: str, reason: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"model._target_={target}", "--package", "their_project", *TOY]) == 2
    assert re.search(reason, capsys.readouterr().err)


@pytest.mark.usefixtures("here", "quiet")
def test_plain_script() -> None:
    names = {"YourModule": _make_net()}
    exec(SCRIPT.replace("64", "4"), names)
    assert names["trainer"].callback_metrics["val/loss"] > 0
    assert names["trainer"].global_step > 1


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_an_engine_that_starts_the_training(tmp_path: Path) -> None:
    toy = '"data.patch_px=64", "trainer.max_epochs=2", "data.loader.global_batch_size=8", '
    code = ENGINE.replace("trainer=ddp", "trainer=ddp_cpu").replace('"resume', f'{toy}"resume')
    code += 'print("START", run.start)\n'
    Path("train.py").write_text(code)
    Path("alone.py").write_text(code.replace("ddp_cpu", "cpu").replace("night", "alone"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for words in (["alone.py"], [*torchrun, "train.py"], [*torchrun, "train.py"]):
        code, output = run_family(
            [sys.executable, "-W", "ignore", *words], limit_s=200, cwd=tmp_path, **SCRIPTS_TOO
        )
        assert code == 0, output
    assert "START runs/night/checkpoints/last.ckpt" in output
    digests = []
    for name in ("alone", "night"):
        path = tmp_path / "runs" / name / "checkpoints/last.ckpt"
        digests.append(torch.load(path, weights_only=True)["callbacks"]["SampleDigest"])
    assert digests[0] == digests[1]
    assert digests[0]["samples"] > 0
    assert main(["validate", f"ckpt={path}", "data.root=images", "data.patch_px=64"]) == 0


@pytest.mark.usefixtures("quiet")
def test_own_dataset_with_the_loader() -> None:
    seen = []

    class Module(BoringModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.extend(batch[1].tolist())
            return self.layer(batch[0]).sum()

    samples = [(torch.zeros(32), number) for number in range(70)]
    exec(LOADER, {"your_dataset": samples, "YourModule": Module})
    assert sorted(seen) == list(range(70))


def test_samples_of_several_sizes_come_as_lists() -> None:
    images = [torch.rand(3, 8 + number, 8) for number in range(10)]
    samples = [(image, {"boxes": torch.zeros(n, 4)}) for n, image in enumerate(images)]
    names = {"your_boxes": samples}
    exec(COLLATE, names)
    assert [image.shape[1] for image in names["images"]] == list(range(8, 16))
    assert [len(target["boxes"]) for target in names["targets"]] == list(range(8))


@pytest.mark.slow
def test_own_datamodule_trains_in_the_command(
    here: Path, project: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "my_project/digits.py").write_text(DATASET)
    rng = np.random.default_rng(0)
    for stage, count in {"train": 12, "val": 4, "test": 0, "predict": 4}.items():
        np.save(f"{stage}.npy", rng.integers(0, 256, (count, 1, 32, 32), dtype=np.uint8))
    targets = ["data._target_=my_project.digits.Digits", "model._target_=my_project.models.Grey"]
    words = ["--package", "my_project", "trainer.max_epochs=1", "data.loader.batch_size=4"]
    assert main(["fit", *targets, *words]) == 0
    summary = _summary(here)
    assert summary["train/samples_hashed"] == 12
    assert (summary["folder"] / "samples.png").is_file()


def test_a_wing_lists_its_commands() -> None:
    names: dict[str, Any] = {}
    exec(WING, names)
    assert [*names["TOOLS"]] == ["mill"]


@pytest.mark.usefixtures("here")
def test_own_kornia_pipeline() -> None:
    names = {}
    exec(KORNIA, names)
    data = names["data"]
    data.prepare_data()
    data.setup("fit")
    loader = data.make_loader("train")
    batch = data.transform(next(iter(loader)), "train")
    again = data.transform(next(iter(data.make_loader("train"))), "train")
    assert batch["image"].shape[1:] == (3, 128, 128)
    assert torch.equal(batch["image"], again["image"])


@pytest.mark.usefixtures("here")
def test_lightning_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # by lightning 2.6.6
    words = ["--data.root=images", "--data.synthesis.probability=0.5", "--data.patch_px=64"]
    words += ["--data.loader.batch_size=4", "--trainer.max_epochs=1"]
    quiet = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", *words, *quiet])
    names = {"YourModule": _make_net()}
    exec(CLI.replace("LightningCLI(Your", "cli = LightningCLI(Your"), names)
    assert names["cli"].datamodule.loader.batch_size == 4
    assert names["cli"].trainer.global_step > 1


@pytest.mark.slow
@pytest.mark.usefixtures("here", "quiet")
def test_datamodule_of_another_project() -> None:
    exec(CALLBACKS, {"YourModule": BoringModel, "YourDataModule": BoringDataModule})
    assert not list(Path().glob("*.png"))  # without a logger or a path nothing is drawn


@pytest.mark.usefixtures("here", "quiet")
def test_pytorch_lightning() -> None:
    names = {"YourModule": _make_net(pl)}
    exec(OTHER, names)
    assert names["trainer"].global_step > 0
    assert names["trainer"].callback_metrics["val/loss"] > 0


def _toy_data(kind: type[StripeDataModule], cache: Path) -> StripeDataModule:
    return kind(
        cache_dir=str(cache),
        samples={"count": 6, "height_px": 128, "width_px": 128},
        patch_px=64,
        stride_px=64,
        loader=LoaderOptions(batch_size=8, num_workers=0),
        synthesis=DefectSpec(probability=0.5),
    )


class BothData(StripeDataModule, pl.LightningDataModule):
    """Of both packages."""


def test_both_packages_train_the_same_weights_also_after_running_out_of_memory(
    tmp_path: Path,
) -> None:
    weights = {}
    for package, kind in ((L, StripeDataModule), (pl, BothData)):
        torch.manual_seed(0)
        module = _make_net(package)()
        module.net[0].register_forward_pre_hook(_run_out_above(4))
        adaptive = AdaptiveBatchSize()
        trainer = package.Trainer(max_epochs=1, callbacks=[adaptive], **QUIET)
        trainer.fit(module, datamodule=_toy_data(kind, tmp_path))
        assert adaptive.summary()["batch/ooms"] > 0
        weights[package] = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert torch.equal(weights[L], weights[pl])


def _run_out_above(most: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if module.training and len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return hook


def test_a_trainer_of_the_other_package_says_how_to_join(tmp_path: Path) -> None:
    net, data = _make_net(pl)(), _toy_data(StripeDataModule, tmp_path)
    with pytest.raises(ConfigError, match=r"class Data\(StripeDataModule, pl.LightningDataModule"):
        pl.Trainer(max_epochs=1, **QUIET).fit(net, datamodule=data)
    trainer, data = pl.Trainer(callbacks=[AMP("bf16")], **QUIET), _toy_data(BothData, tmp_path)
    with pytest.raises(ConfigError, match=r"AMP: this Trainer is that of pytorch_lightning"):
        trainer.fit(net, datamodule=data)
