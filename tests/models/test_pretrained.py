"""Groups of nets of other libraries, as far as these need not be installed; see tests/test_strangers.py."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.names import resolve_target
from lit_data.app.configuration.targets import instantiate
from lit_data.core.checks import read_arguments
from lit_data.core.errors import ConfigError
from lit_data.models import SmpNet
from lit_data.models.pretrained.libraries import (
    IMAGENET,
    NormalizedNet,
    check_options,
)
from lit_data.models.weights import split_weights
from lit_data.wings.detection import TorchvisionDetectionModule
from tests.models.runs import fit_unchanged

GROUPS = {
    "smp_unet": ("segmentation", "segmentation_models_pytorch", "segmentation-models-pytorch"),
    "torchvision_segmentation": ("segmentation", "torchvision", "torchvision"),
    "timm_classifier": ("classification", "timm", "timm"),
    "torchvision_classifier": ("classification", "torchvision", "torchvision"),
    "torchvision_detector": ("detection", "torchvision", "torchvision"),
    "monai": ("ct_segmentation", "monai", "monai"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_every_argument_and_names_a_missing_package(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, module, package = GROUPS[group]
    words = [f"+experiment={experiment}", f"model={group}"]
    cfg = compose("fit", [*words, f"paths.run={tmp_path}"])
    if group.startswith("torchvision"):  # its order does not matter
        assert cfg == compose("fit", [*words[::-1], f"paths.run={tmp_path}"])
    model = OmegaConf.to_container(cfg.model)
    for node in (model, model["net"]):
        arguments = read_arguments(resolve_target(node["_target_"], "model")).hints.keys()
        assert arguments == node.keys() - {"_target_"}
    if experiment == "segmentation":
        assert (model["net"]["prior"], model["anomaly_metrics"]) == (0.02, True)
    importing = importlib.import_module

    def refuse(name: str, *args: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importing(name, *args)

    monkeypatch.setattr(importlib, "import_module", refuse)
    extra = "medical" if group == "monai" else "nets"
    cure = rf"^model.net needs {module}: pip install {package}, or 'lit-data-inspect\[{extra}\]'$"
    with pytest.raises(ConfigError, match=cure):
        instantiate(cfg.model)


def test_names_of_weights_are_told_from_files() -> None:
    assert split_weights(None, ["imagenet"]) == (None, None)
    assert split_weights("imagenet", ["imagenet"]) == ("imagenet", None)
    for file in ("last.ckpt", "runs/imagenet", Path("a.safetensors")):
        assert split_weights(file, ["imagenet"]) == (None, file)
    with pytest.raises(ConfigError, match="weights='imagnet' is unknown: choose imagenet, null,"):
        split_weights("imagnet", ["imagenet"])


@pytest.mark.parametrize(
    "name", ["pretrained", "pretrained_cfg", "checkpoint_path", "weights_backbone", "cache_dir"]
)
def test_options_that_read_files_or_servers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"options.{name} is not allowed here"):
        check_options({name: "http://somewhere"})


def test_images_reach_the_net_as_it_was_trained() -> None:
    seen = []

    class Net(nn.Module):
        def forward(self, images: Tensor) -> dict[str, Tensor]:
            seen.append(images)
            return {"out": images[:, :1], "aux": images}

    net = NormalizedNet(Net(), normalize="auto", trained=IMAGENET, channels=3, multiple_px=32)
    images = torch.rand(1, 3, 33, 20)
    assert net.eval()(images).shape == (1, 1, 33, 20)
    assert seen[0].shape == (1, 3, 64, 32)
    mean, std = (torch.tensor(IMAGENET[name])[:, None, None] for name in ("mean", "std"))
    torch.testing.assert_close(seen[0][..., :33, :20], (images - mean) / std)
    assert net.train()(images).shape == (1, 1, 33, 20)
    assert len(seen[1]) == 2  # for batch normalisation
    grey = NormalizedNet(Net(), normalize="auto", trained=IMAGENET, channels=1)
    assert grey.mean.tolist() == pytest.approx([0.449])
    values = {"mean": [0.5], "std": [0.25]}
    own = NormalizedNet(Net(), normalize=values, trained=IMAGENET, channels=1)
    assert (own.mean.tolist(), own.std.tolist()) == ([0.5], [0.25])
    plain = NormalizedNet(Net(), normalize="none", trained=IMAGENET, channels=2)
    assert plain.std.tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrong", [{"mean": [0.5], "std": [0.5]}, {"mean": [0, 0, 0], "std": [1, 1, 0]}, {"mean": [1]}]
)
def test_wrong_means_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="normalize"):
        NormalizedNet(nn.Identity(), normalize=wrong, trained=IMAGENET, channels=3)


@pytest.mark.parametrize("options", [{"channels": 0}, {"classes": 0}, {"prior": 1.0}])
def test_sizes_are_checked_before_a_package_is_looked_for(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"(channels|classes)=0 is not usable|prior=1.0: need 0 < prior < 1"
    ):
        SmpNet(**options)


class _Finder(nn.Module):
    """A detector as torchvision's: a dict of losses in training, a list of dicts in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm2d(3)
        self.targets = ()
        self.draws = False

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        if self.training:
            self.targets = targets
            self.norm(torch.stack(images))
            drawn = torch.rand(()) if self.draws else 0
            return {"loss_classifier": self.weight + 1, "loss_box_reg": self.weight + 2 + drawn}
        boxes = torch.tensor([[0.0, 0, 8, 4], [1, 1, 2, 2], [1, 1, 2, 2]])
        scores = torch.tensor([0.2, 0.9, 0.8])
        labels = torch.tensor([1, 2, 0])  # 0 is the background, of which there are no objects
        return [{"boxes": boxes, "labels": labels, "scores": scores} for _ in images]


def _batch() -> dict[str, Tensor]:
    boxes = torch.tensor(
        [[0, 1, 0.5, 0.25, 1.0, 0.5], [2, 0, 0.5, 0.5, 0.0, 0.2], [2, 0, 0.5, 0.5, 0.5, 0.5]]
    )
    return {"image": torch.rand(3, 3, 8, 8), "boxes": boxes, "boxes_count": torch.tensor([1, 0, 2])}


def test_any_detector_of_that_form_is_trained_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _Finder()
    module, logged = TorchvisionDetectionModule(net, score_threshold=0.25), {}
    monkeypatch.setattr(module, "log_dict", lambda values, **options: logged.update(values))
    assert module.find_loss(_batch()).item() == 3
    assert logged == {"train/loss_classifier": 1, "train/loss_box_reg": 2}
    assert [len(target["labels"]) for target in net.targets] == [1, 0, 1]
    module.eval()
    [found, _, _] = module.predict_step(_batch(), 0)
    assert (found["classes"].tolist(), found["scores"].tolist()) == ([1], pytest.approx([0.9]))
    module.score(_batch(), "val")
    assert module.take_scores("val")["map50"] == 0  # class 0 is where class 1 is


def test_validations_of_that_form_have_the_loss_of_the_same_draws_and_train_nothing(
    tmp_path: Path,
) -> None:
    net = _Finder()
    net.draws = True
    module = TorchvisionDetectionModule(net, optimizer=partial(torch.optim.SGD, lr=0))
    losses = fit_unchanged(module, _batch(), tmp_path)
    assert 3 < losses[0] < 4
    assert losses[0] == losses[1]
    assert net.norm.num_batches_tracked == 2  # batches of the training alone
